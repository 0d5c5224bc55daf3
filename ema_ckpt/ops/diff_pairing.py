"""What is compared with what: the two trees, and their tensors paired by name."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.names import EMA, canonical
from ema_ckpt.core.text import shown
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.ops.suggest import suggested_command
from ema_ckpt.state_dicts.ema_config import with_tied_names
from ema_ckpt.state_dicts.tree import Tree, default_tree, find_tree, list_trees, live_of


@dataclass(frozen=True, slots=True)
class Side:
    """One side: a checkpoint, the tree of it that is compared, and all its trees."""

    catalog: Catalog
    tree: Tree
    known: Sequence[Tree]


@dataclass(frozen=True, slots=True)
class Pairing:
    """Tensors by name: those of both sides in a's order, and the names that one side alone has."""

    pairs: tuple[tuple[str, Tensor, Tensor], ...] = ()
    mismatched: tuple[tuple[str, Tensor, Tensor], ...] = ()
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = field(default=())


def open_sides(
    path: str | os.PathLike[str],
    other: str | os.PathLike[str] | None,
    tree: str | None,
    against: str | None,
) -> tuple[Side, Side]:
    """Open both sides; where there is one path, one checkpoint with its EMA and its live tree.

    Raises:
        UsageError: `ambiguous-tree`, `unknown-tree` if a side cannot be told.
        SourceError: what opening raises.
    """
    with ExitStack() as undo:
        catalog = open_catalog(path)
        undo.callback(catalog.source.close)
        known = list_trees(catalog)
        command = suggested_command("diff", path, *(() if other is None else (other,)))
        a = (
            find_tree(known, tree, catalog.resolved)
            if tree is not None
            else default_tree(known, command, catalog.resolved)
        )
        beside = catalog if other is None else open_catalog(other)
        undo.callback(beside.source.close)
        others = known if other is None else list_trees(beside)
        if other is None:
            b = _partner(catalog, known, a, against)
        else:
            b = _other_tree(others, tree, against, command, beside.resolved)
        sides = (
            Side(catalog, _under_names_of(b, catalog, a), known),
            Side(beside, _under_names_of(a, beside, b), others),
        )
        undo.pop_all()
    return sides


def _under_names_of(other: Tree, catalog: Catalog, tree: Tree) -> Tree:
    """A tree with its tied weights also under the other names that `other` has: an EMA keeps them
    once.
    """
    whole = with_tied_names(catalog, tree).named
    return replace(
        tree,
        named={name: t for name, t in whole.items() if name in tree.named or name in other.named},
    )


def _partner(catalog: Catalog, known: tuple[Tree, ...], a: Tree, against: str | None) -> Tree:
    if against is not None:
        return find_tree(known, against, catalog.resolved)
    live = live_of(known, a) if a.role == EMA else None
    if live is not None:
        return live
    others = shown([tree.name for tree in known if tree.tensors and tree.name != a.name])
    lacks = (
        "no live tree to compare its EMA with"
        if a.role == EMA
        else f"no EMA; its tree {a.name!r} is {a.role}"
    )
    message = f"{catalog.resolved} has {lacks}; give a second path, or name the sides with --tree and --against"
    raise UsageError("unknown-tree", f"{message} ({others or 'it has no other tree'})")


def _other_tree(
    known: Sequence[Tree], tree: str | None, against: str | None, command: str, where: str
) -> Tree:
    """The tree of a second checkpoint: the one named, else that of a's name if it was named, else
    the default.
    """
    if against is not None:
        return find_tree(known, against, where)
    same = (
        next((found for found in known if found.name == tree), None) if tree is not None else None
    )
    if same is not None:
        return same
    try:
        return default_tree(known, command, where)
    except UsageError as error:
        raise UsageError(error.code, str(error).replace(" --tree ", " --against ")) from None


def pair(a: Tree, b: Tree) -> Pairing:
    """Pair the weights of two trees by name, wrapper prefixes aside."""
    left, right = _named(a), _named(b)
    pairs: list[tuple[str, Tensor, Tensor]] = []
    mismatched: list[tuple[str, Tensor, Tensor]] = []
    for name, tensor in left.items():
        partner = right.get(name)
        if partner is not None:
            (pairs if partner.shape == tensor.shape else mismatched).append((name, tensor, partner))
    return Pairing(
        tuple(pairs),
        tuple(mismatched),
        tuple(name for name in left if name not in right),
        tuple(name for name in right if name not in left),
    )


def _named(tree: Tree) -> Mapping[str, Tensor]:
    """Weights by name without wrapper prefixes, which stay where two names would become one."""
    weights = tree.weights
    count = Counter(map(canonical, weights))
    return {
        (plain if count[plain := canonical(name)] == 1 else name): tensor
        for name, tensor in weights.items()
    }
