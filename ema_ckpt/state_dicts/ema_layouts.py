"""Which tensors of an EMA tree are the averaged weights, and under which names.

Every trainer shapes its EMA differently. The forms below are tried in order, the first that fits
counts:

    weights.<fqn>            this package, beside `num_updates`
    state.<fqn>.ema_params   optimizer-style state per parameter (NeMo Automodel)
    shadow_params.<N>        positions in the order of the live parameters (diffusers, torch_ema)
    ema_model.<fqn>          a module beside `online_model` (ema-pytorch)
    shadow.<fqn>             a plain dictionary
    model.<fqn>              beside `config`
    module.<fqn>             beside `n_averaged` (torch's AveragedModel)
    <fqn>                    otherwise every floating-point tensor that is no setting
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.errors import EmaCkptError, SourceError
from ema_ckpt.core.names import LIVE, SETTINGS, canonical, role_of
from ema_ckpt.core.text import counted, shown

Inner = Sequence[tuple[str, Tensor]]
"""Names inside a tree (without its prefix) and their tensors, in stored order."""

_COMPANIONS = frozenset(
    {"residual", "backup", "online_model", "collected_params", "temp_stored_params"}
)
_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_BESIDE = (("model", "config"), ("module", "n_averaged"))
POSITIONS = "shadow_params.*"


class Averages(NamedTuple):
    """The averaged weights of one EMA tree by the name that each has there, and why they cannot be
    named, if so.
    """

    form: str
    tensors: Mapping[str, Tensor]
    problem: EmaCkptError | None = None


def is_setting(name: str, tensor: Tensor) -> bool:
    """Whether a tensor called `name` inside an EMA tree describes the average (`decay`,
    `num_updates`, …).
    """
    return (name in SETTINGS or name.startswith("config.")) and tensor.numel <= 1


def is_weight(name: str, tensor: Tensor) -> bool:
    """Whether a tensor called `name` inside an EMA tree can have been averaged."""
    return tensor.dtype.kind not in ("int", "bool") and not is_setting(name, tensor)


def find_averages(tree: str, inner: Inner, beside: Collection[str]) -> Averages:
    """Pick the averaged weights of the EMA tree called `tree`. `beside` holds the names of its
    objects.
    """
    present = {name for name, _ in inner}.union(beside)
    found = _under(tree, "weights", inner, sure="num_updates" in present) or _per_parameter(inner)
    found = found or _positions(tree, inner)
    for prefix in ("ema_model", "shadow"):
        found = found or _under(tree, prefix, inner)
    for prefix, mark in _BESIDE:
        if not found and any(name == mark or name.startswith(f"{mark}.") for name in present):
            found = _under(tree, prefix, inner, sure=True)
    return found or Averages(
        "*", {name: tensor for name, tensor in inner if is_weight(name, tensor)}
    )


def _under(tree: str, prefix: str, inner: Inner, *, sure: bool = False) -> Averages | None:
    """The tensors below `prefix`, if that is a dictionary of its own or nothing else could be
    weights.

    Without that test a module that happens to be called `shadow` would swallow its siblings.
    """
    head = f"{prefix}."
    found = {name[len(head) :]: tensor for name, tensor in inner if name.startswith(head)}
    if not found:
        return None
    if not sure and not _is_dict(
        next(iter(found.values())), f"{tree}.{prefix}" if tree else prefix
    ):
        skipped = _COMPANIONS | {prefix}
        if any(
            is_weight(name, tensor) and name.partition(".")[0] not in skipped
            for name, tensor in inner
        ):
            return None
    return Averages(f"{prefix}.*", found)


def _is_dict(tensor: Tensor, name: str) -> bool:
    """Whether `name` is a dictionary on the path to `tensor`, not merely the beginning of a dotted
    key.
    """
    joined = ""
    for element in tensor.path[:-1]:
        joined = f"{joined}.{element}" if joined else str(element)
        if joined == name:
            return True
    return False


def _per_parameter(inner: Inner) -> Averages | None:
    found = {
        name[len("state.") : -len(".ema_params")]: tensor
        for name, tensor in inner
        if name.startswith("state.") and name.endswith(".ema_params")
    }
    strays = [
        name for name, tensor in inner if is_weight(name, tensor) and not name.startswith("state.")
    ]
    return Averages("state.<fqn>.ema_params", found) if found and not strays else None


def _positions(tree: str, inner: Inner) -> Averages | None:
    head = "" if tree.rpartition(".")[2] == "shadow_params" else "shadow_params."
    found = {
        int(name[len(head) :]): t
        for name, t in inner
        if name.startswith(head) and name[len(head) :].isdecimal()
    }
    return (
        Averages(POSITIONS, {str(place): found[place] for place in sorted(found)})
        if found
        else None
    )


def matches(names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether some tensor has the same name on both sides, wrapper prefixes aside; LitEma's dotless
    names count.
    """
    canonical_names = {canonical(name) for name in names}
    known = {canonical(name) for name in others}
    if not canonical_names.isdisjoint(known):
        return True
    if not canonical_names or any("." in name for name in canonical_names):
        return False
    return any(name.replace(".", "") in canonical_names for name in known)


