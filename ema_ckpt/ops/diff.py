"""`diff`: how two trees of weights differ, tensor by tensor; by default an EMA and its live
weights.
"""

from __future__ import annotations

import math
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, partial

from ema_ckpt.analysis.compare import FAST_NUMEL, Comparer, PairStats
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.text import parse_size
from ema_ckpt.ops.diff_findings import Compared, find
from ema_ckpt.ops.diff_pairing import Pairing, Side, open_sides, pair
from ema_ckpt.ops.present import check_sources
from ema_ckpt.ops.results import DiffResult, DiffSummary, DiffTensor, Mismatch, ShapeEntry
from ema_ckpt.reading.overlaps import RowBlocks
from ema_ckpt.reading.streams import Stream, StreamReader, band_jobs, locate
from ema_ckpt.runtime.fork_pool import can_fork, run_forked
from ema_ckpt.runtime.thread_pool import run_jobs, worker_count
from ema_ckpt.storage.files import is_url

_MIN_BUDGET_NBYTES = 4 << 20
_BUDGET_NBYTES = 16 << 20
_REMOTE_BUDGET_NBYTES = 256 << 20
# Stays in the second-level cache with the differences. Threads would be faster with longer ones,
# but sums in float32 depend on where blocks end, and the numbers should not depend on who works.
_BLOCK_NBYTES = 256 << 10
_REMOTE_BLOCK_NBYTES = 8 << 20
_LEAST_FORKED_NBYTES = 64 << 20
_PACKED = struct.Struct("<q6d6q?")  # place of the pair, then the fields of `PairStats`


def diff(
    path: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    tree: str | None = None,
    against: str | None = None,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    html: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    max_memory: int | str | None = None,
    progress: Callable[[int], None] | None = None,
) -> DiffResult:
    """Compare two trees of weights; every selected byte is read.

    With one path, a is its EMA and b the live tree it averages. With two, a is from `path` and b
    from `other`.

    Args:
        path, other: checkpoints, directories that hold one, or fsspec URLs.
        tree: a's tree. against: b's tree.
        rtol, atol: an element has changed if |a − b| > atol + rtol·|b|, or is infinite.
        html: a file to write a self-contained page to.
        max_memory: bytes of buffers in flight. progress: is told the bytes that were read of both
            sides; less than none where they will be read anew.

    Raises:
        EmaCkptError: `ambiguous-tree unknown-tree usage`, `target-is-source` for a page in the
            place of what is compared, and whatever keeps a side from being read.
    """
    compared = compare_trees(
        path,
        other,
        tree,
        against,
        rtol=rtol,
        atol=atol,
        html=html,
        threads=threads,
        max_memory=max_memory,
        progress=progress,
    )
    result = result_of(compared)
    if html is not None:
        from ema_ckpt.ops.diff_html import write_page

        write_page(html, result, compared.catalogs)
    return result


