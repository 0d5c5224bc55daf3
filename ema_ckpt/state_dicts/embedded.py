"""Averages and optimizer state that lie among live weights, where names alone hold them apart.

A module that keeps its average as a submodule (LitEma, ema-pytorch) or as buffers (mmcv's hook)
saves both under one dictionary; a flattened checkpoint has everything in one list of names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import chain

from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.names import (
    EMA,
    LIVE,
    MOMENTS,
    OPTIMIZER,
    OTHER,
    canonical,
    first_components,
    live_partners,
    role_of,
    tree_role,
)
from ema_ckpt.state_dicts.ema_weights import inside, is_setting, matches
from ema_ckpt.state_dicts.groups import Group, Item, collect, first_element, open_bookkeeping

_MAX_AVERAGES = 16
_AVERAGE_DEPTH = 3  # components within which the name of an average is looked for
_BUFFER = "ema_"  # how mmcv's hook begins the names of its buffers


def separate(group: Group) -> list[Group]:
    """Take optimizer state and averages out of a tree of weights, each as a tree of its own."""
    role = group.known_role
    if role not in (None, LIVE, EMA) or group.is_average:
        return [group]
    paths = {path for name in group.names() if (path := _optimizer_of(name))}
    rest, states = _split_below(group, paths)
    for state in states:
        state.role = OPTIMIZER
    if role == EMA:
        return [rest, *states]
    rest, *averages = _take_averages(rest)
    return [*_take_buffers(rest), *averages, *states]


def _split_below(group: Group, paths: Collection[str]) -> tuple[Group, list[Group]]:
    """Take out what lies below each of `paths`."""
    if not paths:
        return group, []
    return group.split(lambda name: _first_prefix(name, paths))


def _take_averages(group: Group) -> list[Group]:
    """Take submodules that average others out; the rest comes first."""
    candidates = group.split(_average_of)[1]
    if len(candidates) > _MAX_AVERAGES:  # parts of layers: a model has few averages
        return [group]
    paths = set()
    for part in candidates:
        if _averages_weights_of(group, part):
            paths.add(part.name[len(group.name) :].lstrip("."))
    rest, averages = _split_below(group, paths)
    for average in averages:
        average.role = EMA
    return [rest, *averages]


def _optimizer_of(name: str) -> str | None:
    """Return the path of the optimizer's state that an entry shows to be there, or None."""
    parts = name.split(".")
    if "param_groups" in parts:
        return ".".join(parts[: parts.index("param_groups")])
    if parts[-1] not in MOMENTS or "state" not in parts:
        return None
    end = parts.index("state")
    for index, part in enumerate(parts):
        if part == "state" and OPTIMIZER in map(role_of, parts[:index]):
            end = index
            break
    # `state` at the very top is what lies in it: there is no name before it.
    return ".".join(parts[:end]) or "state"


def _average_of(name: str) -> str | None:
    """Return the path of the dictionary or submodule with the name of an average, or None."""
    parts = name.split(".")
    for depth, part in enumerate(parts[:-1][:_AVERAGE_DEPTH], 1):
        if role_of(part) == EMA:
            return ".".join(parts[:depth])
    return None


def _first_prefix(name: str, prefixes: Collection[str]) -> str | None:
    """Return the shortest of `prefixes` that `name` lies below, or None."""
    dot = name.find(".")
    while dot >= 0:
        if name[:dot] in prefixes:
            return name[:dot]
        dot = name.find(".", dot + 1)
    return None


def _averages_weights_of(group: Group, part: Group) -> bool:
    """Check whether `part` averages live weights in `group`: a module may bear any name.

    Its settings show it, and that all its weights have a live one of their name and shape;
    otherwise most need one where the name of the part says that the live weights lie.
    """
    if not part.has_weight:
        return False
    path = part.name[len(group.name) :].removeprefix(".")
    live = {n: t for n, t in group.tensors.items() if not n.startswith(f"{path}.")}
    averages = part.averages
    if averages.layout != "*" or len(part.weights) < len(part.tensors):
        return _pairs(averages.tensors, live)
    wanted = set(map(canonical, averages.tensors))
    partners = [*live_partners(path), path.rpartition(".")[0]]
    for place in (live, *(inside(live, f"{partner}.") for partner in partners)):
        paired = wanted.intersection(map(canonical, place))
        if 2 * len(paired) >= len(wanted):
            return True
    return False


