"""What is added up: the snapshots' trees, their profiles, and a weight for each."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ema_ckpt.analysis.phema import Profile, mismatch, solve
from ema_ckpt.analysis.weighted_sum import Part
from ema_ckpt.core.catalog import Catalog, Diagnostic, Tensor
from ema_ckpt.core.errors import EmaCkptError, UsageError, about
from ema_ckpt.core.names import canonical
from ema_ckpt.core.text import counted, shown
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.state_dicts.ema_config import read_ema_config, read_samples_seen, with_tied_names
from ema_ckpt.state_dicts.tree import Tree, default_tree, find_tree, list_trees

_POOR = 0.05


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One average: the checkpoint that holds it, and its tree."""

    catalog: Catalog
    tree: Tree

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.tree.name!r} of {self.catalog.resolved}"


def open_snapshots(
    paths: Sequence[str | os.PathLike[str]], names: Sequence[str], call: tuple[str, str]
) -> list[Snapshot]:
    """Open every snapshot; of each the trees `names`, or its only EMA. `call` is the command and
    its options.

    Raises:
        UsageError: `ambiguous-tree`, `unknown-tree`. SourceError: what opening raises.
    """
    command, options = call
    found = []
    with ExitStack() as undo:
        for path in paths:
            catalog = open_catalog(path)
            undo.callback(catalog.source.close)
            known = list_trees(catalog)
            picked = [find_tree(known, name, catalog.resolved) for name in names]
            picked = picked or [default_tree(known, command, catalog.resolved, options)]
            found += [Snapshot(catalog, with_tied_names(catalog, tree)) for tree in picked]
        undo.pop_all()
    return found


def match_names(snapshots: Sequence[Snapshot]) -> dict[str, list[Tensor]]:
    """The tensors of all snapshots by name, in the order of the last one.

    Raises:
        UsageError: `usage` unless names and shapes are equal everywhere.
    """
    named = [
        {canonical(name): tensor for name, tensor in s.tree.weights.items()} for s in snapshots
    ]
    last = named[-1]
    for snapshot, tensors in zip(snapshots[:-1], named[:-1], strict=True):
        odd = sorted(tensors.keys() ^ last.keys())
        if odd:
            where = f"{snapshot.label} and {snapshots[-1].label}"
            raise UsageError(
                "usage", f"{where} do not hold the same names: only one has {shown(odd)}"
            )
        for name, tensor in tensors.items():
            if tensor.shape != last[name].shape:
                shapes = f"{list(tensor.shape)} in {snapshot.label}, {list(last[name].shape)} in {snapshots[-1].label}"
                raise UsageError(
                    "usage", f"tensor {name!r} has other shapes: {shapes}", tensor=name
                )
            _refuse_unlike(name, tensor, last[name], snapshot)
    return {name: [tensors[name] for tensors in named] for name in last}


def _refuse_unlike(name: str, tensor: Tensor, last: Tensor, snapshot: Snapshot) -> None:
    if tensor.dtype == last.dtype or (tensor.dtype.is_castable and last.dtype.is_castable):
        return
    message = f"tensor {name!r} is {tensor.dtype.name} in {snapshot.label} and {last.dtype.name} in the last snapshot"
    raise UsageError("usage", f"{message}; they cannot be added", tensor=name)


def is_summed(tensor: Tensor) -> bool:
    """Whether a tensor's values are averaged, and not taken from the last snapshot as integers
    are.
    """
    return tensor.dtype.kind == "float" or tensor.dtype.name in ("complex64", "complex128")


def refuse_unsummable(entries: Iterable[OutputTensor]) -> None:
    """Refuse numbers that no sum can be stored in: those of 8 bits, and complex ones of 16.

    Raises:
        UsageError: `unsupported`.
    """
    for entry in entries:
        dtype = entry.source.dtype
        if not is_summed(entry.source) and dtype.kind not in ("int", "bool"):
            message = f"tensor {entry.name!r} is {dtype.name}, of which sums are not made; leave it out with --exclude"
            raise UsageError("unsupported", message, tensor=entry.name)


def parts_of(
    tensors: Sequence[Tensor], snapshots: Sequence[Snapshot], weights: Sequence[float]
) -> list[Part]:
    """What makes up one tensor: all snapshots, or for what is not averaged (integers, say) the last
    alone.
    """
    pairs = list(zip(snapshots, tensors, weights, strict=True))
    if is_summed(tensors[-1]):
        return [Part(snapshot.catalog, tensor, weight) for snapshot, tensor, weight in pairs]
    snapshot, tensor, _ = pairs[-1]
    return [Part(snapshot.catalog, tensor, 1.0)]


# Weights.


