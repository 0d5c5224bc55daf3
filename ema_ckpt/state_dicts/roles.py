"""Group the entries of a checkpoint into its trees, and tell the role of each.

A tree is a top-level entry of the state dict that is a dictionary itself. Where the format records
nesting, the first element of a tensor's path names its tree, never the first dot of its name; names
decide only where nothing nests, and then on whole dot components.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from ema_ckpt.core.catalog import Catalog, Object, Tensor
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER, OTHER, role_of, tree_role
from ema_ckpt.core.text import shown
from ema_ckpt.state_dicts.ema_layouts import (
    Averages,
    find_averages,
    is_setting,
    is_weight,
    matches,
)

_Item = Tensor | Object


@dataclass
class Group:
    """The entries of one tree under names without its prefix, and its role once that is known."""

    name: str
    role: str | None = None
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    objects: list[tuple[str, Object]] = field(default_factory=list)

    def add(self, name: str, item: _Item) -> None:
        """Add an entry under its name inside the tree."""
        if isinstance(item, Tensor):
            self.tensors.append((name, item))
        else:
            self.objects.append((name, item))

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all entries. The group must be complete."""
        return frozenset(name for name, _ in chain[tuple[str, _Item]](self.tensors, self.objects))

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """Names of the tensors that can have been averaged. The group must be complete."""
        return tuple(name for name, tensor in self.tensors if is_weight(name, tensor))

    @cached_property
    def averages(self) -> Averages:
        """The averaged weights, if this is an EMA. The group must be complete."""
        return find_averages(self.name, self.tensors, [name for name, _ in self.objects])

    def is_average(self) -> bool:
        """Check whether the contents alone show that this is an EMA."""
        if not self.tensors:
            return False
        if "num_updates" in self.names and any(n.startswith("weights.") for n in self.names):
            return True
        return bool(self.weights) and all(map(_is_ema_param, self.weights))


def _is_ema_param(name: str) -> bool:
    return name.startswith("state.") and name.endswith(".ema_params")


def group_entries(catalog: Catalog) -> list[Group]:
    """Group everything in a checkpoint into trees with roles, in stored order.

    Raises:
        SourceError: `name-collision` if two paths join to one dotted name.
    """
    _refuse_collisions(catalog)
    if catalog.nested and any(len(tensor.path) > 1 for tensor in catalog.tensors):
        groups = _group_by_nesting(catalog)
    else:
        groups = _group_by_name(catalog)
    split = [part for group in groups.values() for part in _without_online_model(group)]
    _assign_roles(split)
    return split


def _refuse_collisions(catalog: Catalog) -> None:
    seen: set[str] = set()
    twice: list[str] = []
    for item in chain[_Item](catalog.tensors, catalog.objects):
        if item.name in seen:
            twice.append(item.name)
        seen.add(item.name)
    if twice:
        message = (
            f"several entries share the name {shown(twice)}; names joined with dots must be unique"
        )
        raise SourceError("name-collision", f"{catalog.resolved}: {message}", tensor=twice[0])


def _collect(catalog: Catalog, tree_of: Callable[[_Item], str]) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    for item in chain[_Item](catalog.tensors, catalog.objects):
        name = tree_of(item)
        if name not in groups:
            groups[name] = Group(name)
        groups[name].add(item.name[len(name) + 1 :] if name else item.name, item)
    return groups


def _group_by_nesting(catalog: Catalog) -> dict[str, Group]:
    groups = _collect(catalog, _first_element)
    whole = _whole_average(groups)
    opened = set()
    for name, group in groups.items():
        if name and name not in catalog.part_roles and _holds_only_trees(group):
            opened.add(name)

    def tree_of(item: _Item) -> str:
        first = _first_element(item)
        if first in whole:
            return ""
        if not whole and first in opened and len(item.path) > 2:
            return f"{first}.{item.path[1]}"
        return first

    if whole or opened:
        groups = _collect(catalog, tree_of)
    for name, role in catalog.part_roles.items():
        if name in groups and not whole:
            groups[name].role = role
    return groups


def _first_element(item: _Item) -> str:
    path = item.path
    if len(path) == 1:
        return ""
    # A list at the top is a tree only where its name says so: `shadow_params`, `optimizer_states`.
    first = str(path[0])
    return first if isinstance(path[1], str) or role_of(first) is not None else ""


def _whole_average(groups: Mapping[str, Group]) -> frozenset[str]:
    """Name the top-level entries that together are the state dict of one EMA, saved alone."""
    if "weights" in groups and "" in groups and "num_updates" in groups[""].names:
        return frozenset({"weights", "residual", "config"})
    if "state" in groups and sum(bool(group.weights) for group in groups.values()) == 1:
        names = groups["state"].weights
        if names and all(f".{name}".endswith(".ema_params") for name in names):
            return frozenset({"state"})
    return frozenset()


