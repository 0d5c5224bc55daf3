"""Reading a box of a tensor, row-major, from the chunks that hold it.

Two ways. Where a chunk's share of the box is one run of bytes both in the file and in the result (row
shards, whole tensors), the bytes are moved as they are. Otherwise the box is cut into bands: runs of the
result of some hundred KiB, each put together in a small buffer from all chunks that touch it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ema_ckpt.box import Box, intersect, is_contiguous_in, linear, row_major_strides
from ema_ckpt.catalog import Payload, Tensor
from ema_ckpt.checks import Checks
from ema_ckpt.crc import crc32
from ema_ckpt.errors import SourceError
from ema_ckpt.files import Files

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BandCutter", "BandReader", "Run", "Share", "find_runs", "find_shares", "row_runs"]

# numpy types of the same size as an element: bytes are moved, never interpreted.
_UNITS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
_WASTE = 4  # a strided region is read by its span while that is at most so many times its elements


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a box that one chunk holds: in tensor coordinates, with the chunk's own box and payload."""

    box: Box
    chunk: Box
    payload: Payload


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that lie together in a storage (`start`, relative to it) and in the result (`dest`)."""

    dest: int
    start: int
    nbytes: int
    payload: Payload


def find_shares(tensor: Tensor, payloads: Sequence[Payload], picked: Sequence[int], box: Box) -> list[Share]:
    """What each of the `picked` chunks holds of `box`, empty shares left out."""
    shares = []
    for index in picked:
        chunk = tensor.chunks[index]
        common = intersect(chunk.box, box)
        if common is not None:
            shares.append(Share(common, chunk.box, payloads[index]))
    return shares


def find_runs(shares: Sequence[Share], box: Box, itemsize: int) -> list[Run] | None:
    """The shares as runs in the order of the result, or None if one of them is no single run."""
    runs = []
    for share in shares:
        row_major = share.payload.strides is None
        if not (row_major and is_contiguous_in(share.box, box) and is_contiguous_in(share.box, share.chunk)):
            return None
        start = share.payload.start + linear(share.box.within(share.chunk).offsets, share.chunk.sizes)
        dest = linear(share.box.within(box).offsets, box.sizes)
        runs.append(Run(dest * itemsize, start * itemsize, share.box.numel * itemsize, share.payload))
    runs.sort(key=lambda run: run.dest)
    return runs


def row_runs(tensor: Tensor, payloads: Sequence[Payload], picked: Sequence[int], box: Box) -> list[Run] | None:
    """The runs of a whole tensor stored as rows in order, found without intersecting boxes; None otherwise."""
    if box.sizes != tensor.shape:
        return None
    runs, dest, itemsize, rest = [], 0, tensor.dtype.itemsize, tensor.shape[1:]
    for index in picked:
        chunk, payload = tensor.chunks[index], payloads[index]
        if payload.strides is not None or chunk.sizes[1:] != rest or any(chunk.offsets[1:]):
            return None
        nbytes = prod(chunk.sizes) * itemsize
        if chunk.offsets and chunk.offsets[0] * prod(rest) * itemsize != dest:
            return None
        runs.append(Run(dest, payload.start * itemsize, nbytes, payload))
        dest += nbytes
    return runs


class BandCutter:
    """Cuts a box into bands of at most `nbytes` bytes (one element at least) that are runs of its row-major order."""

    def __init__(self, box: Box, itemsize: int, nbytes: int) -> None:
        self._box = box
        axis, inner = len(box.sizes), itemsize
        while axis > 0 and inner * box.sizes[axis - 1] <= nbytes:
            axis -= 1
            inner *= box.sizes[axis]
        self._axis = max(axis - 1, 0)
        rows = box.sizes[self._axis] if box.sizes else 1
        below = prod(box.sizes[self._axis + 1 :]) * itemsize
        self._step = max(1, min(rows, nbytes // max(below, 1)))
        self._per_outer = -(-rows // self._step)
        self.count = prod(box.sizes[: self._axis]) * self._per_outer

    def band(self, index: int) -> Box:
        """The band with that index, in tensor coordinates."""
        box, axis = self._box, self._axis
        if not box.sizes:
            return box
        outer, part = divmod(index, self._per_outer)
        offsets, sizes = list(box.offsets), list(box.sizes)
        for at in range(axis - 1, -1, -1):
            outer, position = divmod(outer, box.sizes[at])
            offsets[at], sizes[at] = box.offsets[at] + position, 1
        first = part * self._step
        offsets[axis], sizes[axis] = box.offsets[axis] + first, min(self._step, box.sizes[axis] - first)
        return Box(tuple(offsets), tuple(sizes))


class BandReader:
    """Puts bands together. Its buffers serve one worker; `limit_nbytes` bounds each of them.

    With `sums` False no checksum is computed on the way: for readers that only look at values.
    """

    def __init__(self, source: Files, checks: Checks, limit_nbytes: int, *, sums: bool = True) -> None:
        self._source = source
        self._sums = sums
        self._checks = checks
        self._limit = limit_nbytes
        self._scratch = bytearray()

    def read(self, tensor: Tensor, shares: Sequence[Share], band: Box, out: memoryview) -> int | None:
        """Fill `out` with the band's bytes; their CRC-32 if it came about on the way."""
        for share in shares:
            if share.box == band and self._is_run(share, band):
                return self._read_run(tensor, share, band, out)
        import numpy as np

        target = np.frombuffer(out, _UNITS[tensor.dtype.itemsize]).reshape(band.sizes)
        for share in shares:
            common = intersect(share.box, band)
            if common is not None:
                where = common.within(band)
                slices = tuple(slice(o, o + s) for o, s in zip(where.offsets, where.sizes, strict=True))
                self._read_share(tensor, share, common, target[slices])
        return None

    def _is_run(self, share: Share, box: Box) -> bool:
        return share.payload.strides is None and is_contiguous_in(box, share.chunk)

    def _read_run(self, tensor: Tensor, share: Share, box: Box, out: memoryview) -> int:
        payload, itemsize = share.payload, tensor.dtype.itemsize
        start = (payload.start + linear(box.within(share.chunk).offsets, share.chunk.sizes)) * itemsize
        self._source.read_into(payload.file, payload.offset + start, out)
        if not self._sums:
            return 0
        crc = crc32(out)
        self._checks.read(tensor.name, payload, start, len(out), crc)
        return crc

    def _take(self, nbytes: int) -> memoryview:
        if len(self._scratch) < nbytes:
            self._scratch = bytearray(nbytes)
        return memoryview(self._scratch)[:nbytes]

    def _read_share(self, tensor: Tensor, share: Share, box: Box, target: NDArray[Any]) -> None:
        import numpy as np

        if self._is_run(share, box):
            block = self._take(box.numel * tensor.dtype.itemsize)
            self._read_run(tensor, share, box, block)
            target[...] = np.frombuffer(block, target.dtype).reshape(box.sizes)
            return
        self._checks.partly(tensor.name, share.payload)
        for part in self._strided_parts(share, box, tensor.dtype.itemsize):
            where = part.within(box)
            slices = tuple(slice(o, o + s) for o, s in zip(where.offsets, where.sizes, strict=True))
            target[slices] = self._read_strided(tensor, share, part, target.dtype)

    def _strided_parts(self, share: Share, box: Box, itemsize: int) -> Iterator[Box]:
        """Cut a box until each part's span in the storage is small, and mostly elements of the part."""
        strides = _strides(share)
        span = _span(box.sizes, strides) * itemsize
        needed = box.numel * itemsize
        if box.numel == 1 or (span <= self._limit and span <= _WASTE * needed):
            yield box
            return
        reach = [(size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True)]
        axis = max(range(len(reach)), key=reach.__getitem__)
        half = box.sizes[axis] // 2
        for first, count in ((0, half), (half, box.sizes[axis] - half)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis], sizes[axis] = offsets[axis] + first, count
            yield from self._strided_parts(share, Box(tuple(offsets), tuple(sizes)), itemsize)

    def _read_strided(self, tensor: Tensor, share: Share, box: Box, kind: Any) -> NDArray[Any]:
        import numpy as np

        strides, itemsize, payload = _strides(share), tensor.dtype.itemsize, share.payload
        where = box.within(share.chunk).offsets
        start = payload.start + sum(o * s for o, s in zip(where, strides, strict=True))
        span = _span(box.sizes, strides)
        if (start + span) * itemsize > payload.nbytes:
            message = f"{payload.file}: tensor {tensor.name!r} reaches beyond its storage"
            raise SourceError("out-of-bounds", message, tensor=tensor.name, file=payload.file)
        block = self._take(span * itemsize)
        self._source.read_into(payload.file, payload.offset + start * itemsize, block)
        flat = np.frombuffer(block, kind)
        steps = tuple(stride * itemsize for stride in strides)
        return np.lib.stride_tricks.as_strided(flat, box.sizes, steps, writeable=False)


def _strides(share: Share) -> tuple[int, ...]:
    return share.payload.strides or row_major_strides(share.chunk.sizes)


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a strided box, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