def compare_trees(
    path: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    tree: str | None = None,
    against: str | None = None,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    html: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    max_memory: int | str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Compared:
    """The work of `diff`: both sides, paired, and what each pair gave; a place for the page is
    checked, not written.

    Arguments and errors are those of `diff`.
    """
    if not (0 <= rtol < math.inf and 0 <= atol < math.inf):
        raise UsageError("usage", f"--rtol {rtol} --atol {atol}: expected 0 or more")
    if threads is not None and threads < 1:
        raise UsageError("usage", f"--threads {threads}: expected 1 or more")
    a, b = open_sides(path, other, tree, against)
    try:
        if html is not None:
            from ema_ckpt.ops.diff_html import check_page

            check_page(html, (a.catalog, b.catalog))
        remote = any(is_url(side.catalog.source.root) for side in (a, b))
        pairing = pair(a.tree, b.tree)
        nbytes = sum(x.nbytes + y.nbytes for _, x, y in pairing.pairs)
        effort = _Resources.fit(nbytes, worker_count(threads), max_memory, remote)
        _check(a, [x for _, x, _ in pairing.pairs])
        _check(b, [y for _, _, y in pairing.pairs])
        sums = _Pairs(a, b, pairing, rtol, atol, progress).run(effort)
        compared = Compared(a, b, pairing, sums, is_pair=other is None or against is not None)
        return replace(compared, findings=find(compared))
    finally:
        a.catalog.source.close()
        b.catalog.source.close()


def _check(side: Side, tensors: Sequence[Tensor]) -> None:
    """Refuse a side that is incomplete, or a torch file with an object that would run code, before
    all the reading.
    """
    check_sources(side.catalog, tensors)
    if side.catalog.format in ("torch", "rank-files"):
        from ema_ckpt.ops.objects import unknown_objects

        unknown_objects(side.catalog, side.catalog.objects)


@dataclass(frozen=True, slots=True)
class _Resources:
    """Workers, whether they are copies of this process rather than threads, and the bytes of one
    buffer.
    """

    workers: int
    forked: bool
    block_nbytes: int

    @classmethod
    def fit(
        cls, nbytes: int, workers: int, max_memory: int | str | None, remote: bool
    ) -> _Resources:
        """What suits so many bytes; two buffers and as much scratch for each worker fit
        `max_memory`.

        Here fewer workers rather than shorter blocks, for blocks change the last digits; behind a
        URL shorter blocks.
        """
        budget = (
            (_REMOTE_BUDGET_NBYTES if remote else _BUDGET_NBYTES)
            if max_memory is None
            else parse_size(max_memory)
        )
        if budget < _MIN_BUDGET_NBYTES:
            raise UsageError("usage", f"--max-memory {max_memory}: expected 4MiB or more")
        if remote:
            return cls(
                workers,
                False,
                max(64 << 10, min(budget // (4 * workers), _REMOTE_BLOCK_NBYTES)) & ~4095,
            )
        workers = min(workers, budget // (4 * _BLOCK_NBYTES))
        return cls(
            workers, workers > 1 and nbytes >= _LEAST_FORKED_NBYTES and can_fork(), _BLOCK_NBYTES
        )


class _Pairs:
    """Streams all pairs through the workers and collects what each segment gave."""

    def __init__(
        self,
        a: Side,
        b: Side,
        pairing: Pairing,
        rtol: float,
        atol: float,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._a = a
        self._b = b
        self._pairing = pairing
        self._rtol = rtol
        self._atol = atol
        self._progress = progress
        self._parts: dict[str, list[PairStats]] = {name: [] for name, _, _ in pairing.pairs}
        self._lock = threading.Lock()

    def run(self, effort: _Resources) -> dict[str, PairStats]:
        """The sums of each pair, by name, in the order of the pairs."""
        make = partial(_Hand, effort.block_nbytes, self._rtol, self._atol)
        if not effort.forked or not self._run_forked(
            effort.workers, list(self._jobs(effort.block_nbytes)), make
        ):
            run_jobs(self._jobs(effort.block_nbytes), effort.workers, make)
        return {name: PairStats.total(parts) for name, parts in self._parts.items()}

    def _run_forked(
        self, workers: int, jobs: Sequence[Callable[[_Hand], None]], make: Callable[[], _Hand]
    ) -> bool:
        """The same by copies of this process; whether they succeeded."""
        progress, names = self._progress, list(self._parts)

        def work(numbers: Iterator[int], tell: Callable[[int], None]) -> bytes:
            self._progress, hand = tell, make()
            for number in numbers:
                jobs[number](hand)
            found = enumerate(self._parts.values())
            return b"".join(
                _PACKED.pack(place, *astuple(part)) for place, parts in found for part in parts
            )

        try:
            results = run_forked(work, len(jobs), workers, progress)
        finally:
            self._parts, self._progress = {name: [] for name in names}, progress
        for place, *numbers in (
            row for result in results or () for row in _PACKED.iter_unpack(result)
        ):
            self._parts[names[place]].append(PairStats(*numbers))
        return results is not None

    def _jobs(self, block_nbytes: int) -> Iterator[Callable[[_Hand], None]]:
        for name, a, b in self._pairing.pairs:
            if a.numel:
                take = partial(self._segment, name, cache(partial(self._located, a, b)))
                yield from band_jobs(
                    a.shape, max(a.dtype.itemsize, b.dtype.itemsize), block_nbytes, take
                )

    def _located(self, a: Tensor, b: Tensor) -> tuple[Stream, Stream]:
        return locate(self._a.catalog, a), locate(self._b.catalog, b)

    def _segment(
        self,
        name: str,
        located: Callable[[], tuple[Stream, Stream]],
        hand: _Hand,
        cutter: RowBlocks,
        first: int,
        stop: int,
    ) -> None:
        a, b = located()
        bands = hand.reader.read_bands
        blocks = zip(
            bands(0, a, cutter, first, stop), bands(1, b, cutter, first, stop), strict=True
        )
        parts = hand.comparer(a.tensor, b.tensor).compare(blocks, fast=a.tensor.numel >= FAST_NUMEL)
        (begin, _), (last, numel) = cutter.extent(first), cutter.extent(stop - 1)
        nbytes = (last + numel - begin) * (a.tensor.dtype.itemsize + b.tensor.dtype.itemsize)
        found = PairStats.total(parts)
        with self._lock:
            self._parts[name].append(found)
            if self._progress is not None:
                self._progress(nbytes)


class _Hand:
    """One worker's buffers."""

    def __init__(self, block_nbytes: int, rtol: float, atol: float) -> None:
        self.reader = StreamReader(block_nbytes)
        self._tolerance = (rtol, atol)
        self._comparers: dict[tuple[str, str], Comparer] = {}

    def comparer(self, a: Tensor, b: Tensor) -> Comparer:
        """The comparer of two element types."""
        key = (a.dtype.name, b.dtype.name)
        if key not in self._comparers:
            self._comparers[key] = Comparer(a.dtype, b.dtype, *self._tolerance)
        return self._comparers[key]


# From sums to numbers.


def result_of(compared: Compared) -> DiffResult:
    """What a comparison gave, as `diff` returns it."""
    a, b, pairing = compared.a, compared.b, compared.pairing
    total = compared.total
    return DiffResult(
        a=a.catalog.resolved,
        b=b.catalog.resolved,
        tree_a=a.tree.name,
        tree_b=b.tree.name,
        compared=len(pairing.pairs),
        identical=sum(not sums.unequal for sums in compared.sums.values()),
        only_in_a=pairing.only_in_a,
        only_in_b=pairing.only_in_b,
        mismatched=tuple(Mismatch(name, _shape(x), _shape(y)) for name, x, y in pairing.mismatched),
        tensors=tuple(_entry(name, x, y, compared.sums[name]) for name, x, y in pairing.pairs),
        summary=DiffSummary(total.rel_l2, total.largest, total.cosine, total.changed),
        findings=compared.findings,
    )


def _shape(tensor: Tensor) -> ShapeEntry:
    return ShapeEntry(tensor.shape, tensor.dtype.name)


def _entry(name: str, a: Tensor, b: Tensor, sums: PairStats) -> DiffTensor:
    numbers = a.numel * (2 if "complex" in (a.dtype.kind, b.dtype.kind) else 1)
    return DiffTensor(
        name=name,
        numel=a.numel,
        rel_l2=sums.rel_l2,
        max_abs=sums.largest,
        mean_abs=sums.absolute / numbers if numbers else 0.0,
        cosine=sums.cosine,
        changed=sums.changed,
        nan_a=sums.nan_a,
        nan_b=sums.nan_b,
        inf_a=sums.inf_a,
        inf_b=sums.inf_b,
    )
