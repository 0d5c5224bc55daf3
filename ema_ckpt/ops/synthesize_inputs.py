"""Inputs of `synthesize`: the snapshots' trees, their profiles, and a weight for each."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ema_ckpt.analysis.merge_weights import merge_weights
from ema_ckpt.analysis.phema import Profile, mismatch, solve
from ema_ckpt.analysis.weighted_sum import Part
from ema_ckpt.core.arguments import whole_number
from ema_ckpt.core.catalog import Catalog, Diagnostic, Tensor
from ema_ckpt.core.display import displayed
from ema_ckpt.core.errors import EmaCkptError, UsageError, about
from ema_ckpt.core.names import EMA, LIVE, canonical
from ema_ckpt.core.text import counted, path_text, shown
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.discovery.locate import select_steps
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.discovery.step_names import step_number, step_order
from ema_ckpt.ops.dequantize import Dequantized, dequantize, refuse_unquantized
from ema_ckpt.ops.results.write import SnapshotEntry
from ema_ckpt.state_dicts.ema_config import read_ema_config, read_samples_seen, with_tied_names
from ema_ckpt.state_dicts.hidden_averages import warn_of_hidden
from ema_ckpt.state_dicts.tree import Tree, default_tree, find_tree, list_trees
from ema_ckpt.storage.directories import base_name, parent_of
from ema_ckpt.writing.options import WriteOptions

_POOR_MISMATCH = 0.05
_VISIBLE_ROUNDING = 0.01  # of a value
_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One average: a checkpoint, and the tree of it that is summed.

    Attributes:
        values: what was dequantised of it.
    """

    catalog: Catalog
    tree: Tree
    values: Dequantized

    @property
    def label(self) -> str:
        """Name in messages."""
        return f"{self.tree.name!r} of {self.catalog.resolved}"


class StepChoice(NamedTuple):
    """Which steps of a run are taken: the newest, or those in a range; each `stride`-th."""

    last: int | None
    from_step: int | None
    to_step: int | None
    stride: int

    @classmethod
    def parse(cls, last: object, from_step: object, to_step: object, stride: object) -> StepChoice:
        """Check the arguments of a call. Raises UsageError `usage` for what is no whole number."""

        def number(value: object, flag: str) -> int | None:
            return None if value is None else whole_number(value, flag)

        first, end = number(from_step, "--from"), number(to_step, "--to")
        return cls(number(last, "--last"), first, end, whole_number(stride, "--stride"))

    @property
    def is_run(self) -> bool:
        """Whether the steps of one run are chosen."""
        return any(value is not None for value in self[:3])


def snapshots_of(
    paths: Sequence[str | os.PathLike[str]], choice: StepChoice
) -> tuple[list[str], list[Diagnostic]]:
    """Return the snapshots to sum, the oldest first, and warnings of steps that are not complete.

    Raises:
        UsageError: `usage`: the choice does not fit the paths, or there are fewer steps.
    """
    named = [path_text(path) for path in paths]
    last, stride = choice.last, choice.stride
    _check_choice(choice, len(named))
    if not choice.is_run:
        return named, []
    first = choice.from_step or 0
    to_step = math.inf if choice.to_step is None else choice.to_step
    steps, broken = select_steps(named[0], count=last, first=first, last=to_step, stride=stride)
    if last is not None and len(steps) < last:
        there = f"{counted(len(steps), 'complete step')} there"
        there += f" with --stride {stride}" if stride != 1 else ""
        raise UsageError("usage", f"{named[0]}: --last {last}: only {there}")
    return steps, [step.diagnostic() for step in broken]


def _check_choice(choice: StepChoice, paths: int) -> None:
    if choice.is_run:
        if paths != 1:
            problem = "--last, --from and --to-step take the directory of one run"
            raise UsageError("usage", f"{problem}; found {paths} paths")
    elif choice.stride != 1:
        raise UsageError("usage", "--stride goes with --last, --from or --to-step")
    last = 1 if choice.last is None else choice.last
    if min(choice.stride, last) < 1:
        raise UsageError("usage", "--last and --stride are 1 or more")


