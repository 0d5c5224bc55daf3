"""Group the entries of a checkpoint into its trees, and tell the role of each.

A tree is a top-level entry of the state dict that is a dictionary itself. Where the format records
nesting, the first element of a tensor's path names its tree, never the first dot of its name; names
decide only where nothing nests, and then on whole dot components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter

from ema_ckpt.core.catalog import Catalog, Object, Tensor
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER, OTHER, role_of, tree_role
from ema_ckpt.core.text import shown
from ema_ckpt.state_dicts.ema_weights import (
    Averages,
    find_averages,
    inside,
    is_setting,
    matches,
    weights_among,
)

_Item = Tensor | Object


@dataclass
class Group:
    """The entries of one tree by name without its prefix, and its role once that is known.

    The cached properties are for groups that are complete.
    """

    name: str
    role: str | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Object] = field(default_factory=dict)

    def add(self, name: str, item: _Item) -> None:
        """Add an entry under its name inside the tree."""
        if isinstance(item, Tensor):
            self.tensors[name] = item
        else:
            self.objects[name] = item

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The tensors that can have been averaged."""
        return weights_among(self.tensors)

    @cached_property
    def averages(self) -> Averages:
        """The averaged weights, if this is an EMA."""
        return find_averages(self.name, self.tensors, self.objects)

    @cached_property
    def is_average(self) -> bool:
        """Whether the contents alone show that this is an EMA."""
        names = [*self.tensors, *self.objects]
        if not self.tensors:
            return False
        if "num_updates" in names and any(name.startswith("weights.") for name in names):
            return True
        states = inside(self.weights, "state.")
        return 0 < len(states) == len(self.weights) and _are_ema_params(states)


def _are_ema_params(names: Iterable[str]) -> bool:
    return all(f".{name}".endswith(".ema_params") for name in names)


def group_entries(catalog: Catalog) -> list[Group]:
    """Group everything in a checkpoint into trees with roles, in stored order.

    Raises:
        SourceError: `name-collision` if two paths join to one dotted name.
    """
    seen: set[str] = set()
    twice = []
    for item in _entries(catalog):
        if item.name in seen:
            twice.append(item.name)
        seen.add(item.name)
    if twice:
        message = f"{catalog.resolved}: several entries share the name {shown(twice)}; names joined"
        message += " with dots must be unique"
        raise SourceError("name-collision", message, tensor=twice[0])
    nests = catalog.nested and any(len(tensor.path) > 1 for tensor in catalog.tensors)
    groups = _group_by_nesting(catalog) if nests else _group_by_name(catalog)
    split = list(chain.from_iterable(map(_without_online_model, groups.values())))
    _assign_roles(split)
    return split


def _entries(catalog: Catalog) -> Iterable[_Item]:
    return chain(catalog.tensors, catalog.objects)


def _collect(catalog: Catalog, tree_of: Callable[[_Item], str]) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    for item in _entries(catalog):
        name = tree_of(item)
        if name not in groups:
            groups[name] = Group(name)
        groups[name].add(item.name[len(name) + 1 :] if name else item.name, item)
    return groups


def _group_by_nesting(catalog: Catalog) -> dict[str, Group]:
    groups = _collect(catalog, _first_element)
    whole = _whole_average(groups)
    if whole:
        return _collect(catalog, lambda item: "" if (e := _first_element(item)) in whole else e)
    roles = catalog.part_roles
    opened = {name for name in groups.keys() - roles.keys() if _holds_only_trees(groups[name])}

    def tree_of(item: _Item) -> str:
        first = _first_element(item)
        return f"{first}.{item.path[1]}" if first in opened and len(item.path) > 2 else first

    groups = _collect(catalog, tree_of) if opened else groups
    for name in groups.keys() & roles.keys():
        groups[name].role = roles[name]
    return groups


def _first_element(item: _Item) -> str:
    """Name the tree of a nested entry: the first element of its path, "" for one at the top."""
    if len(item.path) == 1:
        return ""
    # A list at the top is a tree only where its name says so: `shadow_params`, `optimizer_states`.
    first = str(item.path[0])
    return first if isinstance(item.path[1], str) or role_of(first) is not None else ""


def _whole_average(groups: Mapping[str, Group]) -> frozenset[str]:
    """Name the top-level entries that together are the state dict of one EMA, saved alone."""
    root = groups.get("", Group(""))
    if "weights" in groups and "num_updates" in {*root.tensors, *root.objects}:
        return frozenset({"weights", "residual", "config"})
    with_weights = [group for group in groups.values() if group.weights]
    if [group.name for group in with_weights] == ["state"]:
        return frozenset(["state"] if _are_ema_params(with_weights[0].weights) else [])
    return frozenset()


