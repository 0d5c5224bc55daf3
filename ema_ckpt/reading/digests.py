"""Digest of a tensor: CRC-32 of its logical row-major little-endian bytes, however it is stored.

It comes from recorded checksums (its digest, or those of chunks that are whole rows) where they
suffice, and otherwise from the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ema_ckpt.core.box import whole
from ema_ckpt.core.catalog import Catalog, Payload, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.crc import crc32
from ema_ckpt.formats.sidecar import CHANGED_BYTES, SIDECAR
from ema_ckpt.reading.box_reader import BoxReader, LocatedBox
from ema_ckpt.reading.checksum_verifier import Interval, join_crcs
from ema_ckpt.reading.overlaps import RowBlocks, row_ranges

_GATHERED_NBYTES = 16 << 20  # of a block that takes a little of every row of a file


def explain_mismatch(catalog: Catalog) -> str:
    """Say why a digest can differ although every storage matches its checksum, and what to do."""
    message = f"{CHANGED_BYTES}; use another copy"
    if SIDECAR not in catalog.source.listing():
        return message
    return f"{message}, or, if it was changed on purpose, delete {SIDECAR}"


def join_storage_crcs(
    tensor: Tensor,
    payloads: Sequence[Payload],
    chunks: Sequence[int],
    crc_of: Callable[[Payload], int | None],
) -> int | None:
    """Digest from the CRC-32s of whole storages; None unless they tile the tensor in order."""
    ranges = row_ranges(tensor, payloads, chunks, whole(tensor.shape))
    if ranges is None:
        return None
    intervals: list[Interval] = []
    for byte_range in ranges:
        payload = byte_range.payload
        crc = crc_of(payload)
        if crc is None or byte_range.start or byte_range.nbytes != payload.nbytes:
            return None
        intervals.append((byte_range.dest, byte_range.nbytes, crc))
    return join_crcs(intervals, tensor.nbytes)


def recorded_digest(catalog: Catalog, tensor: Tensor) -> int | None:
    """Digest that the checkpoint records, itself or by checksums of chunks; None if it does not.

    Raises:
        SourceError: the tensor is not whole, or in a form that is not read.
    """
    recorded = catalog.digests.get(tensor.name)
    if recorded is not None or not tensor.nbytes:
        return recorded or 0
    chunks = prove(tensor)  # first: of a tensor that is refused nothing was located
    payloads = catalog.reader.payloads(tensor)
    return join_storage_crcs(tensor, payloads, chunks, lambda payload: payload.crc)


def compute_digest(
    located: LocatedBox,
    reader: BoxReader,
    cast: Callable[[memoryview], memoryview] | None = None,
) -> int:
    """Compute the digest from the bytes, or from what `cast` makes of each block of them.

    Raises:
        SourceError: whatever keeps the bytes from being read.
    """
    crc, tensor = 0, located.tensor
    if not tensor.nbytes:
        return crc
    nbytes = _GATHERED_NBYTES if located.is_gathered else reader.block_nbytes
    blocks = RowBlocks(located.box, tensor.dtype.itemsize, nbytes)
    for block in reader.blocks(located, blocks):
        crc = crc32(block if cast is None else cast(block), crc)
    return crc
