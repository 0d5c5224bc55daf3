"""Read blocks of interleaved rows: the fast path where every chunk holds whole rows of its part.

Column shards, FSDP2 × TP and rows that two chunks share are of this kind: along the axis of the
blocks, the overlap of a chunk with the box is one byte range from row to row. What a block needs of
a slab is then a multiplication away, and what one job reads of a slab is one interval of its
storage, with one CRC-32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ema_ckpt.core.catalog import Files, Payload
from ema_ckpt.core.crc import crc32
from ema_ckpt.reading.overlaps import UNITS, Overlap, RowBlocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ema_ckpt.reading.checksums import ChecksumVerifier


class RowSlab(NamedTuple):
    """Rows [first, stop) of the blocks' axis that one chunk holds, each of `row_nbytes` bytes.

    `start` is where row `first` begins, in bytes of the storage; `inner` is where the rows lie on
    the axes that follow, of sizes `sizes`; `full` if they are as wide as the box.
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


class RowSlabReader:
    """Reads the blocks of one job, in order; the slabs' checksums are reported at its end."""

    def __init__(
        self, source: Files, slabs: Sequence[RowSlab], blocks: RowBlocks, itemsize: int
    ) -> None:
        self._source = source
        self._slabs = slabs
        self._blocks = blocks
        self._unit = UNITS[itemsize]
        self._inner = blocks.box.sizes[blocks.axis + 1 :]
        self._row_nbytes = prod(self._inner) * itemsize
        self._crcs = [0] * len(slabs)
        self._begun: dict[int, int] = {}
        self._stop = 0

    @property
    def block_nbytes(self) -> int:
        """Bytes of the longest block."""
        return self._blocks.rows(0)[1] * self._row_nbytes

    def read(self, index: int, block: memoryview, scratch: memoryview) -> memoryview:
        """Fill the beginning of `block`, by way of `scratch` where slabs interleave; return it."""
        first, count = self._blocks.rows(index)
        self._stop = first + count
        out = block[: count * self._row_nbytes]
        rows: NDArray[Any] | None = None
        for number, slab in enumerate(self._slabs):
            low, high = max(first, slab.first), min(first + count, slab.stop)
            if low >= high:
                continue
            self._begun.setdefault(number, low)
            nbytes = (high - low) * slab.row_nbytes
            view = scratch[:nbytes]
            if slab.full:
                view = out[(low - first) * slab.row_nbytes :][:nbytes]
            offset = slab.payload.offset + slab.start + (low - slab.first) * slab.row_nbytes
            self._source.read_into(slab.payload.file, offset, view)
            self._crcs[number] = crc32(view, self._crcs[number])
            if not slab.full:
                import numpy as np

                if rows is None:
                    rows = np.frombuffer(out, self._unit).reshape(count, *self._inner)
                part = np.frombuffer(view, self._unit).reshape(high - low, *slab.sizes)
                rows[(slice(low - first, high - first), *slab.inner)] = part
        return out

    def report_checksums(self, tensor: str, verifier: ChecksumVerifier) -> None:
        """Report what was read of each slab.

        Raises:
            SourceError: `checksum`.
        """
        for number, low in self._begun.items():
            slab = self._slabs[number]
            nbytes = (min(self._stop, slab.stop) - low) * slab.row_nbytes
            start = slab.start + (low - slab.first) * slab.row_nbytes
            verifier.record(tensor, slab.payload, start, nbytes, self._crcs[number])
