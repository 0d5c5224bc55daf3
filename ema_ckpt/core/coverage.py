"""Prove that the chunks of a tensor hold every element once, before a byte of them is read."""

from __future__ import annotations

from ema_ckpt.core.box import Box, first_overlap
from ema_ckpt.core.catalog import Chunk, Tensor
from ema_ckpt.core.errors import SourceError, about
from ema_ckpt.core.text import counted


def prove(tensor: Tensor) -> tuple[int, ...]:
    """Check bounds, overlap and volume; return the indices of the chunks to read.

    These are the chunks that hold elements, the first of each box (equal boxes are replicas, not
    overlap), in row order if they are rows.

    Raises:
        SourceError: `out-of-bounds`, `overlap`, `hole` or `incomplete`, naming the tensor.
    """
    if tensor.proven_chunks is None:
        object.__setattr__(tensor, "proven_chunks", tuple(_prove(tensor)))
    return tensor.proven_chunks or ()


def _prove(tensor: Tensor) -> list[int]:
    first_of_box: dict[Box, int] = {}
    for index, chunk in enumerate(tensor.chunks):
        if 0 not in chunk.sizes:
            first_of_box.setdefault(chunk.box, index)
    indices = list(first_of_box.values())
    chunks = [tensor.chunks[index] for index in indices]
    for chunk in chunks:
        if not chunk.file:
            message = f"no file is named for the chunk at {list(chunk.offsets)}"
            raise _error("incomplete", tensor, message)
    if _are_rows(tensor, chunks):
        return indices
    for chunk in chunks:
        if not chunk.box.fits(tensor.shape):
            message = f"a chunk at {list(chunk.offsets)} of {list(chunk.sizes)} does not fit"
            raise _error("out-of-bounds", tensor, f"{message} into {list(tensor.shape)}", chunk)
    boxes = list(first_of_box)
    overlap = first_overlap(boxes)
    if overlap is not None:
        a, b = chunks[overlap[0]], chunks[overlap[1]]
        message = f"the chunks at {list(a.offsets)} and {list(b.offsets)}"
        raise _error("overlap", tensor, f"{message} hold some of the same elements", b)
    covered = sum([box.numel for box in boxes])
    if covered != tensor.numel:
        raise _error("hole", tensor, f"{covered} of {counted(tensor.numel, 'element')} covered")
    return indices


def _are_rows(tensor: Tensor, chunks: list[Chunk]) -> bool:
    """Check the common case fast: whole rows in order, end to end."""
    shape = tensor.shape
    if not shape:
        return len(chunks) == 1 and chunks[0].offsets == ()
    row, inner, zeros = 0, shape[1:], (0,) * (len(shape) - 1)
    for chunk in chunks:
        if (chunk.offsets, chunk.sizes[1:]) != ((row, *zeros), inner):
            return False
        row += chunk.sizes[0]
    if not tensor.numel:
        return not chunks
    return row == shape[0]


def _error(code: str, tensor: Tensor, message: str, chunk: Chunk | None = None) -> SourceError:
    file = chunk.file if chunk else None
    return about(SourceError(code, message), tensor=tensor.name, file=file)
