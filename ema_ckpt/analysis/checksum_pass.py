"""CRC-32 of everything stored, read in large pieces; errors are results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from ema_ckpt.analysis.item_checker import ItemChecker
from ema_ckpt.analysis.item_findings import ItemFindings, dump_error, load_error
from ema_ckpt.analysis.items import ItemList, ItemPart, ItemRun
from ema_ckpt.analysis.records import StoredRecord
from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.errors import EmaCkptError, SourceError
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
_SECONDS_PER_BYTE, _SECONDS_PER_PIECE = 0.2e-9, 10e-6  # of one worker


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
    interval: Interval | None
    error: EmaCkptError | None = None


CheckJob = _ReadRanges | ItemRun | ItemPart


class ChecksumPass:
    """The work of reading every item and every other record once.

    Attributes:
        items: the items, and where their payloads are.
        found: what was found of items.
    """

    def __init__(self, catalog: Catalog, items: ItemList, records: Iterable[StoredRecord]) -> None:
        self.items = items
        self.found = ItemFindings()
        self._catalog = catalog
        self._is_remote = is_url(catalog.source.root)
        self._records = list(records)
        self._results: list[_Result] = []

    def run(self, threads: int, on_progress: Callable[[int], None] | None) -> None:
        """Read everything; `on_progress` is called with bytes of payload."""
        streams = [*self.items.jobs(), self._jobs()]
        executor.run(self, streams, self._workers(threads), on_progress)
        self._checker().finish()
        self.found.failures.sort(key=attrgetter("number"))
        self.found.records.sort(key=attrgetter("number", "place"))
        self._results.sort(key=attrgetter("number"))

    def checked(self) -> Iterator[tuple[StoredRecord, int | EmaCkptError]]:
        """Yield records with their CRC-32, or with an error of reading them, in stored order.

        What matches its checksum is not yielded, but for payloads that are no items.
        """
        for checked in self.found.records:
            if checked.error is not None:
                yield checked.record, checked.error
            elif checked.crc is not None:
                yield checked.record, checked.crc
        for number, group in groupby(self._results, key=attrgetter("number")):
            results, record = list(group), self._records[number]
            for result in results:
                if result.error is not None:
                    yield record, result.error
            intervals = [one.interval for one in results if one.interval is not None]
            crc = join_crcs(intervals, record.nbytes)
            if crc is not None:
                yield record, crc

    def _jobs(self) -> Iterator[_ReadRanges]:
        """Cut large records into several jobs, and put small ones together."""
        batch: list[_ReadRange] = []
        total = 0
        for number, record in enumerate(self._records):
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

    def _workers(self, threads: int) -> Workers:
        if self._is_remote:
            return Workers(threads)
        pieces, nbytes = self.items.totals()
        for record in self._records:
            pieces, nbytes = pieces + 1, nbytes + record.nbytes
        return Workers.fit(threads, nbytes * _SECONDS_PER_BYTE, pieces * _SECONDS_PER_PIECE)

    def _block(self) -> memoryview:
        return buffer(_REMOTE_BLOCK_NBYTES if self._is_remote else _BLOCK_NBYTES)

    def _checker(self, block: memoryview | None = None) -> ItemChecker:
        return ItemChecker(self._catalog, self.items, self.found, block or self._block())

    def start_worker(self) -> Callable[[CheckJob], int]:
        block = self._block()
        checker = self._checker(block)

        def check(job: CheckJob) -> int:
            if isinstance(job, ItemRun):
                return checker.check_run(job)
            if isinstance(job, ItemPart):
                return checker.check_part(job)
            return self._read(job, block)

        return check

    def _read(self, job: _ReadRanges, block: memoryview) -> int:
        source = self._catalog.source
        for number, record, start, stop in job.ranges:
            nbytes = stop - start
            try:
                crc = range_crc(source, record.file, record.offset + start, nbytes, block)
            except SourceError as error:
                self._results.append(_Result(number, None, error))
                continue
            if record.is_payload or nbytes < record.nbytes or crc != record.crc:
                self._results.append(_Result(number, (start, nbytes, crc)))
        return sum(part.stop - part.start for part in job.ranges if part.record.is_payload)

    def dump(self) -> bytes:
        results = []
        for number, interval, error in self._results:
            results.append([number, interval, dump_error(error)])
        return dump_json([self.items.dump(), self.found.dump(), results])

    def merge(self, dumped: bytes) -> None:
        items, found, results = json.loads(dumped)
        self.items.merge(items)
        self.found.merge(found)
        for number, interval, error in results:
            place = interval and (interval[0], interval[1], interval[2])
            self._results.append(_Result(number, place, error and load_error(error)))

    def reset(self) -> None:
        self._results.clear()
        self.found.reset()
        self.items.forget()
