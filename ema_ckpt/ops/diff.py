"""`diff`: compare two trees of weights, by default an EMA and its live weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from typing import NamedTuple

from ema_ckpt.analysis.compare import FAST_NUMEL, Comparer, PairStats
from ema_ckpt.core.catalog import Catalog, Diagnostic
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.limits import default_budget, parse_budget, parse_workers
from ema_ckpt.core.text import counted, shown
from ema_ckpt.ops.diff_findings import ComparedTrees, find_all
from ema_ckpt.ops.diff_pairing import Pairing, Side, open_sides, pair
from ema_ckpt.ops.object_plan import unknown_objects
from ema_ckpt.ops.results.diff import DiffResult, DiffSummary, DiffTensor, Mismatch, ShapeEntry
from ema_ckpt.ops.results.further_fields import with_fields
from ema_ckpt.ops.results.quantized import QuantizedEntry, described
from ema_ckpt.reading.box_reader import BoxReader, locate
from ema_ckpt.reading.checksum_verifier import ChecksumVerifier
from ema_ckpt.reading.overlaps import BlockRange, block_ranges
from ema_ckpt.reading.unchanged import unchanged
from ema_ckpt.runtime import executor
from ema_ckpt.runtime.executor import Workers, dump_json
from ema_ckpt.storage.files import is_url
from ema_ckpt.writing.preflight import check_sources

# Stays in the second-level cache with the differences. Threads would be faster with longer ones,
# but sums in float32 depend on where blocks end, and the numbers should not depend on who works.
_BLOCK_NBYTES = 256 << 10
_REMOTE_BLOCK_NBYTES = 8 << 20
# Of one worker; its time in the interpreter is that of numpy's calls.
_SECONDS_PER_BYTE, _LOCKED_SECONDS_PER_BYTE = 0.25e-9, 0.1e-9


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
        threads: maximum number of workers; by default the usable processors, at most 8.
        max_memory: bytes of memory for buffers.
        progress: called with the bytes read of both sides since the last call. If it has a method
            `expect`, that is called first, with the bytes to come.

    Raises:
        EmaCkptError: `ambiguous-tree unknown-tree usage`, `target-is-source` for a page in the
            place of what is compared, and whatever keeps a side from being read.
    """
    if not (0 <= rtol < math.inf and 0 <= atol < math.inf):
        raise UsageError("usage", f"--rtol {rtol} --atol {atol}: expected 0 or more")
    workers, budget = parse_workers(threads), parse_budget(max_memory)
    a, b = open_sides(path, other, tree, against, workers)
    try:
        if html is not None:
            from ema_ckpt.ops.diff_html import check_page

            check_page(html, (a.catalog, b.catalog))
        remote = any(is_url(side.catalog.source.root) for side in (a, b))
        pairing = pair(a.tree, b.tree)
        nbytes = sum(x.nbytes + y.nbytes for _, x, y in pairing.pairs)
        pool, block_nbytes = fit_workers(nbytes, workers, budget or default_budget(remote), remote)
        check_sources(a.catalog, (x for _, x, _ in pairing.pairs))
        unknown_objects(a.catalog)  # refuses a torch file that would run code
        check_sources(b.catalog, (y for _, _, y in pairing.pairs))
        unknown_objects(b.catalog)
        comparison = _Comparison(a, b, pairing, (rtol, atol), block_nbytes)
        executor.expect(progress, nbytes)
        with unchanged(a.catalog), unchanged(b.catalog):
            executor.run(comparison, [comparison.jobs()], pool, progress)
            statistics = comparison.statistics()
        is_pair = other is None or against is not None
        result = _result(ComparedTrees(a, b, pairing, statistics, is_pair))
        if html is not None:
            from ema_ckpt.ops.diff_html import write_page

            write_page(html, result, a, b, pairing)
        return result
    finally:
        a.catalog.source.close()
        b.catalog.source.close()


