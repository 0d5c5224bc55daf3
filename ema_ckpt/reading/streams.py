"""Tensors read side by side, band by band: the same box of one, two or more tensors of one shape at
a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.catalog import Catalog, Payload, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.reading.checksums import ChecksumVerifier
from ema_ckpt.reading.overlaps import (
    BoxReader,
    ByteRange,
    Overlap,
    RowBlocks,
    find_overlaps,
    row_ranges,
)
from ema_ckpt.runtime.page_buffer import buffer

_SEGMENT_NBYTES = 16 << 20
_begin = attrgetter("dest")


class Stream(NamedTuple):
    """A tensor whose bytes have been found; as runs too, where its chunks are whole rows."""

    catalog: Catalog
    tensor: Tensor
    shares: Sequence[Overlap]
    runs: Sequence[ByteRange] | None


def locate(catalog: Catalog, tensor: Tensor, payloads: Sequence[Payload] | None = None) -> Stream:
    """Find a tensor's bytes; `payloads` are those of its chunks if they are known. Reads headers
    only.

    Raises:
        SourceError: `hole overlap out-of-bounds incomplete missing-file bad-header …`, naming the
            tensor.
    """
    picked = prove(tensor)
    if payloads is None:
        payloads = catalog.reader.payloads(tensor) if picked else ()
    box = whole(tensor.shape)
    runs = row_ranges(tensor, payloads, picked, box)
    return Stream(catalog, tensor, find_overlaps(tensor, payloads, picked, box), runs)


class StreamReader:
    """One worker's buffers, `block_nbytes` bytes for each of the tensors that are read side by
    side.
    """

    def __init__(self, block_nbytes: int) -> None:
        self.block_nbytes = block_nbytes
        self._blocks: list[memoryview] = []
        self._readers: dict[int, BoxReader] = {}

    def read(self, place: int, stream: Stream, band: Box) -> memoryview:
        """The bytes of a band in row-major order, valid until the next read with the same
        `place`.
        """
        source = stream.catalog.source
        reader = self._readers.get(id(source))
        if reader is None:
            checks = ChecksumVerifier(source, enabled=False)
            reader = self._readers[id(source)] = BoxReader(
                source, checks, self.block_nbytes, sums=False
            )
        view = self._block(place)[: band.numel * stream.tensor.dtype.itemsize]
        reader.read(stream.tensor, stream.shares, band, view)
        return view

    def read_bands(
        self, place: int, stream: Stream, cutter: RowBlocks, first: int, stop: int
    ) -> Iterator[memoryview]:
        """The same for bands [first, stop) of a cutter of the whole tensor, with less ado for those
        inside a run.
        """
        read_into, runs = stream.catalog.source.read_into, stream.runs or ()
        block, itemsize = self._block(place), stream.tensor.dtype.itemsize
        run, begin, end = None, 0, 0
        for index in range(first, stop):
            start, numel = cutter.extent(index)
            at, nbytes = start * itemsize, numel * itemsize
            if at < begin or at + nbytes > end:
                run = _run_with(runs, at, nbytes)
                begin, end = (run.dest, run.dest + run.nbytes) if run else (0, 0)
            if run is None:
                yield self.read(place, stream, cutter.band(index))
                continue
            view = block if nbytes == len(block) else block[:nbytes]
            read_into(run.payload.file, run.payload.offset + run.start + at - begin, view)
            yield view

    def _block(self, place: int) -> memoryview:
        while len(self._blocks) <= place:
            self._blocks.append(buffer(self.block_nbytes))
        return self._blocks[place]


def _run_with(runs: Sequence[ByteRange], at: int, nbytes: int) -> ByteRange | None:
    """The run that holds these bytes of the tensor, if one does."""
    index = bisect_right(runs, at, key=_begin) - 1
    if index < 0:
        return None
    run = runs[index]
    return run if at + nbytes <= run.dest + run.nbytes else None


class BlockRange(NamedTuple):
    """Blocks [first, stop) of a tensor that `blocks` cuts."""

    blocks: RowBlocks
    first: int
    stop: int

    @property
    def numel(self) -> int:
        """Count the elements of these blocks."""
        start, _ = self.blocks.extent(self.first)
        last, numel = self.blocks.extent(self.stop - 1)
        return last + numel - start


def block_ranges(shape: Sequence[int], itemsize: int, block_nbytes: int) -> Iterator[BlockRange]:
    """Cut a tensor into ranges of blocks, one for each job.

    `itemsize` is that of the widest of the tensors read side by side.
    """
    blocks = RowBlocks(whole(tuple(shape)), itemsize, block_nbytes)
    step = max(1, _SEGMENT_NBYTES // block_nbytes)
    for first in range(0, blocks.count, step):
        yield BlockRange(blocks, first, min(first + step, blocks.count))
