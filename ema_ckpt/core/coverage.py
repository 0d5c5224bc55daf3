"""Proof that the chunks of a tensor hold every element once, before a byte of them is read."""

from __future__ import annotations

from ema_ckpt.core.box import first_overlap
from ema_ckpt.core.catalog import Chunk, Tensor
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import counted


def unique_chunks(tensor: Tensor) -> list[int]:
    """Indices of the chunks that hold elements, the first of each box: equal boxes are replicas,
    not overlap.
    """
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for index, chunk in enumerate(tensor.chunks):
        if 0 not in chunk.sizes:
            seen.setdefault((chunk.offsets, chunk.sizes), index)
    return list(seen.values())


def prove(tensor: Tensor) -> list[int]:
    """Check bounds, overlap and volume; return the indices of the chunks to read, in row order if
    they are rows.

    Raises:
        SourceError: `out-of-bounds`, `overlap`, `hole` or `incomplete`, naming the tensor.
    """
    picked = unique_chunks(tensor)
    chunks = [tensor.chunks[index] for index in picked]
    for chunk in chunks:
        if not chunk.file:
            raise _error(
                "incomplete", tensor, f"no file is named for the chunk at {list(chunk.offsets)}"
            )
    if _is_rows(tensor, chunks):
        return picked
    for chunk in chunks:
        if not chunk.box.fits(tensor.shape):
            found = f"a chunk at {list(chunk.offsets)} of {list(chunk.sizes)}"
            raise _error(
                "out-of-bounds",
                tensor,
                f"{found} does not fit into {list(tensor.shape)}",
                chunk.file,
            )
    boxes = [chunk.box for chunk in chunks]
    clash = first_overlap(boxes)
    if clash is not None:
        a, b = (chunks[index] for index in clash)
        where = f"the chunks at {list(a.offsets)} and {list(b.offsets)}"
        raise _error("overlap", tensor, f"{where} hold some of the same elements", b.file)
    covered = sum(box.numel for box in boxes)
    if covered != tensor.numel:
        raise _error("hole", tensor, f"{covered} of {counted(tensor.numel, 'element')} covered")
    return picked


def _is_rows(tensor: Tensor, chunks: list[Chunk]) -> bool:
    """The common case, told fast: whole rows in order, end to end."""
    shape = tensor.shape
    if not shape:
        return len(chunks) == 1 and chunks[0].offsets == ()
    row, rest, zeros = 0, shape[1:], (0,) * (len(shape) - 1)
    for chunk in chunks:
        if chunk.offsets[:1] != (row,) or chunk.offsets[1:] != zeros or chunk.sizes[1:] != rest:
            return False
        row += chunk.sizes[0]
    return row == shape[0] if tensor.numel else not chunks


def _error(code: str, tensor: Tensor, what: str, file: str | None = None) -> SourceError:
    where = f"{file}: " if file else ""
    return SourceError(
        code, f"{where}tensor {tensor.name!r}: {what}", tensor=tensor.name, file=file
    )
