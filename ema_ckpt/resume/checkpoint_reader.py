"""Read the trees, tensors and objects of a checkpoint as host values, without running its code."""

from __future__ import annotations

import datetime
import io
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain
from typing import Any

import torch

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.errors import SourceError, UsageError
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER, OTHER, first_components
from ema_ckpt.core.text import shown
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.formats.nesting import nest
from ema_ckpt.reading.box_reader import BoxReader, locate_box
from ema_ckpt.reading.checksum_verifier import ChecksumVerifier
from ema_ckpt.state_dicts.ema_config import swap_marks
from ema_ckpt.state_dicts.ema_weights import has_weight
from ema_ckpt.state_dicts.rules.ruled_catalog import apply_rules, list_ties
from ema_ckpt.state_dicts.rules.rules import Rules
from ema_ckpt.state_dicts.tree import Tree, list_trees
from ema_ckpt.storage.directories import join

Nested = dict[str | int, Any]

_BLOCK_NBYTES = 8 << 20
_DEPTH = 3  # dictionaries around an optimizer's state: a list, a class' name, a wrapper's key


class CheckpointReader:
    """Reader of one opened checkpoint; storages that are read whole are compared with their CRC-32.

    Args:
        rules: for names and layouts. optimizers: whether these apply to optimizer state, which is
            not read otherwise.

    Attributes:
        path: the checkpoint as messages name it.
        trees: its trees, in stored order. tree_names: their names.
        by_role: its trees by role and name.
        has_rules: whether rules apply. rule_notes: what is to be said of them.
        left_out: optimizer state that rules do not carry, with the reason.
    """

    def __init__(self, path: str, rules: Rules | None = None, *, optimizers: bool = False) -> None:
        self.catalog = open_catalog(path)
        self.path = self.catalog.resolved
        self.trees = list_trees(self.catalog)
        self.tree_names = [tree.name for tree in self.trees]
        self.has_rules = rules is not None
        self.rule_notes: list[str] = []
        self.left_out: dict[str, str] = {}
        if rules is not None:
            self._apply(rules, optimizers)
        self.by_role: dict[str, dict[str, Tree]] = defaultdict(dict)
        for tree in self.trees:
            self.by_role[tree.role][tree.name] = tree
        self._companions: list[CheckpointReader] = []
        verifier = ChecksumVerifier(self.catalog.source, enabled=True)
        self._boxes = BoxReader(_BLOCK_NBYTES, verifier)

    def _apply(self, rules: Rules, optimizers: bool) -> None:
        """Let rules make of the checkpoint what is restored."""
        try:
            listed = list_ties(self.catalog)
            ruled = apply_rules(rules, listed, list_trees(listed), optimizers=optimizers)
        except BaseException:
            self.catalog.source.close()
            raise
        self.catalog, self.trees = ruled.catalog, ruled.trees
        if optimizers:
            self.left_out = {item.name: reason for item, reason in ruled.left_out}
        # What is left out of an optimizer is told, or refused, where it is restored.
        told = [warning for warning in ruled.warnings if warning.code != "left-out"]
        self.rule_notes = [warning.message for warning in told]

    def close(self) -> None:
        """Close the files of the checkpoint, and of what was opened beside it."""
        self.catalog.source.close()
        for companion in self._companions:
            companion.close()

    def refusal(self, code: str, reason: str) -> SourceError:
        """Return the error of a comparison that failed before anything was written."""
        return SourceError(code, f"{self.path}: nothing was restored: {reason}")

    def items_below(self, name: str) -> list[Tensor | Object]:
        """Return the tensors and objects below a top-level key of the state dict."""
        items: list[Tensor | Object] = []
        for item in chain[Tensor | Object](self.catalog.tensors, self.catalog.objects):
            tree, *inner = item.path
            if tree == name and inner:
                items.append(item)
        return items

    def items_at_top(self, name: str) -> list[Tensor | Object]:
        """Return the tensors and objects at or below one top-level key of the state dict."""
        items: list[Tensor | Object] = [*self.catalog.tensors, *self.catalog.objects]
        return [item for item in items if item.path[0] == name]

    @cached_property
    def is_swapped(self) -> bool:
        """Whether the checkpoint is marked as saved with averages and live weights exchanged."""
        return any(map(self.load_scalar, swap_marks(self.catalog, self.trees)))

    def read(self, tensor: Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
        """Read one host tensor for each box, in the stored dtype.

        Raises:
            SourceError: `missing-file truncated-file checksum hole …`, naming tensor and file.
        """
        dtype = torch_dtype(tensor)
        values = [torch.empty(box.sizes, dtype=dtype) for box in boxes]
        if not any(value.numel() for value in values):
            return values
        chunks = prove(tensor)
        payloads = self.catalog.reader.payloads(tensor)
        for box, value in zip(boxes, values, strict=True):
            if value.numel():
                data: Any = value.view(-1).view(torch.uint8).numpy()
                located = locate_box(self.catalog.source, tensor, payloads, chunks, box)
                self._boxes.read(located, memoryview(data))
        return values

    def load(self, stored: Tensor | Object | Nested) -> Any:
        """Read a tensor, an object, or what `nest` arranged; dicts keyed by indices become lists.

        Raises:
            SourceError: `unsafe-pickle` if an object needs more than plain values and tensors.
        """
        if isinstance(stored, Tensor):
            return self.read(stored, [whole(stored.shape)])[0]
        if isinstance(stored, dict):
            values = {key: self.load(item) for key, item in stored.items()}
            if set(map(type, values)) != {int}:
                return values
            return [values[key] for key in sorted(values)]
        if stored.is_inline:
            return stored.inline
        if self.catalog.format != "dcp":
            return self.catalog.reader.load(stored)
        data = self.catalog.source.read(stored.file, stored.offset, stored.nbytes)
        try:
            return load_plain(data)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            message = f"object {stored.name!r} holds more than plain values: {reason}"
            file = stored.file
            raise SourceError("unsafe-pickle", f"{file}: {message}", file=file) from error

    def load_scalar(self, stored: Tensor | Object) -> Any:
        """Read an object, or the first element of a tensor; None if it has none."""
        value = self.load(stored)
        if isinstance(stored, Object):
            return value
        return value.reshape(-1)[0].item() if stored.numel else None

    def live_tree(self) -> Tree:
        """Select the tree of live weights: `model`, or the only one.

        Raises:
            UsageError: `unknown-tree` or `ambiguous-tree`.
        """
        return self._select_tree(self.by_role[LIVE], "model", "live weights")

    def live_weights(self) -> dict[str, Tensor]:
        """Return live tensors by name; of a swapped checkpoint those in the averages' place."""
        tree = self.live_tree()
        weights = {**tensors_of(tree), **tree.weights}
        for name in tree.settings:  # what describes the average, and lies beside the live weights
            weights.pop(name, None)
        averages = self.average_tree("ema", separate=False) if self.is_swapped else None
        if averages is None:
            return weights
        swapped = averages.weights
        return {name: swapped.get(name, tensor) for name, tensor in weights.items()}

    def average_weights(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return averages by name; of a swapped checkpoint those in the live weights' place."""
        swapped = self.live_tree().weights if self.is_swapped else {}
        return {name: swapped.get(name, tensor) for name, tensor in named.items()}

    def average_tree(self, name: str, *, separate: bool) -> Tree | None:
        """Select the tree of averages called `name`, or the only one; None if there are none.

        Args:
            separate: the checkpoint was given for its averages: without any, its only weights.

        Raises:
            UsageError: `ambiguous-tree`.
        """
        averages = self.by_role[EMA]
        if averages:
            is_one_of_several = "." in name and not separate
            if is_one_of_several and name not in averages:
                return None
            return self._select_tree(averages, name, "averages")
        if not separate:
            return None
        candidates = {}
        for tree in (*self.by_role[LIVE].values(), *self.by_role[OTHER].values()):
            if has_weight(tensors_of(tree)):
                candidates[tree.name] = tree
        return self._select_tree(candidates, name, "weights")

    def _select_tree(self, candidates: Mapping[str, Tree], name: str, content: str) -> Tree:
        if name in candidates:
            return candidates[name]
        if len(candidates) == 1:
            return next(iter(candidates.values()))
        if not candidates:
            trees = shown(self.tree_names) or "none"
            message = f"{self.path}: holds no {content}; its trees are {trees}"
            raise UsageError("unknown-tree", message)
        trees = shown(list(candidates))
        message = f"{self.path}: {trees} all hold {content}, and none is called {name!r}"
        raise UsageError("ambiguous-tree", message)

    def optimizer_documents(self, count: int) -> tuple[list[str], list[Nested]]:
        """Return the trees of the optimizer's state, and each state in them as it was saved.

        Args:
            count: how many parameter groups there are here, by which several trees are told apart.

        Raises:
            UsageError: `unknown-tree`: there is no optimizer state; `ambiguous-tree`: several that
                fit.
        """
        found: dict[str, list[Nested]] = {}
        for tree in self.by_role[OPTIMIZER].values():
            documents = find_documents(nest_items(tree.name, tree.entries))
            if documents:
                found[tree.name] = documents
        if not found:
            trees = shown(self.tree_names) or "none"
            message = f"{self.path}: holds no optimizer state in a form that is known"
            raise UsageError("unknown-tree", f"{message}; its trees are {trees}")
        chosen = [*found] if len(found) == 1 else self._choose_optimizers(found, count)
        return chosen, list(chain.from_iterable(found[name] for name in chosen))

    def _choose_optimizers(self, found: Mapping[str, list[Nested]], count: int) -> list[str]:
        groups = {name: sum(map(count_groups, documents)) for name, documents in found.items()}
        if "optimizer" in found and groups["optimizer"] == count:
            return ["optimizer"]
        if sum(groups.values()) == count:
            return [*found]
        fitting = [name for name, number in groups.items() if number == count]
        if len(fitting) == 1:
            return fitting
        message = f"{self.path}: {shown([*found])} all hold optimizer state, and not one alone has"
        message += f" as many parameter groups as there are here, {count}"
        raise UsageError("ambiguous-tree", message)

    def beside(self, names: Iterable[str]) -> CheckpointReader | None:
        """Open the first of the files called `names` beside the weights; closed with this one."""
        root = self.catalog.source.root
        if self.catalog.resolved.rstrip("/") != root.rstrip("/"):  # one file, named as such
            return None
        present = self.catalog.source.listing()
        for name in names:
            if name in present:
                self._companions.append(CheckpointReader(join(root, name)))
                return self._companions[-1]
        return None


def find_documents(nested: Any, depth: int = 0) -> list[Nested]:
    """Find the optimizer states in what is stored in a tree, in stored order."""
    if not isinstance(nested, dict) or depth > _DEPTH:
        return []
    if not first_components(map(str, nested)).isdisjoint(("state", "param_groups")):
        return [nested]
    inner = (find_documents(value, depth + 1) for value in nested.values())
    return list(chain.from_iterable(inner))


def is_flattened(document: Nested) -> bool:
    """Check for an optimizer's state that has one entry per value, under dotted names."""
    return any(str(key).startswith(("state.", "param_groups.")) for key in document)


def count_groups(document: Nested) -> int:
    """Return how many parameter groups an optimizer's state has; of a flattened one, all in one."""
    groups = document.get("param_groups")
    return len(groups) if isinstance(groups, dict) else 1


def load_plain(data: bytes) -> Any:
    """Load what `torch.save` wrote if it is plain values: torch's own list, NumPy's, times, paths.

    Raises:
        Exception: of a class that torch chooses, if it holds anything else.
    """
    with torch.serialization.safe_globals(_harmless_constructors()):
        return torch.load(io.BytesIO(data), weights_only=True)


@cache
def _harmless_constructors() -> list[Any]:
    """Constructors that make a value of their arguments and do nothing else."""
    import numpy

    array = numpy.empty(0)
    rebuild, scalar = array.__reduce__()[0], numpy.float64().__reduce__()[0]
    dtypes = [kind for name, kind in vars(numpy.dtypes).items() if name.endswith("DType")]
    paths = [type(pathlib.Path()), type(pathlib.PurePath())]
    times = [datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone]
    # Transformer Engine's modules keep their extra state in a BytesIO.
    return [rebuild, scalar, numpy.ndarray, numpy.dtype, *dtypes, *paths, *times, io.BytesIO]


def torch_dtype(tensor: Tensor) -> torch.dtype:
    """Return the torch dtype of a stored tensor.

    Raises:
        SourceError: `unsupported`: this release of torch has no such dtype.
    """
    dtype = getattr(torch, tensor.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        message = f"{tensor.name!r}: this torch has no {tensor.dtype.name}"
        raise SourceError("unsupported", message, tensor=tensor.name)
    return dtype


def name_inside(tree: Tree, item: Tensor | Object) -> str:
    """Return an item's name without the tree's."""
    return item.name.removeprefix(f"{tree.name}.") if tree.name else item.name


def tensors_of(tree: Tree) -> dict[str, Tensor]:
    """Return every tensor of a tree by its name inside."""
    return {name_inside(tree, tensor): tensor for tensor in tree.tensors}


def nest_items(tree: str, items: Iterable[Tensor | Object]) -> Nested:
    """Nest items by their paths inside the tree of that name."""
    return nest((_path_inside(tree, item), item) for item in items)


def _path_inside(tree: str, item: Tensor | Object) -> tuple[str | int, ...]:
    if not tree:
        return item.path
    for depth in range(1, len(item.path)):
        if ".".join(map(str, item.path[:depth])) == tree:
            return item.path[depth:]
    # Where nothing nests the name of the tree is but the beginning of the entry's.
    return (item.name.removeprefix(f"{tree}."),)
