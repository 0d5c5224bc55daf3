"""Find where the bytes of a box lie: pure geometry of chunks, byte ranges and blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ema_ckpt.core.box import Box, intersect, is_contiguous_in, linear, row_major_strides, whole
from ema_ckpt.core.catalog import Payload, Tensor
from ema_ckpt.core.coverage import between_rows

# numpy types of the same size as an element: bytes are moved, never interpreted.
UNITS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
_JOB_NBYTES = 16 << 20


class Overlap(NamedTuple):
    """Part of a box that one chunk holds; `box` and `chunk` are in tensor coordinates."""

    box: Box
    chunk: Box
    payload: Payload
    strides: tuple[int, ...]

    def start(self, box: Box) -> int:
        """Element of the storage at which `box`, inside the overlap, begins."""
        element = self.payload.start
        for offset, corner, stride in zip(
            box.offsets, self.chunk.offsets, self.strides, strict=True
        ):
            element += (offset - corner) * stride
        return element

    def is_contiguous(self, box: Box) -> bool:
        """Whether the elements of `box`, inside the overlap, follow one another in the storage."""
        return self.payload.strides is None and is_contiguous_in(box, self.chunk)


class ByteRange(NamedTuple):
    """Bytes that lie together in a storage (`start`, relative to it) and in the result (`dest`)."""

    dest: int
    start: int
    nbytes: int
    payload: Payload


def find_overlaps(
    tensor: Tensor, payloads: Sequence[Payload], chunks: Sequence[int], box: Box
) -> list[Overlap]:
    """Overlaps of `box` with the chunks of the given indices, as proven; empty ones left out."""
    overlaps = []
    first, stop = (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)
    for index in between_rows(tensor, chunks, first, stop):
        chunk, payload = tensor.chunks[index], payloads[index]
        if chunk.sizes and (chunk.offsets[0] >= stop or chunk.offsets[0] + chunk.sizes[0] <= first):
            continue  # most are other rows
        common = intersect(chunk.box, box)
        if common is not None:
            strides = payload.strides or row_major_strides(chunk.sizes)
            overlaps.append(Overlap(common, chunk.box, payload, strides))
    return overlaps


def contiguous_ranges(
    overlaps: Sequence[Overlap], box: Box, itemsize: int
) -> list[ByteRange] | None:
    """Overlaps as byte ranges in the order of the result; None if one is no single range."""
    ranges = []
    for overlap in overlaps:
        if not overlap.is_contiguous(overlap.box) or not is_contiguous_in(overlap.box, box):
            return None
        dest = linear(overlap.box.within(box).offsets, box.sizes) * itemsize
        start, nbytes = overlap.start(overlap.box) * itemsize, overlap.box.numel * itemsize
        ranges.append(ByteRange(dest, start, nbytes, overlap.payload))
    ranges.sort(key=lambda byte_range: byte_range.dest)
    return ranges


def row_ranges(
    tensor: Tensor, payloads: Sequence[Payload], chunks: Sequence[int], box: Box
) -> list[ByteRange] | None:
    """Byte ranges of a whole tensor stored as rows in order, without intersections; else None."""
    if box.sizes != tensor.shape:
        return None
    ranges, dest, itemsize, inner = [], 0, tensor.dtype.itemsize, tensor.shape[1:]
    row_nbytes = prod(inner) * itemsize
    for index in chunks:
        chunk, payload = tensor.chunks[index], payloads[index]
        if payload.strides is not None or chunk.sizes[1:] != inner or any(chunk.offsets[1:]):
            return None
        if chunk.offsets and chunk.offsets[0] * row_nbytes != dest:
            return None
        nbytes = prod(chunk.sizes) * itemsize
        ranges.append(ByteRange(dest, payload.start * itemsize, nbytes, payload))
        dest += nbytes
    return ranges


class RowBlocks:
    """Cuts a box into blocks of at most `nbytes` bytes (one element at least).

    The elements of each block follow one another in row-major order of the box. A block consists of
    rows along `axis`, of which the outer axes have one index each.
    """

    def __init__(self, box: Box, itemsize: int, nbytes: int) -> None:
        self.box = box
        axis, inner_nbytes = len(box.sizes), itemsize
        while axis > 0 and inner_nbytes * box.sizes[axis - 1] <= nbytes:
            axis -= 1
            inner_nbytes *= box.sizes[axis]
        self.axis = max(axis - 1, 0)
        rows = box.sizes[self.axis] if box.sizes else 1
        self._row_numel = prod(box.sizes[self.axis + 1 :])
        self._step = max(1, min(rows, nbytes // max(self._row_numel * itemsize, 1)))
        self._per_outer = -(-rows // self._step)
        self.count = prod(box.sizes[: self.axis]) * self._per_outer

    def rows(self, index: int) -> tuple[int, int]:
        """First row, relative to the box, and number of rows of a block along `axis`."""
        first = index % self._per_outer * self._step
        return first, min(self._step, self.box.sizes[self.axis] - first)

    def extent(self, index: int) -> tuple[int, int]:
        """First element, in row-major order of the box, and number of elements of a block."""
        if not self.box.sizes:
            return 0, 1
        first, rows = self.rows(index)
        before = index // self._per_outer * self.box.sizes[self.axis]
        return (before + first) * self._row_numel, rows * self._row_numel

    def block(self, index: int) -> Box:
        """The block with that index, in tensor coordinates."""
        box = self.box
        if not box.sizes:
            return box
        first, rows = self.rows(index)
        outer = index // self._per_outer
        offsets, sizes = list(box.offsets), list(box.sizes)
        for axis in range(self.axis - 1, -1, -1):
            outer, position = divmod(outer, box.sizes[axis])
            offsets[axis], sizes[axis] = box.offsets[axis] + position, 1
        offsets[self.axis] += first
        sizes[self.axis] = rows
        return Box(tuple(offsets), tuple(sizes))


class RowSlab(NamedTuple):
    """Rows [first, stop) along the blocks' axis that one chunk holds, as one byte range.

    Column shards, FSDP2 × TP and rows that two chunks share are of this kind. `start` is where row
    `first` begins, in bytes of the storage; `inner` is where the rows lie on the axes that follow,
    of sizes `sizes`; `full` if they are as wide as the box.
    """

    payload: Payload
    first: int
    stop: int
    start: int
    row_nbytes: int
    inner: tuple[slice, ...]
    sizes: tuple[int, ...]
    full: bool


def find_row_slabs(
    overlaps: Sequence[Overlap], blocks: RowBlocks, itemsize: int
) -> list[RowSlab] | None:
    """Overlaps of a box as row slabs of its blocks; None if one is none, or if outer axes count."""
    box, axis = blocks.box, blocks.axis
    if not box.sizes or prod(box.sizes[:axis]) != 1:
        return None
    slabs = []
    for overlap in overlaps:
        sizes = overlap.box.sizes[axis + 1 :]
        if overlap.payload.strides is not None or sizes != overlap.chunk.sizes[axis + 1 :]:
            return None
        part = overlap.box.within(box)
        first = part.offsets[axis]
        slab = RowSlab(
            payload=overlap.payload,
            first=first,
            stop=first + part.sizes[axis],
            start=overlap.start(overlap.box) * itemsize,
            row_nbytes=prod(sizes) * itemsize,
            inner=part.slices()[axis + 1 :],
            sizes=sizes,
            full=sizes == box.sizes[axis + 1 :],
        )
        slabs.append(slab)
    return slabs


class BlockRange(NamedTuple):
    """Blocks [first, stop) of a tensor that `blocks` cuts."""

    blocks: RowBlocks
    first: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements in these blocks."""
        start, _ = self.blocks.extent(self.first)
        last, numel = self.blocks.extent(self.stop - 1)
        return last + numel - start


def block_ranges(shape: Sequence[int], itemsize: int, block_nbytes: int) -> Iterator[BlockRange]:
    """Cut a tensor into ranges of blocks, one for each job.

    `itemsize` is that of the widest of the tensors read side by side.
    """
    blocks = RowBlocks(whole(shape), itemsize, block_nbytes)
    step = max(1, _JOB_NBYTES // block_nbytes)
    for first in range(0, blocks.count, step):
        yield BlockRange(blocks, first, min(first + step, blocks.count))
