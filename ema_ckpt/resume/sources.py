"""Where each tree to restore lies in a checkpoint: ours, a hand-made DCP, or anybody's file of
averages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.core.errors import UsageError, shown
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER
from ema_ckpt.resume.tensor_source import Source
from ema_ckpt.state_dicts.ema_config import swap_marks
from ema_ckpt.state_dicts.ema_layouts import is_weight
from ema_ckpt.state_dicts.tree import Tree, list_trees

Nested = dict[str | int, Any]


class Checkpoint:
    """An opened checkpoint: its trees, and a source to read them from."""

    def __init__(self, path: str) -> None:
        from ema_ckpt.discovery.opening import open_catalog

        self.catalog = open_catalog(path)
        self.source = Source(self.catalog)
        self.trees = list_trees(self.catalog)

    @cached_property
    def is_exchanged(self) -> bool:
        """Whether a mark says that it was saved with averages in the model's place and live weights
        in theirs.
        """
        marks = swap_marks(self.catalog, self.trees)
        return any(bool(setting(self.source, {item.name: item}, item.name)) for item in marks)

    @property
    def where(self) -> str:
        """The checkpoint as messages name it."""
        return self.catalog.resolved

    def close(self) -> None:
        """Close its files."""
        self.catalog.source.close()


def live_tree_of(checkpoint: Checkpoint) -> Tree:
    """The tree of live weights: `model`, or the only one.

    Raises:
        UsageError: `unknown-tree` or `ambiguous-tree`.
    """
    return _one_of(
        checkpoint,
        [tree for tree in checkpoint.trees if tree.role == LIVE],
        "model",
        "live weights",
    )


def live_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Stored live tensors by name; from the averages' place if the checkpoint was saved while they
    were exchanged.
    """
    tree = live_tree_of(checkpoint)
    found = {**tensors_of(tree), **tree.weights}
    averages = average_tree(checkpoint, "ema", foreign=False) if checkpoint.is_exchanged else None
    return (
        found
        if averages is None
        else found | {n: t for n, t in averages.weights.items() if n in found}
    )


def average_weights(checkpoint: Checkpoint, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stored averages by name; from the live weights' place if the checkpoint was saved while they
    were exchanged.
    """
    found = dict(named)
    return (
        found
        if not checkpoint.is_exchanged
        else found
        | {
            name: tensor
            for name, tensor in live_tree_of(checkpoint).weights.items()
            if name in found
        }
    )


def tensors_of(tree: Tree) -> dict[str, Tensor]:
    """Every tensor of a tree by its name inside."""
    return {
        tensor.name.removeprefix(f"{tree.name}.") if tree.name else tensor.name: tensor
        for tensor in tree.tensors
    }


def average_tree(checkpoint: Checkpoint, name: str, *, foreign: bool) -> Tree | None:
    """The tree of averages called `name`, or the only one; in a separate file that has none, its
    only weights.

    Returns:
        None if the checkpoint has no averages.

    Raises:
        UsageError: `ambiguous-tree`.
    """
    found = [tree for tree in checkpoint.trees if tree.role == EMA]
    if not found and foreign:
        return _one_of(
            checkpoint,
            [tree for tree in checkpoint.trees if _may_be_averages(tree)],
            name,
            "weights",
        )
    if not found or (
        not foreign and name.count(".") and not any(tree.name == name for tree in found)
    ):
        return None
    return _one_of(checkpoint, found, name, "averages")


def _may_be_averages(tree: Tree) -> bool:
    return tree.role != OPTIMIZER and any(
        is_weight(name, tensor) for name, tensor in tensors_of(tree).items()
    )


def _one_of(checkpoint: Checkpoint, found: Sequence[Tree], name: str, what: str) -> Tree:
    for tree in found:
        if tree.name == name:
            return tree
    if len(found) == 1:
        return found[0]
    names = shown([tree.name for tree in (found or checkpoint.trees)])
    if not found:
        raise UsageError(
            "unknown-tree", f"{checkpoint.where}: holds no {what}; its trees are {names or 'none'}"
        )
    raise UsageError(
        "ambiguous-tree",
        f"{checkpoint.where}: {names} all hold {what}, and none is called {name!r}",
    )


def optimizer_entries(checkpoint: Checkpoint) -> Nested:
    """Stored tensors and objects of the optimizer's tree, nested as they were saved.

    Raises:
        UsageError: `unknown-tree`: there is no optimizer state in torch's nested form.
    """
    for tree in checkpoint.trees:
        if tree.role == OPTIMIZER:
            depth = len(tree.name.split("."))
            items: list[Tensor | Object] = [*tree.tensors, *tree.objects]
            entries = nested([(item.path[depth:], item) for item in items])
            if "state" in entries or "param_groups" in entries:
                return entries
    names = shown([tree.name for tree in checkpoint.trees])
    raise UsageError(
        "unknown-tree",
        f"{checkpoint.where}: holds no optimizer state of torch's form; its trees are {names}",
    )


def nested(entries: Sequence[tuple[Sequence[str | int], Any]]) -> Nested:
    """Values by path, as dicts in dicts; list indices are int keys."""
    root: Nested = {}
    for path, value in entries:
        inner = root
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return root


def loaded(source: Source, stored: Any) -> Any:
    """Read what `nested` arranged: whole tensors, objects, and lists where keys are indices."""
    if isinstance(stored, Tensor):
        return source.read_whole(stored)
    if isinstance(stored, Object):
        return source.load(stored)
    inner = {key: loaded(source, item) for key, item in stored.items()}
    return (
        [inner[key] for key in sorted(inner)]
        if inner and all(isinstance(k, int) for k in inner)
        else inner
    )


def setting(source: Source, settings: Mapping[str, Tensor | Object], *names: str) -> Any:
    """The first of some settings of an EMA that is there, as a plain value, or None."""
    for name in names:
        found = settings.get(name)
        if isinstance(found, Tensor):
            return source.read_whole(found).reshape(-1)[0].item() if found.numel else None
        if found is not None:
            return source.load(found)
    return None
