"""Where one tree of a checkpoint ends and the next begins.

A tree is a top-level entry of the state dict that is a dictionary itself. Where the format records
nesting, the first element of a tensor's path tells its tree, never the first dot of its name; names
decide only where nothing nests, and then on whole dot components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from ema_ckpt.core.catalog import Catalog, Object, Tensor
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER, OTHER, role_of, tree_role
from ema_ckpt.core.text import shown
from ema_ckpt.state_dicts.ema_layouts import find_averages, is_setting, is_weight, matches


@dataclass(slots=True)
class Group:
    """A tree while it is being told apart; names are without the tree's prefix."""

    name: str
    role: str | None = None
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    objects: list[tuple[str, Object]] = field(default_factory=list)

    def names(self) -> list[str]:
        """Names of everything in it."""
        return [*(name for name, _ in self.tensors), *(name for name, _ in self.objects)]

    def has_weights(self) -> bool:
        """Whether any of its tensors can have been averaged."""
        return any(is_weight(name, tensor) for name, tensor in self.tensors)

    def is_average(self) -> bool:
        """Whether the contents alone say that this is an EMA."""
        if not self.tensors:
            return False
        names = self.names()
        if "num_updates" in names and any(name.startswith("weights.") for name in names):
            return True
        weights = [name for name, tensor in self.tensors if is_weight(name, tensor)]
        return bool(weights) and all(
            n.startswith("state.") and n.endswith(".ema_params") for n in weights
        )


_Item = Tensor | Object
_Key = Callable[[_Item], str]


def group_entries(catalog: Catalog) -> list[Group]:
    """Sort everything a checkpoint holds into its trees, in stored order; roles are set only where
    parts tell them.

    Raises:
        SourceError: `name-collision` if two paths join to one dotted name.
    """
    _refuse_collisions(catalog)
    groups = _nested(catalog, catalog.part_roles) if _nests(catalog) else _by_name(catalog)
    return [piece for group in groups.values() for piece in _without_online_model(group)]


def _refuse_collisions(catalog: Catalog) -> None:
    seen: set[str] = set()
    twice: list[str] = []
    for item in chain[_Item](catalog.tensors, catalog.objects):
        if item.name in seen:
            twice.append(item.name)
        seen.add(item.name)
    if twice:
        raise SourceError(
            "name-collision",
            f"{catalog.resolved}: several entries share the name {shown(twice)}; names joined with dots must be unique",
            tensor=twice[0],
        )


def _nests(catalog: Catalog) -> bool:
    return catalog.nested and any(len(tensor.path) > 1 for tensor in catalog.tensors)


def _collect(catalog: Catalog, key: _Key) -> dict[str, Group]:
    """Sort everything into groups by `key`, the name of the tree, in stored order."""
    groups: dict[str, Group] = {}
    for tensor in catalog.tensors:
        name = key(tensor)
        group = groups.get(name) or groups.setdefault(name, Group(name))
        group.tensors.append((tensor.name[len(name) + 1 :] if name else tensor.name, tensor))
    for item in catalog.objects:
        name = key(item)
        group = groups.get(name) or groups.setdefault(name, Group(name))
        group.objects.append((item.name[len(name) + 1 :] if name else item.name, item))
    return groups


def _first_element(item: Tensor | Object) -> str:
    path = item.path
    if len(path) == 1:
        return ""
    # A list at the top is a tree only where its name says so: `shadow_params`, `optimizer_states`.
    first = str(path[0])
    return first if isinstance(path[1], str) or role_of(first) is not None else ""


def _nested(catalog: Catalog, parts: Mapping[str, str]) -> dict[str, Group]:
    groups = _collect(catalog, _first_element)
    whole = _whole_average(groups)
    if whole:
        return _collect(
            catalog, lambda item: "" if (name := _first_element(item)) in whole else name
        )
    opened = {
        name
        for name, group in groups.items()
        if name and name not in parts and _passes_through(group)
    }
    if opened:
        groups = _collect(catalog, partial(_second_element, opened=opened))
    for name, role in parts.items():
        if name in groups:
            groups[name].role = role
    return groups


def _second_element(item: Tensor | Object, opened: set[str]) -> str:
    first = _first_element(item)
    return f"{first}.{item.path[1]}" if first in opened and len(item.path) > 2 else first


