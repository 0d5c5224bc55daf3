"""Flatten a training state into leaves: this rank's shards of tensors, and pickled objects.

Nesting is flattened as `torch.distributed.checkpoint` does it (`_traverse.py`, since torch 2.4), so
that plain `dcp.load` reads what is written and the metadata has the tree structure.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.errors import UsageError
from ema_ckpt.ema.checkpoint.local_shards_tensor import LocalShardsTensor, box_views, pieces_of
from ema_ckpt.ema.model.shards import Shard

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LocalShards:
    """This rank's shards of one tensor: boxes in elements of the global shape, and their views."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[tuple[Box, torch.Tensor], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One entry of a flattened state under its dotted name and its path.

    `fingerprint` is equal for objects that print alike: pickles of equal values may differ.
    """

    name: str
    path: Path
    value: LocalShards | bytes
    fingerprint: int = 0


def flatten(state: Mapping[str, Any]) -> list[Leaf]:
    """Flatten a nested state in order: objects are pickled now, tensors keep sharing their memory.

    Raises:
        UsageError: `name-collision` if two paths join to one dotted name.
    """
    leaves: dict[str, Leaf] = {}
    for path, value in _walk((), state):
        name = ".".join(map(str, path))
        if name in leaves:
            message = f"two entries of the state are called {name!r}; rename one of them"
            raise UsageError("name-collision", message)
        if isinstance(value, LocalShards | Shard | torch.Tensor):
            leaves[name] = Leaf(name, path, local_shards(value))
            continue
        fingerprint = 0
        if path[0] == "extra" and " at 0x" not in (text := repr(value)):
            fingerprint = zlib.crc32(text.encode())
        leaves[name] = Leaf(name, path, _pickle(name, value), fingerprint)
    return list(leaves.values())


def local_shards(tensor: torch.Tensor | Shard | LocalShards) -> LocalShards:
    """List this rank's shards of a tensor: a live shard, or one that is distributed or whole."""
    if isinstance(tensor, LocalShards):
        return tensor
    shards: Iterable[tuple[Box, torch.Tensor]]
    if isinstance(tensor, Shard):
        shards = zip(tensor.boxes, box_views(tensor.boxes, tensor.local), strict=True)
    elif hasattr(tensor, "local_shards"):  # a ShardedTensor, as in FSDP1's sharded state dicts
        parts = [part for part in tensor.local_shards() if part.tensor.numel()]
        places = [part.metadata for part in parts]
        boxes = [Box(tuple(place.shard_offsets), tuple(place.shard_sizes)) for place in places]
        shards = zip(boxes, [part.tensor for part in parts], strict=True)
    else:
        shards = pieces_of(tensor)
    shape = tuple(tensor.shape)
    if 0 in shape:
        # Kept on every rank, so that its shape survives whichever rank writes it.
        shards = [(whole(shape), torch.empty(shape, dtype=tensor.dtype))]
    return LocalShards(shape, tensor.dtype, tuple((box, view.detach()) for box, view in shards))


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping) and not _is_leaf(path, value):
        for key, inner in value.items():
            yield from _walk((*path, str(key)), inner)
    elif isinstance(value, list) and _holds_tensor_or_dict(value):
        for index, inner in enumerate(value):
            yield from _walk((*path, index), inner)
    else:
        yield path, value


def _is_leaf(path: Path, value: Mapping[Any, Any]) -> bool:
    """Whether a dict of the user's would not come back the same from flattened entries.

    torch turns keys into text and drops empty dicts; `MultiStepLR` keeps its milestones by number.
    """
    is_extra = path[:1] == ("extra",) or any(str(part).endswith("_extra_state") for part in path)
    if len(path) < 2 or not is_extra:
        return False
    if value and all(isinstance(key, str) for key in value):
        return False
    if _holds_shards(value):
        raise UsageError(
            "usage",
            f"{'.'.join(map(str, path))!r}: a dict with keys that are no text holds sharded"
            " tensors, which could not be put back under their keys; an optimizer belongs in"
            " save(optimizer=…)",
        )
    return True


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


def _pickle(name: str, value: Any) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        message = f"{name!r} of type {type(value).__name__} cannot be pickled: {error}"
        raise UsageError("usage", message) from error
    return stream.getvalue()
