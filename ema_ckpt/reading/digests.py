"""The digest of a tensor: CRC-32 of its logical row-major little-endian bytes, however it is
stored.

It is taken from what is known (a recorded digest, checksums of chunks that are whole rows) where
that is enough, and else from the bytes, band by band.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ema_ckpt.core.box import whole
from ema_ckpt.core.catalog import Catalog, Payload, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.crc import crc32
from ema_ckpt.formats.sidecar import SIDECAR
from ema_ckpt.reading.checksums import Interval, join_crcs
from ema_ckpt.reading.overlaps import RowBlocks, row_ranges
from ema_ckpt.reading.streams import Stream, StreamReader

Cast = Callable[[memoryview], memoryview]


def mixed(catalog: Catalog) -> str:
    """Why a recorded digest may differ although every storage matches its checksum, and what to
    do.
    """
    message = "these are not the bytes that were saved (files swapped, mixed or changed); use another copy"
    if SIDECAR not in catalog.source.listing():
        return message
    return f"{message}, or, if another checkpoint was saved over this one, delete {SIDECAR}"


def combined(
    tensor: Tensor,
    payloads: Sequence[Payload],
    picked: Sequence[int],
    crc_of: Callable[[Payload], int | None],
) -> int | None:
    """The digest from the CRC-32s of whole storages, or None if they do not follow one another in
    the tensor.
    """
    runs = row_ranges(tensor, payloads, picked, whole(tensor.shape))
    if runs is None:
        return None
    intervals: list[Interval] = []
    for run in runs:
        crc = crc_of(run.payload)
        if crc is None or run.start or run.nbytes != run.payload.nbytes:
            return None
        intervals.append((run.dest, run.nbytes, crc))
    return join_crcs(intervals, tensor.nbytes)


def stored_digest(catalog: Catalog, tensor: Tensor) -> int | None:
    """The digest as the checkpoint records it, as a digest or in the checksums of its chunks; None
    if it does not.
    """
    recorded = catalog.digests.get(tensor.name)
    if recorded is not None or not tensor.nbytes:
        return recorded or 0
    return combined(
        tensor, catalog.reader.payloads(tensor), prove(tensor), lambda payload: payload.crc
    )


def computed(stream: Stream, reader: StreamReader, cast: Cast | None = None) -> int:
    """The digest computed from the tensor's bytes, or from what `cast` makes of each block of them.

    Raises:
        SourceError: whatever keeps the bytes from being read.
    """
    crc, tensor = 0, stream.tensor
    if not tensor.nbytes:
        return crc
    cutter = RowBlocks(whole(tensor.shape), tensor.dtype.itemsize, reader.block_nbytes)
    for index in range(cutter.count):
        block = reader.read(0, stream, cutter.band(index))
        crc = crc32(block if cast is None else cast(block), crc)
    return crc