def refuse_whole_run(path: str, snapshots: Sequence[Snapshot]) -> None:
    """Refuse a scheme for one path that is a run, of which only the newest step was opened.

    Raises:
        UsageError: `usage`, with the options that take several steps.
    """
    resolved = snapshots[0].catalog.resolved
    below = resolved.removeprefix(path).strip("/").split("/")
    if resolved.startswith(path) and any(step_order(name) is not None for name in below):
        problem = f"is a directory of steps, and without more only {below[0]} would be read"
        remedy = "--last N merges the newest N, --from STEP and --to STEP those in a range"
        raise UsageError("usage", f"{path}: {problem}; {remedy}")


def open_snapshots(
    paths: Sequence[str | os.PathLike[str]],
    names: Sequence[str],
    call: tuple[str, str],
    options: WriteOptions,
) -> list[Snapshot]:
    """Open the trees `names` of each checkpoint, by default its only EMA, or live tree.

    Args:
        call: the command and its options, for messages that suggest another.

    Raises:
        UsageError: `ambiguous-tree`, `unknown-tree`. SourceError: as opening raises.
    """
    command, flags = call
    snapshots = []
    with ExitStack() as undo:
        for path in paths:
            stored = open_catalog(path, workers=options.threads)
            undo.callback(stored.source.close)
            values = dequantize(stored, options, required=False)
            catalog = values.catalog
            trees = list_trees(catalog)
            catalog = warn_of_hidden(catalog, trees, names)
            picked = [find_tree(trees, name, catalog.resolved) for name in names]
            where, said = catalog.resolved, catalog.warnings
            picked = picked or [default_tree(trees, command, where, flags, said)]
            snapshots += [Snapshot(catalog, with_tied_names(catalog, t), values) for t in picked]
        if not any(snapshot.values.is_quantized for snapshot in snapshots):
            refuse_unquantized(snapshots[-1].catalog, options)
        undo.pop_all()
    return snapshots


def mixed_roles(snapshots: Sequence[Snapshot], *, is_run: bool) -> list[Diagnostic]:
    """Warn of a sum of averages and live weights, as of a run whose average began later.

    A file of weights alone may be an average that was written whole, unless it is a step.
    """
    averages = [snapshot for snapshot in snapshots if snapshot.tree.role == EMA]
    lives = [snapshot for snapshot in snapshots if snapshot.tree.role == LIVE]
    others = [snapshot for snapshot in lives if is_run or snapshot.tree.name]
    if not averages or not others:
        return []
    message = (
        f"averages and live weights are summed: {averages[0].label} and"
        f" {counted(len(averages) - 1, 'more average')}, {others[0].label} and"
        f" {counted(len(others) - 1, 'more live tree')}; --tree names the one that is meant"
    )
    return [Diagnostic("mixed-trees", message)]


def match_names(snapshots: Sequence[Snapshot]) -> dict[str, list[Tensor]]:
    """Return the tensors of all snapshots by name, in the order of the last snapshot.

    Raises:
        UsageError: `usage` unless names and shapes are equal everywhere.
    """
    named = []
    for snapshot in snapshots:
        weights = snapshot.tree.weights
        named.append({canonical(name): tensor for name, tensor in weights.items()})
    last, last_label = named[-1], snapshots[-1].label
    for snapshot, tensors in zip(snapshots[:-1], named[:-1], strict=True):
        unmatched = sorted(tensors.keys() ^ last.keys())
        if unmatched:
            both = f"{snapshot.label} and {last_label}"
            message = f"{both} do not hold the same names: only one has {shown(unmatched)}"
            raise UsageError("usage", message)
        for name, tensor in tensors.items():
            check_alike(name, tensor, last[name], snapshot.label, last_label)
    return {name: [tensors[name] for tensors in named] for name in last}


def check_alike(name: str, tensor: Tensor, last: Tensor, label: str, last_label: str) -> None:
    """Check that two tensors have one shape, and one dtype or dtypes that can be cast."""
    if tensor.shape != last.shape:
        shapes = f"{list(tensor.shape)} in {label}, {list(last.shape)} in {last_label}"
        raise UsageError("usage", f"tensor {name!r} has other shapes: {shapes}", tensor=name)
    castable = tensor.dtype.is_castable and last.dtype.is_castable
    if tensor.dtype != last.dtype and not castable:
        dtypes = f"{tensor.dtype.name} in {label} and {last.dtype.name} in the last snapshot"
        message = f"tensor {name!r} is {dtypes}; they cannot be added"
        raise UsageError("usage", message, tensor=name)


