"""How a copy may name its source's tensors, and those that bear no name of the copy."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from ema_ckpt.core.catalog import Catalog, Ints, Tensor
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.names import EMA, LIVE, OTHER, canonical
from ema_ckpt.state_dicts.ema_config import with_tied_names
from ema_ckpt.state_dicts.selection import missing_weights, strip_starts
from ema_ckpt.state_dicts.ties import Tied, tied_names, with_ties_of
from ema_ckpt.state_dicts.tree import Tree, live_of, of_role

# Digests of tensors after their cast to a type.
Digests = Callable[[Sequence[Tensor], DType], Iterable[int | None]]

_MOST_AVERAGES = 16  # of one model, that a copy may have filled from it
_MOST_GIVERS = 4  # trees that may have filled averages which are paired with none of them


class Naming(NamedTuple):
    """One way to name the source's tensors.

    Attributes:
        label: for messages.
        tensors: the tensors by name.
        optional: ids of those that a copy may lack.
        path: of the names below a dotted path, that path.
    """

    label: str
    tensors: Mapping[str, Tensor]
    optional: frozenset[int] = frozenset()
    path: str | None = None

    def pair(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Find the tensor of each name, with or without wrapper prefixes.

        Of names that differ in these prefixes alone only one is a tensor's.
        """
        pairs: dict[str, Tensor] = {}
        claimed: set[tuple[int, str]] = set()
        others = []
        for name in names:
            if name in self.tensors:
                _claim(pairs, claimed, name, self.tensors[name])
            else:
                others.append(name)
        for name in others:
            tensor = self.tensors.get(canonical(name))
            if tensor is not None:
                _claim(pairs, claimed, name, tensor)
        return pairs

    def moved(self, prefix: str) -> Naming:
        """Put `prefix` in place of what the names of all that a copy has to hold begin with."""
        names = {}
        for name, tensor in self.tensors.items():
            if id(tensor) not in self.optional:
                names[canonical(name)] = tensor
        skip = len(common_prefix(names))
        return Naming(self.label, {prefix + name[skip:]: names[name] for name in names})


def _claim(
    pairs: dict[str, Tensor], claimed: set[tuple[int, str]], name: str, tensor: Tensor
) -> None:
    key = id(tensor), canonical(name)
    if key not in claimed:
        claimed.add(key)
        pairs[name] = tensor


def common_prefix(names: Iterable[str]) -> str:
    """Return the components that all names begin with, with the dot behind them."""
    plain = [canonical(name) for name in names]
    first, last = min(plain, default=""), max(plain, default="")
    pairs = zip(first, last, strict=False)
    common = "".join([here for here, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)])
    return common[: common.rfind(".") + 1]


def full_names(origin: Catalog, trees: Sequence[Tree]) -> Naming:
    """Name tensors in full; also without the wrapper prefixes, which writers strip inside a tree
    only.
    """
    full = {}
    starts = strip_starts(trees)
    for tree in trees:
        skip = starts[tree.name]
        for tensor in tree.tensors:
            full[tensor.name[:skip] + canonical(tensor.name[skip:])] = tensor
    return Naming("", full | {tensor.name: tensor for tensor in origin.tensors})


def names_inside(origin: Catalog, trees: Sequence[Tree]) -> list[Naming]:
    """Name the tensors of each tree as they are called inside it.

    An average's are called as its weights are, with the settings beside them, and in a second
    naming as they are stored. All weights that it lacks may have been filled from its live tree, or
    from any one where it is paired with none.
    """
    partners = Counter(tree.partner for tree in trees if tree.role == EMA)
    by_name = {tree.name: tree for tree in trees}
    ties: dict[str | None, dict[str, Tied]] = {None: {}}  # of each tree that may fill others
    namings: list[Naming] = []
    for tree in trees:
        whole = with_tied_names(origin, tree)
        is_filled = tree.role == EMA and partners[tree.partner] <= _MOST_AVERAGES
        for giver in _givers(tree, trees, by_name) if is_filled else [_partner(tree, by_name)]:
            name = None if giver is None else giver.name
            if name not in ties:
                ties[name] = tied_names(giver)
            namings += _of_tree(with_ties_of(whole, ties[name]), giver if is_filled else None)
    return namings


