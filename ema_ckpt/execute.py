"""Moves the bytes of a laid-out target: a pool of workers under a byte budget, checksums on the way.

Small pieces that lie side by side in the output are put together and written at once; large ones are cut
into segments that any worker may take. Each worker has one buffer for reading and writing and, where values
are cast or shards interleave, two more. No torch, and numpy only for bands and casts.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ema_ckpt.box import Box, is_contiguous_in, linear, whole
from ema_ckpt.catalog import Catalog, Payload, Tensor
from ema_ckpt.checks import Checks, Interval, joined
from ema_ckpt.coverage import prove
from ema_ckpt.errors import SourceError
from ema_ckpt.journal import Journal
from ema_ckpt.regions import BandCutter, BandReader, Run, Share, find_runs, find_shares, row_runs
from ema_ckpt.staging import preallocate
from ema_ckpt.target import Piece, Target

if TYPE_CHECKING:
    from ema_ckpt.cast import Caster

__all__ = ["MIN_BUDGET_NBYTES", "Outcome", "Settings", "run"]

MIN_BUDGET_NBYTES = 4 << 20
_BLOCK_NBYTES = 512 << 10  # stays in the second-level cache between read, checksum and write
_REMOTE_BLOCK_NBYTES = 8 << 20
_SEGMENT_NBYTES = 32 << 20
_MAX_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run: workers, bytes of buffers in flight, whether stored checksums are compared."""

    threads: int = 2
    budget_nbytes: int = 16 << 20
    verify: bool = True
    progress: Callable[[int], None] | None = None

    def block_nbytes(self, remote: bool) -> int:
        """Bytes of one buffer: four of them for each worker fit the budget."""
        share = max(self.budget_nbytes, MIN_BUDGET_NBYTES) // (4 * max(self.threads, 1))
        largest = _REMOTE_BLOCK_NBYTES if remote else _BLOCK_NBYTES
        return max(16 << 10, min(share, largest)) & ~15


@dataclass(slots=True)
class Outcome:
    """What a run found out: CRC-32 of each piece, of each whole entry by name, values that became infinite."""

    crcs: list[int]
    digests: dict[str, int] = field(default_factory=dict)
    overflow: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Work:
    """One piece being written, perhaps by several workers."""

    index: int
    piece: Piece
    runs: list[Run] | None
    shares: Sequence[Share]
    pending: int = 1
    intervals: list[Interval] = field(default_factory=list)
    source_intervals: list[Interval] = field(default_factory=list)

    @property
    def tensor(self) -> Tensor:
        return self.piece.entry.source

    @property
    def casts(self) -> bool:
        return self.piece.entry.dtype != self.tensor.dtype


