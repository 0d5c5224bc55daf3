"""One worker: its buffers, and the three ways to bring a piece into the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ema_ckpt.core.box import Box, linear
from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.crc import combine_crcs, crc32
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.write_plan import WriteItem
from ema_ckpt.reading.checksums import ChecksumVerifier, Interval, join_crcs
from ema_ckpt.reading.overlaps import BoxReader, ByteRange, Overlap, RowBlocks
from ema_ckpt.reading.row_slabs import RowSlab, RowSlabReader, find_row_slabs
from ema_ckpt.runtime.page_buffer import buffer
from ema_ckpt.writing.journal import Finished, Range
from ema_ckpt.writing.output_files import OutputFiles, write_end

if TYPE_CHECKING:
    from ema_ckpt.reading.cast import Caster


@dataclass(slots=True)
class ItemTask:
    """One piece being written, perhaps by several workers."""

    index: int
    piece: WriteItem
    runs: list[ByteRange] | None
    shares: Sequence[Overlap]
    pending: int = 1
    intervals: list[Interval] = field(default_factory=list)
    source_intervals: list[Interval] = field(default_factory=list)

    @property
    def tensor(self) -> Tensor:
        """The tensor that is read."""
        return self.piece.output.source

    @property
    def casts(self) -> bool:
        """Whether values change on the way."""
        return self.piece.output.casts

    @property
    def source_nbytes(self) -> int:
        """Bytes of the piece as it is read."""
        return self.piece.box.numel * self.tensor.dtype.itemsize

    @property
    def abreast(self) -> int:
        """Shares that hold a part of the piece's first row."""
        starts = self.piece.box.offsets[:1]
        return sum(share.box.offsets[:1] == starts for share in self.shares)

    def written(self, source_nbytes: int) -> int:
        """Bytes that so many bytes of the source become."""
        return source_nbytes // self.tensor.dtype.itemsize * self.piece.output.dtype.itemsize

    def read(self, written_nbytes: int) -> int:
        """Bytes of the source that so many written bytes come from."""
        return written_nbytes // self.piece.output.dtype.itemsize * self.tensor.dtype.itemsize


class WriteContext(Protocol):
    """What a worker needs of the run it works for."""

    catalog: Catalog
    outputs: OutputFiles
    checks: ChecksumVerifier
    block_nbytes: int
    moved_nbytes: int
    finished: dict[Range, Finished]
    journals: bool
    aligns: bool

    def prepare(self, index: int) -> ItemTask:
        """Find out where a piece's bytes are."""
        ...

    def complete(
        self,
        work: ItemTask,
        intervals: Sequence[Interval],
        source_intervals: Sequence[Interval] = (),
    ) -> None:
        """Take the checksums of a part of a piece."""
        ...

    def count(self, overflow: Mapping[str, int]) -> None:
        """Add values that became infinite to those known, by name."""
        ...

    def wrote(self, file: str, offset: int, nbytes: int, finished: Finished) -> None:
        """Record a finished range."""
        ...


