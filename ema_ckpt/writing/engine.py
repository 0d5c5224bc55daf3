"""Moves the bytes of a laid-out target: a pool of workers under a byte budget, checksums on the
way.

Small pieces that lie side by side in the output are put together and written at once; large ones
are cut into segments that any worker may take. Each worker has one buffer for reading and writing
and, where values are cast or shards interleave, two more. No torch, and numpy only for bands and
casts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from ema_ckpt.core.box import is_contiguous_in, linear, whole
from ema_ckpt.core.catalog import Catalog, Payload, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.write_plan import WriteItem, WritePlan, coalesce_headers
from ema_ckpt.reading.cast import import_all
from ema_ckpt.reading.checksums import ChecksumVerifier, Interval, join_crcs
from ema_ckpt.reading.digests import mixed
from ema_ckpt.reading.overlaps import (
    Overlap,
    RowBlocks,
    contiguous_ranges,
    find_overlaps,
    row_ranges,
)
from ema_ckpt.runtime.fork_pool import can_fork, jobs_per_batch, run_forked
from ema_ckpt.runtime.thread_pool import interleaved, run_streams
from ema_ckpt.storage.files import is_url
from ema_ckpt.writing.journal import Finished, Journal
from ema_ckpt.writing.output_files import OutputFiles
from ema_ckpt.writing.partial import PartialItem, PartialResult, WriterGroup
from ema_ckpt.writing.worker import ItemTask, WriteWorker

MIN_BUDGET_NBYTES = 4 << 20
# What is moved at once stays in the second-level cache between read, checksum and write: it takes a
# tenth less time than 1.75 MiB would. Bands are put together from reads of about `_READ_NBYTES`,
# for which several shards abreast need longer ones: with reads of 64 KiB workers wait for each
# other's Python.
_MOVED_NBYTES = 768 << 10
_READ_NBYTES = 256 << 10
_BLOCK_NBYTES = 1792 << 10
_REMOTE_BLOCK_NBYTES = 8 << 20
_SEGMENT_NBYTES = 32 << 20
_MAX_BATCH = 4096
# Of one file. Measured on 16 cores: rows 1.2 s with four workers, 1.4 s with eight; columns 2.5 s
# and 3.6 s.
_WRITERS = 4
# Of columns and casts: copies take a tenth less time for 2 GB than threads. Each takes 5 to 8 MB
# with its buffers.
_LEAST_FORKED_NBYTES = 64 << 20
_COPY_NBYTES = 4 << 20
_LAST_JOBS = 8  # of each worker
_WORTH_NBYTES = 48 << 10  # of one read, for a second worker to be of use


class Settings(NamedTuple):
    """How to run: workers, bytes of buffers in flight, whether stored checksums are compared."""

    threads: int = 2
    budget_nbytes: int = 16 << 20
    verify: bool = True
    progress: Callable[[int], None] | None = None
    durable: bool = False  # the files will be synced at the end

    def block_nbytes(self, remote: bool) -> int:
        """Bytes of one buffer: four of them for each worker fit the budget."""
        share = max(self.budget_nbytes, MIN_BUDGET_NBYTES) // (4 * max(self.threads, 1))
        largest = _REMOTE_BLOCK_NBYTES if remote else _BLOCK_NBYTES
        return max(16 << 10, min(share, largest)) & ~15


@dataclass(slots=True)
class Outcome:
    """What a run found out: CRC-32 of each piece, of each whole entry by name, values that became
    infinite.
    """

    crcs: list[int]
    digests: dict[str, int] = field(default_factory=dict)
    overflow: dict[str, int] = field(default_factory=dict)


def run(
    catalog: Catalog,
    target: WritePlan,
    root: Path,
    settings: Settings,
    journal: Journal | None = None,
    crew: WriterGroup | None = None,
) -> Outcome:
    """Write a target below `root` (or to the file `root` itself) and return its checksums.

    Args:
        catalog: where the bytes come from.
        target: what goes where; all its tensors are from `catalog`.
        journal: ranges that an earlier run finished, and where this one records its own.
        crew: the processes that write this target together, each its share; the first one gets the
            whole outcome.

    Raises:
        SourceError: `checksum truncated-file missing-file unsupported …`, naming file and tensor.
        OSError: from writing; the staging turns it into a `TargetError`.
    """
    outputs = OutputFiles(root, target.files)
    try:
        engine = _Engine(catalog, target, outputs, settings, journal)
        outcome = engine.run(crew)
        if crew is None or crew.rank == 0:
            for frame in coalesce_headers(target.header_bytes(outcome.crcs, outcome.digests)):
                outputs.write(frame.file, frame.offset, frame.data)
    finally:
        outputs.close()
    return outcome


class _Engine:
    """One run: hands out jobs, collects checksums, stops at the first error."""

    def __init__(
        self,
        catalog: Catalog,
        target: WritePlan,
        outputs: OutputFiles,
        settings: Settings,
        journal: Journal | None,
    ) -> None:
        self.catalog = catalog
        self.items = target.items
        self._files = len(target.files)
        self.outputs = outputs
        self.settings = settings
        self.journal = journal
        self.finished = journal.completed() if journal else {}
        self._is_remote = is_url(catalog.source.root)
        self.block_nbytes = settings.block_nbytes(self._is_remote)
        self.moved_nbytes = (
            self.block_nbytes if self._is_remote else min(self.block_nbytes, _MOVED_NBYTES)
        )
        self.journals, self.aligns = journal is not None, not self._is_remote
        self.lock = threading.Lock()
        # Where a tensor goes to several files its pieces come far apart, each after a file's worth
        # of others.
        self._recurs = len({piece.output.name for piece in target.items}) < len(target.items)
        self._located: dict[str, tuple[tuple[Payload, ...], list[int]]] = {}
        self._progress = settings.progress
        self._begin()

    def _begin(self) -> None:
        """Nothing is found out yet."""
        self.checks = ChecksumVerifier(self.catalog.source, self.settings.verify)
        self.outcome = Outcome([0] * len(self.items))
        self._parts: dict[str, list[Interval]] = {}
        self._divided: dict[int, tuple[ItemTask, int]] = {}

    def run(self, crew: WriterGroup | None = None) -> Outcome:
        """Do all jobs, or this process' share of them, then compare what was only read in part."""
        workers = self._workers()
        copies = min(workers, self.settings.budget_nbytes // _COPY_NBYTES)
        if crew is not None or not (self._forks(copies) and self._run_forked(copies)):
            run_streams(self._streams(crew), workers, lambda: WriteWorker(self))
        if crew is not None:
            if crew.rank:
                # on a network file system this is what lets the first process see it
                self.outputs.close()
            shares = crew.pool(self._part())
            if crew.rank:
                return self.outcome
            for part in shares[1:]:
                self._absorb(part)
        self.checks.finish()
        self._digest()
        return self.outcome

    def _workers(self) -> int:
        """One where there is more to interpret than to move: two would only hand the interpreter
        lock to and fro.

        And no more than find work where a file takes the writes of one of them at a time.
        """
        if self._is_remote:
            return self.settings.threads
        reads = sum(len(piece.output.source.chunks) for piece in self.items)
        nbytes = sum(piece.nbytes for piece in self.items)
        if nbytes < reads * _WORTH_NBYTES:
            return 1
        casts = any(piece.output.casts for piece in self.items)
        return (
            self.settings.threads if casts else min(self.settings.threads, _WRITERS * self._files)
        )

    def _forks(self, copies: int) -> bool:
        """Whether so many copies of this process shall work: where numpy has enough to do."""
        able = copies > 1 and not self._is_remote and can_fork()
        if (
            not able
            or sum(piece.nbytes for piece in self.items if not piece.is_moved)
            < _LEAST_FORKED_NBYTES
        ):
            return False
        import_all((piece.output.source.dtype, piece.output.dtype) for piece in self.items)
        return can_fork()  # numpy starts threads of its own where it is not told to do without

    def _run_forked(self, workers: int) -> bool:
        """Do all jobs by copies of this process; whether they succeeded."""
        jobs = self._listed(workers)
        progress, parent = self._progress, os.getpid()

        def work(numbers: Iterator[int], tell: Callable[[int], None]) -> bytes:
            is_copy = os.getpid() != parent
            if is_copy and self.journal is not None:
                self.journal.follow()
            self._progress, hands = tell, WriteWorker(self)
            for number in numbers:
                jobs[number](hands)
            return self._part().dump() if is_copy else b""

        try:
            results = run_forked(work, len(jobs), workers, progress)
        finally:
            self._progress = progress
        for result in (results or ())[1:]:
            self._absorb(PartialResult.load(result))
        if results is None:
            self._begin()
        return results is not None

    def _listed(self, workers: int) -> list[Callable[[WriteWorker], None]]:
        """All jobs: those done at once write to different files if there are several, the last few
        by size.

        Reads the headers of tensors that are cut before a byte is moved.
        """
        files = [list(self._cut(indices)) for indices in self._by_file()]
        length = jobs_per_batch(sum(map(len, files)))
        sized = interleaved(files, workers, length)
        last = slice(-_LAST_JOBS * workers * length, None)
        sized[last] = sorted(sized[last], key=itemgetter(0), reverse=True)
        return [job for _, job in sized]

    def _by_file(self) -> Iterator[list[int]]:
        for _, group in groupby(range(len(self.items)), key=lambda index: self.items[index].file):
            yield list(group)

    def _streams(
        self, crew: WriterGroup | None
    ) -> Iterator[Iterator[Callable[[WriteWorker], None]]]:
        """All jobs by output file, or those that begin in this process' share of the bytes."""
        total = max(sum(piece.nbytes for piece in self.items), 1)
        at = 0
        for indices in self._by_file():
            yield self._jobs(indices, at, total, crew)
            at += sum(self.items[index].nbytes for index in indices)

    def _jobs(
        self, indices: Sequence[int], at: int, total: int, crew: WriterGroup | None
    ) -> Iterator[Callable[[WriteWorker], None]]:
        rank, size = (crew.rank, crew.size) if crew else (0, 1)
        for nbytes, job in self._cut(indices):
            if min(at * size // total, size - 1) == rank:
                yield job
            at += nbytes

    def _part(self) -> PartialResult:
        begun = [
            PartialItem(index, jobs - work.pending, work.intervals, work.source_intervals)
            for index, (work, jobs) in self._divided.items()
            if 0 < work.pending < jobs
        ]
        crcs = {index: crc for index, crc in enumerate(self.outcome.crcs) if crc}
        return PartialResult(crcs, self._parts, self.outcome.overflow, begun, self.checks.pending())

    def _absorb(self, part: PartialResult) -> None:
        """Take over what another process did."""
        for index, crc in part.crcs.items():
            self.outcome.crcs[index] = crc
        for name, intervals in part.intervals.items():
            self._parts.setdefault(name, []).extend(intervals)
        self.count(part.overflow)
        self.checks.absorb(part.pending)
        for begun in part.begun:
            work = self._divided[begun.place][0]
            work.pending -= begun.jobs - 1
            self.complete(work, begun.intervals, begun.source_intervals)

    def _cut(self, indices: Sequence[int]) -> Iterator[tuple[int, Callable[[WriteWorker], None]]]:
        batch: list[int] = []
        for index in indices:
            piece = self.items[index]
            widest = max(piece.output.dtype.itemsize, piece.output.source.dtype.itemsize)
            nbytes = piece.box.numel * widest
            if batch and (nbytes > self.moved_nbytes or not self._joins(batch, piece)):
                yield self._batch_job(batch)
                batch = []
            if nbytes > _SEGMENT_NBYTES:
                yield from self._segments(self.prepare(index))
            elif nbytes > self.moved_nbytes:
                yield piece.nbytes, partial(self._alone, index)
            else:
                batch.append(index)
        if batch:
            yield self._batch_job(batch)

    def _joins(self, batch: Sequence[int], piece: WriteItem) -> bool:
        first, last = self.items[batch[0]], self.items[batch[-1]]
        near = first.offset <= last.offset <= piece.offset <= last.offset + last.nbytes + 4096
        room = piece.offset + piece.nbytes - first.offset <= self.moved_nbytes
        return piece.file == first.file and near and room and len(batch) < _MAX_BATCH

    def _batch_job(self, batch: Sequence[int]) -> tuple[int, Callable[[WriteWorker], None]]:
        return sum(self.items[index].nbytes for index in batch), lambda hands: hands.batch(batch)

    def _alone(self, index: int, hands: WriteWorker) -> None:
        for _, job in self._segments(self.prepare(index)):
            job(hands)

    def _segments(self, work: ItemTask) -> Iterator[tuple[int, Callable[[WriteWorker], None]]]:
        if work.runs is not None:
            nbytes = work.source_nbytes
            cuts = [
                (at, min(at + _SEGMENT_NBYTES, nbytes)) for at in range(0, nbytes, _SEGMENT_NBYTES)
            ]
            self._divide(work, len(cuts))
            for start, stop in cuts:
                yield (
                    stop - start,
                    lambda hands, start=start, stop=stop: hands.move(work, start, stop),  # type: ignore[misc]
                )
            return
        band_nbytes = self._band_nbytes(work)
        cutter = RowBlocks(work.piece.box, work.tensor.dtype.itemsize, band_nbytes)
        step = max(1, _SEGMENT_NBYTES // band_nbytes)
        self._divide(work, -(-cutter.count // step))
        for first in range(0, cutter.count, step):
            stop = min(first + step, cutter.count)
            nbytes = work.piece.nbytes * (stop - first) // cutter.count
            yield (
                nbytes,
                lambda hands, first=first, stop=stop: hands.bands(work, cutter, first, stop),  # type: ignore[misc]
            )

    def _band_nbytes(self, work: ItemTask) -> int:
        if self._is_remote:
            return self.block_nbytes
        row_nbytes = prod(work.piece.box.sizes[1:]) * work.tensor.dtype.itemsize
        whole_row = row_nbytes if row_nbytes <= self.block_nbytes else 0  # of which lanes consist
        return min(
            self.block_nbytes, max(self.moved_nbytes // 2, _READ_NBYTES * work.abreast, whole_row)
        )

    def _divide(self, work: ItemTask, jobs: int) -> None:
        work.pending = jobs
        if jobs > 1:
            self._divided[work.index] = (work, jobs)

    def _locate(self, tensor: Tensor) -> tuple[tuple[Payload, ...], list[int]]:
        located = self._located.get(tensor.name)
        if located is None:
            located = (self.catalog.reader.payloads(tensor), prove(tensor))
            if self._recurs:
                self._located[tensor.name] = located
        return located

    def prepare(self, index: int) -> ItemTask:
        """Find out where a piece's bytes are. Reads headers only."""
        piece = self.items[index]
        tensor = piece.output.source
        payloads, picked = self._locate(tensor)
        runs = row_ranges(tensor, payloads, picked, piece.box)
        shares: list[Overlap] = []
        if runs is None:
            shares = find_overlaps(tensor, payloads, picked, piece.box)
            runs = contiguous_ranges(shares, piece.box, tensor.dtype.itemsize)
        return ItemTask(index, piece, runs, shares)

    def complete(
        self,
        work: ItemTask,
        intervals: Sequence[Interval],
        source_intervals: Sequence[Interval] = (),
    ) -> None:
        """Take the checksums of a part of a piece; with the last part, those of the whole piece."""
        with self.lock:
            work.intervals += intervals
            work.source_intervals += source_intervals
            work.pending -= 1
            if work.pending:
                return
        crc = join_crcs(work.intervals, work.piece.nbytes)
        if crc is None:
            raise SourceError("internal", f"the parts of {work.tensor.name!r} do not make a whole")
        self._compare_digest(work)
        self.outcome.crcs[work.index] = crc
        piece, shape = work.piece, work.tensor.shape
        if is_contiguous_in(piece.box, whole(shape)):
            start = (
                linear(piece.box.offsets, shape) * piece.output.dtype.itemsize if piece.nbytes else 0
            )
            with self.lock:
                self._parts.setdefault(piece.output.name, []).append((start, piece.nbytes, crc))

    def _compare_digest(self, work: ItemTask) -> None:
        """Compare the digest that the source records of a whole tensor, where its bytes went by in
        order.
        """
        expected = self.catalog.digests.get(work.tensor.name)
        if (
            expected is None
            or not self.settings.verify
            or work.piece.box.sizes != work.tensor.shape
        ):
            return
        intervals = work.source_intervals if work.casts else work.intervals
        found = join_crcs(intervals, work.tensor.nbytes)
        if found is not None and found != expected:
            file = work.tensor.chunks[0].file if work.tensor.chunks else ""
            name = work.tensor.name
            message = f"{file}: tensor {name!r}: expected the digest crc32:{expected:08x}, found crc32:{found:08x}"
            raise SourceError(
                "checksum", f"{message}: {mixed(self.catalog)}", tensor=name, file=file
            )

    def _digest(self) -> None:
        for entry in {piece.output.name: piece.output for piece in self.items}.values():
            parts = self._parts.get(entry.name)
            crc = join_crcs([part for part in parts if part[1]], entry.nbytes) if parts else None
            if crc is not None:
                self.outcome.digests[entry.name] = crc

    def count(self, overflow: Mapping[str, int]) -> None:
        """Add values that became infinite to those known, by name."""
        with self.lock:
            counts = self.outcome.overflow
            for name, count in overflow.items():
                counts[name] = counts.get(name, 0) + count

    def wrote(self, file: str, offset: int, nbytes: int, finished: Finished) -> None:
        """Record a finished range."""
        self.count(finished.overflow)
        if self.settings.durable and nbytes > self.moved_nbytes:
            self.outputs.start_writeback(file, offset, nbytes)
        if self.journal is not None:
            self.journal.done(file, offset, nbytes, finished)
        if self._progress is not None:
            self._progress(nbytes)