def _holds_only_trees(group: Group) -> bool:
    """Check for a dictionary like `app` of `{"app": {"model": …, "optim": …}}`.

    Single objects and 0-dim tensors beside the trees are bookkeeping. A recognised name is a tree
    itself, unless it holds several averages of one model.
    """
    role = role_of(group.name)
    if role not in (None, EMA):
        return False
    children: dict[str, Group] = {}
    for name, item in chain[tuple[str, _Item]](group.tensors, group.objects):
        if len(item.path) > 2 and isinstance(item.path[1], str):
            child = item.path[1]
            children.setdefault(child, Group(child)).add(name[len(child) + 1 :], item)
        elif isinstance(item, Tensor) and item.shape:
            return False
    if role == EMA:
        return bool(children) and all(child.is_average() for child in children.values())
    roles = [role_of(c.name) or (EMA if c.is_average() else None) for c in children.values()]
    return None not in roles and not {LIVE, EMA, OPTIMIZER}.isdisjoint(roles)


def _group_by_name(catalog: Catalog) -> dict[str, Group]:
    groups = _collect(catalog, _first_component)
    averages = [group for group in groups.values() if role_of(group.name) == EMA]
    prefix = _live_prefix(groups[""], averages) if "" in groups else None
    if prefix is None:
        return groups
    head = f"{prefix}."

    def tree_of(item: _Item) -> str:
        return _first_component(item) or (prefix if item.name.startswith(head) else "")

    return _collect(catalog, tree_of)


def _first_component(item: _Item) -> str:
    if len(item.path) > 1:
        return _first_element(item)
    first, dot, _ = item.name.partition(".")
    return first if dot and role_of(first) in (EMA, OPTIMIZER, OTHER) else ""


def _live_prefix(root: Group, averages: Sequence[Group]) -> str | None:
    """Find the live tree's name that all weights of `root` start with.

    It counts only if the names are those of an EMA without it, and not with it.
    """
    averaged = {name for group in averages for name in group.averages.tensors}
    weights = []
    for name, tensor in root.tensors:
        # Such as the `step` of ema-pytorch.
        is_bookkeeping = is_setting(name, tensor) or (not tensor.shape and "." not in name)
        if name in averaged or not is_bookkeeping:
            weights.append(name)
    if not weights or not averaged:
        return None
    first = weights[0].partition(".")[0]
    prefix = "app.model" if weights[0].startswith("app.model.") else first
    head = f"{prefix}."
    if role_of(prefix) != LIVE or not all(name.startswith(head) for name in weights):
        return None
    bare = [name.removeprefix(head) for name in weights]
    return prefix if matches(averaged, bare) and not matches(averaged, weights) else None


def _without_online_model(group: Group) -> list[Group]:
    """Split ema-pytorch's copy of the live model off the tree of its averages."""
    head = "online_model."
    if tree_role(group.name) != EMA or not any(n.startswith(head) for n, _ in group.tensors):
        return [group]
    rest = Group(group.name, group.role, objects=group.objects)
    online = Group(f"{group.name}.online_model", LIVE)
    for name, tensor in group.tensors:
        (online if name.startswith(head) else rest).add(name.removeprefix(head), tensor)
    return [rest, online]


def _assign_roles(groups: Sequence[Group]) -> None:
    for group in groups:
        role = EMA if group.is_average() else group.role or tree_role(group.name)
        if (role == EMA and not group.weights) or (role == LIVE and not group.tensors):
            role = OTHER
        group.role = role
    # Lightning's WeightAveraging callback stores the averages under `state_dict` and moves the live
    # weights aside.
    by_name = {group.name: group for group in groups}
    marks = by_name.get("averaging_state")
    is_lightning = {"averaging_state", "state_dict", "current_model_state"} <= by_name.keys()
    if is_lightning and marks is not None and "n_averaged" in marks.names:
        by_name["state_dict"].role = EMA
        marks.role = OTHER
    unnamed = [group for group in groups if group.role is None]
    live = _only_candidate(unnamed, {group.role for group in groups})
    for group in unnamed:
        group.role = LIVE if group is live else OTHER


def _only_candidate(unnamed: Sequence[Group], roles: set[str | None]) -> Group | None:
    """Find the group without a known name that holds the live weights: the only one with any."""
    candidates = []
    if LIVE not in roles:
        candidates = [g for g in unnamed if any(tensor.shape for _, tensor in g.tensors)]
    if not candidates and roles <= {None, OTHER, OPTIMIZER}:
        candidates = [group for group in unnamed if group.tensors]
    return candidates[0] if len(candidates) == 1 else None
