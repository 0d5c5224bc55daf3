"""Averages and weights below other names than those of trees, which no verb takes unnamed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, starmap

from ema_ckpt.core.catalog import Catalog, Diagnostic, Tensor
from ema_ckpt.core.names import EMA, LIVE, MOMENTS, OPTIMIZER, OTHER, canonical, role_of, tree_role
from ema_ckpt.core.text import counted
from ema_ckpt.state_dicts.ema_weights import has_weight, is_weight
from ema_ckpt.state_dicts.tree import Tree, of_role

# `EMACallback`, `ModelEma`, `weight_averaging`; not `cinema` or `schema`.
_AVERAGE = re.compile(r"(?<![a-zA-Z])ema(?![a-z])|EMA|Ema(?![a-z])|[aA]verag(?:e|ing)")
_DEPTH = 8


def warn_of_hidden(catalog: Catalog, trees: Sequence[Tree], named: Sequence[str] = ()) -> Catalog:
    """Return the catalog with a warning of each average that no tree has the role of.

    Args:
        named: the trees that are taken, if not all; an average in them is not hidden.
    """
    return replace(catalog, warnings=(*catalog.warnings, *find_hidden(trees, named)))


def find_hidden(trees: Sequence[Tree], named: Sequence[str] = ()) -> Iterator[Diagnostic]:
    """Warn of averages in bookkeeping, an optimizer's state or a tree of an unknown name.

    If a tree is an average, that is what verbs take, and nothing is said. Those that the trees
    `named` hold, or are, are left away.
    """
    if of_role(trees, EMA):
        return
    yield from _modules_by_name(trees, named)
    live: dict[str, tuple[int, ...]] = {}
    for tree in of_role(trees, LIVE):
        live |= {canonical(name): t.shape for name, t in tree.named.items() if is_weight(name, t)}
    for tree in of_role(trees, OTHER, OPTIMIZER):
        for path, count in _averages_in(tree, live):
            if _is_below(path, named):
                continue
            message = (
                f"an average of the weights may lie below {path!r} ({counted(count, 'tensor')}),"
                f" in a tree whose role is {tree.role}; it is not taken unless it is named: --tree"
                f" {shlex.quote(path)}"
            )
            yield Diagnostic("left-out", message)


def _is_below(path: str, names: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{name}.") for name in names)


def _modules_by_name(trees: Sequence[Tree], named: Sequence[str]) -> Iterator[Diagnostic]:
    """Warn of what may be modules of a model: its file records no nesting, and names alone tell.

    A state dict with a module `scaler` has the tree of that name beside its weights.
    """
    if not any(tree.name == "" for tree in of_role(trees, LIVE)):
        return
    for tree in of_role(trees, OTHER, OPTIMIZER):
        count = sum(starmap(is_weight, tree.named.items()))
        is_nested = any(len(tensor.path) > 1 for tensor in tree.tensors)
        if not (tree.name and count) or is_nested or _is_below(tree.name, named):
            continue
        if _is_optimizer(tree.named):
            continue
        message = (
            f"{counted(count, 'tensor')} below {tree.name!r} may be weights: the file"
            f" records no nesting, and this name is that of a tree whose role is {tree.role}; not"
            f" taken unless named: --tree {shlex.quote(tree.name)}; `convert` takes all there is"
        )
        yield Diagnostic("left-out", message)


def _is_optimizer(names: Iterable[str]) -> bool:
    return any(
        f".{name}".startswith((".state.", ".param_groups.")) or name.rpartition(".")[2] in MOMENTS
        for name in names
    )


def _averages_in(tree: Tree, live: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Find dictionaries with the live weights' names and shapes, or the name of an average."""
    skip = _depth_of(tree)
    inner: dict[str, dict[str, Tensor]] = {}
    for tensor in tree.tensors:
        for path in _parents(tensor, skip):
            inner.setdefault(path, {})[tensor.name[len(path) + 1 :]] = tensor
    seen: set[str] = set()
    for path, tensors in inner.items():
        if any(other in seen for other in accumulate(path.split("."), "{}.{}".format)):
            continue
        copies = tree.role == OTHER and _has_all(tensors, live)
        if copies or (_is_named(path, tensors) and has_weight(tensors)):
            seen.add(path)
            yield path, len(tensors)


def _depth_of(tree: Tree) -> int:
    """Count the components of a tree's name; one less where it may itself be an average.

    That is a tree of an unknown name: `averaged_model`, `teacher`.
    """
    depth = tree.name.count(".") + 1 if tree.name else 0
    may_be = tree.role == OTHER and tree.name and tree_role(tree.name) is None
    return depth - 1 if may_be else depth


def _parents(tensor: Tensor, skip: int) -> Iterator[str]:
    """Yield the dotted paths of the dictionaries around a tensor, the outermost first."""
    *heads, last = map(str, tensor.path)
    parts = [*heads, *last.split(".")]
    for depth in range(skip + 1, min(len(parts), skip + _DEPTH)):
        yield ".".join(parts[:depth])


def _has_all(inner: Mapping[str, Tensor], live: Mapping[str, tuple[int, ...]]) -> bool:
    if len(inner) < len(live):
        return False
    shapes = {canonical(name): tensor.shape for name, tensor in inner.items()}
    return bool(live) and all(shapes.get(name) == shape for name, shape in live.items())


def _is_named(path: str, inner: Mapping[str, Tensor]) -> bool:
    """Check for the name of an average that no dictionary inside bears."""
    last = path.rpartition(".")[2]
    below = {name.partition(".")[0] for name in inner if "." in name}
    named = role_of(last) == EMA or _AVERAGE.search(last) is not None
    return named and not any(role_of(n) == EMA or _AVERAGE.search(n) for n in below)
