"""Prove that the chunks of a tensor hold every element once, before a byte of them is read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

from ema_ckpt.core.box import Box, first_overlap, tiles_once
from ema_ckpt.core.catalog import Chunk, Tensor
from ema_ckpt.core.errors import SourceError, about
from ema_ckpt.core.text import counted, shown

_FEW = 16
HOLE_REMEDY = "a rank did not save its part: use another copy, or save again"


def prove(tensor: Tensor) -> tuple[int, ...]:
    """Check bounds, overlap and volume; return the indices of the chunks to read.

    These are the chunks that hold elements, the first of each box (equal boxes are replicas, not
    overlap), ordered by their first row.

    Raises:
        SourceError: `out-of-bounds`, `overlap`, `hole` or `incomplete`, naming the tensor, or its
            `refusal`.
    """
    if tensor.refusal is not None:
        error = SourceError(tensor.refusal.code, tensor.refusal.message)
        raise about(error, tensor=tensor.name, file=tensor.first_file)
    if tensor.proven_chunks is None:
        chunks = tensor.chunks
        proven: Iterable[int] = range(len(chunks))
        if not _are_rows(tensor, chunks):
            proven = _prove_boxes(tensor)
            if tensor.shape:
                proven = sorted(proven, key=lambda index: chunks[index].offsets[0])
        object.__setattr__(tensor, "proven_chunks", tuple(proven))
    return tensor.proven_chunks or ()


def between_rows(tensor: Tensor, proven: Sequence[int], first: int, stop: int) -> Sequence[int]:
    """Return those of the proven chunks that may hold something of rows [first, stop).

    Found by bisection: each of many pieces that are written takes few of many that are stored.
    """
    if len(proven) < _FEW or not tensor.shape:
        return proven
    chunks = tensor.chunks
    if tensor.tallest_chunk is None:
        tallest = max([chunk.sizes[0] for chunk in chunks])
        object.__setattr__(tensor, "tallest_chunk", tallest)
    lowest = first - (tensor.tallest_chunk or 0) + 1
    start = bisect_left(proven, lowest, key=lambda index: chunks[index].offsets[0])
    end = bisect_left(proven, stop, start, key=lambda index: chunks[index].offsets[0])
    return proven[start:end]


def _prove_boxes(tensor: Tensor) -> list[int]:
    """Prove chunks of any form, the first of each box."""
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
    try:
        is_sound = tiles_once(boxes, tensor.shape)
    except OverflowError:
        message = f"its {len(boxes)} chunks are cut on too many axes to prove that they fit"
        raise _error("unsupported", tensor, message) from None
    if not is_sound:
        raise _defect(tensor, chunks, boxes)
    return indices


def _defect(tensor: Tensor, chunks: list[Chunk], boxes: list[Box]) -> SourceError:
    """Return the error of chunks that are known to overlap or to leave a hole."""
    overlap = first_overlap(boxes)
    if overlap is not None:
        a, b = chunks[overlap[0]], chunks[overlap[1]]
        message = f"the chunks at {list(a.offsets)} and {list(b.offsets)}"
        return _error("overlap", tensor, f"{message} hold some of the same elements", b)
    covered = sum([box.numel for box in boxes])
    if covered < tensor.numel:
        return _error("hole", tensor, _describe_hole(tensor, covered, boxes))
    message = f"its {len(boxes)} chunks hold {covered} elements of {tensor.numel}: some twice"
    return _error("overlap", tensor, message)


def _describe_hole(tensor: Tensor, covered: int, boxes: list[Box]) -> str:
    """Say which rows no file holds, which files hold the others, and what to do."""
    message = f"{covered} of {counted(tensor.numel, 'element')} covered"
    if tensor.shape:
        spans = [f"{a} to {b - 1}" if b - a > 1 else str(a) for a, b in _open_rows(tensor, boxes)]
        more = f" and {len(spans) - 10} more spans" if len(spans) > 10 else ""
        rows = "row" if len(spans) == 1 and "to" not in spans[0] else "rows"
        message += f"; not stored whole: {rows} {', '.join(spans[:10])}{more} of {tensor.shape[0]}"
    files = list(dict.fromkeys(chunk.file for chunk in tensor.chunks if 0 not in chunk.sizes))
    held = f"the rest is in {shown(files)}" if files else "no file holds any of it"
    return f"{message}; {held}; {HOLE_REMEDY}"


def _open_rows(tensor: Tensor, boxes: list[Box]) -> list[tuple[int, int]]:
    """List spans of rows of which at least one element is in no box; the boxes do not overlap."""
    changes = {0: 0, tensor.shape[0]: 0}  # elements of a row that boxes begin or cease to hold
    for offsets, sizes in boxes:
        inner = prod(sizes[1:])
        changes[offsets[0]] = changes.get(offsets[0], 0) + inner
        end = offsets[0] + sizes[0]
        changes[end] = changes.get(end, 0) - inner
    spans: list[tuple[int, int]] = []
    whole, held = prod(tensor.shape[1:]), 0
    edges = sorted(changes)
    for first, end in pairwise(edges):
        held += changes[first]
        if held < whole:
            joined = spans and spans[-1][1] == first
            spans[-1:] = [(spans[-1][0], end)] if joined else [*spans[-1:], (first, end)]
    return spans


def _are_rows(tensor: Tensor, chunks: Sequence[Chunk]) -> bool:
    """Check the common case fast: whole rows in order, end to end, each chunk in a file."""
    shape = tensor.shape
    if not shape:
        return len(chunks) == 1 and chunks[0].offsets == () and bool(chunks[0].file)
    row, inner, zeros = 0, shape[1:], (0,) * (len(shape) - 1)
    for offsets, sizes, file, _, _ in chunks:
        if offsets != (row, *zeros) or sizes[1:] != inner or not sizes[0] or not file:
            return False
        row += sizes[0]
    if not tensor.numel:
        return not chunks
    return row == shape[0]


def _error(code: str, tensor: Tensor, message: str, chunk: Chunk | None = None) -> SourceError:
    file = chunk.file if chunk else None
    return about(SourceError(code, message), tensor=tensor.name, file=file)
