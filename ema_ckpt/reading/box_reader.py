"""Read a box of a tensor, row-major, from the chunks that hold it.

Where the box consists of byte ranges of the storages (row shards, whole tensors), their bytes are
read as they are. Otherwise blocks of it are assembled: each is put together from all chunks that
hold a part of it. Rows of column shards have a fast path of their own (`RowSlab`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ema_ckpt.core.box import Box, flat_range_boxes, intersect, whole
from ema_ckpt.core.catalog import Catalog, Files, Payload, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import SourceError, about
from ema_ckpt.core.text import format_size
from ema_ckpt.reading.checksum_verifier import ChecksumVerifier, Interval
from ema_ckpt.reading.overlaps import (
    UNITS,
    ByteRange,
    Overlap,
    RowBlocks,
    RowSlab,
    contiguous_ranges,
    find_overlaps,
    find_row_slabs,
    row_ranges,
)
from ema_ckpt.reading.turned_copy import TurnedCopy
from ema_ckpt.runtime.page_buffer import buffer
from ema_ckpt.storage.files import is_url

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GAP_NBYTES = 16 << 10  # reading over so much costs less than one more read
# From a gigabyte on, a tensor may be so many times the bytes that a file has of it.
_MAX_EXPANDED_NBYTES, _MAX_EXPANSION = 1 << 30, 64
# What rows that are read one by one are longer by, so that those at a power of two do not push each
# other out of the cache.
_PAD_NBYTES = 64
_dest = attrgetter("dest")
_T = TypeVar("_T")


class LocatedBox(NamedTuple):
    """A box of a tensor whose bytes are located.

    Attributes:
        ranges: the byte ranges that the box consists of, in row-major order, or None if it must be
            assembled.
        overlaps: the parts of the box that chunks hold; may be empty where there are `ranges`.
    """

    source: Files
    tensor: Tensor
    box: Box
    ranges: Sequence[ByteRange] | None
    overlaps: Sequence[Overlap]

    @property
    def is_gathered(self) -> bool:
        """Whether elements that lie together in the file come apart, as in a transposed tensor.

        Each block then takes a little of every row of the file: the larger it is, the better.
        """
        return any(overlap.payload.strides is not None for overlap in self.overlaps)


def locate(
    catalog: Catalog, tensor: Tensor, payloads: Sequence[Payload] | None = None
) -> LocatedBox:
    """Locate the bytes of a tensor; reads headers only, unless the chunks' `payloads` are given.

    Raises:
        SourceError: `hole overlap out-of-bounds incomplete missing-file bad-header …`, naming the
            tensor; `unsupported` for a view that expands few bytes to many.
    """
    chunks = prove(tensor)
    if payloads is None:
        payloads = catalog.reader.payloads(tensor) if chunks else ()
    stored = sum([payload.nbytes for payload in payloads])
    if tensor.nbytes >= _MAX_EXPANDED_NBYTES and tensor.nbytes > _MAX_EXPANSION * stored:
        # A view that repeats a file's bytes (`expand`) until they take hours to read.
        message = f"{format_size(stored)} are expanded to {format_size(tensor.nbytes)}"
        remedy = "leave it out with --exclude, or save it as it was before expand()"
        error = SourceError("unsupported", f"{message}; {remedy}")
        raise about(error, tensor=tensor.name, file=tensor.first_file)
    return locate_box(catalog.source, tensor, payloads, chunks, whole(tensor.shape))


def read_whole(catalog: Catalog, tensor: Tensor) -> memoryview:
    """Read all bytes of a small tensor, in row-major order. Raises as `BoxReader.read`."""
    data = memoryview(bytearray(tensor.nbytes))
    BoxReader(max(len(data), 1)).read(locate(catalog, tensor), data)
    return data


def locate_box(
    source: Files, tensor: Tensor, payloads: Sequence[Payload], chunks: Sequence[int], box: Box
) -> LocatedBox:
    """Locate a box in the payloads of a tensor; `chunks` are the indices that `prove` returns."""
    overlaps: Sequence[Overlap] = ()
    ranges = row_ranges(tensor, payloads, chunks, box)
    if ranges is None:
        overlaps = find_overlaps(tensor, payloads, chunks, box)
        ranges = contiguous_ranges(overlaps, box, tensor.dtype.itemsize)
    return LocatedBox(source, tensor, box, ranges, overlaps)


class BoxReader:
    """Reads located boxes; its buffers serve one worker.

    Args:
        block_nbytes: bytes of a block, which bound each buffer.
        verifier: gets the checksums of what is read; without it none are computed.
    """

    def __init__(self, block_nbytes: int, verifier: ChecksumVerifier | None = None) -> None:
        self.block_nbytes = block_nbytes
        self._verifier = verifier
        self._buffers: dict[str, memoryview] = {}
        self._turned = TurnedCopy()

    def read(self, located: LocatedBox, out: memoryview, start: int = 0) -> int | None:
        """Fill `out` with the bytes of the box in row-major order, from byte `start` on.

        Returns the CRC-32 of `out` if it was computed on the way.

        Raises:
            SourceError: `truncated-file checksum out-of-bounds …`.
        """
        done, ranges = 0, located.ranges
        if ranges is not None:
            crc, index = None, bisect_right(ranges, start, key=_dest) - 1
            while done < len(out):
                byte_range = ranges[index]
                skipped = start + done - byte_range.dest
                part = out[done : done + byte_range.nbytes - skipped]
                crc = self._read_range(
                    located, byte_range.payload, byte_range.start + skipped, part
                )
                done += len(part)
                index += 1
            return crc if done == 0 or len(part) == done else None
        itemsize, corner = located.tensor.dtype.itemsize, located.box.offsets
        first = start // itemsize
        for box in flat_range_boxes(located.box.sizes, first, first + len(out) // itemsize):
            offsets = [o + c for o, c in zip(box.offsets, corner, strict=True)]
            nbytes = len(out) if located.is_gathered else self.block_nbytes
            blocks = RowBlocks(Box(tuple(offsets), box.sizes), itemsize, nbytes)
            for index in range(blocks.count):
                block = blocks.block(index)
                nbytes = block.numel * itemsize
                self._assemble(located, block, out[done : done + nbytes])
                done += nbytes
        return None

    def blocks(
        self, located: LocatedBox, blocks: RowBlocks, first: int = 0, stop: int | None = None
    ) -> Iterator[memoryview]:
        """Yield the bytes of blocks [first, stop), each valid until the next is asked for.

        Raises:
            SourceError: as `read`; the checksums of interleaved rows are compared at the end.
        """
        itemsize = located.tensor.dtype.itemsize
        stop = blocks.count if stop is None else stop
        if located.ranges is None:
            slabs = find_row_slabs(located.overlaps, blocks, itemsize)
            if slabs is not None:
                yield from self._read_slabs(located, slabs, blocks, range(first, stop))
                return
        for index in range(first, stop):
            start, numel = blocks.extent(index)
            view = self._buffer("block", numel * itemsize)
            self.read(located, view, start * itemsize)
            yield view

    def _read_slabs(
        self, located: LocatedBox, slabs: Sequence[RowSlab], blocks: RowBlocks, indices: range
    ) -> Iterator[memoryview]:
        """Yield blocks of interleaved rows; one interval of each slab's storage is read."""
        source, verifier = located.source, self._verifier
        inner, unit = blocks.box.sizes[blocks.axis + 1 :], UNITS[located.tensor.dtype.itemsize]
        row_nbytes = prod(inner) * located.tensor.dtype.itemsize
        axes = _long_axes(inner)
        memory = self._buffer("block", blocks.rows(0)[1] * row_nbytes)
        scratch = self._buffer("scratch", len(memory))
        intervals: dict[int, Interval] = {}
        for index in indices:
            first, count = blocks.rows(index)
            out, rows = memory[: count * row_nbytes], None
            for number, slab in enumerate(slabs):
                low, high = max(first, slab.first), min(first + count, slab.stop)
                if low >= high:
                    continue
                start = slab.start + (low - slab.first) * slab.row_nbytes
                nbytes = (high - low) * slab.row_nbytes
                view = out[(low - first) * row_nbytes :] if slab.full else scratch
                view = view[:nbytes]
                source.read_into(slab.payload.file, slab.payload.offset + start, view)
                if verifier is not None:
                    begin, total, crc = intervals.get(number, (start, 0, 0))
                    intervals[number] = (begin, total + nbytes, crc32(view, crc))
                if not slab.full:
                    import numpy as np

                    if rows is None:
                        rows = np.frombuffer(out, unit).reshape(count, *_of(axes, inner))
                    part = np.frombuffer(view, unit).reshape(high - low, *_of(axes, slab.sizes))
                    rows[(slice(low - first, high - first), *_of(axes, slab.inner))] = part
            yield out
        for number, interval in intervals.items():
            if verifier is not None:
                verifier.record(located.tensor.name, slabs[number].payload, *interval)

    def _buffer(self, name: str, nbytes: int) -> memoryview:
        memory = self._buffers.get(name)
        if memory is None or len(memory) < nbytes:
            memory = self._buffers[name] = buffer(max(nbytes, self.block_nbytes))
        return memory if len(memory) == nbytes else memory[:nbytes]

    def _read_range(
        self, located: LocatedBox, payload: Payload, start: int, out: memoryview
    ) -> int | None:
        """Fill `out` from byte `start` of a storage; record and return its CRC-32 if it matters."""
        source, offset, verifier = located.source, payload.offset + start, self._verifier
        if verifier is None or payload.crc is None:
            source.read_into(payload.file, offset, out)
            return None
        crc = 0
        for position in range(0, len(out), self.block_nbytes):
            view = out[position : position + self.block_nbytes]
            source.read_into(payload.file, offset + position, view)
            crc = crc32(view, crc)
        verifier.record(located.tensor.name, payload, start, len(out), crc)
        return crc

    def _assemble(self, located: LocatedBox, block: Box, out: memoryview) -> None:
        """Fill `out` with one block, from all chunks that hold a part of it."""
        import numpy as np

        itemsize = located.tensor.dtype.itemsize
        axes = _long_axes(block.sizes)
        values = np.frombuffer(out, UNITS[itemsize]).reshape(_of(axes, block.sizes))
        for overlap in located.overlaps:
            part = intersect(overlap.box, block)
            if part is None:
                continue
            target = values[_of(axes, part.within(block).slices())]
            if not overlap.is_contiguous(part):
                self._read_strided(located, overlap, part, target, axes)
                continue
            start = overlap.start(part) * itemsize
            if part == block:
                self._read_range(located, overlap.payload, start, out)
                continue
            scratch = self._buffer("scratch", target.nbytes)
            self._read_range(located, overlap.payload, start, scratch)
            target[...] = np.frombuffer(scratch, target.dtype).reshape(target.shape)

    def _read_strided(
        self,
        located: LocatedBox,
        overlap: Overlap,
        box: Box,
        target: NDArray[Any],
        axes: Sequence[int],
    ) -> None:
        """Read tiles into scratch, the reads of each one behind the other; copy strided views.

        `axes` are those of the box that `target` has.
        """
        import numpy as np

        tensor, payload, itemsize = located.tensor, overlap.payload, located.tensor.dtype.itemsize
        if self._verifier is not None:
            self._verifier.require_full_read(tensor.name, payload)
        last = overlap.start(box)
        for size, stride in zip(box.sizes, overlap.strides, strict=True):
            last += (size - 1) * stride
        if (last + 1) * itemsize > payload.nbytes:
            message = f"{payload.file}: tensor {tensor.name!r} reaches beyond its storage"
            raise SourceError("out-of-bounds", message, tensor=tensor.name, file=payload.file)
        gap = self.block_nbytes if is_url(located.source.root) else _GAP_NBYTES
        for tile in _tiles(box, overlap.strides, itemsize, self.block_nbytes, gap):
            strides, nbytes = list(overlap.strides), tile.span * itemsize
            step = strides[tile.axis] if strides else 0
            pitch = nbytes + _PAD_NBYTES // itemsize * itemsize if tile.reads > 1 else nbytes
            scratch = self._buffer("scratch", tile.reads * pitch)
            for index in range(tile.reads):
                offset = payload.offset + (overlap.start(tile.box) + index * step) * itemsize
                view = scratch[index * pitch : index * pitch + nbytes]
                located.source.read_into(payload.file, offset, view)
            if tile.reads > 1:
                strides[tile.axis] = pitch // itemsize
            values = np.lib.stride_tricks.as_strided(
                np.frombuffer(scratch, target.dtype),
                _of(axes, tile.box.sizes),
                [strides[axis] * itemsize for axis in axes],
                writeable=False,
            )
            self._turned.copy(target[_of(axes, tile.box.within(box).slices())], values)