def _whole_average(groups: Mapping[str, Group]) -> frozenset[str]:
    """Top-level entries that together are the state dict of one EMA, saved with nothing around
    it.
    """
    root = groups.get("")
    if "weights" in groups and root is not None and "num_updates" in root.names():
        return frozenset({"weights", "residual", "config"})
    if "state" in groups and sum(group.has_weights() for group in groups.values()) == 1:
        names = [
            f"state.{name}" for name, tensor in groups["state"].tensors if is_weight(name, tensor)
        ]
        if names and all(name.endswith(".ema_params") for name in names):
            return frozenset({"state"})
    return frozenset()


def _passes_through(group: Group) -> bool:
    """Whether a top-level dictionary holds nothing but trees: `app` of `{"app": {"model": …,
    "optim": …}}`.

    Single objects and 0-dim tensors beside them are bookkeeping. A recognised name is a tree
    itself, unless it holds several averages of one model.
    """
    role = role_of(group.name)
    if role not in (None, EMA):
        return False
    children: dict[str, Group] = {}
    for name, tensor in group.tensors:
        if len(tensor.path) > 2 and isinstance(tensor.path[1], str):
            child = str(tensor.path[1])
            children.setdefault(child, Group(child)).tensors.append(
                (name[len(child) + 1 :], tensor)
            )
        elif tensor.shape:
            return False
    for name, item in group.objects:
        if len(item.path) > 2 and isinstance(item.path[1], str):
            child = str(item.path[1])
            children.setdefault(child, Group(child)).objects.append((name[len(child) + 1 :], item))
    if role == EMA:
        return bool(children) and all(child.is_average() for child in children.values())
    known = [
        role_of(name) or (EMA if child.is_average() else None) for name, child in children.items()
    ]
    return bool(known) and None not in known and any(role != OTHER for role in known)


def _by_name(catalog: Catalog) -> dict[str, Group]:
    """Trees of a checkpoint in which nothing nests."""
    groups = _collect(catalog, _first_component)
    rest = groups.get("")
    prefix = (
        _live_prefix(rest, [group for group in groups.values() if role_of(group.name) == EMA])
        if rest
        else None
    )
    if prefix is None:
        return groups
    head = f"{prefix}."

    def key(item: Tensor | Object) -> str:
        return _first_component(item) or (prefix if item.name.startswith(head) else "")

    return _collect(catalog, key)


def _first_component(item: Tensor | Object) -> str:
    first, dot, _ = item.name.partition(".")
    if len(item.path) > 1:
        return _first_element(item)
    return first if dot and role_of(first) in (EMA, OPTIMIZER, OTHER) else ""


def _live_prefix(rest: Group, averages: Sequence[Group]) -> str | None:
    """The one live name that all of `rest` starts with, if only without it the names are those of
    an EMA.
    """
    found = [
        find_averages(group.name, group.tensors, [name for name, _ in group.objects])
        for group in averages
    ]
    averaged = [name for average in found for name in average.tensors]
    known = set(averaged)
    weights = [
        name for name, tensor in rest.tensors if name in known or not _is_scalar(name, tensor)
    ]
    if not weights or not averaged:
        return None
    first, _, _ = weights[0].partition(".")
    prefix = "app.model" if weights[0].startswith("app.model.") else first
    head = f"{prefix}."
    if role_of(prefix) != LIVE or not all(name.startswith(head) for name in weights):
        return None
    bare = [name[len(head) :] for name in weights]
    return prefix if matches(averaged, bare) and not matches(averaged, weights) else None


def _is_scalar(name: str, tensor: Tensor) -> bool:
    """Whether a tensor at the top is bookkeeping, such as the `step` of ema-pytorch."""
    return is_setting(name, tensor) or (not tensor.shape and "." not in name)


def _without_online_model(group: Group) -> Iterable[Group]:
    """Take ema-pytorch's copy of the live model out of the tree of its averages."""
    head = "online_model."
    if tree_role(group.name) != EMA or not any(name.startswith(head) for name, _ in group.tensors):
        return (group,)
    online = Group(f"{group.name}.online_model", LIVE)
    online.tensors = [
        (name[len(head) :], tensor) for name, tensor in group.tensors if name.startswith(head)
    ]
    group.tensors = [(name, tensor) for name, tensor in group.tensors if not name.startswith(head)]
    return (group, online)
