"""Bands put together from lanes: the quick way where every chunk holds whole rows of its part of a
box.

Column shards, FSDP2 × TP and rows that two chunks share are all of this kind: on the axis along
which bands are cut, a chunk's part of the box is one run of bytes from row to row. What a band
takes from a lane is then a multiplication away, and what one job reads of a lane is one interval of
its storage, with one CRC-32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ema_ckpt.core.catalog import Files
from ema_ckpt.core.crc import crc32
from ema_ckpt.reading.overlaps import UNITS, Overlap, RowBlocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ema_ckpt.core.catalog import Payload
    from ema_ckpt.reading.checksums import ChecksumVerifier


class RowSlab(NamedTuple):
    """What a chunk holds of a box: the rows [first, stop) of the bands' axis, each of `row_nbytes`
    bytes.

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
    shares: Sequence[Overlap], cutter: RowBlocks, itemsize: int
) -> list[RowSlab] | None:
    """The shares of a box as lanes of its bands, or None if one is no lane or bands begin anew in
    outer axes.
    """
    box, axis = cutter.box, cutter.axis
    if not box.sizes or prod(box.sizes[:axis]) != 1:
        return None
    lanes = []
    for share in shares:
        sizes = share.box.sizes[axis + 1 :]
        if share.payload.strides is not None or sizes != share.chunk.sizes[axis + 1 :]:
            return None
        where = share.box.within(box)
        inner = tuple(
            [slice(o, o + s) for o, s in zip(where.offsets[axis + 1 :], sizes, strict=True)]
        )
        first = where.offsets[axis]
        lanes.append(
            RowSlab(
                share.payload,
                first,
                first + where.sizes[axis],
                share.start(share.box) * itemsize,
                prod(sizes) * itemsize,
                inner,
                sizes,
                sizes == box.sizes[axis + 1 :],
            )
        )
    return lanes


class RowSlabReader:
    """Puts the bands of one job together; the lanes' checksums are told at its end."""

    def __init__(
        self, source: Files, lanes: Sequence[RowSlab], cutter: RowBlocks, itemsize: int
    ) -> None:
        self._source = source
        self._lanes = lanes
        self._cutter = cutter
        self._unit = UNITS[itemsize]
        self._inner = cutter.box.sizes[cutter.axis + 1 :]
        self._row_nbytes = prod(self._inner) * itemsize
        self._crcs = [0] * len(lanes)
        self._begun: dict[int, int] = {}
        self._rows = 0

    def read(self, index: int, block: memoryview, scratch: memoryview) -> memoryview:
        """Fill the beginning of `block` with a band, by way of `scratch` where lanes interleave;
        return that part.
        """
        first, count = self._cutter.rows(index)
        stop = self._rows = first + count
        band = block[: count * self._row_nbytes]
        target: NDArray[Any] | None = None
        for number, lane in enumerate(self._lanes):
            low, high = max(first, lane.first), min(stop, lane.stop)
            if low >= high:
                continue
            self._begun.setdefault(number, low)
            nbytes = (high - low) * lane.row_nbytes
            part = (
                band[(low - first) * nbytes // (high - low) :][:nbytes]
                if lane.full
                else scratch[:nbytes]
            )
            payload = lane.payload
            at = payload.offset + lane.start + (low - lane.first) * lane.row_nbytes
            self._source.read_into(payload.file, at, part)
            self._crcs[number] = crc32(part, self._crcs[number])
            if not lane.full:
                import numpy as np

                if target is None:
                    target = np.frombuffer(band, self._unit).reshape(count, *self._inner)
                rows = np.frombuffer(part, self._unit).reshape(high - low, *lane.sizes)
                target[(slice(low - first, high - first), *lane.inner)] = rows
        return band

    def tell(self, tensor: str, checks: ChecksumVerifier) -> None:
        """Tell what was read.

        Raises:
            SourceError: `checksum`.
        """
        for number, low in self._begun.items():
            lane = self._lanes[number]
            nbytes = (min(self._rows, lane.stop) - low) * lane.row_nbytes
            start = lane.start + (low - lane.first) * lane.row_nbytes
            checks.read(tensor, lane.payload, start, nbytes, self._crcs[number])
