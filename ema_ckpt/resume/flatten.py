"""A training state as a list of leaves: tensors in pieces, and pickled objects, each under its
path.

Nesting is flattened as `torch.distributed.checkpoint` does it (`_traverse.py`, since torch 2.4), so
that what is written can be read with plain `dcp.load` and has the tree structure in its metadata.
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
class Pieces:
    """What this rank holds of one tensor: boxes in elements of the global shape, with the local
    elements of each.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[tuple[Box, torch.Tensor], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One entry of a flattened state: its dotted name, its path, and a tensor or a pickled object.

    `mark` is equal for objects that print alike: pickles of equal values may differ.
    """

    name: str
    path: Path
    value: Pieces | bytes
    mark: int = 0


def flatten(state: Mapping[str, Any]) -> list[Leaf]:
    """The leaves of a nested state in order; objects are pickled now, tensors keep sharing their
    memory.

    Raises:
        UsageError: `name-collision` if two paths join to one dotted name.
    """
    leaves: dict[str, Leaf] = {}
    for path, value in _walk((), state):
        name = ".".join(map(str, path))
        if name in leaves:
            raise UsageError(
                "name-collision",
                f"two entries of the state are called {name!r}; rename one of them",
            )
        if isinstance(value, Shard):
            leaves[name] = Leaf(name, path, shard_pieces(value))
        elif isinstance(value, torch.Tensor):
            leaves[name] = Leaf(name, path, pieces(value))
        else:
            leaves[name] = Leaf(
                name, path, _pickled(name, value), _mark(value) if path[0] == "extra" else 0
            )
    return list(leaves.values())


def pieces(tensor: torch.Tensor) -> Pieces:
    """What this rank holds of a tensor of a state: published, distributed, sharded or whole."""
    held = _sharded(tensor) if hasattr(tensor, "local_shards") else pieces_of(tensor)
    return _pieces(tuple(tensor.shape), tensor.dtype, held)


def shard_pieces(shard: Shard) -> Pieces:
    """What this rank holds of a live parameter or buffer."""
    return _pieces(
        shard.shape, shard.dtype, zip(shard.boxes, box_views(shard.boxes, shard.local), strict=True)
    )


def _pieces(
    shape: tuple[int, ...], dtype: torch.dtype, held: Iterable[tuple[Box, torch.Tensor]]
) -> Pieces:
    if 0 in shape:
        # Kept on every rank, so that its shape survives whichever rank writes it.
        held = [(whole(shape), torch.empty(shape, dtype=dtype))]
    return Pieces(shape, dtype, tuple((box, view.detach()) for box, view in held))


def _sharded(tensor: Any) -> tuple[tuple[Box, torch.Tensor], ...]:
    """Pieces of a `ShardedTensor`, which FSDP1 puts into its sharded state dicts."""
    return tuple(
        (Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)), shard.tensor)
        for shard in tensor.local_shards()
        if shard.tensor.numel()
    )


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping) and not _is_one_value(path, value):
        for key, inner in value.items():
            yield from _walk((*path, str(key)), inner)
    elif isinstance(value, list) and not _is_terminal(value):
        for index, inner in enumerate(value):
            yield from _walk((*path, index), inner)
    else:
        yield path, value


def _is_one_value(path: Path, value: Mapping[Any, Any]) -> bool:
    """Whether a dict among the user's own values would not come back the same from its flattened
    entries.

    torch turns keys into text and drops empty dicts; `MultiStepLR` for one keeps its milestones
    under numbers.
    """
    if len(path) < 2 or not (
        path[0] == "extra" or any(str(part).endswith("_extra_state") for part in path)
    ):
        return False
    if value and all(isinstance(key, str) for key in value):
        return False
    if _holds_shards(value):
        raise UsageError(
            "usage",
            f"{'.'.join(map(str, path))!r}: a dict with keys that are no text holds sharded tensors, which could not be"
            " put back under their keys; an optimizer belongs in save(optimizer=…)",
        )
    return True


def _holds_shards(value: Any) -> bool:
    inner = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    shards = isinstance(value, DTensor | LocalShardsTensor) or hasattr(value, "local_shards")
    return shards or any(map(_holds_shards, inner))


def _is_terminal(value: Any) -> bool:
    """Whether a list holds neither tensors nor dicts, at any depth of lists."""
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return not isinstance(value, torch.Tensor | DTensor | LocalShardsTensor)
    return all(_is_terminal(item) for item in value)


def _mark(value: Any) -> int:
    text = repr(value)
    return 0 if " at 0x" in text else zlib.crc32(text.encode())


def _pickled(name: str, value: Any) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        raise UsageError(
            "usage", f"{name!r} of type {type(value).__name__} cannot be pickled: {error}"
        ) from error
    return stream.getvalue()