def _pairs(averages: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> bool:
    """Check whether below one prefix each average has a live weight of its name and shape."""
    forms: list[Callable[[str], str]] = [canonical, lambda name: canonical(name).replace(".", "")]
    for form in forms:
        shapes = {form(name): tensor.shape for name, tensor in live.items()}
        wanted = {form(name): tensor.shape for name, tensor in averages.items()}
        first = next(iter(wanted), "")
        if not first:
            continue
        for name in shapes:
            if not name.endswith(first):
                continue
            head = name[: -len(first)]
            if all(shapes.get(head + tail) == shape for tail, shape in wanted.items()):
                return True
    return False


def _take_buffers(group: Group) -> list[Group]:
    """Take mmcv's buffers out: `ema_<name>`, dots of the live name as underscores."""
    buffers: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for name, tensor in group.tensors.items():
        is_buffer = name.startswith(_BUFFER) and "." not in name
        (buffers if is_buffer else rest)[name] = tensor
    if not buffers:
        return [group]
    live: dict[str, list[str]] = {}
    for name in rest:
        live.setdefault(canonical(name).replace(".", "_"), []).append(name)
    named: dict[str, Tensor] = {}
    for name, tensor in buffers.items():
        partners = live.get(name.removeprefix(_BUFFER), [])
        if len(partners) != 1 or rest[partners[0]].shape != tensor.shape:
            return [group]
        named[partners[0]] = tensor
    average = Group(f"{group.name}.ema".lstrip("."), EMA, named)
    return [Group(group.name, group.role, rest, group.objects, group.depth), average]


def without_online_model(group: Group) -> list[Group]:
    """Split ema-pytorch's copy of the live model off the tree of its averages."""
    online = inside(group.tensors, "online_model.")
    if group.known_role != EMA or not online:
        return [group]
    rest = {n: t for n, t in group.tensors.items() if not n.startswith("online_model.")}
    return [
        Group(group.name, group.role, rest, group.objects, group.depth),
        Group(f"{group.name}.online_model", LIVE, online),
    ]


def group_by_name(catalog: Catalog) -> list[Group]:
    """Group by names where nothing nests: by their first component if its role is recognised."""
    groups = collect(catalog, _first_component)
    open_bookkeeping(groups.values())
    found = list(chain.from_iterable(map(separate, groups.values())))
    root = next((group for group in found if not group.name), Group("", depth=0))
    averaged: set[str] = set()
    for group in found:
        if group.known_role == EMA:
            averaged.update(group.averages.tensors)
    prefixes = _live_prefixes(root, averaged)
    if not prefixes:
        return found
    rest, live = root.split(lambda name: _first_prefix(name, prefixes))
    index = found.index(root)
    found[index : index + 1] = [*live, rest] if rest.names() else live
    return found


def _first_component(item: Item) -> str:
    """Name the tree of an entry by the first component of its dotted name, or return ""."""
    if len(item.path) > 1:
        return first_element(item)
    first, dot, _ = item.name.partition(".")
    return first if dot and role_of(first) in (EMA, OPTIMIZER, OTHER) else ""


def _live_prefixes(root: Group, averaged: set[str]) -> list[str]:
    """Find the live tree's name that all weights outside other trees start with.

    It counts only if the names are those of an EMA without it, and not with it. Of a form that has
    the average under a live name, both names count.
    """
    tops = first_components(root.tensors)
    if "current_model_state" in tops:
        return sorted(tops & {"state_dict", "current_model_state"})
    weights: dict[str, Tensor] = {}
    for name, tensor in root.tensors.items():
        # Outside all trees a number is a counter, such as the `step` of ema-pytorch.
        is_counter = not tensor.shape and "." not in name
        if name in averaged or not (is_counter or is_setting(name, tensor)):
            weights[name] = tensor
    if matches(averaged, weights):
        return []
    parts = next(iter(weights), "").split(".")
    for depth in range(1, min(len(parts), _AVERAGE_DEPTH + 1)):
        prefix = ".".join(parts[:depth])
        bare = inside(weights, f"{prefix}.")
        if len(bare) != len(weights):
            break
        if tree_role(prefix) == LIVE and matches(averaged, bare):
            return [prefix]
    return []
