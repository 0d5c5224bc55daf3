"""Stored checksums, compared as the bytes pass: ranges may be read in any order, by several
workers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ema_ckpt.core.catalog import Files, Payload
from ema_ckpt.core.crc import combine_crcs, crc32
from ema_ckpt.core.errors import SourceError
from ema_ckpt.runtime.page_buffer import buffer

_BLOCK_NBYTES = 1 << 19
Interval = tuple[int, int, int]  # start and length in bytes, CRC-32
Pending = dict[tuple[str, int], tuple[str, Payload, list[Interval], int]]
"""Storages read in part, by file and offset: tensor, payload, what was read, and how many bytes that is."""


def mismatch(tensor: str, payload: Payload, found: int) -> SourceError:
    """The error for a storage whose bytes are not those that were written."""
    expected = payload.crc or 0
    message = (
        f"expected CRC-32 {expected:08x}, found {found:08x}: the file is damaged; use another copy"
    )
    return SourceError(
        "checksum",
        f"{payload.file}: tensor {tensor!r}: {message}",
        tensor=tensor,
        file=payload.file,
    )


def join_crcs(intervals: Iterable[Interval], nbytes: int) -> int | None:
    """CRC-32 of `nbytes` bytes from those of intervals that tile them, or None if they do not."""
    crc, at = 0, 0
    for start, length, part in sorted(set(intervals)):
        if start != at:
            return None
        crc, at = combine_crcs(crc, part, length) if at else part, at + length
    return crc if at == nbytes else None


def storage_crc(source: Files, payload: Payload) -> int:
    """CRC-32 of a whole storage, read in blocks."""
    memory = buffer(min(_BLOCK_NBYTES, payload.nbytes))
    crc, at = 0, 0
    while at < payload.nbytes:
        block = memory[: payload.nbytes - at]
        source.read_into(payload.file, payload.offset + at, block)
        crc = crc32(block, crc)
        at += len(block)
    return crc


class ChecksumVerifier:
    """Collects the CRC-32s of ranges that were read, and compares each storage once it is
    complete.
    """

    def __init__(self, source: Files, enabled: bool) -> None:
        self._source = source
        self._enabled = enabled
        self._lock = threading.Lock()
        self._open: Pending = {}

    def read(self, tensor: str, payload: Payload, start: int, nbytes: int, crc: int) -> None:
        """Tell that `nbytes` bytes from `start` (relative to the storage) were read and have this
        CRC-32.

        Raises:
            SourceError: `checksum` if that completes the storage and it does not match.
        """
        if payload.crc is None or not self._enabled:
            return
        if nbytes == payload.nbytes:
            if crc != payload.crc:
                raise mismatch(tensor, payload, crc)
            return
        key = (payload.file, payload.offset)
        with self._lock:
            _, _, intervals, total = self._open.get(key, (tensor, payload, [], 0))
            intervals.append((start, nbytes, crc))
            self._open[key] = (tensor, payload, intervals, total + nbytes)
            complete = total + nbytes >= payload.nbytes
        if complete and self._compare(tensor, payload, intervals):
            self._close(key)

    def partly(self, tensor: str, payload: Payload) -> None:
        """Tell that bytes were read in no useful order: the storage will be read whole at the
        end.
        """
        if payload.crc is not None and self._enabled:
            with self._lock:
                self._open.setdefault((payload.file, payload.offset), (tensor, payload, [], 0))

    def finish(self) -> None:
        """Read and compare every storage of which only a part was used.

        Raises:
            SourceError: `checksum`.
        """
        for tensor, payload, intervals, _ in list(self._open.values()):
            if not self._compare(tensor, payload, intervals):
                found = storage_crc(self._source, payload)
                if found != payload.crc:
                    raise mismatch(tensor, payload, found)
        self._open.clear()

    def dump(self) -> list[object]:
        """Return what was read of incomplete storages, as plain data for `merge`."""
        return [[tensor, *rest] for tensor, *rest in self._open.values()]

    def merge(self, dumped: Sequence[Any]) -> None:
        """Add what another process read, after JSON."""
        for tensor, fields, intervals, nbytes in dumped:
            payload = Payload(*fields)
            if payload.strides is not None:
                payload = payload._replace(strides=tuple(payload.strides))
            key = (payload.file, payload.offset)
            _, _, own, total = self._open.get(key, (tensor, payload, [], 0))
            merged = own + [(start, length, crc) for start, length, crc in intervals]
            self._open[key] = (tensor, payload, merged, total + nbytes)

    def _compare(self, tensor: str, payload: Payload, intervals: list[Interval]) -> bool:
        found = join_crcs(intervals, payload.nbytes)
        if found is not None and found != payload.crc:
            raise mismatch(tensor, payload, found)
        return found is not None

    def _close(self, key: tuple[str, int]) -> None:
        with self._lock:
            self._open.pop(key, None)