def is_summed(tensor: Tensor) -> bool:
    """Check whether values are averaged; integers, for one, come from the last snapshot."""
    return tensor.dtype.kind == "float" or tensor.dtype.name in ("complex64", "complex128")


def refuse_unsummable(tensors: Iterable[OutputTensor]) -> None:
    """Refuse dtypes that no sum can be stored in: those of 8 bits, and complex ones of 16.

    Raises:
        UsageError: `unsupported`.
    """
    for tensor in tensors:
        dtype = tensor.source.dtype
        if not is_summed(tensor.source) and not dtype.is_discrete:
            hint = "leave it out with --exclude"
            message = f"tensor {tensor.name!r} is {dtype.name}, of which sums are not made; {hint}"
            raise UsageError("unsupported", message, tensor=tensor.name)


def refuse_quantized(
    tensors: Iterable[OutputTensor],
    snapshots: Sequence[Snapshot],
    made_from: Mapping[str, Sequence[Tensor]],
) -> None:
    """Refuse parts of quantised weights: sums of scales fit no snapshot's codes.

    Args:
        made_from: what rules made each tensor of.

    Raises:
        UsageError: `unsupported`.
    """
    from ema_ckpt.reading.quantized.exact_parts import exact_parts, understood_parts

    parts = dict[str, Snapshot]()
    understood = set[str]()
    for snapshot in snapshots:
        exact = exact_parts(snapshot.values.catalog)
        understood.update(understood_parts(snapshot.values.catalog) if exact else ())
        for name, weight in snapshot.tree.weights.items() if exact else ():
            if weight.name in exact:
                parts[canonical(name)] = snapshot
    for tensor in tensors if parts else ():
        for source in made_from.get(tensor.source.name, (tensor.source,)):
            if source.name in parts:
                where = (
                    f"{tensor.name!r} is part of a quantised weight in {parts[source.name].label}"
                )
                remedy = "--exclude leaves it out, and --dequantize does not understand its scheme"
                if source.name in understood:
                    remedy = "--dequantize bf16 sums the values of such weights"
                message = f"{where}, and sums of codes and scales are no weights; {remedy}"
                raise UsageError("unsupported", message, tensor=tensor.name)


def parts_of(
    tensors: Sequence[Tensor], snapshots: Sequence[Snapshot], weights: Sequence[float]
) -> list[Part]:
    """Return the terms of one tensor's sum; without a sum, the tensor of the last snapshot."""
    if not is_summed(tensors[-1]):
        return [Part(snapshots[-1].catalog, tensors[-1], 1.0)]
    terms = zip(snapshots, tensors, weights, strict=True)
    return [Part(snapshot.catalog, tensor, weight) for snapshot, tensor, weight in terms]


def copied_integers(tensors: Iterable[OutputTensor], newest: Snapshot) -> list[Diagnostic]:
    """Say which tensors are not averaged, because they are integers or bools."""
    names = [tensor.name for tensor in tensors if not is_summed(tensor.source)]
    if not names:
        return []
    come = "comes" if len(names) == 1 else "come"
    message = f"{shown(names)} cannot be averaged and {come} from {newest.label} alone"
    return [Diagnostic("not-averaged", message)]


def amplified_rounding(snapshots: Sequence[Snapshot], weights: Sequence[float]) -> list[Diagnostic]:
    """Warn if weights that nearly cancel make the rounding of stored values visible in the sum."""
    errors: dict[str, float] = {}
    for snapshot, weight in zip(snapshots, weights, strict=True):
        stored = {tensor.dtype.part.name for tensor in snapshot.tree.weights.values()}
        name = max(stored & _ROUNDOFF.keys(), key=_ROUNDOFF.__getitem__, default=None)
        if name is not None:
            errors[name] = math.hypot(errors.get(name, 0.0), weight * _ROUNDOFF[name])
    error = math.hypot(*errors.values())
    if error < _VISIBLE_ROUNDING:
        return []
    largest = max(map(abs, weights))
    message = (
        f"the largest weight is {largest:.3g}, which amplifies the rounding of "
        f"{max(errors, key=errors.__getitem__)} in the snapshots to {error:.2g} of a value; take "
        "snapshots that are less alike, or fewer"
    )
    return [Diagnostic("rounding-amplified", message)]


