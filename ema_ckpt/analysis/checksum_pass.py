"""CRC-32 of stored records, read in large pieces; errors are results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from ema_ckpt.analysis.records import StoredRecord
from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.checksum_verifier import Interval, join_crcs, range_crc
from ema_ckpt.runtime import executor
from ema_ckpt.runtime.executor import Workers, dump_json
from ema_ckpt.runtime.page_buffer import buffer
from ema_ckpt.storage.files import is_url

_BLOCK_NBYTES = 512 << 10  # stays in the second-level cache between the read and the checksum
_REMOTE_BLOCK_NBYTES = 8 << 20
_SEGMENT_NBYTES = 32 << 20
_BATCH_NBYTES = 4 << 20
_MAX_BATCH = 256


class _ReadRange(NamedTuple):
    """Bytes [start, stop) of a record; `number` is its place among all records."""

    number: int
    record: StoredRecord
    start: int
    stop: int


class _ReadRanges(NamedTuple):
    """A part of one large record, or a number of small ones: one job."""

    ranges: list[_ReadRange]

    @property
    def nbytes(self) -> int:
        return sum(part.stop - part.start for part in self.ranges)


class _Result(NamedTuple):
    """The CRC-32 of part of a record, or an error of reading it."""

    number: int
    record: StoredRecord
    interval: Interval | None
    error: SourceError | None = None


def checksum_all(
    source: Files,
    records: Iterable[StoredRecord],
    workers: Workers,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[StoredRecord, int | SourceError]]:
    """Read every record once; yield records with their CRC-32, or with an error of reading them.

    Small records of archives whose checksum matches are not yielded. `on_progress` is called with
    bytes of payload.
    """
    work = _ChecksumPass(source)
    executor.run(work, [work.jobs(records)], workers, on_progress)
    work.results.sort(key=attrgetter("number"))
    for _, group in groupby(work.results, key=attrgetter("number")):
        results = list(group)
        record = results[0].record
        for result in results:
            if result.error is not None:
                yield record, result.error
        crc = join_crcs([r.interval for r in results if r.interval is not None], record.nbytes)
        if crc is not None:
            yield record, crc


class _ChecksumPass:
    """The work of a pass."""

    def __init__(self, source: Files) -> None:
        self.results: list[_Result] = []
        self._source = source

    def jobs(self, records: Iterable[StoredRecord]) -> Iterator[_ReadRanges]:
        """Cut large records into several jobs, and put small ones together."""
        batch: list[_ReadRange] = []
        total = 0
        for number, record in enumerate(records):
            if record.nbytes > _SEGMENT_NBYTES:
                for start in range(0, record.nbytes, _SEGMENT_NBYTES):
                    stop = min(start + _SEGMENT_NBYTES, record.nbytes)
                    yield _ReadRanges([_ReadRange(number, record, start, stop)])
                continue
            batch.append(_ReadRange(number, record, 0, record.nbytes))
            total += record.nbytes
            if total >= _BATCH_NBYTES or len(batch) >= _MAX_BATCH:
                yield _ReadRanges(batch)
                batch, total = [], 0
        if batch:
            yield _ReadRanges(batch)

    def start_worker(self) -> Callable[[_ReadRanges], int]:
        is_remote = is_url(self._source.root)
        block = buffer(_REMOTE_BLOCK_NBYTES if is_remote else _BLOCK_NBYTES)

        def read(job: _ReadRanges) -> int:
            for number, record, start, stop in job.ranges:
                nbytes = stop - start
                try:
                    offset = record.offset + start
                    crc = range_crc(self._source, record.file, offset, nbytes, block)
                except SourceError as error:
                    self.results.append(_Result(number, record, None, error))
                    continue
                if record.is_payload or nbytes < record.nbytes or crc != record.crc:
                    self.results.append(_Result(number, record, (start, nbytes, crc)))
            return sum(part.stop - part.start for part in job.ranges if part.record.is_payload)

        return read

    def dump(self) -> bytes:
        rows = []
        for number, record, interval, error in self.results:
            failure = error and [error.code, str(error), error.tensor, error.file]
            rows.append([number, astuple(record), interval, failure])
        return dump_json(rows)

    def merge(self, dumped: bytes) -> None:
        for number, fields, interval, failure in json.loads(dumped):
            error = None
            if failure:
                code, message, tensor, file = failure
                error = SourceError(code, message, tensor=tensor, file=file)
            place = interval and (interval[0], interval[1], interval[2])
            self.results.append(_Result(number, StoredRecord(*fields), place, error))

    def reset(self) -> None:
        self.results.clear()