def fit_workers(nbytes: int, threads: int, budget: int, remote: bool) -> tuple[Workers, int]:
    """Choose workers, and the bytes of one buffer, for a comparison of `nbytes` bytes."""
    # Two buffers and as much scratch for each worker fit the budget. Behind a URL blocks become
    # shorter; elsewhere fewer workers, because block length changes the rounding in float32.
    if remote:
        block_nbytes = min(budget // (4 * threads), _REMOTE_BLOCK_NBYTES)
        return Workers(threads), max(64 << 10, block_nbytes) & ~4095
    import numpy  # noqa: F401 - before children are forked, which share it

    most = max(min(threads, budget // (4 * _BLOCK_NBYTES)), 1)
    free_seconds, locked_seconds = nbytes * _SECONDS_PER_BYTE, nbytes * _LOCKED_SECONDS_PER_BYTE
    return Workers.fit(most, free_seconds, locked_seconds), _BLOCK_NBYTES


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
        self.verifier_a = ChecksumVerifier(a.catalog.source, enabled=True)
        self.verifier_b = ChecksumVerifier(b.catalog.source, enabled=True)
        self._parts: dict[int, list[PairStats]] = {}

    def jobs(self) -> Iterator[_CompareBlocks]:
        """Cut all pairs into jobs."""
        for index, (_, a, b) in enumerate(self.pairs):
            if a.numel:
                sizes = a.dtype.itemsize, b.dtype.itemsize
                for blocks in block_ranges(a.shape, max(sizes), self.block_nbytes):
                    yield _CompareBlocks(index, sum(sizes), blocks)

    def statistics(self) -> dict[str, PairStats]:
        """Return the statistics of each pair, by name, in the order of the pairs.

        Raises:
            SourceError: `checksum` if what was read is not what is stored.
        """
        self.verifier_a.finish()
        self.verifier_b.finish()
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
        stats: list[list[object]] = []
        for index, parts in self._parts.items():
            stats += [[index, *astuple(part)] for part in parts]
        return dump_json([stats, self.verifier_a.dump(), self.verifier_b.dump()])

    def merge(self, dumped: bytes) -> None:
        stats, read_of_a, read_of_b = json.loads(dumped)
        for index, *numbers in stats:
            self.add(index, PairStats(*numbers))
        self.verifier_a.merge(read_of_a)
        self.verifier_b.merge(read_of_b)

    def reset(self) -> None:
        self._parts.clear()
        self.verifier_a.reset()
        self.verifier_b.reset()


class _CompareWorker:
    """One worker's buffers."""

    def __init__(self, comparison: _Comparison) -> None:
        self._comparison = comparison
        self._reader_a = BoxReader(comparison.block_nbytes, comparison.verifier_a)
        self._reader_b = BoxReader(comparison.block_nbytes, comparison.verifier_b)
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


# From statistics to the result.


def _warnings(a: Catalog, b: Catalog) -> Iterator[Diagnostic]:
    """Yield what is odd about both checkpoints; of two, each warning names its checkpoint."""
    if a.resolved == b.resolved:
        yield from a.warnings
        return
    for catalog in (a, b):
        for warning in catalog.warnings:
            yield replace(warning, message=f"{catalog.resolved}: {warning.message}")


def _bare_codes(compared: ComparedTrees) -> Iterator[Diagnostic]:
    """Warn of parts of quantised weights that were compared as they are stored, with the reason."""
    pairs = compared.pairing.pairs
    for side, tensors in (
        (compared.a, [tensor for _, tensor, _ in pairs]),
        (compared.b, [tensor for _, _, tensor in pairs]),
    ):
        bare = [tensor.name for tensor in tensors if tensor.name in side.refused]
        if bare:
            count = counted(len(bare), "stored part")
            why = f"{bare[0]!r}: {side.refused[bare[0]].message}"
            message = f"{count} of quantised weights compared as plain numbers, not as the values "
            message += f"of the weights: {shown(bare)} ({why})"
            yield Diagnostic("bare-codes", f"{side.catalog.resolved}: {message}")


def _compared_values(side: Side) -> tuple[QuantizedEntry, ...] | None:
    """Describe the quantised weights of a side's tree, which were compared as values."""
    names = {tensor.name for tensor in side.tree.weights.values()}
    return described([weight for weight in side.quantized if weight.name in names])


def _result(compared: ComparedTrees) -> DiffResult:
    a, b, pairing = compared.a, compared.b, compared.pairing
    total = PairStats.total(list(compared.stats.values()))
    tensors = []
    identical = same_bits = 0
    for name, x, y in pairing.pairs:
        stats = compared.stats[name]
        identical += not stats.unequal
        same_bits += stats.same_bits and x.dtype == y.dtype
        numbers = x.numel * (2 if "complex" in (x.dtype.kind, y.dtype.kind) else 1)
        tensor = DiffTensor(
            name=name,
            numel=x.numel,
            rel_l2=stats.rel_l2,
            max_abs=stats.largest,
            mean_abs=stats.absolute / numbers if numbers else 0.0,
            cosine=stats.cosine,
            changed=stats.changed,
            nan_a=stats.nan_a,
            nan_b=stats.nan_b,
            inf_a=stats.inf_a,
            inf_b=stats.inf_b,
        )
        tensors.append(tensor)
    result = DiffResult(
        a=a.catalog.path,
        b=b.catalog.path,
        resolved_a=a.catalog.resolved,
        resolved_b=b.catalog.resolved,
        warnings=tuple(dict.fromkeys([*_warnings(a.catalog, b.catalog), *_bare_codes(compared)])),
        tree_a=a.tree.name,
        tree_b=b.tree.name,
        compared=len(pairing.pairs),
        identical=identical,
        only_in_a=pairing.only_in_a,
        only_in_b=pairing.only_in_b,
        mismatched=tuple(
            Mismatch(name, ShapeEntry(x.shape, x.dtype.name), ShapeEntry(y.shape, y.dtype.name))
            for name, x, y in pairing.mismatched
        ),
        tensors=tuple(tensors),
        summary=DiffSummary(total.rel_l2, total.largest, total.cosine, total.changed),
        findings=find_all(compared),
    )
    result = with_fields(
        result,
        same_bits=None if same_bits == identical else same_bits,
        dequantized_a=_compared_values(a),
        dequantized_b=_compared_values(b),
    )
    object.__setattr__(result, "pair_stats", compared.stats)  # the class is frozen
    return result