class _Outputs:
    """The files being written, open and at their final size."""

    def __init__(self, root: Path, files: Mapping[str, int]) -> None:
        self._fds: dict[str, int] = {}
        try:
            for name, nbytes in files.items():
                path = root / name if name else root
                path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                self._fds[name] = fd
                preallocate(fd, nbytes)
        except BaseException:
            self.close()
            raise

    def write(self, file: str, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data` at `offset`."""
        fd, view = self._fds[file], memoryview(data)
        while view:
            done = os.pwrite(fd, view, offset)
            view, offset = view[done:], offset + done

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Read back what an earlier run wrote."""
        done = 0
        while done < len(buffer):
            done += os.preadv(self._fds[file], [buffer[done:]], offset + done) or len(buffer)

    def close(self) -> None:
        """Close every file."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def run(catalog: Catalog, target: Target, root: Path, settings: Settings, journal: Journal | None = None) -> Outcome:
    """Write a target below `root` (or to the file `root` itself) and return its checksums.

    Args:
        catalog: where the bytes come from.
        target: what goes where; all its tensors are from `catalog`.
        journal: ranges that an earlier run finished, and where this one records its own.

    Raises:
        SourceError: `checksum truncated-file missing-file unsupported …`, naming file and tensor.
        OSError: from writing; the staging turns it into a `TargetError`.
    """
    outputs = _Outputs(root, target.files)
    try:
        engine = _Engine(catalog, target, outputs, settings, journal)
        outcome = engine.run()
        for frame in target.frames(outcome.crcs, outcome.digests):
            outputs.write(frame.file, frame.offset, frame.data)
    finally:
        outputs.close()
    return outcome


class _Engine:
    """One run: hands out jobs, collects checksums, stops at the first error."""

    def __init__(
        self, catalog: Catalog, target: Target, outputs: _Outputs, settings: Settings, journal: Journal | None
    ) -> None:
        self.catalog = catalog
        self.pieces = target.pieces
        self.outputs = outputs
        self.settings = settings
        self.journal = journal
        self.finished = journal.completed() if journal else {}
        self.block_nbytes = settings.block_nbytes(remote="://" in catalog.source.root)
        self.checks = Checks(catalog.source, settings.verify)
        self.outcome = Outcome([0] * len(target.pieces))
        self.lock = threading.Lock()
        self._parts: dict[str, list[Interval]] = {}
        self._jobs = self._cut()
        self._jobs_lock = threading.Lock()
        self._error: BaseException | None = None
        self._located: tuple[str, tuple[Payload, ...], list[int]] | None = None

    def run(self) -> Outcome:
        """Do all jobs, then compare what was only read in part."""
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(self.settings.threads - 1)]
        for thread in threads:
            thread.start()
        try:
            self._serve()
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        self.checks.finish()
        self._digest()
        return self.outcome

    def _serve(self) -> None:
        """Work until there is nothing left, or somebody failed."""
        try:
            hands = _Hands(self)
            while self._error is None:
                with self._jobs_lock:
                    job = next(self._jobs, None)
                if job is None:
                    return
                job(hands)
        except BaseException as error:  # noqa: BLE001 - reported by `run`, in the thread that called it
            if self._error is None:
                self._error = error

    def _cut(self) -> Iterator[Callable[[_Hands], None]]:
        batch: list[int] = []
        for index, piece in enumerate(self.pieces):
            widest = max(piece.entry.dtype.itemsize, piece.entry.source.dtype.itemsize)
            if piece.box.numel * widest > self.block_nbytes:
                yield from self._segments(self.prepare(index))
                continue
            if batch and not self._joins(batch, piece):
                yield self._batch_job(batch)
                batch = []
            batch.append(index)
        if batch:
            yield self._batch_job(batch)

    def _joins(self, batch: Sequence[int], piece: Piece) -> bool:
        first, last = self.pieces[batch[0]], self.pieces[batch[-1]]
        near = first.offset <= last.offset <= piece.offset <= last.offset + last.nbytes + 4096
        room = piece.offset + piece.nbytes - first.offset <= self.block_nbytes
        return piece.file == first.file and near and room and len(batch) < _MAX_BATCH

    def _batch_job(self, batch: Sequence[int]) -> Callable[[_Hands], None]:
        return lambda hands: hands.batch(batch)

    def _segments(self, work: _Work) -> Iterator[Callable[[_Hands], None]]:
        if work.runs is not None:
            nbytes = work.piece.nbytes
            cuts = [(at, min(at + _SEGMENT_NBYTES, nbytes)) for at in range(0, nbytes, _SEGMENT_NBYTES)]
            work.pending = len(cuts)
            for start, stop in cuts:
                yield lambda hands, start=start, stop=stop: hands.move(work, start, stop)  # type: ignore[misc]
            return
        cutter = BandCutter(work.piece.box, work.tensor.dtype.itemsize, self.block_nbytes)
        step = max(1, _SEGMENT_NBYTES // self.block_nbytes)
        work.pending = -(-cutter.count // step)
        for first in range(0, cutter.count, step):
            stop = min(first + step, cutter.count)
            yield lambda hands, first=first, stop=stop: hands.bands(work, cutter, first, stop)  # type: ignore[misc]

    def prepare(self, index: int) -> _Work:
        """Find out where a piece's bytes are. Reads headers only."""
        piece = self.pieces[index]
        tensor = piece.entry.source
        located = self._located
        if located is None or located[0] != tensor.name:
            located = (tensor.name, self.catalog.reader.payloads(tensor), prove(tensor))
            self._located = located
        _, payloads, picked = located
        runs = row_runs(tensor, payloads, picked, piece.box)
        shares: list[Share] = []
        if runs is None or piece.entry.dtype != tensor.dtype:
            shares = find_shares(tensor, payloads, picked, piece.box)
            runs = find_runs(shares, piece.box, tensor.dtype.itemsize) if piece.entry.dtype == tensor.dtype else None
        return _Work(index, piece, runs, shares)

    def complete(self, work: _Work, intervals: Sequence[Interval], source_intervals: Sequence[Interval] = ()) -> None:
        """Take the checksums of a part of a piece; with the last part, those of the whole piece."""
        with self.lock:
            work.intervals += intervals
            work.source_intervals += source_intervals
            work.pending -= 1
            if work.pending:
                return
        crc = joined(work.intervals, work.piece.nbytes)
        if crc is None:
            raise SourceError("internal", f"the parts of {work.tensor.name!r} do not make a whole")
        self._compare_digest(work)
        self.outcome.crcs[work.index] = crc
        piece, shape = work.piece, work.tensor.shape
        if is_contiguous_in(piece.box, whole(shape)):
            start = linear(piece.box.offsets, shape) * piece.entry.dtype.itemsize if piece.nbytes else 0
            with self.lock:
                self._parts.setdefault(piece.entry.name, []).append((start, piece.nbytes, crc))

    def _compare_digest(self, work: _Work) -> None:
        """Compare the digest that the source records of a whole tensor, where its bytes went by in order."""
        expected = self.catalog.digests.get(work.tensor.name)
        if expected is None or not self.settings.verify or work.piece.box.sizes != work.tensor.shape:
            return
        intervals = work.source_intervals if work.casts else work.intervals
        found = joined(intervals, work.tensor.nbytes)
        if found is not None and found != expected:
            file = work.tensor.chunks[0].file if work.tensor.chunks else ""
            name = work.tensor.name
            message = f"{file}: tensor {name!r}: expected the digest crc32:{expected:08x}, found crc32:{found:08x}"
            raise SourceError("checksum", f"{message}: the file is damaged; use another copy", tensor=name, file=file)

    def _digest(self) -> None:
        for piece in self.pieces:
            entry = piece.entry
            parts = self._parts.get(entry.name)
            crc = joined([part for part in parts if part[1]], entry.nbytes) if parts else None
            if crc is not None:
                self.outcome.digests[entry.name] = crc

    def wrote(self, file: str, offset: int, nbytes: int, crc: int) -> None:
        """Record a finished range."""
        if self.journal is not None:
            self.journal.done(file, offset, nbytes, crc)
        if self.settings.progress is not None:
            self.settings.progress(nbytes)


class _Hands:
    """One worker's buffers, and the three ways to do a job with them."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._source = engine.catalog.source
        self._block = memoryview(bytearray(engine.block_nbytes))
        self._reader = BandReader(self._source, engine.checks, engine.block_nbytes)
        self._assembled: memoryview | None = None
        self._casters: dict[tuple[str, str], Caster] = {}

    def move(self, work: _Work, start: int, stop: int) -> None:
        """Copy the bytes [start, stop) of a piece that consists of runs."""
        engine, piece = self._engine, work.piece
        known = engine.finished.get((piece.file, piece.offset + start, stop - start))
        if known is not None:
            engine.complete(work, [(start, stop - start, known)])
            return
        intervals: list[Interval] = []
        for run in work.runs or ():
            first, last = max(run.dest, start), min(run.dest + run.nbytes, stop)
            if first < last:
                intervals.append((first, last - first, self._move_run(work, run, first, last)))
        shifted = [(at - start, nbytes, crc) for at, nbytes, crc in intervals]
        engine.wrote(piece.file, piece.offset + start, stop - start, joined(shifted, stop - start) or 0)
        engine.complete(work, intervals)

    def _move_run(self, work: _Work, run: Run, first: int, last: int) -> int:
        source, outputs, block = self._source, self._engine.outputs, self._block
        piece, payload, crc = work.piece, run.payload, 0
        from_start = run.start + first - run.dest
        shift = payload.offset + from_start - first
        for at in range(first, last, len(block)):
            view = block[: last - at]
            source.read_into(payload.file, shift + at, view)
            crc = zlib.crc32(view, crc)
            outputs.write(piece.file, piece.offset + at, view)
        self._engine.checks.read(work.tensor.name, payload, from_start, last - first, crc)
        return crc

    def bands(self, work: _Work, cutter: BandCutter, first: int, stop: int) -> None:
        """Assemble the bands [first, stop) of a piece, cast them if asked, and write each."""
        intervals: list[Interval] = []
        sources: list[Interval] = []
        piece, itemsize = work.piece, work.piece.entry.dtype.itemsize
        for index in range(first, stop):
            band = cutter.band(index)
            at = linear(band.within(piece.box).offsets, piece.box.sizes)
            data, crc, source_crc = self._assemble(work, band)
            self._engine.outputs.write(piece.file, piece.offset + at * itemsize, data)
            intervals.append((at * itemsize, len(data), crc))
            sources.append((at * work.tensor.dtype.itemsize, band.numel * work.tensor.dtype.itemsize, source_crc))
        start = intervals[0][0]
        nbytes = sum(interval[1] for interval in intervals)
        shifted = [(at - start, length, crc) for at, length, crc in intervals]
        self._engine.wrote(piece.file, piece.offset + start, nbytes, joined(shifted, nbytes) or 0)
        self._engine.complete(work, intervals, sources)

    def _assemble(self, work: _Work, band: Box) -> tuple[memoryview, int, int]:
        """The bytes of a band in the dtype to be written, their CRC-32, and that of the bytes before the cast."""
        tensor, view = work.tensor, self._block[: band.numel * work.tensor.dtype.itemsize]
        crc = self._reader.read(tensor, work.shares, band, view)
        if not work.casts:
            crc = zlib.crc32(view) if crc is None else crc
            return view, crc, crc
        source_crc = 0
        if tensor.name in self._engine.catalog.digests:
            source_crc = zlib.crc32(view) if crc is None else crc
        caster = self._caster(work)
        before = caster.overflow
        data = caster.cast(view)
        if caster.overflow != before:
            with self._engine.lock:
                counts, name = self._engine.outcome.overflow, work.piece.entry.name
                counts[name] = counts.get(name, 0) + caster.overflow - before
        return data, zlib.crc32(data), source_crc

    def _caster(self, work: _Work) -> Caster:
        source, target = work.tensor.dtype, work.piece.entry.dtype
        key = (source.name, target.name)
        if key not in self._casters:
            from ema_ckpt.cast import Caster

            self._casters[key] = Caster(source, target)
        return self._casters[key]

    def batch(self, indices: Sequence[int]) -> None:
        """Put small neighbouring pieces together and write them at once."""
        engine = self._engine
        works = [engine.prepare(index) for index in indices]
        base = works[0].piece.offset
        nbytes = works[-1].piece.offset + works[-1].piece.nbytes - base
        view = self._batch_buffer()[:nbytes]
        file = works[0].piece.file
        if (file, base, nbytes) in engine.finished:
            engine.outputs.read_into(file, base, view)
            parts = [view[w.piece.offset - base :][: w.piece.nbytes] for w in works]
            results = [(zlib.crc32(part), 0) for part in parts]
        else:
            results = [self._fill(work, view[work.piece.offset - base :][: work.piece.nbytes]) for work in works]
            engine.outputs.write(file, base, view)
            engine.wrote(file, base, nbytes, zlib.crc32(view) if engine.journal else 0)
        for work, (crc, source_crc) in zip(works, results, strict=True):
            source_nbytes = work.piece.box.numel * work.tensor.dtype.itemsize
            engine.complete(work, [(0, work.piece.nbytes, crc)], [(0, source_nbytes, source_crc)])

    def _batch_buffer(self) -> memoryview:
        if self._assembled is None:
            self._assembled = memoryview(bytearray(self._engine.block_nbytes))
        return self._assembled

    def _fill(self, work: _Work, view: memoryview) -> tuple[int, int]:
        """Fill `view` with a whole small piece; CRC-32 of it, and of its bytes before a cast."""
        if not view:
            return 0, 0
        if work.runs is None:
            data, crc, source_crc = self._assemble(work, work.piece.box)
            view[:] = data
            return crc, source_crc
        crc = 0
        for run in work.runs:
            part = view[run.dest : run.dest + run.nbytes]
            self._source.read_into(run.payload.file, run.payload.offset + run.start, part)
            crc = zlib.crc32(part)
            self._engine.checks.read(work.tensor.name, run.payload, run.start, run.nbytes, crc)
        crc = crc if len(work.runs) == 1 else zlib.crc32(view)
        return crc, crc
