"""`diff`: how two trees of weights differ, tensor by tensor; by default an EMA and its live
weights.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from typing import NamedTuple

from ema_ckpt.analysis.compare import FAST_NUMEL, Comparer, PairStats
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.errors import UsageError
from ema_ckpt.ops.diff_findings import Compared, find
from ema_ckpt.ops.diff_pairing import Pairing, Side, open_sides, pair
from ema_ckpt.ops.objects import unknown_objects
from ema_ckpt.ops.results import DiffResult, DiffSummary, DiffTensor, Mismatch, ShapeEntry
from ema_ckpt.reading.box_reader import BoxReader, locate
from ema_ckpt.reading.overlaps import BlockRange, block_ranges
from ema_ckpt.runtime import executor
from ema_ckpt.runtime.executor import Workers, dump_json
from ema_ckpt.storage.files import is_url
from ema_ckpt.writing.options import default_budget, parse_budget, parse_workers
from ema_ckpt.writing.preflight import check_sources

# Stays in the second-level cache with the differences. Threads would be faster with longer ones,
# but sums in float32 depend on where blocks end, and the numbers should not depend on who works.
_BLOCK_NBYTES = 256 << 10
_REMOTE_BLOCK_NBYTES = 8 << 20


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
        max_memory: bytes of buffers in flight. progress: called with the bytes that were read of
            both sides since the last call.

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
    workers, budget = parse_workers(threads), parse_budget(max_memory)
    a, b = open_sides(path, other, tree, against)
    try:
        if html is not None:
            from ema_ckpt.ops.diff_html import check_page

            check_page(html, (a.catalog, b.catalog))
        remote = any(is_url(side.catalog.source.root) for side in (a, b))
        pairing = pair(a.tree, b.tree)
        nbytes = sum(x.nbytes + y.nbytes for _, x, y in pairing.pairs)
        pool, block_nbytes = _resources(nbytes, workers, budget or default_budget(remote), remote)
        _check(a, [x for _, x, _ in pairing.pairs])
        _check(b, [y for _, _, y in pairing.pairs])
        comparison = _Comparison(a, b, pairing, (rtol, atol), block_nbytes)
        executor.run(comparison, [comparison.jobs()], pool, progress)
        compared = Compared(
            a, b, pairing, comparison.statistics(), is_pair=other is None or against is not None
        )
        return replace(compared, findings=find(compared))
    finally:
        a.catalog.source.close()
        b.catalog.source.close()


def _check(side: Side, tensors: Sequence[Tensor]) -> None:
    """Refuse a side that is incomplete, or a torch file with an object that would run code, before
    all the reading.
    """
    check_sources(side.catalog, tensors)
    unknown_objects(side.catalog)


def _resources(nbytes: int, threads: int, budget: int, remote: bool) -> tuple[Workers, int]:
    """Choose workers, and the bytes of one buffer, for a comparison of `nbytes` bytes."""
    # Two buffers and as much scratch for each worker fit the budget. Behind a URL blocks become
    # shorter; elsewhere fewer workers, because block length changes the rounding in float32.
    if remote:
        block_nbytes = min(budget // (4 * threads), _REMOTE_BLOCK_NBYTES)
        return Workers(threads), max(64 << 10, block_nbytes) & ~4095
    threads = min(threads, budget // (4 * _BLOCK_NBYTES))
    return Workers.fit(threads, nbytes, budget, 4 * _BLOCK_NBYTES), _BLOCK_NBYTES


class _CompareBlocks(NamedTuple):
    """Compare blocks of the pair with that index; `itemsize` is that of both elements together."""

    pair: int
    itemsize: int
    range: BlockRange

    @property
    def nbytes(self) -> int:
        return self.range.numel * self.itemsize


class _Comparison:
    """The work of comparing pairs of tensors: statistics of parts of each pair."""

    def __init__(
        self, a: Side, b: Side, pairing: Pairing, tolerance: tuple[float, float], block_nbytes: int
    ) -> None:
        self.a = a
        self.b = b
        self.pairs = pairing.pairs
        self.tolerance = tolerance
        self.block_nbytes = block_nbytes
        self._parts: dict[int, list[PairStats]] = {}

    def jobs(self) -> Iterator[_CompareBlocks]:
        """Cut all pairs into jobs."""
        for index, (_, a, b) in enumerate(self.pairs):
            if a.numel:
                sizes = a.dtype.itemsize, b.dtype.itemsize
                for blocks in block_ranges(a.shape, max(sizes), self.block_nbytes):
                    yield _CompareBlocks(index, sum(sizes), blocks)

    def statistics(self) -> dict[str, PairStats]:
        """Return the statistics of each pair, by name, in the order of the pairs."""
        return {
            name: PairStats.total(self._parts.get(index, ()))
            for index, (name, _, _) in enumerate(self.pairs)
        }

    def add(self, index: int, stats: PairStats) -> None:
        """Add the statistics of a part of a pair; may be called by several threads."""
        self._parts.setdefault(index, []).append(stats)

    def start_worker(self) -> Callable[[_CompareBlocks], int]:
        return _CompareWorker(self).compare

    def dump(self) -> bytes:
        return dump_json(
            [[index, *astuple(part)] for index, parts in self._parts.items() for part in parts]
        )

    def merge(self, dumped: bytes) -> None:
        for index, *numbers in json.loads(dumped):
            self.add(index, PairStats(*numbers))

    def reset(self) -> None:
        self._parts.clear()


class _CompareWorker:
    """One worker's buffers."""

    def __init__(self, comparison: _Comparison) -> None:
        self._comparison = comparison
        self._reader_a = BoxReader(comparison.block_nbytes)
        self._reader_b = BoxReader(comparison.block_nbytes)
        self._comparers: dict[tuple[str, str], Comparer] = {}
        self._pair = -1

    def compare(self, job: _CompareBlocks) -> int:
        """Compare the blocks of one job; return their bytes."""
        comparison = self._comparison
        if job.pair != self._pair:
            _, x, y = comparison.pairs[job.pair]
            self._a, self._b = locate(comparison.a.catalog, x), locate(comparison.b.catalog, y)
            self._pair = job.pair
        a, b = self._a, self._b
        key = (a.tensor.dtype.name, b.tensor.dtype.name)
        if key not in self._comparers:
            self._comparers[key] = Comparer(a.tensor.dtype, b.tensor.dtype, *comparison.tolerance)
        blocks_a = self._reader_a.blocks(a, *job.range)
        blocks_b = self._reader_b.blocks(b, *job.range)
        blocks = zip(blocks_a, blocks_b, strict=True)
        parts = self._comparers[key].compare(blocks, fast=a.tensor.numel >= FAST_NUMEL)
        comparison.add(job.pair, PairStats.total(parts))
        return job.nbytes


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
