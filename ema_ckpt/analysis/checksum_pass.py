"""CRC-32 of stored records, by several workers in large sequential reads; every one is tried."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from ema_ckpt.analysis.records import StoredRecord
from ema_ckpt.core.catalog import Files
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.checksums import Interval, join_crcs
from ema_ckpt.runtime.page_buffer import buffer
from ema_ckpt.runtime.thread_pool import run_jobs
from ema_ckpt.storage.files import is_url

_BLOCK_NBYTES = 512 << 10  # stays in the second-level cache between the read and the checksum
_REMOTE_BLOCK_NBYTES = 8 << 20
_SEGMENT_NBYTES = 32 << 20
_BATCH_NBYTES = 4 << 20
_MAX_BATCH = 256

OnChecksum = Callable[[StoredRecord, int], None]
Failed = Callable[[StoredRecord, SourceError], None]


@dataclass(slots=True)
class _Long:
    """A record that several workers share."""

    stored: StoredRecord
    pending: int
    intervals: list[Interval] = field(default_factory=list)


class _Hand:
    """One worker's buffer."""

    def __init__(self, source: Files) -> None:
        self._source = source
        remote = is_url(source.root)
        self._block = buffer(_REMOTE_BLOCK_NBYTES if remote else _BLOCK_NBYTES)

    def sum(self, stored: StoredRecord, start: int, stop: int) -> int:
        """CRC-32 of the bytes [start, stop) of a record."""
        read_into, block, file, base = (
            self._source.read_into,
            self._block,
            stored.file,
            stored.offset,
        )
        crc = 0
        for at in range(start, stop, len(block)):
            view = block[: stop - at]
            read_into(file, base + at, view)
            crc = crc32(view, crc)
        return crc


def checksum_all(
    source: Files, records: Iterable[StoredRecord], threads: int, summed: OnChecksum, failed: Failed
) -> None:
    """Read every record once and tell its CRC-32 to `summed`, or to `failed` why it cannot be read.

    Both are called by one worker at a time.
    """
    _Sums(threads, summed, failed).run(source, records)


class _Sums:
    def __init__(self, threads: int, summed: OnChecksum, failed: Failed) -> None:
        self._threads = threads
        self._summed = summed
        self._failed = failed
        self._lock = threading.Lock()

    def run(self, source: Files, records: Iterable[StoredRecord]) -> None:
        run_jobs(self._jobs(records), self._threads, lambda: _Hand(source))

    def _jobs(self, records: Iterable[StoredRecord]) -> Iterator[Callable[[_Hand], None]]:
        batch: list[StoredRecord] = []
        total = 0
        for stored in records:
            if stored.nbytes > _SEGMENT_NBYTES:
                cuts = range(0, stored.nbytes, _SEGMENT_NBYTES)
                long = _Long(stored, len(cuts))
                for start in cuts:
                    yield partial(self._segment, long=long, start=start)
                continue
            batch.append(stored)
            total += stored.nbytes
            if total >= _BATCH_NBYTES or len(batch) >= _MAX_BATCH:
                yield partial(self._batch, batch=batch)
                batch, total = [], 0
        if batch:
            yield partial(self._batch, batch=batch)

    def _batch(self, hand: _Hand, batch: list[StoredRecord]) -> None:
        for stored in batch:
            try:
                crc = hand.sum(stored, 0, stored.nbytes)
            except SourceError as error:
                with self._lock:
                    self._failed(stored, error)
                continue
            with self._lock:
                self._summed(stored, crc)

    def _segment(self, hand: _Hand, long: _Long, start: int) -> None:
        stop = min(start + _SEGMENT_NBYTES, long.stored.nbytes)
        try:
            crc = hand.sum(long.stored, start, stop)
        except SourceError as error:
            with self._lock:
                self._failed(long.stored, error)
            return
        with self._lock:
            long.intervals.append((start, stop - start, crc))
            long.pending -= 1
            whole = None if long.pending else join_crcs(long.intervals, long.stored.nbytes)
            if whole is not None:
                self._summed(long.stored, whole)
