"""Tensors read side by side, band by band: the same box of one, two or more tensors of one shape at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ema_ckpt.box import Box, whole
from ema_ckpt.buffers import buffer
from ema_ckpt.catalog import Catalog, Payload, Tensor
from ema_ckpt.checks import Checks
from ema_ckpt.coverage import prove
from ema_ckpt.regions import BandCutter, BandReader, Share, find_shares

__all__ = ["Stream", "StreamReader", "band_jobs", "locate"]

_SEGMENT_NBYTES = 16 << 20

Hand = TypeVar("Hand")


@dataclass(frozen=True, slots=True)
class Stream:
    """A tensor whose bytes have been found."""

    catalog: Catalog
    tensor: Tensor
    shares: Sequence[Share]


def locate(catalog: Catalog, tensor: Tensor, payloads: Sequence[Payload] | None = None) -> Stream:
    """Find a tensor's bytes; `payloads` are those of its chunks if they are known. Reads headers only.

    Raises:
        SourceError: `hole overlap out-of-bounds incomplete missing-file bad-header …`, naming the tensor.
    """
    picked = prove(tensor)
    if payloads is None:
        payloads = catalog.reader.payloads(tensor) if picked else ()
    return Stream(catalog, tensor, find_shares(tensor, payloads, picked, whole(tensor.shape)))


class StreamReader:
    """One worker's buffers, `block_nbytes` bytes for each of the tensors that are read side by side."""

    def __init__(self, block_nbytes: int) -> None:
        self.block_nbytes = block_nbytes
        self._blocks: list[memoryview] = []
        self._readers: dict[int, BandReader] = {}

    def read(self, place: int, stream: Stream, band: Box) -> memoryview:
        """The bytes of a band in row-major order, valid until the next read with the same `place`."""
        while len(self._blocks) <= place:
            self._blocks.append(buffer(self.block_nbytes))
        source = stream.catalog.source
        reader = self._readers.get(id(source))
        if reader is None:
            checks = Checks(source, enabled=False)
            reader = self._readers[id(source)] = BandReader(source, checks, self.block_nbytes, sums=False)
        view = self._blocks[place][: band.numel * stream.tensor.dtype.itemsize]
        reader.read(stream.tensor, stream.shares, band, view)
        return view


def band_jobs(
    shape: Sequence[int], itemsize: int, block_nbytes: int, take: Callable[[Hand, BandCutter, int, int], None]
) -> Iterator[Callable[[Hand], None]]:
    """Jobs that hand all bands of a tensor of `shape` to `take(hand, cutter, first, stop)`, a range at a time.

    `itemsize` is that of the widest of the tensors read side by side.
    """
    cutter = BandCutter(whole(tuple(shape)), itemsize, block_nbytes)
    step = max(1, _SEGMENT_NBYTES // block_nbytes)
    for first in range(0, cutter.count, step):
        yield partial(_run, take, cutter, first, min(first + step, cutter.count))


def _run(
    take: Callable[[Hand, BandCutter, int, int], None], cutter: BandCutter, first: int, stop: int, hand: Hand
) -> None:
    take(hand, cutter, first, stop)
