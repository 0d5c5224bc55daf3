"""Find where the bytes of a box lie: pure geometry of chunks, byte ranges and blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ema_ckpt.core.box import Box, intersect, is_contiguous_in, linear, row_major_strides
from ema_ckpt.core.catalog import Files, Payload, Tensor
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.checksums import ChecksumVerifier
from ema_ckpt.runtime.page_buffer import buffer
from ema_ckpt.storage.files import is_url

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GAP_NBYTES = 16 << 10  # reading over so much costs less than one more read

# numpy types of the same size as an element: bytes are moved, never interpreted.
UNITS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


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
    """Overlaps of `box` with the chunks of the given indices, empty ones left out."""
    overlaps = []
    first, stop = (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)
    for index in chunks:
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

    band = block  # until callers are switched


# The class below goes once its last users read through `box_reader`.


class BoxReader:
    """Puts bands together. Its buffers serve one worker; `limit_nbytes` bounds each of them.

    With `sums` False no checksum is computed on the way: for readers that only look at values.
    """

    def __init__(
        self, source: Files, checks: ChecksumVerifier, limit_nbytes: int, *, sums: bool = True
    ) -> None:
        self._source = source
        self._sums = sums
        self._checks = checks
        self._limit = limit_nbytes
        self._gap = limit_nbytes if is_url(source.root) else _GAP_NBYTES
        self._scratch = memoryview(b"")
        self._hint = 0

    def read(
        self, tensor: Tensor, shares: Sequence[Overlap], band: Box, out: memoryview
    ) -> int | None:
        """Fill `out` with the band's bytes; their CRC-32 if it came about on the way."""
        share = self._holder(shares, band)
        if share is not None and self._is_run(share, band):
            return self._read_run(tensor, share, band, out)
        import numpy as np

        target = np.frombuffer(out, UNITS[tensor.dtype.itemsize]).reshape(band.sizes)
        for share in shares:
            common = intersect(share.box, band)
            if common is not None:
                self._read_share(tensor, share, common, target[_slices(common, band)])
        return None

    def _holder(self, shares: Sequence[Overlap], band: Box) -> Overlap | None:
        """The share that holds the whole band, if one does; mostly it is that of the band
        before.
        """
        if self._hint < len(shares) and _holds(shares[self._hint].box, band):
            return shares[self._hint]
        for index, share in enumerate(shares):
            if _holds(share.box, band):
                self._hint = index
                return share
        return None

    def _is_run(self, share: Overlap, box: Box) -> bool:
        return share.payload.strides is None and is_contiguous_in(box, share.chunk)

    def _read_run(self, tensor: Tensor, share: Overlap, box: Box, out: memoryview) -> int:
        payload, itemsize = share.payload, tensor.dtype.itemsize
        start = share.start(box) * itemsize
        self._source.read_into(payload.file, payload.offset + start, out)
        if not self._sums:
            return 0
        crc = crc32(out)
        self._checks.read(tensor.name, payload, start, len(out), crc)
        return crc

    def _take(self, nbytes: int) -> memoryview:
        if len(self._scratch) < nbytes:
            self._scratch = buffer(nbytes)
        return self._scratch[:nbytes]

    def _read_share(self, tensor: Tensor, share: Overlap, box: Box, target: NDArray[Any]) -> None:
        import numpy as np

        if self._is_run(share, box):
            block = self._take(target.nbytes)
            self._read_run(tensor, share, box, block)
            target[...] = np.frombuffer(block, target.dtype).reshape(box.sizes)
            return
        self._checks.partly(tensor.name, share.payload)
        self._check_reach(tensor, share, box)
        for tile in _tiles(box, share.strides, tensor.dtype.itemsize, self._limit, self._gap):
            target[_slices(tile.box, box)] = self._read_tile(share, tile, target.dtype)

    def _check_reach(self, tensor: Tensor, share: Overlap, box: Box) -> None:
        payload = share.payload
        last = share.start(box) + sum(
            (size - 1) * step for size, step in zip(box.sizes, share.strides, strict=True)
        )
        if (last + 1) * tensor.dtype.itemsize > payload.nbytes:
            message = f"{payload.file}: tensor {tensor.name!r} reaches beyond its storage"
            raise SourceError("out-of-bounds", message, tensor=tensor.name, file=payload.file)

    def _read_tile(self, share: Overlap, tile: _Tile, kind: Any) -> NDArray[Any]:
        """A tile as a view of the scratch buffer, its reads one behind the other there."""
        import numpy as np

        payload, itemsize, strides = share.payload, kind.itemsize, list(share.strides)
        start, nbytes = share.start(tile.box), tile.span * itemsize
        block = self._take(tile.reads * nbytes)
        for index in range(tile.reads):
            at = (
                (start + index * strides[tile.axis]) * itemsize
                if tile.reads > 1
                else start * itemsize
            )
            self._source.read_into(
                payload.file, payload.offset + at, block[index * nbytes : (index + 1) * nbytes]
            )
        if tile.reads > 1:
            strides[tile.axis] = tile.span
        steps = tuple(stride * itemsize for stride in strides)
        return np.lib.stride_tricks.as_strided(
            np.frombuffer(block, kind), tile.box.sizes, steps, writeable=False
        )


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

    Axes are taken up from the smallest stride on. As long as what lies between two steps of an axis
    is at most `gap` bytes it is read over, which costs less than another read; from there on, every
    step is a read.
    """
    axes = sorted(range(len(strides)), key=lambda axis: strides[axis])
    span, within = 1, []
    while axes:
        axis = axes[0]
        wider = span + (box.sizes[axis] - 1) * strides[axis]
        if wider > span and ((strides[axis] - span) * itemsize > gap or wider * itemsize > limit):
            break
        span = wider
        within.append(axes.pop(0))
    if not axes:
        yield _Tile(box, span, 0, 1)
        return
    axis, *rest = axes
    over = (strides[axis] - span) * itemsize <= gap
    room = limit // itemsize
    step = max(1, (room - span) // strides[axis] + 1 if over else room // span)
    for corner in product(*(range(box.sizes[other]) for other in rest)):
        for first in range(0, box.sizes[axis], step):
            count = min(step, box.sizes[axis] - first)
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis], sizes[axis] = offsets[axis] + first, count
            for other, position in zip(rest, corner, strict=True):
                offsets[other], sizes[other] = offsets[other] + position, 1
            piece = Box(tuple(offsets), tuple(sizes))
            yield (
                _Tile(piece, span + (count - 1) * strides[axis], axis, 1)
                if over
                else _Tile(piece, span, axis, count)
            )


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Where `inner` lies in an array of `outer`'s elements."""
    return tuple(
        [
            slice(o - p, o - p + s)
            for o, s, p in zip(inner.offsets, inner.sizes, outer.offsets, strict=True)
        ]
    )


def _holds(outer: Box, inner: Box) -> bool:
    """Whether `inner` lies in `outer`."""
    for o, s, p, t in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True):
        if p < o or p + t > o + s:
            return False
    return True