def describe_terms(
    snapshots: Sequence[Snapshot], weights: Sequence[float]
) -> tuple[SnapshotEntry, ...]:
    """Return each snapshot with its weight, for the result."""
    terms = []
    for snapshot, weight in zip(snapshots, weights, strict=True):
        step = _step_of(snapshot.catalog)
        terms.append(SnapshotEntry(snapshot.catalog.resolved, snapshot.tree.name, step, weight))
    return tuple(terms)


def _step_of(catalog: Catalog) -> int | None:
    """Return the number in the name of the step that a snapshot is."""
    below = catalog.resolved.removeprefix(catalog.path).split("/")  # `actor` in a step
    numbers = map(step_number, (base_name(catalog.path), *below))
    return next((number for number in numbers if number is not None), None)


def log_sum(snapshots: Sequence[Snapshot], weights: Sequence[float]) -> None:
    """Log the weight of each snapshot (level info)."""
    terms = [f"{w:.6g} x {s.label}" for w, s in zip(weights, snapshots, strict=True)]
    logging.getLogger("ema_ckpt").info(displayed(f"the sum of {', '.join(terms)}"))


# Weights.


def weights_for(
    snapshots: Sequence[Snapshot],
    *,
    sigma_rel: float | None,
    weights: Sequence[float] | None,
    sigma_rels: Sequence[float] | None,
    steps: Sequence[float] | None,
    scheme: str | None = None,
) -> tuple[list[float], list[Diagnostic]]:
    """Return one weight for each snapshot: as given, by a scheme, or for a width `sigma_rel`.

    Raises:
        UsageError: `usage` if numbers are missing, do not fit, or contradict each other.
    """
    if [sigma_rel, weights, scheme].count(None) != 2:
        message = "give one of --sigma-rel (another averaging length), --weights (a weighted sum)"
        message += " and --scheme (a merge of steps)"
        raise UsageError("usage", message)
    if sigma_rel is None and (sigma_rels or steps):
        message = "--sigma-rels and --steps go with --sigma-rel alone"
        raise UsageError("usage", message)
    if scheme is not None:
        return _weights_by_position(scheme, snapshots), []
    if weights is not None:
        _check_count("--weights", weights, snapshots)
        return list(weights), _check_sum(weights)
    profiles = profiles_of(snapshots, sigma_rels, steps)
    target = Profile(max(profile.time for profile in profiles), sigma_rel or 0.0)
    solved = solve(profiles, target)
    distance = mismatch(profiles, solved, target)
    if distance <= _POOR_MISMATCH:
        return solved, []
    widths = sorted({profile.sigma_rel for profile in profiles})
    message = (
        f"the profile of relative width {target.sigma_rel:g} is missed by {distance:.1%}; take "
        "more snapshots, or a width nearer to those that were tracked "
        f"({', '.join(f'{width:g}' for width in widths)})"
    )
    return solved, [Diagnostic("profile-missed", message)]


def _weights_by_position(scheme: str, snapshots: Sequence[Snapshot]) -> list[float]:
    _refuse_several_trees(snapshots)
    weights = merge_weights(scheme, len(snapshots))
    if len(set(weights)) > 1:
        _refuse_disorder(scheme, snapshots)
    return weights


def _refuse_several_trees(snapshots: Sequence[Snapshot]) -> None:
    for one, other in pairwise(snapshots):
        if one.catalog is other.catalog:
            message = f"a scheme weighs one tree a step; found {one.label} and {other.label}"
            raise UsageError("usage", message)


