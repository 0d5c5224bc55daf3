"""Sides of `diff`: the two trees, and their tensors paired by name."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ema_ckpt.core.catalog import Catalog, Diagnostic, Tensor
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.names import EMA, canonical
from ema_ckpt.core.text import shown
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.ops.dequantize import with_real_values
from ema_ckpt.ops.suggested_commands import suggested_command
from ema_ckpt.reading.quantized.schemes import QuantizedTensor
from ema_ckpt.state_dicts.hidden_averages import warn_of_hidden
from ema_ckpt.state_dicts.ties import with_all_names
from ema_ckpt.state_dicts.tree import Tree, default_tree, find_tree, list_trees, live_of


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a checkpoint, the tree that is compared, and all its trees.

    Attributes:
        quantized: weights that are compared as the values they stand for.
        refused: why others are compared as they are stored, by the stored name of their codes.
    """

    catalog: Catalog
    tree: Tree
    trees: Sequence[Tree]
    quantized: Sequence[QuantizedTensor] = ()
    refused: Mapping[str, Diagnostic] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pairing:
    """Tensors by name in a's order, as pairs or with unlike shapes, and names of one side only."""

    pairs: tuple[tuple[str, Tensor, Tensor], ...] = ()
    mismatched: tuple[tuple[str, Tensor, Tensor], ...] = ()
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()


def open_sides(
    path: str | os.PathLike[str],
    other: str | os.PathLike[str] | None,
    tree: str | None,
    against: str | None,
    workers: int,
) -> tuple[Side, Side]:
    """Open both sides; with one path, one checkpoint with its EMA and its live tree.

    Raises:
        UsageError: `ambiguous-tree`, `unknown-tree` if a side cannot be determined.
        SourceError: as opening raises.
    """
    command = suggested_command("diff", path, *(() if other is None else (other,)))
    with ExitStack() as undo:
        stored = open_catalog(path, workers=workers)
        undo.callback(stored.source.close)
        values_a = values_b = with_real_values(stored)
        catalog_a = catalog_b = values_a.catalog
        trees_a = trees_b = list_trees(catalog_a)
        catalog_a = catalog_b = warn_of_hidden(catalog_a, trees_a)
        if tree is None:
            a = default_tree(trees_a, command, catalog_a.resolved, warnings=catalog_a.warnings)
        else:
            a = find_tree(trees_a, tree, catalog_a.resolved)
        if other is None:
            b = tree_beside(catalog_a, trees_a, a, against)
        else:
            stored = open_catalog(other, workers=workers)
            undo.callback(stored.source.close)
            values_b = with_real_values(stored)
            catalog_b = values_b.catalog
            trees_b = list_trees(catalog_b)
            catalog_b = warn_of_hidden(catalog_b, trees_b)
            b = tree_of_other(trees_b, tree, against, command, catalog_b.resolved)
        sides = (
            Side(
                catalog_a,
                _with_names_of(b, catalog_a, trees_a, a),
                trees_a,
                values_a.weights,
                values_a.refused,
            ),
            Side(
                catalog_b,
                _with_names_of(a, catalog_b, trees_b, b),
                trees_b,
                values_b.weights,
                values_b.refused,
            ),
        )
        undo.pop_all()
    return sides


def _with_names_of(other: Tree, catalog: Catalog, trees: Sequence[Tree], tree: Tree) -> Tree:
    """Return `tree` with the names of its tied weights that `other` has; an EMA keeps one name."""
    whole = with_all_names(catalog, tree, live_of(trees, tree)).named
    wanted = set(map(canonical, other.named))
    named = {n: t for n, t in whole.items() if n in tree.named or canonical(n) in wanted}
    return replace(tree, named=named)


def tree_beside(catalog: Catalog, trees: Sequence[Tree], a: Tree, against: str | None) -> Tree:
    """Return the tree of the same checkpoint to compare `a` with: `against`, or its live tree."""
    if against is not None:
        return find_tree(trees, against, catalog.resolved)
    live = live_of(trees, a)  # of an EMA
    if live is not None:
        return live
    others = shown([tree.name for tree in trees if tree.tensors and tree.name != a.name])
    lacks = f"no EMA; its tree {a.name!r} is {a.role}"
    if a.role == EMA:
        lacks = "no live tree to compare its EMA with"
    hint = "give a second path, or name the sides with --tree and --against"
    message = f"{catalog.resolved} has {lacks}; {hint} ({others or 'it has no other tree'})"
    raise UsageError("unknown-tree", message)


def tree_of_other(
    trees: Sequence[Tree], tree: str | None, against: str | None, command: str, where: str
) -> Tree:
    """Return the other checkpoint's tree: `against`, else the one named `tree`, else default."""
    if against is not None:
        return find_tree(trees, against, where)
    for candidate in trees:
        if tree is not None and candidate.name == tree:
            return candidate
    try:
        return default_tree(trees, command, where)
    except UsageError as error:
        raise UsageError(error.code, str(error).replace(" --tree ", " --against ")) from None


def pair(a: Tree, b: Tree) -> Pairing:
    """Pair the weights of two trees by name, without wrapper prefixes."""
    left, right = _by_plain_name(a), _by_plain_name(b)
    pairs: list[tuple[str, Tensor, Tensor]] = []
    mismatched: list[tuple[str, Tensor, Tensor]] = []
    only_in_a = []
    for name, tensor in left.items():
        other = right.get(name)
        if other is None:
            only_in_a.append(name)
        elif other.shape == tensor.shape:
            pairs.append((name, tensor, other))
        else:
            mismatched.append((name, tensor, other))
    only_in_b = tuple(name for name in right if name not in left)
    return Pairing(tuple(pairs), tuple(mismatched), tuple(only_in_a), only_in_b)


def _by_plain_name(tree: Tree) -> Mapping[str, Tensor]:
    """Weights by name without wrapper prefixes, which stay where two names would become one."""
    count = Counter(map(canonical, tree.weights))
    named = {}
    for name, tensor in tree.weights.items():
        plain = canonical(name)
        named[plain if count[plain] == 1 else name] = tensor
    return named
