"""CRC-32 of stored records, read in large pieces; errors are results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ema_ckpt.analysis.records import StoredRecord
from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.checksums import Interval, join_crcs, range_crc
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
    """Bytes [start, stop) of the record with that index."""

    record: int
    start: int
    stop: int


class _ReadRanges(NamedTuple):
    """A part of one large record, or a number of small ones: one job."""

    ranges: list[_ReadRange]

    @property
    def nbytes(self) -> int:
        return sum(part.stop - part.start for part in self.ranges)


def checksum_all(
    source: Files,
    records: Iterable[StoredRecord],
    workers: Workers,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[StoredRecord, int | SourceError]]:
    """Read every record once; yield each with its CRC-32, or with the errors of reading it."""
    work = _ChecksumPass(source)
    executor.run(work, [work.jobs(records)], workers, on_progress)
    for index, record in enumerate(work.records):
        for error in work.errors.get(index, ()):
            yield record, error
        crc = join_crcs(work.crcs.get(index, ()), record.nbytes)
        if crc is not None and index not in work.errors:
            yield record, crc


class _ChecksumPass:
    """The work of a pass: CRC-32s of parts of records, and errors, by the record's index."""

    def __init__(self, source: Files) -> None:
        self.records: list[StoredRecord] = []
        self.crcs: dict[int, list[Interval]] = {}
        self.errors: dict[int, list[SourceError]] = {}
        self._source = source

    def jobs(self, records: Iterable[StoredRecord]) -> Iterator[_ReadRanges]:
        """Cut large records into several jobs, and put small ones together."""
        batch: list[_ReadRange] = []
        total = 0
        for index, record in enumerate(records):
            self.records.append(record)
            if record.nbytes > _SEGMENT_NBYTES:
                for start in range(0, record.nbytes, _SEGMENT_NBYTES):
                    stop = min(start + _SEGMENT_NBYTES, record.nbytes)
                    yield _ReadRanges([_ReadRange(index, start, stop)])
                continue
            batch.append(_ReadRange(index, 0, record.nbytes))
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
            for index, start, stop in job.ranges:
                file, offset = self.records[index].file, self.records[index].offset + start
                try:
                    crc = range_crc(self._source, file, offset, stop - start, block)
                except SourceError as error:
                    self.errors.setdefault(index, []).append(error)
                else:
                    self.crcs.setdefault(index, []).append((start, stop - start, crc))
            return job.nbytes

        return read

    def dump(self) -> bytes:
        errors = [
            [index, error.code, str(error), error.tensor, error.file]
            for index, failures in self.errors.items()
            for error in failures
        ]
        return dump_json([list(self.crcs.items()), errors])

    def merge(self, dumped: bytes) -> None:
        crcs: list[Any]
        crcs, errors = json.loads(dumped)
        for index, intervals in crcs:
            self.crcs.setdefault(index, []).extend(map(tuple, intervals))
        for index, code, message, tensor, file in errors:
            error = SourceError(code, message, tensor=tensor, file=file)
            self.errors.setdefault(index, []).append(error)

    def reset(self) -> None:
        self.crcs.clear()
        self.errors.clear()
