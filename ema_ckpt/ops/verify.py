"""`verify`: is every element there once, every file with its size, every byte as it was written?"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import NamedTuple

from ema_ckpt.analysis.audit import Audit, audit_checkpoint
from ema_ckpt.analysis.value_scan import ABSURD, Scanner, ValueCounts, has_values
from ema_ckpt.core.catalog import Catalog, Diagnostic, Problem, Tensor
from ema_ckpt.core.errors import EmaCkptError, SourceError
from ema_ckpt.core.names import TORCH_SUFFIXES
from ema_ckpt.core.text import counted
from ema_ckpt.discovery.locate import locate_checkpoint
from ema_ckpt.discovery.location import PARTS, SAFETENSORS, TORCH, Location
from ema_ckpt.discovery.opening import open_location
from ema_ckpt.ops.results import VerifyResult
from ema_ckpt.ops.verify_against import compare_with
from ema_ckpt.reading.box_reader import BoxReader, LocatedBox, locate
from ema_ckpt.reading.overlaps import BlockRange, block_ranges
from ema_ckpt.runtime import executor
from ema_ckpt.runtime.executor import Workers, dump_json
from ema_ckpt.storage.directories import join, list_folder
from ema_ckpt.storage.files import is_url
from ema_ckpt.writing.options import parse_workers

# Opening fails with these where there is no checkpoint to judge, or none that can be judged.
_TROUBLE = frozenset(
    {
        "not-found",
        "not-a-checkpoint",
        "usage",
        "ambiguous-path",
        "ambiguous-tree",
        "missing-extra",
        "unsupported",
    }
)
_BLOCK_NBYTES = 512 << 10


def verify(
    path: str | os.PathLike[str],
    values: bool = False,
    against: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyResult:
    """Check structure, sizes, coverage and every stored checksum of a checkpoint.

    Nothing is repaired, and nothing stops at the first problem.

    Args:
        path: a checkpoint, a directory that holds one, or an fsspec URL of either.
        values: also look for NaN, infinities, tensors of nothing but zeros and absurd magnitudes.
        against: the checkpoint that this one was made from: each tensor's digest must be equal
            there.
        progress: is told the bytes of each part that was read.

    Raises:
        EmaCkptError: if at `path` there is nothing, no checkpoint, one of a kind that is not
            supported, or one that the system does not let us read; or if `against` cannot be
            opened. Damage is a result, and metadata of `path` that is missing, unreadable or
            hostile is damage.
    """
    workers = parse_workers(threads)
    report = _Report()
    for catalog, is_whole in _opened(os.fspath(path), report):
        try:
            audit = audit_checkpoint(catalog, workers, progress)
            report.warnings += [w for w in catalog.warnings if w.code not in _REPORTED]
            report.warnings += _stale(catalog)
            if values:
                _scan(audit, workers)
            if against is not None and is_whole:
                compare_with(audit, against)
            report.take(audit)
        finally:
            catalog.source.close()
    return report.result()


# Said better by the audit.
_REPORTED = frozenset({"missing-file", "truncated-file", "unsafe-pickle"})


class _Report:
    """What came out so far."""

    def __init__(self) -> None:
        self.problems: dict[Problem, None] = {}
        self.warnings: list[Diagnostic] = []
        self.checked = 0
        self.unchecked = 0

    def error(self, error: EmaCkptError) -> None:
        self.problems[Problem(error.code, error.tensor, error.file, str(error))] = None

    def take(self, audit: Audit) -> None:
        self.problems |= audit.problems
        self.warnings += audit.warnings
        self.checked += sum(audit.checked.values())
        self.unchecked += sum(audit.unchecked.values())

    def result(self) -> VerifyResult:
        status = "damaged" if self.problems else "unproven" if self.unchecked else "sound"
        problems = tuple(self.problems)
        warnings = self.warnings
        if self.unchecked:
            message = f"{counted(self.unchecked, 'byte')} of payload without a checksum may be damaged without a trace"
            warnings = [*warnings, Diagnostic("unchecked", message)]
        return VerifyResult(
            status, self.checked, self.unchecked, problems, tuple(dict.fromkeys(warnings))
        )


# Opening, as much of it as there is.


def _opened(path: str, report: _Report) -> Iterator[tuple[Catalog, bool]]:
    """The checkpoint and True, or those of its parts, shards and files that can still be opened and
    False.
    """
    try:
        found = locate_checkpoint(path)
    except EmaCkptError as error:
        _refuse_trouble(error)
        report.error(error)
        return
    for catalog in _open_pieces(found, path, report):
        yield catalog, catalog.resolved == found.resolved and not report.problems


def _open_pieces(found: Location, path: str, report: _Report) -> Iterator[Catalog]:
    try:
        catalog = open_location(found, path, lenient=True)
    except EmaCkptError as error:
        _refuse_trouble(error)
        report.error(error)
        for piece in _pieces(found):
            yield from _open_pieces(piece, path, report)
        return
    yield catalog


def _refuse_trouble(error: EmaCkptError) -> None:
    """Raise what says nothing of damage: a wrong path, a form that is not read here, a refusal by
    the system.
    """
    by_system = error.code == "unreadable" and isinstance(error.__context__, OSError)
    if error.code in _TROUBLE or by_system:
        raise error


def _pieces(found: Location) -> list[Location]:
    """What can be opened by itself when the whole cannot: parts, or the files beside an index."""
    if found.format == PARTS:
        return [part for _, part in found.parts]
    if found.format in (SAFETENSORS, TORCH) and found.names[0].endswith(".index.json"):
        suffixes = (".safetensors",) if found.format == SAFETENSORS else TORCH_SUFFIXES
        shards = [name for name in list_folder(found.root).files if name.endswith(suffixes)]
        return [
            Location(found.format, found.root, (name,), join(found.root, name)) for name in shards
        ]
    return []


# Files that belong to nothing.


def _stale(catalog: Catalog) -> Iterator[Diagnostic]:
    """Data files beside those of the checkpoint that it does not name: what an earlier, larger save
    left behind.
    """
    if is_url(catalog.resolved) or not os.path.isdir(catalog.resolved):
        return
    folders = dict.fromkeys(
        file.rpartition("/")[0] for file in catalog.files if file.endswith(_STALE_SUFFIXES)
    )
    for folder in folders:
        prefix = f"{folder}/" if folder else ""
        root = join(catalog.source.root, folder) if folder else catalog.source.root
        suffixes = {os.path.splitext(f)[1] for f in catalog.files if f.rpartition("/")[0] == folder}
        for name in list_folder(root).files:
            file = prefix + name
            if file in catalog.files or not name.endswith(tuple(suffixes & set(_STALE_SUFFIXES))):
                continue
            if os.path.getsize(join(root, name)):  # idle ranks leave empty files
                message = f"{file}: the checkpoint does not use it; left by an earlier save? It can be removed"
                yield Diagnostic("stale-file", message)


_STALE_SUFFIXES = (".distcp", ".safetensors")


# Values.


class _ScanBlocks(NamedTuple):
    """Look at the values of blocks of a tensor."""

    located: LocatedBox
    range: BlockRange

    @property
    def nbytes(self) -> int:
        return self.range.numel * self.located.tensor.dtype.itemsize


class _ValueScan:
    """The work of looking at every value of every tensor that can be read."""

    def __init__(self, audit: Audit) -> None:
        self.seen: dict[str, ValueCounts] = {}
        self._audit = audit
        self._lock = threading.Lock()

    def jobs(self) -> Iterator[_ScanBlocks]:
        """Cut all tensors into jobs; report those whose bytes cannot be located."""
        for tensor in self._audit.catalog.tensors:
            located = _readable(self._audit, tensor)
            if located is not None:
                for blocks in block_ranges(tensor.shape, tensor.dtype.itemsize, _BLOCK_NBYTES):
                    yield _ScanBlocks(located, blocks)

    def add(self, name: str, part: ValueCounts) -> None:
        """Add what was seen of a part of a tensor; may be called by several threads."""
        with self._lock:
            self.seen.setdefault(name, ValueCounts()).add(part)

    def start_worker(self) -> Callable[[_ScanBlocks], int]:
        reader = BoxReader(_BLOCK_NBYTES)

        def scan(job: _ScanBlocks) -> int:
            tensor = job.located.tensor
            scanner, part = Scanner(tensor.dtype), ValueCounts()
            for block in reader.blocks(job.located, *job.range):
                part.add(scanner.scan(block))
            self.add(tensor.name, part)
            return job.nbytes

        return scan

    def dump(self) -> bytes:
        return dump_json([[name, *astuple(seen)] for name, seen in self.seen.items()])

    def merge(self, dumped: bytes) -> None:
        for name, *numbers in json.loads(dumped):
            self.add(name, ValueCounts(*numbers))

    def reset(self) -> None:
        self.seen.clear()


def _scan(audit: Audit, threads: int) -> None:
    scan = _ValueScan(audit)
    executor.run(scan, [scan.jobs()], Workers(threads))
    for tensor in audit.catalog.tensors:
        if tensor.name in scan.seen:
            _judge(audit, tensor, scan.seen[tensor.name])


def _readable(audit: Audit, tensor: Tensor) -> LocatedBox | None:
    payloads = audit.payloads_of(tensor)
    if not tensor.numel or not has_values(tensor.dtype) or payloads is None:
        return None
    try:
        return locate(audit.catalog, tensor, payloads)
    except SourceError as error:
        audit.error(error)
        return None


def _judge(audit: Audit, tensor: Tensor, seen: ValueCounts) -> None:
    file = tensor.chunks[0].file if tensor.chunks else None
    if seen.nan or seen.inf:
        what = f"{seen.nan} NaN and {seen.inf} infinite of {counted(tensor.numel, 'value')}"
        audit.report("non-finite", f"tensor {tensor.name!r}: {what}", tensor.name, file)
    elif seen.largest == 0 and tensor.numel > 1:
        audit.warnings.append(
            Diagnostic(
                "all-zero", f"tensor {tensor.name!r}: all of its {tensor.numel} values are zero"
            )
        )
    if seen.largest >= ABSURD:
        message = f"tensor {tensor.name!r}: magnitudes up to {seen.largest:.3g} are no weights"
        audit.warnings.append(Diagnostic("overflow", message))
