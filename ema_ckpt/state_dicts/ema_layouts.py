"""Which tensors of an EMA tree are the averaged weights, and under which names.

Every trainer shapes its EMA differently. The layouts below are tried in order, the first that fits
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

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.errors import EmaCkptError, SourceError
from ema_ckpt.core.names import LIVE, SETTINGS, canonical, role_of
from ema_ckpt.core.text import counted, shown

Entries = Sequence[tuple[str, Tensor]]
"""Names inside a tree (without its prefix) and their tensors, in stored order."""

POSITIONS = "shadow_params.*"
_BESIDE_WEIGHTS = frozenset(
    {"residual", "backup", "online_model", "collected_params", "temp_stored_params"}
)
_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


class Averages(NamedTuple):
    """The averaged weights of an EMA tree by name, and why they cannot be named, if so."""

    layout: str
    tensors: Mapping[str, Tensor]
    problem: EmaCkptError | None = None


def is_setting(name: str, tensor: Tensor) -> bool:
    """Check whether a tensor inside an EMA tree describes the average (`decay`, `num_updates`)."""
    return tensor.numel <= 1 and (name in SETTINGS or name.startswith("config."))


def is_weight(name: str, tensor: Tensor) -> bool:
    """Check whether a tensor inside an EMA tree can have been averaged."""
    return tensor.dtype.kind not in ("int", "bool") and not is_setting(name, tensor)


def find_averages(tree: str, entries: Entries, objects: Collection[str]) -> Averages:
    """Find the averaged weights of the EMA tree called `tree`; `objects` are its objects' names."""
    names = {name for name, _ in entries}.union(objects)
    top_names = {name.partition(".")[0] for name in names}
    averages = _below(tree, "weights", entries, certain="num_updates" in names)
    averages = averages or _per_parameter(entries) or _by_position(tree, entries)
    for prefix, mark in (
        ("ema_model", ""),
        ("shadow", ""),
        ("model", "config"),
        ("module", "n_averaged"),
    ):
        if averages is None and (not mark or mark in top_names):
            averages = _below(tree, prefix, entries, certain=bool(mark))
    if averages is None:
        return Averages("*", {name: tensor for name, tensor in entries if is_weight(name, tensor)})
    return averages


def _below(tree: str, prefix: str, entries: Entries, *, certain: bool) -> Averages | None:
    """Find the tensors below `prefix`, if it is a dictionary or no other tensor can be a weight.

    Without that test a module that happens to be called `shadow` would swallow its siblings.
    """
    head = f"{prefix}."
    tensors = {name[len(head) :]: tensor for name, tensor in entries if name.startswith(head)}
    if not tensors:
        return None
    path = next(iter(tensors.values())).path
    parents = [".".join(map(str, path[:depth])) for depth in range(1, len(path))]
    if not certain and f"{tree}.{prefix}".removeprefix(".") not in parents:
        for name, tensor in entries:
            top_name = name.partition(".")[0]
            if top_name != prefix and top_name not in _BESIDE_WEIGHTS and is_weight(name, tensor):
                return None
    return Averages(f"{prefix}.*", tensors)


def _per_parameter(entries: Entries) -> Averages | None:
    head, tail = "state.", ".ema_params"
    tensors = {}
    for name, tensor in entries:
        if not name.startswith(head):
            if is_weight(name, tensor):
                return None
        elif name.endswith(tail):
            tensors[name[len(head) : -len(tail)]] = tensor
    return Averages("state.<fqn>.ema_params", tensors) if tensors else None


def _by_position(tree: str, entries: Entries) -> Averages | None:
    head = "" if tree.rpartition(".")[2] == "shadow_params" else "shadow_params."
    tensors = {}
    for name, tensor in entries:
        position = name.removeprefix(head)
        if name.startswith(head) and position.isdecimal():
            tensors[int(position)] = tensor
    if not tensors:
        return None
    return Averages(POSITIONS, {str(position): tensors[position] for position in sorted(tensors)})


def matches(names: Iterable[str], others: Iterable[str]) -> bool:
    """Check whether a tensor has the same name on both sides, wrapper prefixes aside.

    LitEma's names without dots count too.
    """
    names = {canonical(name) for name in names}
    others = {canonical(name) for name in others}
    if not names.isdisjoint(others):
        return True
    if not names or any("." in name for name in names):
        return False
    return any(name.replace(".", "") in names for name in others)