def _long_axes(sizes: Sequence[int]) -> list[int]:
    """Return the axes of other lengths than 1, or one: NumPy has at most 64, a tensor more."""
    return [axis for axis, size in enumerate(sizes) if size != 1] or [*range(len(sizes))][:1]


def _of(axes: Sequence[int], values: Sequence[_T]) -> tuple[_T, ...]:
    return tuple([values[axis] for axis in axes])


class _Tile(NamedTuple):
    """Part of a strided box: one read of `span` elements, or `reads` of them along `axis`."""

    box: Box
    span: int
    axis: int
    reads: int


def _tiles(
    box: Box, strides: Sequence[int], itemsize: int, limit: int, gap: int
) -> Iterator[_Tile]:
    """Cut a strided box into tiles of at most `limit` bytes of reading (one element at least).

    Axes are added from the smallest stride on. As long as at most `gap` bytes lie between two steps
    of an axis they are read over, which costs less than another read; from there on, every step is
    a read.
    """
    axes = sorted(range(len(strides)), key=lambda axis: strides[axis])
    span = 1
    while axes:
        stride = strides[axes[0]]
        wider = span + (box.sizes[axes[0]] - 1) * stride
        if wider > span and ((stride - span) * itemsize > gap or wider * itemsize > limit):
            break
        span = wider
        axes.pop(0)
    if not axes:
        yield _Tile(box, span, 0, 1)
        return
    axis, *outer = axes
    stride, room = strides[axis], limit // itemsize
    reads_over = (stride - span) * itemsize <= gap
    step = max(1, (room - span) // stride + 1 if reads_over else room // span)
    for corner in product(*(range(box.sizes[other]) for other in outer)):
        offsets, sizes = list(box.offsets), list(box.sizes)
        for other, position in zip(outer, corner, strict=True):
            offsets[other], sizes[other] = offsets[other] + position, 1
        for first in range(0, box.sizes[axis], step):
            count = min(step, box.sizes[axis] - first)
            offsets[axis], sizes[axis] = box.offsets[axis] + first, count
            part = Box(tuple(offsets), tuple(sizes))
            if reads_over:
                yield _Tile(part, span + (count - 1) * stride, axis, 1)
            else:
                yield _Tile(part, span, axis, count)