def _refuse_disorder(scheme: str, snapshots: Sequence[Snapshot]) -> None:
    """Refuse steps of one run that are not named from the oldest on, as by a shell's `step_*`."""
    for one, other in pairwise(snapshots):
        step, after = _step_of(one.catalog), _step_of(other.catalog)
        is_one_run = parent_of(one.catalog.path) == parent_of(other.catalog.path)
        is_later = step is not None and after is not None and step > after
        if is_one_run and is_later and _numbers_in(one) > _numbers_in(other):
            problem = f"--scheme {scheme} weighs from the oldest to the newest, and step {step}"
            remedy = "name them in the order of their numbers, or name the run, with --last N"
            raise UsageError("usage", f"{problem} is named before step {after}; {remedy}")


def _numbers_in(snapshot: Snapshot) -> list[int]:
    """Return all numbers in a name: steps that begin anew in each epoch are in order by both."""
    return list(map(int, re.findall(r"[0-9]+", base_name(snapshot.catalog.path))))


def _check_count(flag: str, values: Sequence[float], snapshots: Sequence[Snapshot]) -> None:
    if len(values) != len(snapshots):
        numbers, several = counted(len(values), "number"), counted(len(snapshots), "snapshot")
        raise UsageError("usage", f"{flag} has {numbers} for {several}")


def _check_sum(weights: Sequence[float]) -> list[Diagnostic]:
    """Refuse weights that are not finite; warn if they do not sum to 1."""
    text = f"--weights {', '.join(map(str, weights))}"
    if not all(map(math.isfinite, weights)):
        raise UsageError("usage", f"{text}: expected finite numbers")
    try:
        total = math.fsum(weights)
    except OverflowError:
        raise UsageError("usage", f"{text}: their sum is not finite") from None
    if abs(total - 1) <= 1e-6:
        return []
    scale = "the result is no average, its scale is changed"
    return [Diagnostic("weights-sum", f"the weights sum to {total:.6g}, not 1: {scale}")]


class RecordedProfile(NamedTuple):
    """Profile of a snapshot as its own settings record it."""

    sigma_rel: float | None
    time: float | None
    unit: str


def profiles_of(
    snapshots: Sequence[Snapshot], sigma_rels: Sequence[float] | None, steps: Sequence[float] | None
) -> list[Profile]:
    """Return width and time of each snapshot: as given, else as recorded."""
    for flag, values in (("--sigma-rels", sigma_rels), ("--steps", steps)):
        if values:
            _check_count(flag, values, snapshots)
    if sigma_rels and steps:
        return [Profile(time, width) for time, width in zip(steps, sigma_rels, strict=True)]
    recorded: list[RecordedProfile] = []
    units: set[str] = set()
    for snapshot in snapshots:
        recorded.append(recorded_profile(snapshot))
        units.add(recorded[-1].unit)
    if not steps and len(units) > 1:
        message = "some snapshots count updates and others samples; give --steps in one unit"
        raise UsageError("usage", message)
    return [
        complete_profile(
            snapshot.label,
            sigma_rels[index] if sigma_rels else recorded[index].sigma_rel,
            steps[index] if steps else recorded[index].time,
        )
        for index, snapshot in enumerate(snapshots)
    ]


def complete_profile(label: str, width: float | None, time: float | None) -> Profile:
    """Return a profile; refuse one without width or time."""
    if width is not None and time is not None:
        return Profile(time, width)
    lacks = "no power-function schedule" if width is None else "no step"
    hint = "give --sigma-rels and --steps, one number for each snapshot"
    raise UsageError("usage", f"{label} records {lacks}; {hint}")


def recorded_profile(snapshot: Snapshot) -> RecordedProfile:
    """Read width, time and unit of a snapshot from its own settings."""
    try:
        config = read_ema_config(snapshot.catalog, snapshot.tree)
        samples = read_samples_seen(snapshot.catalog, snapshot.tree)
    except EmaCkptError as error:
        raise about(error, label=snapshot.label) from None
    schedule = config.schedule if isinstance(config.schedule, dict) else {}
    width, unit = schedule.get("sigma_rel"), str(schedule.get("unit", "updates"))
    time = samples if unit == "samples" else config.num_updates
    if schedule.get("kind") != "power-function" or not isinstance(width, int | float):
        return RecordedProfile(None, time, unit)
    return RecordedProfile(float(width), time, unit)
