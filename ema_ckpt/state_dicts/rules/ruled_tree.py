"""Rules applied to one tree of weights: its tensors under new names, in new layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ema_ckpt.core.catalog import Object, Path, Tensor
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import canonical
from ema_ckpt.state_dicts.ema_weights import inside
from ema_ckpt.state_dicts.rules.rules import ConstantRule, Item, Rules, StateDict
from ema_ckpt.state_dicts.rules.views import StoredViews
from ema_ckpt.state_dicts.tree import Tree

_RESIDUALS = "residual."
_EMA_PARAMS = ".ema_params"


class Place(NamedTuple):
    """What is around a weight's name: text before and after it, and the parts of its path.

    `nested` are the elements that the name itself consists of; empty where nothing nests. `lead` is
    what the first of them has before the name: that of a tree inside other weights.
    """

    before: str
    after: str
    head: Path = ()
    nested: Path = ()
    tail: Path = ()
    lead: str = ""

    def name(self, fqn: str) -> str:
        """Return the full name of a weight called `fqn` at this place."""
        return f"{self.before}{fqn}{self.after}"

    def path(self, fqn: str) -> Path:
        """Return the path of a weight called `fqn` at this place, nested as the one there is."""
        if not self.nested:
            return (self.name(fqn),)
        if len(self.nested) == 1 or any("." in str(part) for part in self.nested):
            return (*self.head, self.lead + fqn, *self.tail)
        parts: list[str | int] = [*fqn.split(".")]
        for index, old in enumerate(self.nested[: len(parts)]):
            if str(old) != parts[index]:
                break
            parts[index] = old  # an index of a list stays a number
        if self.lead:
            parts[0] = f"{self.lead}{parts[0]}"
        return (*self.head, *parts, *self.tail)


def place_of(key: str, tensor: Tensor) -> Place | None:
    """Return the place of a weight called `key` in its tree; None if it is stored under another.

    Averages that are known by their positions, or by names without dots, have no place for a name.
    """
    full, after = tensor.name, ""
    if full.endswith(_EMA_PARAMS) and not key.endswith(_EMA_PARAMS):
        full, after = full[: -len(_EMA_PARAMS)], _EMA_PARAMS
    before = full[: len(full) - len(key)]
    if before + key != full or not f".{before}".endswith("."):
        return None
    tail = 1 if after else 0
    start, reached = 0, 0
    for part in tensor.path:
        end = reached + len(str(part)) + 1
        if end > len(before):
            break
        start, reached = start + 1, end
    nested, lead = tensor.path[start : len(tensor.path) - tail], before[reached:]
    if lead and nested:
        nested = (str(nested[0]).removeprefix(lead), *nested[1:])
    if ".".join(map(str, nested)) != key:
        return Place(before, after)
    end_path = tensor.path[len(tensor.path) - tail :]
    return Place(before, after, tensor.path[:start], nested, end_path, lead)


@dataclass(slots=True)
class RuledTree:
    """A tree that rules were applied to.

    Attributes:
        replaced: what stands in the place of each tensor that rules took, by its full name.
        added: tensors that come from none.
        sources: the tensors that each one that rules made comes from, by its full name.
        origins: their names inside the tree, by that of what was made.
        moved: the stored names of tensors that are as they were, by their new full names.
        objects: what stands in the place of each object that rules took, by its full name.
        object_sources: the objects that each of these comes from, by its full name.
        dropped: what rules drop, with the reason. left_out: state that they do not carry.
        tied: other names of averages that are stored once, by the name that is stored.
        unwrapped: a stored name of which rules made one that lacks a wrapper prefix; None if none.
        paths: of an optimizer, paths that changed: the old one and the new one.
        constants: of an optimizer, new weights that come from none, and so have no state.
    """

    tree: Tree
    replaced: dict[str, list[Tensor]] = field(default_factory=dict)
    added: list[Tensor] = field(default_factory=list)
    sources: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    objects: dict[str, list[Object]] = field(default_factory=dict)
    object_sources: dict[str, tuple[Object, ...]] = field(default_factory=dict)
    dropped: list[tuple[Tensor | Object, str]] = field(default_factory=list)
    left_out: list[tuple[Tensor | Object, str]] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    inexact: dict[int, str] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    unwrapped: str | None = None
    paths: list[tuple[Path, Path]] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)


def apply_to_tree(
    rules: Rules,
    tree: Tree,
    views: StoredViews,
    tied: Mapping[str, str],
    *,
    keeps_places: bool,
) -> RuledTree:
    """Apply rules to the weights of a tree, and to what goes with them name by name.

    Args:
        tied: further names of weights that are stored once, each with the stored name.
        keeps_places: full names and paths matter; without it only names inside the tree do.

    Raises:
        UsageError: as rules raise.
        SourceError: `unsupported` if the tree's weights cannot be named.
    """
    weights = dict(tree.weights)
    weights |= {other: weights[name] for other, name in tied.items()}
    work = _TreeWork(tree, weights, set(tied), views, keeps_places)
    work.apply(rules)
    result = work.result
    residuals = inside({tensor.name: tensor for tensor in tree.tensors}, tree.prefix + _RESIDUALS)
    if residuals and result.used:
        # A constant has no rounding error that would be kept beside it.
        mapped = tuple([rule for rule in rules.rules if not isinstance(rule, ConstantRule)])
        beside = _TreeWork(tree, residuals, set(), views, keeps_places)
        beside.apply(replace(rules, rules=mapped))
        result.replaced |= beside.result.replaced
        result.sources |= beside.result.sources
        result.moved |= beside.result.moved
        result.unwrapped = result.unwrapped or beside.result.unwrapped
    tensors: list[Tensor] = []
    for tensor in tree.tensors:
        tensors += result.replaced.get(tensor.name, [tensor])
    result.tree = replace(tree, tensors=(*tensors, *result.added), named=work.named)
    return result


def drop_reason(rules: Rules, number: int) -> str:
    """Return why something is left out that a rule drops."""
    return f"dropped by rule {number} of {rules.name}"


class _TreeWork:
    """Weights of one tree by name, and what rules make of them."""

    def __init__(
        self,
        tree: Tree,
        weights: Mapping[str, Tensor],
        aliases: set[str],
        views: StoredViews,
        keeps_places: bool,
    ) -> None:
        self.result = RuledTree(tree)
        self.named: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._keys: dict[str, str] = {}  # as stored, by the name without wrapper prefixes
        for key, tensor in weights.items():
            name = canonical(key)
            name = key if name in self._keys else name
            self._keys[name], self._weights[name] = key, tensor
        self._aliases = aliases
        self._views = views
        self._keeps_places = keeps_places

    def apply(self, rules: Rules) -> None:
        """Apply the rules, and note what became of every weight."""
        result = self.result
        state = rules.apply(self._weights)
        result.used, result.inexact = state.used, state.inexact
        for name, number in state.dropped:
            result.dropped.append((self._weights[name], drop_reason(rules, number)))
        kept = self._aliased(state)
        stays: set[str] = set()
        for name, item in state.items.items():
            if name in kept:
                continue
            if name not in state.origins:
                self.named[self._keys[name]] = self._weights[name]
                stays.add(self._weights[name].name)
                continue
            self._add(name, item, state.origins[name])
        for name, tensor in self._weights.items():
            gone = name not in state.items or name in state.origins
            if gone and tensor.name not in stays:
                result.replaced.setdefault(tensor.name, [])

    def _aliased(self, state: StateDict) -> set[str]:
        """Find names that still stand for what another name stands for; note them as tied."""
        if not self._aliases:
            return set()
        owners: dict[str, str] = {}  # by the full name of what is stored
        for name in state.items:
            for origin in state.origins_of(name):
                if origin not in self._aliases:
                    owners.setdefault(self._weights[origin].name, name)
        tied: set[str] = set()
        for name, item in state.items.items():
            origins = state.origins_of(name)
            if len(origins) != 1 or origins[0] not in self._aliases:
                continue
            owner = owners.get(self._weights[origins[0]].name)
            if owner is not None and state.items[owner] == item:
                self.result.tied.setdefault(owner, []).append(name)
                tied.add(name)
        return tied

    def _add(self, name: str, item: Item, origins: Sequence[str]) -> None:
        place = self._place(origins)
        stored = self._wrapped(name, origins)
        full, path = place.name(stored), place.path(stored)
        sources = [self._weights[origin] for origin in origins]
        result = self.result
        if isinstance(item, Tensor):
            # Three times as fast as `dataclasses.replace`, which counts with 100 000 names.
            tensor = Tensor(
                full, path, item.shape, item.dtype, item.chunks, item.storage, item.refusal
            )
            result.moved[full] = item.name
        else:
            tensor = self._views.add(item, full, path)
        result.sources[full] = tuple(sources)
        result.origins[name] = tuple(origins)
        self.named[stored] = tensor
        if sources:
            result.replaced.setdefault(sources[0].name, []).append(tensor)
        else:
            result.added.append(tensor)

    def _wrapped(self, name: str, origins: Sequence[str]) -> str:
        """Return a new name behind the wrapper prefix that its origins begin with, as `module.`.

        Prefixes inside of names have no place in a new one; that one is lost is noted.
        """
        models = origins or list(self._weights)[:1]
        prefixes: set[str] = set()
        for model in models:
            key = self._keys[model]
            if not key.endswith(model):
                self.result.unwrapped = self.result.unwrapped or key
                return name
            prefixes.add(key[: len(key) - len(model)])
        if len(prefixes) > 1:
            self.result.unwrapped = self.result.unwrapped or self._keys[models[0]]
            return name
        return prefixes.pop() + name if prefixes else name

    def _place(self, origins: Sequence[str]) -> Place:
        """Return where the first of some weights is; that of any weight if there are none."""
        models = origins or list(self._weights)[:1]
        for model in models:
            place = place_of(self._keys[model], self._weights[model])
            if place is not None:
                return place
        tree = self.result.tree
        if self._keeps_places and models:
            stored = self._weights[models[0]].name
            message = (
                f"tree {tree.name!r} stores {models[0]!r} as {stored!r}, where no other name fits"
            )
            remedy = f"consolidate --tree {tree.name} takes rules"
            raise SourceError("unsupported", f"{message}; {remedy}", tensor=stored)
        return Place(f"{tree.name}." if tree.name else "", "")
