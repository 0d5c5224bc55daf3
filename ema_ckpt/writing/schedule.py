"""Cuts a write plan into jobs: where each item's bytes are, and which worker-sized parts it has.

Small items that lie side by side in the output are put together and written at once; large ones
are cut into segments that any worker may take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

from ema_ckpt.core.catalog import Catalog, Payload, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.write_plan import WriteItem, WritePlan
from ema_ckpt.reading.box_reader import LocatedBox, locate_box
from ema_ckpt.reading.cast import import_all
from ema_ckpt.reading.checksum_verifier import computed_files
from ema_ckpt.reading.overlaps import RowBlocks
from ema_ckpt.runtime.executor import Workers
from ema_ckpt.storage.files import is_url
from ema_ckpt.writing.journal import Range
from ema_ckpt.writing.options import WriteOptions

# What is copied at once stays in the second-level cache between read, checksum and write: it takes
# a tenth less time than 1.75 MiB would. Blocks are assembled from reads of about `_READ_NBYTES`:
# with reads of 64 KiB workers wait for each other's Python.
_COPY_NBYTES = 768 << 10
_READ_NBYTES = 256 << 10
_SEGMENT_NBYTES = 32 << 20
_MAX_BATCH = 4096
_MAX_GAP_NBYTES = 4096
# The kernel serialises writes to one file. Measured on 16 cores with four and eight workers: rows
# 1.2 s and 1.4 s; columns 2.5 s and 3.6 s.
_WORKERS_PER_FILE = 4
# Of one worker: to copy a byte, to find and read a chunk, to assemble or cast a byte; and besides,
# to compute a byte of a sum or of a quantised weight.
_SECONDS_PER_BYTE, _SECONDS_PER_READ, _LOCKED_SECONDS_PER_BYTE = 0.4e-9, 20e-6, 0.15e-9
_COMPUTED_SECONDS_PER_BYTE = 2e-9


@dataclass(frozen=True, slots=True)
class LocatedItem:
    """A write item whose source bytes are located.

    Attributes:
        index: its place in the plan.
        box: its box of the source; copied as it is if it has `ranges`, else assembled.
    """

    index: int
    item: WriteItem
    box: LocatedBox

    @property
    def tensor(self) -> Tensor:
        """The tensor that is read."""
        return self.item.output.source

    @property
    def casts(self) -> bool:
        """Whether values change on the way."""
        return self.item.output.casts

    @property
    def source_nbytes(self) -> int:
        """Bytes of the item as it is read."""
        return self.item.box.numel * self.tensor.dtype.itemsize

    def to_output(self, nbytes: int) -> int:
        """Convert bytes that are read into bytes that are written."""
        return nbytes // self.tensor.dtype.itemsize * self.item.output.dtype.itemsize

    def to_source(self, nbytes: int) -> int:
        """Convert bytes that are written into bytes that are read."""
        return nbytes // self.item.output.dtype.itemsize * self.tensor.dtype.itemsize


class CopyBatch(NamedTuple):
    """Write small neighbouring items, by their indices in the plan, at once."""

    indices: Sequence[int]
    nbytes: int


class CopyItem(NamedTuple):
    """Write one item, located by the worker."""

    item: int
    nbytes: int


class CopyRange(NamedTuple):
    """Copy the source bytes [start, stop) of an item that consists of byte ranges."""

    located: LocatedItem
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class AssembleBlocks(NamedTuple):
    """Assemble the blocks [first, stop) of an item from the chunks that hold parts of them."""

    located: LocatedItem
    blocks: RowBlocks
    first: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.extent[1]

    @property
    def extent(self) -> tuple[int, int]:
        """Start and length of the blocks in the item as it is written, in bytes."""
        itemsize = self.located.item.output.dtype.itemsize
        start, _ = self.blocks.extent(self.first)
        last, numel = self.blocks.extent(self.stop - 1)
        return start * itemsize, (last + numel - start) * itemsize


Segment = CopyRange | AssembleBlocks
WriteJob = CopyBatch | CopyItem | Segment


class Schedule:
    """A write plan as jobs, located item by item.

    Attributes:
        workers: how many are to do the jobs.
        block_nbytes: bytes of one buffer; four of them for each worker fit the budget.
        copy_nbytes: bytes that are copied at once.
    """

    def __init__(self, catalog: Catalog, plan: WritePlan, options: WriteOptions) -> None:
        self.items = plan.items
        self._source = catalog.source
        self.is_remote = is_url(catalog.source.root)
        most = options.most_workers(self.is_remote)
        if self.is_remote or not options.forks:
            self.workers = Workers(most)
        else:
            self.workers = self._choose_workers(most)
        self.block_nbytes = options.block_nbytes(self.is_remote, self.workers.number)
        self.copy_nbytes = self.block_nbytes
        if not self.is_remote:
            self.copy_nbytes = min(self.block_nbytes, _COPY_NBYTES)
        self._gathered_nbytes = options.gathered_nbytes(self.is_remote, self.workers.number)
        self._reader = catalog.reader
        # A tensor that goes to several files is located once: its items come far apart.
        self._recurs = len({item.output.name for item in self.items}) < len(self.items)
        self._payloads: dict[str, tuple[Payload, ...]] = {}

    def nbytes(self, ranks: int, finished: Iterable[Range]) -> int:
        """Return the bytes that one of so many ranks will write, if those ranges are there."""
        total = sum(item.nbytes for item in self.items)
        return max(total - sum(nbytes for _, _, nbytes in finished), 0) // ranks

    def streams(self, rank: int = 0, ranks: int = 1) -> Iterator[Iterator[WriteJob]]:
        """Cut the plan into jobs, one stream for each file; of several ranks each has its share."""
        total = max(sum(item.nbytes for item in self.items), 1)
        position = 0
        for _, group in groupby(enumerate(self.items), key=lambda numbered: numbered[1].file):
            indices = [index for index, _ in group]
            jobs = self._jobs(indices)
            yield jobs if ranks == 1 else _share(jobs, position, total, rank, ranks)
            position += sum(self.items[index].nbytes for index in indices)

    def _choose_workers(self, threads: int) -> Workers:
        """Choose as many workers as find work; columns and casts are work in the interpreter."""
        outputs = {item.output.name: item.output for item in self.items}
        computed = set[tuple[DType, DType]]()
        reads = len(self.items)  # one for each, and one more for each chunk that begins inside one
        for output in outputs.values():
            reads += len(output.source.chunks)
            if not output.is_moved:
                computed.add((output.source.dtype, output.dtype))
        nbytes = sum([item.nbytes for item in self.items])
        free_seconds = nbytes * _SECONDS_PER_BYTE
        locked_seconds = reads * _SECONDS_PER_READ
        is_computed = computed_files(self._source) is not None
        if computed:
            locked_seconds += nbytes * _LOCKED_SECONDS_PER_BYTE
        if is_computed:
            free_seconds += nbytes * _COMPUTED_SECONDS_PER_BYTE
        if all(source == target for source, target in computed):
            threads = min(threads, self._useful_writers())
        workers = Workers.fit(threads, free_seconds, locked_seconds)
        if workers.processes and (computed or is_computed):
            # Child processes share what is imported before. numpy may start threads, which forbid
            # children.
            import_all(computed)
            return Workers.fit(threads, free_seconds, locked_seconds)
        return workers

    def _useful_writers(self) -> int:
        """Return how many workers the files that hold items take without waiting for each other."""
        return _WORKERS_PER_FILE * len({item.file for item in self.items})

    def _jobs(self, indices: Sequence[int]) -> Iterator[WriteJob]:
        batch: list[int] = []
        for index in indices:
            item = self.items[index]
            widest = max(item.output.dtype.itemsize, item.output.source.dtype.itemsize)
            nbytes = item.box.numel * widest
            if batch and (nbytes > self.copy_nbytes or not self._extends(batch, item)):
                yield self._batch(batch)
                batch = []
            if nbytes > _SEGMENT_NBYTES:
                yield from self.segments(self.locate(index))
            elif nbytes > self.copy_nbytes:
                yield CopyItem(index, item.nbytes)
            else:
                batch.append(index)
        if batch:
            yield self._batch(batch)

    def _batch(self, indices: Sequence[int]) -> CopyBatch:
        return CopyBatch(indices, sum(self.items[index].nbytes for index in indices))

    def _extends(self, batch: Sequence[int], item: WriteItem) -> bool:
        """Check that an item can be written at once with those of the batch."""
        first, last = self.items[batch[0]], self.items[batch[-1]]
        end = last.offset + last.nbytes
        if len(batch) >= _MAX_BATCH or not first.offset <= last.offset <= item.offset:
            return False
        room = first.offset + self.copy_nbytes
        return item.offset <= end + _MAX_GAP_NBYTES and item.offset + item.nbytes <= room

    def segments(self, located: LocatedItem) -> Iterator[Segment]:
        """Cut an item into segments that any worker may take."""
        if located.box.ranges is not None:
            nbytes = located.source_nbytes
            for start in range(0, nbytes, _SEGMENT_NBYTES):
                yield CopyRange(located, start, min(start + _SEGMENT_NBYTES, nbytes))
            return
        block_nbytes = self._assembled_nbytes(located)
        blocks = RowBlocks(located.item.box, located.tensor.dtype.itemsize, block_nbytes)
        step = max(1, _SEGMENT_NBYTES // block_nbytes)
        for first in range(0, blocks.count, step):
            yield AssembleBlocks(located, blocks, first, min(first + step, blocks.count))

    def _assembled_nbytes(self, located: LocatedItem) -> int:
        """Choose the length of blocks so that each chunk abreast is read in long pieces."""
        if located.box.is_gathered:
            return self._gathered_nbytes
        if self.is_remote:
            return self.block_nbytes
        box = located.item.box
        abreast = 0
        for overlap in located.box.overlaps:
            abreast += overlap.box.offsets[:1] == box.offsets[:1]
        wanted = max(self.copy_nbytes // 2, _READ_NBYTES * abreast)
        row_nbytes = prod(box.sizes[1:]) * located.tensor.dtype.itemsize
        if row_nbytes <= self.block_nbytes:  # row slabs consist of whole rows
            wanted = max(wanted, row_nbytes)
        return min(self.block_nbytes, wanted)

    def locate(self, index: int) -> LocatedItem:
        """Locate the bytes of an item in the source. Reads headers only."""
        item = self.items[index]
        tensor = item.output.source
        payloads = self._payloads.get(tensor.name)
        if payloads is None:
            payloads = self._reader.payloads(tensor)
            if self._recurs:
                self._payloads[tensor.name] = payloads
        box = locate_box(self._source, tensor, payloads, prove(tensor), item.box)
        return LocatedItem(index, item, box)


def _share(
    jobs: Iterator[WriteJob], position: int, total: int, rank: int, ranks: int
) -> Iterator[WriteJob]:
    """Yield the jobs that begin in a rank's share of `total` bytes, the first at `position`."""
    for job in jobs:
        if min(position * ranks // total, ranks - 1) == rank:
            yield job
        position += job.nbytes