def name_averages(
    tree: str,
    averages: Averages,
    live: Mapping[str, Tensor],
    trained: Collection[str],
    *,
    ordered: bool,
) -> Averages:
    """Name averages after the live tree where their own names are positions or lack dots.

    Args:
        live: the live weights by name.
        trained: the parameters that an optimizer's state lists, if there is one.
        ordered: whether the live weights stand in the order of the state dict they were saved from.

    Returns:
        The averages; what cannot be named carries its error in `problem`, so that listing the
        checkpoint still works.
    """
    names = averages.tensors.keys()
    if averages.layout == POSITIONS:
        return _name_positions(tree, averages, live, trained, ordered)
    if averages.layout != "*" or not live or not names:
        return averages
    if any("." in name for name in live) and not any("." in name for name in names):
        return _restore_dots(tree, averages, live)
    first = next(iter(names)).partition(".")[0]
    head = f"{first}."
    if role_of(first) != LIVE or not all(name.startswith(head) for name in names):
        return averages
    bare = {name[len(head) :]: tensor for name, tensor in averages.tensors.items()}
    if matches(names, live) or not matches(bare, live):
        return averages
    return Averages(f"{head}*", bare)


def _restore_dots(tree: str, averages: Averages, live: Mapping[str, Tensor]) -> Averages:
    # LitEma registers its shadows as buffers, whose names must not hold a dot, and so drops them.
    names = averages.tensors.keys()
    if names <= live.keys() or not matches(names, live):
        return averages
    dotted: dict[str, list[str]] = {}
    for name in live:
        for key in {name.replace(".", ""), canonical(name).replace(".", "")}:
            dotted.setdefault(key, []).append(name)
    unclear = [name for name in names if len(dotted.get(name, ())) != 1]
    if unclear:
        reason = f"there is not exactly one live name for {shown(unclear)}"
        return _unpaired(tree, averages, live, reason)
    tensors = {dotted[name][0]: tensor for name, tensor in averages.tensors.items()}
    return averages._replace(tensors=tensors)


def _name_positions(
    tree: str,
    averages: Averages,
    live: Mapping[str, Tensor],
    trained: Collection[str],
    ordered: bool,
) -> Averages:
    positions = list(map(int, averages.tensors))
    if positions != list(range(len(positions))):
        reason = f"positions 0 to {positions[-1]} expected, {len(positions)} found"
        return _unpaired(tree, averages, live, reason)
    if not live:
        reason = "the shadows have positions for names and no single live tree is beside them to name them"
        return _unpaired(tree, averages, live, reason)
    shapes = [tensor.shape for tensor in averages.tensors.values()]
    fitting = set()
    for names in _parameter_lists(live, trained):
        candidate = names if ordered else _sort_by_shape(names, live, shapes)
        if [live[name].shape for name in candidate] == shapes:
            fitting.add(candidate)
    if len(fitting) == 1:
        named = zip(fitting.pop(), averages.tensors.values(), strict=True)
        return averages._replace(tensors=dict(named))
    if not ordered:
        reason = "its file sorts tensors, so that their order is lost, and shapes alone do not tell which is which"
    elif fitting:
        reason = "several lists of parameters fit"
    else:
        reason = "their shapes fit no list of live parameters"
    return _unpaired(tree, averages, live, reason)


def _sort_by_shape(
    names: tuple[str, ...], live: Mapping[str, Tensor], shapes: Sequence[tuple[int, ...]]
) -> tuple[str, ...]:
    """Bring live tensors into the order of `shapes`; return () unless each has its own shape.

    safetensors files are sorted by dtype and name: by position, a norm's weight and bias would
    change places.
    """
    owners = {live[name].shape: name for name in names}
    if len(owners) != len(names) or owners.keys() != set(shapes):
        return ()
    return tuple(owners[shape] for shape in shapes)


def _parameter_lists(
    live: Mapping[str, Tensor], trained: Collection[str]
) -> Iterator[tuple[str, ...]]:
    """List what the live parameters may be, in stored order: a state dict also holds buffers."""
    floating = [name for name in live if live[name].dtype.kind not in ("int", "bool")]
    learned = [name for name in floating if name.rpartition(".")[2] not in _BUFFERS]
    stepped = [name for name in learned if name in trained]
    for names in (learned, floating, stepped, list(live)):
        yield tuple(names)
        # `Module.parameters()` yields a tied parameter once, a state dict under each name.
        untied: list[str] = []
        seen = set()
        for name in names:
            tensor = live[name]
            spans = tuple((chunk.file, chunk.offset) for chunk in tensor.chunks)
            memory = (tensor.storage, tensor.shape, spans)
            if tensor.storage is None or memory not in seen:
                untied.append(name)
            seen.add(memory)
        yield tuple(untied)


def _unpaired(tree: str, averages: Averages, live: Mapping[str, Tensor], reason: str) -> Averages:
    count = counted(len(averages.tensors), "averaged tensor")
    message = (
        f"tree {tree!r}: its {count} cannot be paired with the {counted(len(live), 'tensor')} of "
        f"the live tree ({reason}); `convert` takes the checkpoint as it stands"
    )
    return averages._replace(problem=SourceError("unsupported", message))
