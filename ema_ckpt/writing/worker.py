"""One worker: its buffers, and the three ways to write an item: copy, assemble, or in a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.box_reader import BoxReader
from ema_ckpt.reading.checksum_verifier import Interval, join_crcs
from ema_ckpt.runtime.page_buffer import buffer
from ema_ckpt.writing.journal import Finished, Journal, Range
from ema_ckpt.writing.output_files import Outputs, write_end
from ema_ckpt.writing.run_state import RunState
from ema_ckpt.writing.schedule import (
    AssembleBlocks,
    CopyBatch,
    CopyItem,
    CopyRange,
    LocatedItem,
    Schedule,
    Segment,
    WriteJob,
)

if TYPE_CHECKING:
    from ema_ckpt.reading.cast import Caster


@dataclass(frozen=True, slots=True)
class WriteContext:
    """The work of writing a plan: what all workers of a run share.

    Attributes:
        finished: ranges that an interrupted run wrote, by file, offset and length.
        durable: the files will be synced, so writeback begins early.
    """

    catalog: Catalog
    schedule: Schedule
    outputs: Outputs
    state: RunState
    journal: Journal | None
    finished: Mapping[Range, Finished]
    durable: bool

    def start_worker(self) -> Callable[[WriteJob], int]:
        return WriteWorker(self).write

    def dump(self) -> bytes:
        """End a child process' share.

        What it wrote and some file systems could not store, sshfs say, is told to the first that
        closes the file. Nobody hears that of a process that ends without.
        """
        self.outputs.close()
        return self.state.dump()

    def merge(self, dumped: bytes) -> None:
        self.state.merge(dumped)

    def reset(self) -> None:
        self.state.reset()


class WriteWorker:
    """One worker's buffers: one for reading, one more for batches."""

    def __init__(self, context: WriteContext) -> None:
        self._context = context
        self._state = context.state
        self._verifier = context.state.verifier
        self._source = context.catalog.source
        self._schedule = context.schedule
        self._block = buffer(self._schedule.block_nbytes)
        self._reader = BoxReader(self._schedule.block_nbytes, self._verifier)
        self._batch: memoryview | None = None
        self._casters: dict[tuple[str, str], Caster] = {}
        self._overflow: dict[str, int] = {}  # of the range at hand

    def write(self, job: WriteJob) -> int:
        """Do a job; return the bytes written."""
        if isinstance(job, CopyBatch):
            return self._write_batch(job.indices)
        if isinstance(job, CopyItem):
            segments = self._schedule.segments(self._schedule.locate(job.item))
            return sum(self._write_segment(segment) for segment in segments)
        return self._write_segment(job)

    def _write_segment(self, job: Segment) -> int:
        located = job.located
        item = located.item
        if isinstance(job, CopyRange):
            start = located.to_output(job.start)
            nbytes = located.to_output(job.stop) - start
        else:
            start, nbytes = job.extent
        finished = self._context.finished.get((item.file, item.offset + start, nbytes))
        if finished is not None:
            self._state.add_overflow(finished.overflow)
            self._read_again(located, job)
            self._state.record(located.index, [(start, nbytes, finished.crc)])
            return 0
        sources: Sequence[Interval]
        if isinstance(job, CopyRange):
            crc, sources = self._copy(job)
        else:
            crc, sources = self._assemble(job, item.offset + start)
        self._finish_range(item.file, item.offset + start, nbytes, crc)
        sources = sources if located.casts else ()
        self._state.record(located.index, [(start, nbytes, crc)], sources)
        return nbytes

    def _finish_range(self, file: str, offset: int, nbytes: int, crc: int) -> None:
        """Record that a range is written."""
        context = self._context
        overflow, self._overflow = self._overflow, {}
        self._state.add_overflow(overflow)
        if context.durable and nbytes > self._schedule.copy_nbytes:
            context.outputs.start_writeback(file, offset, nbytes)
        if context.journal is not None:
            context.journal.done(file, offset, nbytes, Finished(crc, overflow))

    def _read_again(self, located: LocatedItem, job: Segment | None = None) -> None:
        """Have the storages behind a finished range verified once more.

        The interrupted run may have died before it had all of a storage to compare.
        """
        start, stop = 0, located.source_nbytes
        if isinstance(job, CopyRange):
            start, stop = job.start, job.stop
        payloads = [overlap.payload for overlap in located.box.overlaps]
        if located.box.ranges is not None:
            ranges = located.box.ranges
            payloads = [r.payload for r in ranges if r.dest < stop and r.dest + r.nbytes > start]
        for payload in payloads:
            self._verifier.require_full_read(located.tensor.name, payload)

    # Copying.

    def _copy(self, job: CopyRange) -> tuple[int, list[Interval]]:
        """Copy source bytes block by block; CRC-32 of what was written, and of each byte range."""
        located, start, stop = job
        source, outputs, item = self._source, self._context.outputs, located.item
        crc, sources = 0, list[Interval]()
        begin, end = start, self._block_end(located, start, stop)
        for run in located.box.ranges or ():
            first, last = max(run.dest, start), min(run.dest + run.nbytes, stop)
            if first >= last:
                continue
            shift, position, run_crc = run.payload.offset + run.start - run.dest, first, 0
            while position < last:
                view = self._block[position - begin : min(last, end) - begin]
                source.read_into(run.payload.file, shift + position, view)
                run_crc = crc32(view, run_crc)
                position += len(view)
                if position == end:
                    view = self._block[: end - begin]
                    if located.casts:
                        view = self._cast(located, view)
                        crc = crc32(view, crc)
                    outputs.write(item.file, item.offset + located.to_output(begin), view)
                    begin, end = end, self._block_end(located, end, stop)
            sources.append((first, last - first, run_crc))
            begin_in_storage = first - run.dest + run.start
            self._verifier.record(
                located.tensor.name, run.payload, begin_in_storage, last - first, run_crc
            )
        read = join_crcs([(first - start, n, part) for first, n, part in sources], stop - start)
        if read is None:
            name = located.tensor.name
            raise SourceError("internal", f"the byte ranges of {name!r} do not make a whole")
        return crc if located.casts else read, sources

    def _block_end(self, located: LocatedItem, start: int, stop: int) -> int:
        """Choose the end of the source block from `start` so that its write ends aligned."""
        nbytes = self._schedule.copy_nbytes
        if not self._schedule.is_remote:
            offset = located.item.offset + located.to_output(start)
            aligned = write_end(offset, located.to_output(nbytes)) - offset
            nbytes = located.to_source(aligned) or nbytes
        return min(start + nbytes, stop)

    # Assembling.

    def _assemble(self, job: AssembleBlocks, offset: int) -> tuple[int, list[Interval]]:
        """Write assembled blocks; return their CRC-32, and that of the bytes before a cast."""
        located = job.located
        start = located.to_source(offset - located.item.offset)
        crc, source_crc, source_nbytes = 0, 0, 0
        is_compared = located.casts and located.tensor.name in self._context.catalog.digests
        for view in self._reader.blocks(located.box, job.blocks, job.first, job.stop):
            source_nbytes += len(view)
            if is_compared:
                source_crc = crc32(view, source_crc)
            data = self._cast(located, view) if located.casts else view
            crc = crc32(data, crc)
            self._context.outputs.write(located.item.file, offset, data)
            offset += len(data)
        return crc, [(start, source_nbytes, source_crc)]

    def _cast(self, located: LocatedItem, view: memoryview) -> memoryview:
        """Cast a block; the result is valid until the next cast."""
        source, target = located.tensor.dtype, located.item.output.dtype
        key = (source.name, target.name)
        if key not in self._casters:
            from ema_ckpt.reading.cast import Caster

            self._casters[key] = Caster(source, target)
        caster = self._casters[key]
        before = caster.overflow
        data = caster.cast(view)
        if caster.overflow != before:
            name = located.item.output.name
            self._overflow[name] = self._overflow.get(name, 0) + caster.overflow - before
        return data

    # Batches.

    def _write_batch(self, indices: Sequence[int]) -> int:
        """Put small neighbouring items together and write them at once."""
        context = self._context
        batch = [self._schedule.locate(index) for index in indices]
        file, base = batch[0].item.file, batch[0].item.offset
        nbytes = batch[-1].item.offset + batch[-1].item.nbytes - base
        if self._batch is None:
            self._batch = buffer(self._schedule.block_nbytes)
        view = self._batch[:nbytes]
        parts = [view[one.item.offset - base :][: one.item.nbytes] for one in batch]
        finished = context.finished.get((file, base, nbytes))
        if finished is not None:
            self._state.add_overflow(finished.overflow)
            context.outputs.read_into(file, base, view)
            for located, part in zip(batch, parts, strict=True):
                self._read_again(located)
                self._state.record(located.index, [(0, len(part), crc32(part))])
            return 0
        crcs = [self._fill(located, part) for located, part in zip(batch, parts, strict=True)]
        extents = [(located.item.offset - base, located.item.nbytes) for located in batch]
        context.outputs.write_items(file, base, view, extents)
        self._finish_range(file, base, nbytes, crc32(view) if context.journal else 0)
        for located, (crc, source_crc) in zip(batch, crcs, strict=True):
            sources = [(0, located.source_nbytes, source_crc)]
            self._state.record(located.index, [(0, located.item.nbytes, crc)], sources)
        return nbytes

    def _fill(self, located: LocatedItem, view: memoryview) -> tuple[int, int]:
        """Fill `view` with a small item; return its CRC-32, and that of its bytes before a cast."""
        if not view:
            return 0, 0
        out = self._block[: located.source_nbytes] if located.casts else view
        crc = self._reader.read(located.box, out)
        if crc is None:
            crc = crc32(out)
        if not located.casts:
            return crc, crc
        view[:] = self._cast(located, out)
        return crc32(view), crc