def name_averages(
    tree: str,
    found: Averages,
    live: Mapping[str, Tensor],
    trained: Collection[str],
    *,
    ordered: bool,
) -> Averages:
    """Give the weights found in `tree` the names of the live tree where their own are positions or
    lack dots.

    `live` holds the live weights by name, `trained` the names that an optimizer's state lists, if
    there is one; `ordered` tells whether the live weights stand in the order of the state dict they
    were saved from. What cannot be named carries its error in `problem`, so that listing the
    checkpoint still works.
    """
    if found.form == POSITIONS:
        return _by_position(tree, found, live, trained, ordered)
    if found.form != "*" or not live or not found.tensors:
        return found
    names = found.tensors.keys()
    if not any("." in name for name in names) and any("." in name for name in live):
        return _with_dots(tree, found, live)
    first = next(iter(names)).partition(".")[0]
    head = f"{first}."
    if (
        role_of(first) != LIVE
        or not all(name.startswith(head) for name in names)
        or matches(names, live)
    ):
        return found
    bare = {name[len(head) :]: tensor for name, tensor in found.tensors.items()}
    return Averages(f"{head}*", bare) if matches(bare, live) else found


def _with_dots(tree: str, found: Averages, live: Mapping[str, Tensor]) -> Averages:
    # LitEma registers its shadows as buffers, whose names must not hold a dot, and so drops them.
    if not matches(found.tensors, live) or all(name in live for name in found.tensors):
        return found
    owners: dict[str, list[str]] = {}
    for name in live:
        for key in {name.replace(".", ""), canonical(name).replace(".", "")}:
            owners.setdefault(key, []).append(name)
    unclear = [name for name in found.tensors if len(owners.get(name, ())) != 1]
    if unclear:
        reason = f"there is not exactly one live name for {shown(unclear)}"
        return Averages(found.form, found.tensors, _unpaired(tree, found, live, reason))
    return Averages(found.form, {owners[name][0]: tensor for name, tensor in found.tensors.items()})


def _by_position(
    tree: str, found: Averages, live: Mapping[str, Tensor], trained: Collection[str], ordered: bool
) -> Averages:
    shadows = list(found.tensors.values())
    places = list(map(int, found.tensors))
    if places != list(range(len(places))):
        reason = f"positions 0 to {places[-1]} expected, {len(places)} found"
        return Averages(found.form, found.tensors, _unpaired(tree, found, live, reason))
    if not live:
        reason = "the shadows have positions for names and no single live tree is beside them to name them"
        return Averages(found.form, found.tensors, _unpaired(tree, found, live, reason))
    shapes = [tensor.shape for tensor in shadows]
    lists = _parameter_lists(live, trained)
    fitting = {
        names
        for names in (lists if ordered else _by_shape(lists, live, shapes))
        if _fit(names, live, shapes)
    }
    if len(fitting) == 1:
        return Averages(found.form, dict(zip(fitting.pop(), shadows, strict=True)))
    reason = (
        "their shapes fit no list of live parameters"
        if not fitting
        else "several lists of parameters fit"
    )
    if not ordered:
        reason = "its file sorts tensors, so that their order is lost, and shapes alone do not tell which is which"
    return Averages(found.form, found.tensors, _unpaired(tree, found, live, reason))


def _fit(
    names: Sequence[str], live: Mapping[str, Tensor], shapes: Sequence[tuple[int, ...]]
) -> bool:
    return len(names) == len(shapes) and all(
        live[name].shape == s for name, s in zip(names, shapes, strict=True)
    )


def _by_shape(
    lists: Iterable[tuple[str, ...]], live: Mapping[str, Tensor], shapes: Sequence[tuple[int, ...]]
) -> Iterable[tuple[str, ...]]:
    """The lists brought into the order of `shapes`, where no two of their tensors have one shape.

    safetensors files are sorted by dtype and name: by position, a norm's weight and bias would
        change places.
    """
    for names in lists:
        owner = {live[name].shape: name for name in names}
        if len(owner) == len(names) and owner.keys() == set(shapes):
            yield tuple(owner[shape] for shape in shapes)


def _parameter_lists(
    live: Mapping[str, Tensor], trained: Collection[str]
) -> Iterable[tuple[str, ...]]:
    """What the live tree's parameters may be, in stored order: a state dict does not tell them from
    buffers.
    """
    floating = {
        name: tensor for name, tensor in live.items() if tensor.dtype.kind not in ("int", "bool")
    }
    learned = {name: t for name, t in floating.items() if name.rpartition(".")[2] not in _BUFFERS}
    stepped = {name: t for name, t in learned.items() if name in trained}
    for group in (learned, floating, stepped, live):
        yield tuple(group)
        yield tuple(_untied(group))


def _untied(group: Mapping[str, Tensor]) -> Iterable[str]:
    # `Module.parameters()` yields a tied parameter once, a state dict under each name.
    seen = set()
    for name, tensor in group.items():
        place = (tensor.storage, tensor.shape, tuple((c.file, c.offset) for c in tensor.chunks))
        if tensor.storage is None or place not in seen:
            yield name
        seen.add(place)


def _unpaired(tree: str, found: Averages, live: Mapping[str, Tensor], reason: str) -> SourceError:
    averages, weights = counted(len(found.tensors), "averaged tensor"), counted(len(live), "tensor")
    return SourceError(
        "unsupported",
        f"tree {tree!r}: its {averages} cannot be paired with the {weights} of the live "
        f"tree ({reason}); `convert` takes the checkpoint as it stands",
    )