def weights_for(
    snapshots: Sequence[Snapshot],
    *,
    sigma_rel: float | None,
    weights: Sequence[float] | None,
    sigma_rels: Sequence[float] | None,
    steps: Sequence[float] | None,
) -> tuple[list[float], list[Diagnostic]]:
    """One weight for each snapshot: those given, or those that make an average of relative width
    `sigma_rel`.

    Raises:
        UsageError: `usage` if numbers are missing, do not fit, or contradict each other.
    """
    if (sigma_rel is None) == (weights is None):
        raise UsageError(
            "usage", "give either --sigma-rel, for another averaging length, or --weights"
        )
    if weights is not None:
        if sigma_rels or steps:
            raise UsageError(
                "usage", "--sigma-rels and --steps go with --sigma-rel, not with --weights"
            )
        return _given(snapshots, weights)
    profiles = _profiles(snapshots, sigma_rels, steps)
    target = Profile(max(profile.time for profile in profiles), sigma_rel or 0.0)
    found = solve(profiles, target)
    return found, list(_quality(profiles, found, target))


def _given(
    snapshots: Sequence[Snapshot], weights: Sequence[float]
) -> tuple[list[float], list[Diagnostic]]:
    if len(weights) != len(snapshots):
        raise _miscounted("--weights", weights, snapshots)
    if not all(map(math.isfinite, weights)):
        raise UsageError(
            "usage", f"--weights {', '.join(map(str, weights))}: expected finite numbers"
        )
    try:
        total = math.fsum(weights)
    except OverflowError:
        raise UsageError(
            "usage", f"--weights {', '.join(map(str, weights))}: their sum is not finite"
        ) from None
    message = (
        f"the weights sum to {total:.6g}, not 1: the result is no average, its scale is changed"
    )
    return list(weights), [] if abs(total - 1) <= 1e-6 else [Diagnostic("weights-sum", message)]


def _miscounted(flag: str, values: Sequence[float], snapshots: Sequence[Snapshot]) -> UsageError:
    numbers, several = counted(len(values), "number"), counted(len(snapshots), "snapshot")
    return UsageError("usage", f"{flag} has {numbers} for {several}")


def _quality(
    profiles: Sequence[Profile], weights: Sequence[float], target: Profile
) -> Iterator[Diagnostic]:
    distance = mismatch(profiles, weights, target)
    if distance > _POOR:
        widths = ", ".join(
            f"{width:g}" for width in sorted({profile.sigma_rel for profile in profiles})
        )
        message = (
            f"the profile of relative width {target.sigma_rel:g} is missed by {distance:.1%}; take more snapshots, "
            f"or a width nearer to those that were tracked ({widths})"
        )
        yield Diagnostic("profile-missed", message)


def _profiles(
    snapshots: Sequence[Snapshot], sigma_rels: Sequence[float] | None, steps: Sequence[float] | None
) -> list[Profile]:
    """Width and time of each snapshot: as given, else as its own settings tell."""
    for flag, values in (("--sigma-rels", sigma_rels), ("--steps", steps)):
        if values and len(values) != len(snapshots):
            raise _miscounted(flag, values, snapshots)
    told = (
        [(None, None, None)] * len(snapshots)
        if sigma_rels and steps
        else list(map(_recorded, snapshots))
    )
    units = {unit for _, _, unit in told if unit is not None}
    if len(units) > 1 and not steps:
        raise UsageError(
            "usage", "some snapshots count updates and others samples; give --steps in one unit"
        )
    profiles = []
    for index, (snapshot, (width, time, _)) in enumerate(zip(snapshots, told, strict=True)):
        sigma = sigma_rels[index] if sigma_rels else width
        step = steps[index] if steps else time
        if sigma is None or step is None:
            lacks = "no power-function schedule" if sigma is None else "no step"
            hint = "give --sigma-rels and --steps, one number for each snapshot"
            raise UsageError("usage", f"{snapshot.label} records {lacks}; {hint}")
        profiles.append(Profile(step, sigma))
    return profiles


def _recorded(snapshot: Snapshot) -> tuple[float | None, float | None, str | None]:
    """Relative width, time and unit as the EMA's own settings tell; None for what they do not."""
    try:
        settings = read_ema_config(snapshot.catalog, snapshot.tree)
        samples = read_samples_seen(snapshot.catalog, snapshot.tree)
    except EmaCkptError as error:
        raise about(error, label=snapshot.label) from None
    schedule = settings.schedule if isinstance(settings.schedule, dict) else {}
    width, unit = schedule.get("sigma_rel"), str(schedule.get("unit", "updates"))
    time = samples if unit == "samples" else settings.num_updates
    if schedule.get("kind") != "power-function" or not isinstance(width, int | float):
        return None, time, unit
    return float(width), time, unit
