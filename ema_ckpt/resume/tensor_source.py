"""Read the trees, tensors and objects of a checkpoint as host values, without running its code."""

from __future__ import annotations

import datetime
import io
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import starmap
from typing import Any

import torch

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.errors import SourceError, UsageError
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER
from ema_ckpt.core.text import shown
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.reading.box_reader import BoxReader, locate_box
from ema_ckpt.reading.checksums import ChecksumVerifier
from ema_ckpt.state_dicts.ema_config import swap_marks
from ema_ckpt.state_dicts.ema_layouts import is_weight
from ema_ckpt.state_dicts.tree import Tree, list_trees

Nested = dict[str | int, Any]

_BLOCK_NBYTES = 8 << 20


class CheckpointReader:
    """Reader of one opened checkpoint; storages that are read whole are compared with their CRC-32.

    Attributes:
        path: the checkpoint as messages name it.
        trees: its trees, in stored order.
    """

    def __init__(self, path: str) -> None:
        self.catalog = open_catalog(path)
        self.path = self.catalog.resolved
        self.trees = list_trees(self.catalog)
        self._verifier = ChecksumVerifier(self.catalog.source, enabled=True)
        self._boxes = BoxReader(_BLOCK_NBYTES, self._verifier)

    def close(self) -> None:
        """Close the files of the checkpoint."""
        self.catalog.source.close()

    @cached_property
    def is_swapped(self) -> bool:
        """Whether the checkpoint is marked as saved with averages and live weights exchanged."""
        marks = swap_marks(self.catalog, self.trees)
        return any(bool(self.setting({item.name: item}, item.name)) for item in marks)

    def read(self, tensor: Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
        """Read one host tensor for each box, in the stored dtype.

        Raises:
            SourceError: `missing-file truncated-file checksum hole …`, naming tensor and file.
        """
        dtype = torch_dtype(tensor)
        values = [torch.empty(box.sizes, dtype=dtype) for box in boxes]
        if any(box.numel for box in boxes):
            chunks = prove(tensor)
            payloads = self.catalog.reader.payloads(tensor)
            for box, value in zip(boxes, values, strict=True):
                if box.numel:
                    data: Any = value.view(-1).view(torch.uint8).numpy()
                    located = locate_box(self.catalog.source, tensor, payloads, chunks, box)
                    self._boxes.read(located, memoryview(data))
        return values

    def read_whole(self, tensor: Tensor) -> torch.Tensor:
        """Read the whole tensor."""
        return self.read(tensor, [whole(tensor.shape)])[0]

    def load(self, stored: Tensor | Object | Nested) -> Any:
        """Read a tensor, an object, or what `nested` arranged; dicts keyed by indices become lists.

        Raises:
            SourceError: `unsafe-pickle` if an object needs more than plain values and tensors.
        """
        if isinstance(stored, Tensor):
            return self.read_whole(stored)
        if isinstance(stored, Object):
            return self._load_object(stored)
        values = {key: self.load(item) for key, item in stored.items()}
        if values and all(isinstance(key, int) for key in values):
            return [values[key] for key in sorted(values)]
        return values

    def setting(self, settings: Mapping[str, Tensor | Object], *names: str) -> Any:
        """Read the first of the named settings of an EMA as a plain value, or None."""
        for name in names:
            entry = settings.get(name)
            if isinstance(entry, Tensor):
                return self.read_whole(entry).reshape(-1)[0].item() if entry.numel else None
            if entry is not None:
                return self.load(entry)
        return None

    def _load_object(self, item: Object) -> Any:
        if item.is_inline:
            return item.inline
        if self.catalog.format != "dcp":
            return self.catalog.reader.load(item)
        data = self.catalog.source.read(item.file, item.offset, item.nbytes)
        try:
            return load_plain(data)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SourceError(
                "unsafe-pickle",
                f"{item.file}: object {item.name!r} holds more than plain values: {reason}",
                file=item.file,
            ) from error


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


def live_tree(reader: CheckpointReader) -> Tree:
    """Select the tree of live weights: `model`, or the only one.

    Raises:
        UsageError: `unknown-tree` or `ambiguous-tree`.
    """
    candidates = [tree for tree in reader.trees if tree.role == LIVE]
    return _select(reader, candidates, "model", "live weights")


def live_weights(reader: CheckpointReader) -> dict[str, Tensor]:
    """Stored live tensors by name; of a swapped checkpoint those in the averages' place."""
    tree = live_tree(reader)
    weights = {**tensors_of(tree), **tree.weights}
    if reader.is_swapped:
        averages = average_tree(reader, "ema", separate=False)
        if averages is not None:
            weights |= {n: tensor for n, tensor in averages.weights.items() if n in weights}
    return weights


def average_weights(reader: CheckpointReader, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stored averages by name; of a swapped checkpoint those in the live weights' place."""
    weights = dict(named)
    if reader.is_swapped:
        live = live_tree(reader).weights
        weights |= {name: tensor for name, tensor in live.items() if name in weights}
    return weights


def average_tree(reader: CheckpointReader, name: str, *, separate: bool) -> Tree | None:
    """Select the tree of averages called `name`, or the only one; None if there are no averages.

    Args:
        separate: the checkpoint was given for its averages: without any, its only weights count.

    Raises:
        UsageError: `ambiguous-tree`.
    """
    averages = [tree for tree in reader.trees if tree.role == EMA]
    if averages:
        is_named = any(tree.name == name for tree in averages)
        if not separate and "." in name and not is_named:
            return None
        return _select(reader, averages, name, "averages")
    if not separate:
        return None
    trees = [tree for tree in reader.trees if tree.role != OPTIMIZER]
    candidates = [tree for tree in trees if any(starmap(is_weight, tensors_of(tree).items()))]
    return _select(reader, candidates, name, "weights")


def _select(reader: CheckpointReader, candidates: Sequence[Tree], name: str, content: str) -> Tree:
    """Select the candidate called `name`, or the only one."""
    for tree in candidates:
        if tree.name == name:
            return tree
    if len(candidates) == 1:
        return candidates[0]
    names = shown([tree.name for tree in (candidates or reader.trees)])
    if not candidates:
        message = f"{reader.path}: holds no {content}; its trees are {names or 'none'}"
        raise UsageError("unknown-tree", message)
    message = f"{reader.path}: {names} all hold {content}, and none is called {name!r}"
    raise UsageError("ambiguous-tree", message)


def tensors_of(tree: Tree) -> dict[str, Tensor]:
    """Every tensor of a tree by its name inside."""
    prefix = f"{tree.name}." if tree.name else ""
    return {tensor.name.removeprefix(prefix): tensor for tensor in tree.tensors}


def optimizer_entries(reader: CheckpointReader) -> Nested:
    """Stored tensors and objects of the optimizer's tree, nested as they were saved.

    Raises:
        UsageError: `unknown-tree`: there is no optimizer state in torch's nested form.
    """
    for tree in reader.trees:
        if tree.role == OPTIMIZER:
            depth = len(tree.name.split("."))
            items: list[Tensor | Object] = [*tree.tensors, *tree.objects]
            entries = nested((item.path[depth:], item) for item in items)
            if "state" in entries or "param_groups" in entries:
                return entries
    names = shown([tree.name for tree in reader.trees])
    message = f"{reader.path}: holds no optimizer state of torch's form; its trees are {names}"
    raise UsageError("unknown-tree", message)


def nested(entries: Iterable[tuple[Sequence[str | int], Any]]) -> Nested:
    """Nest values by their paths as dicts in dicts; list indices are int keys."""
    root: Nested = {}
    for path, value in entries:
        inner = root
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return root
