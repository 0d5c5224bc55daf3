"""Flatten a training state into leaves: this rank's shards of tensors, and pickled objects.

Nesting is flattened as `torch.distributed.checkpoint` does it (`_traverse.py`, since torch 2.4), so
that plain `dcp.load` reads what is written and the metadata has the tree structure.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import UsageError
from ema_ckpt.ema.checkpoint.local_shards_tensor import LocalShardsTensor, box_views, pieces_of
from ema_ckpt.ema.model.shards import Shard
from ema_ckpt.formats.nesting import walk

Path = tuple[str | int, ...]

_SMALL_NUMEL = 4096


@dataclass(frozen=True, slots=True, eq=False)
class LocalShards:
    """This rank's shards of one tensor: boxes in elements of the global shape, and their views."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[tuple[Box, torch.Tensor], ...]

    @classmethod
    def of(
        cls, boxes: Sequence[Box], shape: tuple[int, ...], local: torch.Tensor, *_: object
    ) -> LocalShards:
        """Cut `local` into views of the boxes; takes what `as_global_tensor` does."""
        if 0 in shape:
            # Kept on every rank, so that its shape survives whichever rank writes it.
            boxes, local = [whole(shape)], torch.empty(shape, dtype=local.dtype)
        views = [view.detach() for view in box_views(boxes, local)]
        return cls(shape, local.dtype, tuple(zip(boxes, views, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One entry of a flattened state under its dotted name and its path.

    `text_crc` is equal for objects that print alike: pickles of equal values may differ.
    """

    name: str
    path: Path
    value: LocalShards | bytes
    text_crc: int = 0

    def is_small(self) -> bool:
        """Whether this rank has it whole, as options and state of one value per layer are."""
        if isinstance(self.value, bytes):
            return True
        box = whole(self.value.shape)
        return box.numel <= _SMALL_NUMEL and all(part == box for part, _ in self.value.shards)

    def boxes(self) -> list[list[list[int]]]:
        """Return offsets and sizes of this rank's boxes of a tensor, as JSON has them."""
        if isinstance(self.value, bytes):
            return []
        return [[list(box.offsets), list(box.sizes)] for box, _ in self.value.shards]

    def checksums(self) -> list[tuple[tuple[int, ...], int]]:
        """Return offsets and CRC-32 of each shard of a tensor, or the object's `text_crc`."""
        if isinstance(self.value, bytes):
            return [((), self.text_crc)]
        checksums = []
        for box, view in self.value.shards:
            data: Any = view.cpu().contiguous().view(-1).view(torch.uint8).numpy()
            checksums.append((box.offsets, crc32(data)))
        return checksums


def flatten(state: Mapping[str, Any]) -> list[Leaf]:
    """Flatten a nested state in order: objects are pickled now, tensors keep sharing their memory.

    Raises:
        UsageError: `name-collision` if two paths join to one dotted name.
    """
    leaves: dict[str, Leaf] = {}
    for path, value in walk(state, _open_container):
        name = ".".join(map(str, path))
        if name in leaves:
            message = f"two entries of the state are called {name!r}; rename one of them"
            raise UsageError("name-collision", message)
        if isinstance(value, LocalShards | Shard | torch.Tensor):
            leaves[name] = Leaf(name, path, local_shards(value))
            continue
        if path[0] != "extra":  # the user's own values keep their types
            value = _plain(value)  # noqa: PLW2901
        stream = io.BytesIO()
        try:
            torch.save(value, stream)
        except Exception as error:
            message = f"{name!r} of type {type(value).__name__} cannot be pickled: {error}"
            raise UsageError("usage", message) from error
        text = repr(value) if path[0] == "extra" else ""
        crc = 0 if " at 0x" in text else crc32(text.encode())
        leaves[name] = Leaf(name, path, stream.getvalue(), crc)
    return list(leaves.values())


def local_shards(tensor: torch.Tensor | Shard | LocalShards) -> LocalShards:
    """List this rank's shards of a tensor: a live shard, or one that is distributed or whole."""
    if isinstance(tensor, LocalShards):
        return tensor
    if isinstance(tensor, Shard):
        return LocalShards.of(tensor.boxes, tensor.shape, tensor.local)
    shape = tuple(tensor.shape)
    if 0 in shape:
        return LocalShards.of((), shape, torch.empty(0, dtype=tensor.dtype))
    if not hasattr(tensor, "local_shards"):
        shards = [(box, view.detach()) for box, view in pieces_of(tensor)]
        return LocalShards(shape, tensor.dtype, tuple(shards))
    shards = []
    for shard in tensor.local_shards():  # of a ShardedTensor, as in FSDP1's sharded state dicts
        if shard.tensor.numel():
            place = shard.metadata
            box = Box(tuple(place.shard_offsets), tuple(place.shard_sizes))
            shards.append((box, shard.tensor.detach()))
    return LocalShards(shape, tensor.dtype, tuple(shards))


def _plain(value: Any) -> Any:
    """Return a value with plain numbers in place of NumPy's scalars, also in tuples and lists."""
    if isinstance(value, numpy.number | numpy.bool_):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value) is dict:
        return {key: _plain(inner) for key, inner in value.items()}
    return value


def _open_container(path: Path, value: Any) -> Iterable[tuple[str | int, Any]] | None:
    if isinstance(value, Mapping) and not _is_leaf(path, value):
        return [(str(key), inner) for key, inner in value.items()]
    if isinstance(value, list) and _holds_tensor_or_dict(value):
        return enumerate(value)
    return None


def _is_leaf(path: Path, value: Mapping[Any, Any]) -> bool:
    """Whether a dict of the user's would not come back the same from flattened entries.

    torch turns keys into text and drops empty dicts; `MultiStepLR` keeps its milestones by number.
    """
    is_extra = path[:1] == ("extra",) or is_extra_state(path)
    has_text_keys = bool(value) and all(isinstance(key, str) for key in value)
    if len(path) < 2 or not is_extra or has_text_keys:
        return False
    if _holds_shards(value):
        raise UsageError(
            "usage",
            f"{'.'.join(map(str, path))!r}: a dict with keys that are no text holds sharded"
            " tensors, which could not be put back under their keys; an optimizer belongs in"
            " save(optimizer=…)",
        )
    return True


def is_extra_state(path: Path) -> bool:
    """Whether a path leads into what a module's `get_extra_state` returned."""
    return any(str(part).endswith("_extra_state") for part in path)


def _holds_shards(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_shards, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_shards, value))
    return isinstance(value, DTensor | LocalShardsTensor) or hasattr(value, "local_shards")


def _holds_tensor_or_dict(value: Any) -> bool:
    """Whether a list, at any depth of lists, holds a tensor or a dict."""
    if isinstance(value, list):
        return any(map(_holds_tensor_or_dict, value))
    return isinstance(value, Mapping | torch.Tensor)