def _holds_only_trees(group: Group) -> bool:
    """Check for a dictionary like `app` of `{"app": {"model": …, "optim": …}}`.

    Single objects and 0-dim tensors beside the trees are bookkeeping. A recognised name is a tree
    itself, unless it holds several averages of one model.
    """
    role = role_of(group.name)
    if not group.name or role not in (None, EMA):
        return False
    children = _children(group)
    averages = [child.name for child in children.values() if child.is_average]
    if role == EMA:
        return 0 < len(averages) == len(children)
    roles = {role_of(name) or (EMA if name in averages else None) for name in children}
    return None not in roles and not roles.isdisjoint({LIVE, EMA, OPTIMIZER})


def _children(group: Group) -> dict[str, Group]:
    """Group a dictionary's entries by the dictionaries in it; {} if a tensor lies beside them."""
    children: dict[str, Group] = {}
    for name, item in chain[tuple[str, _Item]](group.tensors.items(), group.objects.items()):
        child = item.path[1]
        if len(item.path) > 2 and isinstance(child, str):
            children.setdefault(child, Group(child)).add(name[len(child) + 1 :], item)
        elif isinstance(item, Tensor) and item.shape:
            return {}
    return children


def _group_by_name(catalog: Catalog) -> dict[str, Group]:
    groups = _collect(catalog, _first_component)
    prefix = _live_prefix(groups)
    if prefix is None:
        return groups
    head = f"{prefix}."

    def tree_of(item: _Item) -> str:
        return _first_component(item) or (prefix if item.name.startswith(head) else "")

    return _collect(catalog, tree_of)


def _first_component(item: _Item) -> str:
    """Name the tree of an entry by the first component of its dotted name, or return ""."""
    if len(item.path) > 1:
        return _first_element(item)
    first, dot, _ = item.name.partition(".")
    return first if dot and role_of(first) in (EMA, OPTIMIZER, OTHER) else ""


def _live_prefix(groups: Mapping[str, Group]) -> str | None:
    """Find the live tree's name that all weights outside other trees start with.

    It counts only if the names are those of an EMA without it, and not with it.
    """
    averaged: set[str] = set()
    for group in groups.values():
        if role_of(group.name) == EMA:
            averaged.update(group.averages.tensors)
    root = groups.get("", Group("")).tensors
    weights = {n: t for n, t in root.items() if n in averaged or not _is_bookkeeping(n, t)}
    first = next(iter(weights), "")
    prefix = "app.model" if first.startswith("app.model.") else first.partition(".")[0]
    bare = inside(weights, f"{prefix}.")
    if role_of(prefix) != LIVE or len(bare) != len(weights):
        return None
    return prefix if matches(averaged, bare) and not matches(averaged, weights) else None


def _is_bookkeeping(name: str, tensor: Tensor) -> bool:
    # Outside all trees, such as the `step` of ema-pytorch.
    return is_setting(name, tensor) or (not tensor.shape and "." not in name)


def _without_online_model(group: Group) -> list[Group]:
    """Split ema-pytorch's copy of the live model off the tree of its averages."""
    online = inside(group.tensors, "online_model.")
    if tree_role(group.name) != EMA or not online:
        return [group]
    rest = {n: t for n, t in group.tensors.items() if not n.startswith("online_model.")}
    return [
        Group(group.name, group.role, rest, group.objects),
        Group(f"{group.name}.online_model", LIVE, online),
    ]


def _assign_roles(groups: Sequence[Group]) -> None:
    for group in groups:
        role = EMA if group.is_average else group.role or tree_role(group.name)
        needed = {EMA: group.weights, LIVE: group.tensors}.get(role or "", True)
        group.role = role if needed else OTHER
    # Lightning's WeightAveraging callback stores the averages under `state_dict` and moves the live
    # weights aside.
    by_name = {group.name: group for group in groups}
    marks = by_name.get("averaging_state", Group(""))
    is_lightning = {"state_dict", "current_model_state"} <= by_name.keys()
    if is_lightning and "n_averaged" in {*marks.tensors, *marks.objects}:
        by_name["state_dict"].role, marks.role = EMA, OTHER
    live = _unnamed_live(groups)
    for group in groups:
        group.role = group.role or (LIVE if group is live else OTHER)


def _unnamed_live(groups: Sequence[Group]) -> Group | None:
    """Find the live weights if no name tells them: the only group without a role that has any."""
    roles = set(map(attrgetter("role"), groups))
    unnamed = [group for group in groups if group.role is None and group.tensors]
    shaped = [g for g in unnamed if any(map(attrgetter("shape"), g.tensors.values()))]
    if LIVE in roles or (EMA in roles and not shaped):
        return None
    candidates = shaped or unnamed
    return candidates[0] if len(candidates) == 1 else None