def _partner(tree: Tree, by_name: Mapping[str, Tree]) -> Tree | None:
    return None if tree.partner is None else by_name.get(tree.partner)


def _givers(
    tree: Tree, trees: Sequence[Tree], by_name: Mapping[str, Tree]
) -> Sequence[Tree | None]:
    """List the trees that may have filled an average: its live tree, or those of which a user named
    one if it is paired with none; None stands for no tree.
    """
    if tree.partner is not None:
        return [_partner(tree, by_name) or live_of(trees, tree)]
    others = of_role(trees, LIVE, OTHER)
    return [None, *others] if len(others) <= _MOST_GIVERS else [None]


def _of_tree(tree: Tree, live: Tree | None) -> Iterator[Naming]:
    label = f", tree {tree.name!r}"
    stored = {tensor.name.removeprefix(tree.prefix): tensor for tensor in tree.tensors}
    if tree.problem is not None:
        yield _naming(label, stored)
        return
    used = set(map(id, tree.named.values()))
    settings = {name: tensor for name, tensor in stored.items() if id(tensor) not in used}
    weights = dict(tree.named) if tree.role == EMA else stored
    yield _naming(label, settings | weights, settings)
    filled = {} if live is None or live.problem is not None else missing_weights(tree, live)
    if filled:
        yield _naming(label, settings | filled | weights, settings)
    if tree.prefix and not weights.keys() <= stored.keys():
        yield _naming(label, stored)


def names_below(origin: Catalog, names: Iterable[str], prefix: str = "") -> list[Naming]:
    """Name what lies below a dotted path as it is called there, for paths that fit a copy's names.

    `--tree` takes such a path too. There are none if the copy holds nothing.

    Args:
        names: the copy's names, without the `prefix` that all begin with if `--rename` put it in
            the place of such a path.
    """
    ending = "." + min(map(canonical, names), default=".")
    starts: dict[str, str] = {}
    for tensor in origin.tensors:
        name = canonical(tensor.name)
        if name.endswith(ending):
            path, start = _apart(name[: -len(ending)], prefix)
            if path and bool(start) == bool(prefix):
                starts[path] = start
    paths: dict[str, dict[str, Tensor]] = {path: {} for path in starts}
    for tensor in origin.tensors if paths else ():
        name = canonical(tensor.name)
        dot = name.find(".")
        while dot >= 0:
            path = name[:dot]
            if path in paths:
                paths[path][starts[path] + name[dot + 1 :]] = tensor
            dot = name.find(".", dot + 1)
    return [Naming(f", below {path!r}", named, path=path) for path, named in paths.items()]


def _apart(path: str, prefix: str) -> tuple[str, str]:
    """Take what both end with off a path and a prefix: nobody has changed that."""
    old, new = path.split("."), prefix.split(".")[:-1]
    while old and new and old[-1] == new[-1]:
        old.pop()
        new.pop()
    return ".".join(old), "".join([f"{part}." for part in new])


def _naming(
    label: str, names: dict[str, Tensor], optional: Mapping[str, Tensor] | None = None
) -> Naming:
    plain = {canonical(name): tensor for name, tensor in names.items()}
    return Naming(label, plain | names, frozenset(map(id, (optional or {}).values())))


