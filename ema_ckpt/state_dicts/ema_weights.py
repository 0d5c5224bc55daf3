"""Which tensors of an EMA tree are the averaged weights, and under which names.

Every trainer shapes its EMA differently. The layouts below are tried in order, the first that fits
counts:

    weights.<fqn>            this package, beside `num_updates`
    state.<fqn>.ema_params   optimizer-style state per parameter (torchtitan)
    shadow_params.<N>        positions in the order of the live parameters (diffusers, torch_ema)
    ema_model.<fqn>          a module beside `online_model` (ema-pytorch)
    shadow.<fqn>             a plain dictionary
    model.<fqn>              beside `config`
    module.<fqn>             beside `n_averaged` (torch's AveragedModel) or `steps` (mmengine's)
    <fqn>                    otherwise every tensor that is no setting, buffers among them
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, starmap
from typing import NamedTuple, TypeVar

from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.errors import EmaCkptError, SourceError
from ema_ckpt.core.names import LIVE, SETTINGS, canonical, first_components, role_of
from ema_ckpt.core.text import counted, shown

Tensors = Mapping[str, Tensor]
"""Tensors by their name inside a tree (without its prefix), in stored order."""

POSITIONS = "shadow_params.*"
AVERAGED_MODEL = "module.*"
_EMA_PARAMS = ".ema_params"
LAYOUT_DICTIONARIES = frozenset(
    "weights shadow shadow_params ema_model model module residual backup online_model".split()
)
"""Dictionaries in an EMA tree that tell how it is laid out."""
_NO_WEIGHTS = frozenset(
    {"residual", "backup", "online_model", "collected_params", "temp_stored_params"}
)
_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})

_Value = TypeVar("_Value")


class Averages(NamedTuple):
    """The averaged weights of an EMA tree by name, and why they cannot be named, if so."""

    layout: str
    tensors: Tensors
    problem: EmaCkptError | None = None


def is_setting(name: str, tensor: Tensor) -> bool:
    """Check whether a tensor inside an EMA tree describes the average (`decay`, `num_updates`)."""
    return (name in SETTINGS or name.startswith("config.")) and tensor.numel <= 1


def is_weight(name: str, tensor: Tensor) -> bool:
    """Check whether a tensor is like a weight: no setting, no counter, no statistic of 0 dims."""
    return not tensor.dtype.is_discrete and bool(tensor.shape) and not is_setting(name, tensor)


def has_weight(tensors: Tensors) -> bool:
    """Check whether a tensor is like a weight, so that an average of it makes sense."""
    return any(starmap(is_weight, tensors.items()))


def weights_among(tensors: Tensors) -> dict[str, Tensor]:
    """Keep the tensors of an EMA tree that are no settings: averages, and buffers of any dtype."""
    return {name: tensor for name, tensor in tensors.items() if not is_setting(name, tensor)}


def floating_among(tensors: Tensors) -> dict[str, Tensor]:
    """Keep the tensors of an EMA tree that can have been averaged."""
    return {name: t for name, t in weights_among(tensors).items() if not t.dtype.is_discrete}


def inside(items: Mapping[str, _Value], prefix: str) -> dict[str, _Value]:
    """Keep the items whose names start with `prefix`, under their names without it."""
    skip = len(prefix)
    return {name[skip:]: item for name, item in items.items() if name.startswith(prefix)}


def find_averages(tree: str, tensors: Tensors, objects: Collection[str]) -> Averages:
    """Find the averaged weights of the EMA tree called `tree`; `objects` are its objects' names."""
    return next(filter(None, _try_layouts(tree, tensors, {*tensors, *objects})))


def _try_layouts(tree: str, tensors: Tensors, names: Collection[str]) -> Iterator[Averages | None]:
    top_names = first_components(names)
    yield _below("weights", tensors, "num_updates" in names)
    yield _dictionary(tree, "weights", tensors)
    yield _per_parameter(tensors)
    yield _positions(tree, tensors)
    yield _dictionary(tree, "ema_model", tensors)
    yield _dictionary(tree, "shadow", tensors)
    yield _below("model", tensors, "config" in top_names)
    yield _below("module", tensors, not top_names.isdisjoint(("n_averaged", "steps")))
    yield Averages("*", weights_among(tensors))


def _below(prefix: str, tensors: Tensors, is_marked: bool) -> Averages | None:
    averages = inside(tensors, f"{prefix}.")
    return Averages(f"{prefix}.*", averages) if averages and is_marked else None


def _dictionary(tree: str, prefix: str, tensors: Tensors) -> Averages | None:
    """Take the tensors below `prefix` if that is a dictionary or nothing else can be a weight.

    Without that test a module that happens to be called `shadow` would swallow its siblings.
    """
    averages = _below(prefix, tensors, True)
    if averages is None:
        return None
    path = next(iter(averages.tensors.values())).path
    dictionaries = accumulate(map(str, path[:-1]), "{}.{}".format)
    if f"{tree}.{prefix}".removeprefix(".") in dictionaries:
        return averages
    if first_components(floating_among(tensors)) <= {prefix, *_NO_WEIGHTS}:
        return averages
    return None