class WriteWorker:
    """One worker's buffers, and the three ways to do a job with them."""

    def __init__(self, engine: WriteContext) -> None:
        self._engine = engine
        self._source = engine.catalog.source
        self._block = buffer(engine.block_nbytes)
        self._reader = BoxReader(self._source, engine.checks, engine.block_nbytes)
        self._second: memoryview | None = None
        self._casters: dict[tuple[str, str], Caster] = {}
        self._overflow: dict[str, int] = {}  # of the range at hand

    def move(self, work: ItemTask, start: int, stop: int) -> None:
        """Bring the bytes [start, stop) of the source of a piece that consists of runs into the
        output.
        """
        engine, piece = self._engine, work.piece
        base = work.written(start)
        nbytes = work.written(stop) - base
        known = engine.finished.get((piece.file, piece.offset + base, nbytes))
        if known is not None:
            engine.count(known.overflow)
            self._recheck(work, start, stop)
            engine.complete(work, [(base, nbytes, known.crc)])
            return
        crc, sources = self._move_runs(work, start, stop)
        self._wrote(piece.file, piece.offset + base, nbytes, crc)
        engine.complete(work, [(base, nbytes, crc)], sources if work.casts else ())

    def _move_runs(self, work: ItemTask, start: int, stop: int) -> tuple[int, list[Interval]]:
        """Write the bytes [start, stop) of the source block by block; CRC-32 of what was written,
        and of each run.
        """
        source, outputs, piece = self._source, self._engine.outputs, work.piece
        crc, sources = 0, list[Interval]()
        at, end = start, self._block_end(work, start, stop)
        for run in work.runs or ():
            first, last = max(run.dest, start), min(run.dest + run.nbytes, stop)
            if first >= last:
                continue
            shift, position, run_crc = run.payload.offset + run.start - run.dest, first, 0
            while position < last:
                view = self._block[position - at : min(last, end) - at]
                source.read_into(run.payload.file, shift + position, view)
                run_crc = crc32(view, run_crc)
                position += len(view)
                if position == end:
                    view = self._block[: end - at]
                    if work.casts:
                        view = self._cast(work, view)
                        crc = crc32(view, crc)
                    outputs.write(piece.file, piece.offset + work.written(at), view)
                    at, end = end, self._block_end(work, end, stop)
            sources.append((first, last - first, run_crc))
            self._engine.checks.read(
                work.tensor.name, run.payload, first - run.dest + run.start, last - first, run_crc
            )
        read = join_crcs(
            [(first - start, nbytes, part) for first, nbytes, part in sources], stop - start
        )
        if read is None:
            raise SourceError("internal", f"the runs of {work.tensor.name!r} do not make a whole")
        return crc if work.casts else read, sources

    def _recheck(self, work: ItemTask, start: int = 0, stop: int | None = None) -> None:
        """Have the storages behind a range that an earlier run wrote read once more: it may have
        died before it had all of a storage to compare."""
        for run in work.runs or ():
            if (
                run.dest < (work.source_nbytes if stop is None else stop)
                and run.dest + run.nbytes > start
            ):
                self._engine.checks.partly(work.tensor.name, run.payload)
        for share in work.shares if work.runs is None else ():
            self._engine.checks.partly(work.tensor.name, share.payload)

    def _block_end(self, work: ItemTask, at: int, stop: int) -> int:
        """Where the block of the source that begins at byte `at` ends, so that the write does where
        it had best.
        """
        step = self._engine.moved_nbytes
        if not self._engine.aligns:
            return min(at + step, stop)
        begin = work.piece.offset + work.written(at)
        end = write_end(begin, work.written(step))
        return min(at + (work.read(end - begin) or step), stop)

    def bands(self, work: ItemTask, cutter: RowBlocks, first: int, stop: int) -> None:
        """Assemble the bands [first, stop) of a piece, cast them if asked, and write each."""
        engine, piece = self._engine, work.piece
        start, nbytes = _extent(work, cutter, first, stop)
        known = engine.finished.get((piece.file, piece.offset + start, nbytes))
        if known is not None:
            engine.count(known.overflow)
            self._recheck(work)
            engine.complete(work, [(start, nbytes, known.crc)])
            return
        lanes = find_row_slabs(work.shares, cutter, work.tensor.dtype.itemsize)
        if lanes is None:
            crc, sources = self._loose_bands(work, cutter, range(first, stop), piece.offset + start)
        else:
            crc, sources = self._lane_bands(
                work, cutter, lanes, range(first, stop), piece.offset + start
            )
        self._wrote(piece.file, piece.offset + start, nbytes, crc)
        engine.complete(work, [(start, nbytes, crc)], sources if work.casts else ())

    def _lane_bands(
        self, work: ItemTask, cutter: RowBlocks, lanes: Sequence[RowSlab], indices: range, at: int
    ) -> tuple[int, list[Interval]]:
        """Write bands from `at` on; CRC-32 of them, and that of the bytes before a cast."""
        engine, file, casts = self._engine, work.piece.file, work.casts
        reader = RowSlabReader(self._source, lanes, cutter, work.tensor.dtype.itemsize)
        scratch, crc, source_crc, start = self._second_buffer(), 0, 0, at
        for index in indices:
            view = reader.read(index, self._block, scratch)
            if casts:
                source_crc = crc32(view, source_crc)
                view = self._cast(work, view)
            crc = crc32(view, crc)
            engine.outputs.write(file, at, view)
            at += len(view)
        reader.tell(work.tensor.name, engine.checks)
        return crc, [(work.read(start - work.piece.offset), work.read(at - start), source_crc)]

    def _loose_bands(
        self, work: ItemTask, cutter: RowBlocks, indices: range, at: int
    ) -> tuple[int, list[Interval]]:
        """The same where chunks do not hold whole rows."""
        crc, source_at = 0, work.read(at - work.piece.offset)
        sources: list[Interval] = []
        for index in indices:
            band = cutter.band(index)
            data, part, source_crc = self._assemble(work, band)
            self._engine.outputs.write(work.piece.file, at, data)
            crc = combine_crcs(crc, part, len(data))
            at += len(data)
            sources.append((source_at, band.numel * work.tensor.dtype.itemsize, source_crc))
            source_at += band.numel * work.tensor.dtype.itemsize
        return crc, sources

    def _assemble(self, work: ItemTask, band: Box) -> tuple[memoryview, int, int]:
        """The bytes of a band in the dtype to be written, their CRC-32, and that of the bytes
        before the cast.
        """
        tensor, view = work.tensor, self._block[: band.numel * work.tensor.dtype.itemsize]
        crc = self._reader.read(tensor, work.shares, band, view)
        if not work.casts:
            crc = crc32(view) if crc is None else crc
            return view, crc, crc
        source_crc = 0
        if tensor.name in self._engine.catalog.digests:
            source_crc = crc32(view) if crc is None else crc
        data = self._cast(work, view)
        return data, crc32(data), source_crc

    def _cast(self, work: ItemTask, view: memoryview) -> memoryview:
        """The values of a block in the dtype to be written, valid until the next cast."""
        caster = self._caster(work)
        before = caster.overflow
        data = caster.cast(view)
        if caster.overflow != before:
            name = work.piece.output.name
            self._overflow[name] = self._overflow.get(name, 0) + caster.overflow - before
        return data

    def _wrote(self, file: str, offset: int, nbytes: int, crc: int) -> None:
        overflow, self._overflow = self._overflow, {}
        self._engine.wrote(file, offset, nbytes, Finished(crc, overflow))

    def _caster(self, work: ItemTask) -> Caster:
        source, target = work.tensor.dtype, work.piece.output.dtype
        key = (source.name, target.name)
        if key not in self._casters:
            from ema_ckpt.reading.cast import Caster

            self._casters[key] = Caster(source, target)
        return self._casters[key]

    def batch(self, indices: Sequence[int]) -> None:
        """Put small neighbouring pieces together and write them at once."""
        engine = self._engine
        works = [engine.prepare(index) for index in indices]
        base = works[0].piece.offset
        nbytes = works[-1].piece.offset + works[-1].piece.nbytes - base
        view = self._second_buffer()[:nbytes]
        file = works[0].piece.file
        results: Sequence[tuple[int, int | None]]
        known = engine.finished.get((file, base, nbytes))
        if known is not None:
            engine.count(known.overflow)
            engine.outputs.read_into(file, base, view)
            parts = [view[w.piece.offset - base :][: w.piece.nbytes] for w in works]
            results = [(crc32(part), None) for part in parts]
            for work in works:
                self._recheck(work)
        else:
            results = [
                self._fill(work, view[work.piece.offset - base :][: work.piece.nbytes])
                for work in works
            ]
            engine.outputs.write(file, base, view)
            self._wrote(file, base, nbytes, crc32(view) if engine.journals else 0)
        for work, (crc, source_crc) in zip(works, results, strict=True):
            sources = [] if source_crc is None else [(0, work.source_nbytes, source_crc)]
            engine.complete(work, [(0, work.piece.nbytes, crc)], sources)

    def _second_buffer(self) -> memoryview:
        if self._second is None:
            self._second = buffer(self._engine.block_nbytes)
        return self._second

    def _fill(self, work: ItemTask, view: memoryview) -> tuple[int, int]:
        """Fill `view` with a whole small piece; CRC-32 of it, and of its bytes before a cast."""
        if not view:
            return 0, 0
        if work.runs is None:
            data, crc, source_crc = self._assemble(work, work.piece.box)
            view[:] = data
            return crc, source_crc
        target = self._block[: work.source_nbytes] if work.casts else view
        crc = 0
        for run in work.runs:
            part = target[run.dest : run.dest + run.nbytes]
            self._source.read_into(run.payload.file, run.payload.offset + run.start, part)
            crc = crc32(part)
            self._engine.checks.read(work.tensor.name, run.payload, run.start, run.nbytes, crc)
        crc = crc if len(work.runs) == 1 else crc32(target)
        if not work.casts:
            return crc, crc
        view[:] = self._cast(work, target)
        return crc32(view), crc


def _extent(work: ItemTask, cutter: RowBlocks, first: int, stop: int) -> tuple[int, int]:
    """Where the bands [first, stop) lie in their piece as it is written: start and length in
    bytes.
    """
    box, itemsize = work.piece.box, work.piece.output.dtype.itemsize
    last = cutter.band(stop - 1)
    start = linear(cutter.band(first).within(box).offsets, box.sizes)
    end = linear(last.within(box).offsets, box.sizes) + last.numel
    return start * itemsize, (end - start) * itemsize