class Spare:
    """The tensors and tied names that only the source has; those that were renamed are taken out.

    A tensor that a naming lists under several names may have been written under each of them. Of
    equal ones those of trees of which the copy has others are taken first.

    Args:
        owners: the number of its tree, by the id of each tensor.
        likely: ids of tensors of trees of which the copy has others.

    Attributes:
        taken: ids of the tensors that the copy has, by name or by their bytes.
    """

    def __init__(
        self,
        naming: Naming,
        pairs: Mapping[str, Tensor],
        digests: Digests,
        owners: Mapping[int, int],
        likely: Collection[int] = frozenset(),
    ) -> None:
        self.digests = digests
        self.owners = owners
        self.trees = {owners.get(key) for key in likely}
        self.taken = set(map(id, pairs.values()))
        free: dict[int, set[str]] = {}  # names of each that are not in the copy
        for name, tensor in naming.tensors.items():
            free.setdefault(id(tensor), set()).add(canonical(name))
        for name, tensor in pairs.items():
            free[id(tensor)].discard(canonical(name))
        self.times = Counter({key: len(left) for key, left in free.items()})
        listed = {id(tensor): tensor for tensor in naming.tensors.values() if free[id(tensor)]}
        self.by_shape: dict[Ints, list[Tensor]] = {}
        for tensor in sorted(listed.values(), key=lambda tensor: id(tensor) in self.taken):
            self.by_shape.setdefault(tensor.shape, []).append(tensor)
        self.by_digest: dict[tuple[Ints, DType, bool], dict[int | None, _Equal]] = {}

    def may_have(self, tensor: Tensor) -> bool:
        """Whether there is a tensor of that shape, so that a digest tells more."""
        return tensor.shape in self.by_shape

    def take(self, tensor: Tensor, digest: int, *, cast: bool, settled: bool) -> bool:
        """Take out a tensor that has this digest, as it is or cast; return whether there is one.

        Unless it is `settled` which trees the copy has, one of several trees is left for later.
        """
        key = tensor.shape, tensor.dtype, cast
        if key not in self.by_digest:
            self.by_digest[key] = self._by_digest(*key)
        equal = self.by_digest[key].get(digest)
        if equal is None or not (settled or equal.is_of_one_tree):
            return False
        if not equal.is_of_one_tree:
            equal.prefer(self.trees, self.owners)
        tensors = equal.tensors
        while tensors and not self.times[id(tensors[0])]:
            tensors.popleft()
        if not tensors:
            return False
        self.times[id(tensors[0])] -= 1
        self.taken.add(id(tensors[0]))
        self.trees.add(self.owners.get(id(tensors[0])))
        tensors.rotate(-1)  # those that were not taken at all come first
        return True

    def _by_digest(self, shape: Ints, dtype: DType, cast: bool) -> dict[int | None, _Equal]:
        if cast:
            others = [tensor for tensor in self.by_shape[shape] if tensor.dtype != dtype]
            fitting = [t for t in others if t.dtype.is_castable and dtype.is_castable]
        else:
            fitting = [tensor for tensor in self.by_shape[shape] if tensor.dtype == dtype]
        found: dict[int | None, list[Tensor]] = {}
        for tensor, digest in zip(fitting, self.digests(fitting, dtype), strict=True):
            found.setdefault(digest, []).append(tensor)
        return {digest: _Equal(tensors, self.owners) for digest, tensors in found.items()}


class _Equal:
    """Tensors of equal bytes, of which the first one is taken next."""

    def __init__(self, tensors: Sequence[Tensor], owners: Mapping[int, int]) -> None:
        self.tensors = deque(tensors)
        self.is_of_one_tree = len({owners.get(id(tensor)) for tensor in tensors}) == 1
        self.preferred = 0  # as many trees as were known when these were put in order

    def prefer(self, trees: Collection[int | None], owners: Mapping[int, int]) -> None:
        """Put those of some trees first, if these are twice as many as at the last call."""
        if len(trees) > 2 * self.preferred:
            self.preferred = len(trees)
            ordered = sorted(self.tensors, key=lambda tensor: owners.get(id(tensor)) not in trees)
            self.tensors = deque(ordered)