def _per_parameter(tensors: Tensors) -> Averages | None:
    averages: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("state."):
            if name.endswith(_EMA_PARAMS):
                averages[name.removeprefix("state.").removesuffix(_EMA_PARAMS)] = tensor
        elif name.startswith("param_groups."):
            continue
        elif not tensor.dtype.is_discrete and not is_setting(name, tensor):
            return None  # a weight that is no optimizer's state
    return Averages("state.<fqn>.ema_params", averages) if averages else None


def _positions(tree: str, tensors: Tensors) -> Averages | None:
    items: Tensors = inside(tensors, "shadow_params.")
    # A list of tensors without further names is one too, as NeMo's optimizer keeps it.
    if tree.rpartition(".")[2] == "shadow_params" or _are_positions(tensors):
        items = tensors
    positions = sorted(filter(str.isdecimal, items), key=int)
    averages = {str(int(position)): items[position] for position in positions}
    return Averages(POSITIONS, averages) if averages else None


def _are_positions(tensors: Tensors) -> bool:
    """Check whether tensors are the items of a list, where each is named by its index."""
    for name, tensor in tensors.items():
        if not name.isdecimal() or tensor.path[-1] != int(name):
            return False
    return True


def matches(names: Iterable[str], others: Iterable[str]) -> bool:
    """Check whether a tensor has the same name on both sides, wrapper prefixes aside.

    LitEma's names without dots count too.
    """
    names, others = set(map(canonical, names)), set(map(canonical, others))
    if _have_dots(names):
        return not names.isdisjoint(others)
    return not names.isdisjoint(others.union(name.replace(".", "") for name in others))


def name_averages(
    tree: str,
    averages: Averages,
    live: Tensors,
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
    if averages.layout == POSITIONS:
        return _name_by_position(tree, averages, live, trained, ordered)
    names = averages.tensors
    if averages.layout != "*" or not live or not names:
        return averages
    if _have_dots(live) and not _have_dots(names):
        return _restore_dots(tree, averages, live)
    first = next(iter(names)).partition(".")[0]
    bare = inside(names, f"{first}.")
    if role_of(first) != LIVE or len(bare) != len(names):
        return averages
    if matches(bare, live) and not matches(names, live):
        return Averages(f"{first}.*", bare)
    return averages


def _name_by_position(
    tree: str,
    averages: Averages,
    live: Tensors,
    trained: Collection[str],
    ordered: bool,
) -> Averages:
    positions = list(map(int, averages.tensors))
    if positions != list(range(len(positions))):
        reason = f"positions 0 to {positions[-1]} expected, {len(positions)} found"
        return _unpaired(tree, averages, live, reason)
    if not live:
        reason = "the shadows have positions for names and no single live tree is beside them"
        reason += " to name them"
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
        reason = "its file sorts tensors, so that their order is lost, and shapes alone do not tell"
        reason += " which is which"
    elif fitting:
        reason = "several lists of parameters fit"
    else:
        reason = "their shapes fit no list of live parameters"
    return _unpaired(tree, averages, live, reason)


def _have_dots(names: Iterable[str]) -> bool:
    return "." in "".join(names)


def _restore_dots(tree: str, averages: Averages, live: Tensors) -> Averages:
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


def _sort_by_shape(
    names: tuple[str, ...], live: Tensors, shapes: Sequence[tuple[int, ...]]
) -> tuple[str, ...]:
    """Bring live tensors into the order of `shapes`; return () unless each has its own shape.

    safetensors files are sorted by dtype and name: by position, a norm's weight and bias would
    change places.
    """
    owners = {live[name].shape: name for name in names}
    if len(owners) != len(names) or owners.keys() != set(shapes):
        return ()
    return tuple(owners[shape] for shape in shapes)


def _parameter_lists(live: Tensors, trained: Collection[str]) -> Iterator[tuple[str, ...]]:
    """List what the live parameters may be, in stored order: a state dict also holds buffers."""
    floating = [name for name in live if not live[name].dtype.is_discrete]
    learned = [name for name in floating if name.rpartition(".")[2] not in _BUFFERS]
    stepped = filter(set(trained).__contains__, learned)
    for names in (learned, floating, list(stepped), list(live)):
        yield tuple(names)
        # `Module.parameters()` yields a tied parameter once, a state dict under each name.
        memory: dict[object, str] = {}
        for name in names:
            tensor = live[name]
            key: object = name
            if tensor.storage is not None:
                spans = tuple((chunk.file, chunk.offset) for chunk in tensor.chunks)
                key = (tensor.storage, tensor.shape, spans)
            memory.setdefault(key, name)
        yield tuple(memory.values())


def _unpaired(tree: str, averages: Averages, live: Tensors, reason: str) -> Averages:
    count = counted(len(averages.tensors), "averaged tensor")
    message = (
        f"tree {tree!r}: its {count} cannot be paired with the {counted(len(live), 'tensor')} of "
        f"the live tree ({reason}); `convert` takes the checkpoint as it stands"
    )
    return averages._replace(problem=SourceError("unsupported", message))
