"""What every writing verb does once it knows what goes where: check, stage, move, publish, report."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ema_ckpt.catalog import Catalog, Tensor, Warn
from ema_ckpt.coverage import prove
from ema_ckpt.errors import SourceError, UsageError, shown
from ema_ckpt.execute import MIN_BUDGET_NBYTES, Outcome, Settings, run
from ema_ckpt.files import is_url
from ema_ckpt.sizes import parse_size
from ema_ckpt.staging import check_target, stage
from ema_ckpt.target import Entry, Target

__all__ = [
    "TORCH_SUFFIXES",
    "Job",
    "WriteOptions",
    "check_sources",
    "payload_nbytes",
    "timer",
    "write",
    "write_options",
]

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

_LOCAL_BUDGET_NBYTES = 16 << 20
_REMOTE_BUDGET_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options that all writing verbs share, checked."""

    threads: int
    budget_nbytes: int | None
    dry_run: bool
    verify: bool
    fsync: bool
    overwrite: bool
    resume: bool
    progress: Callable[[int], None] | None = None


@dataclass(slots=True)
class Job:
    """A write that is laid out: from where, to where, what."""

    catalog: Catalog
    out: Path
    is_directory: bool
    target: Target
    keep_foreign: bool = False
    warnings: list[Warn] = field(default_factory=list)

    @property
    def sources(self) -> list[str]:
        """Local places that are read, which the target may not touch."""
        return [] if is_url(self.catalog.resolved) else [self.catalog.resolved]


def usable_cpus() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_options(
    *,
    threads: int | None = None,
    max_memory: int | str | None = None,
    dry_run: bool = False,
    no_verify: bool = False,
    no_fsync: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    progress: Callable[[int], None] | None = None,
) -> WriteOptions:
    """Check the shared options.

    Raises:
        UsageError: `usage` for less than one thread or 4 MiB of memory.
    """
    if threads is not None and threads < 1:
        raise UsageError("usage", f"--threads {threads}: expected 1 or more")
    budget = None if max_memory is None else parse_size(max_memory)
    if budget is not None and budget < MIN_BUDGET_NBYTES:
        raise UsageError("usage", f"--max-memory {max_memory}: expected 4MiB or more")
    workers = threads or min(usable_cpus(), 8)
    return WriteOptions(workers, budget, dry_run, not no_verify, not no_fsync, overwrite, resume, progress)


def payload_nbytes(entries: Iterable[Entry]) -> int:
    """Bytes of tensor data that will be written."""
    return sum(entry.nbytes for entry in entries)


def check_sources(catalog: Catalog, tensors: Iterable[Tensor]) -> None:
    """Prove that every tensor is covered, and that every file it needs is there and long enough.

    Raises:
        SourceError: `hole overlap out-of-bounds incomplete missing-file truncated-file`, naming tensor and file.
    """
    users: dict[str, list[str]] = {}
    for tensor in tensors:
        for index in prove(tensor):
            held = users.setdefault(tensor.chunks[index].file, [])
            if not held or held[-1] != tensor.name:
                held.append(tensor.name)
    for file, names in users.items():
        try:
            size = catalog.source.size(file)
        except SourceError as error:
            message = f"{error}; it holds {shown(names)}"
            raise type(error)(error.code, message, tensor=names[0], file=file) from None
        expected = catalog.files.get(file, 0)
        if size < expected:
            message = f"{file}: expected at least {expected} bytes, found {size}: the file is truncated"
            raise SourceError("truncated-file", f"{message}; it holds {shown(names)}", tensor=names[0], file=file)


def write(job: Job, options: WriteOptions) -> Outcome | None:
    """Stage the target, move its bytes, switch it in; with `dry_run` make every check and return None.

    Raises:
        EmaCkptError: whatever stops the work; nothing of it stays.
    """
    nbytes = sum(job.target.files.values())
    if options.dry_run:
        check_target(
            job.out,
            is_directory=job.is_directory,
            sources=job.sources,
            overwrite=options.overwrite,
            keep_foreign=job.keep_foreign,
            nbytes=nbytes,
        )
        return None
    with stage(
        job.out,
        is_directory=job.is_directory,
        sources=job.sources,
        overwrite=options.overwrite,
        keep_foreign=job.keep_foreign,
        nbytes=nbytes,
        fsync=options.fsync,
        resume=options.resume,
        identity=_identity(job),
    ) as staged:
        outcome = run(job.catalog, job.target, staged.path, _settings(job, options), staged.journal)
    job.warnings += staged.warnings
    job.warnings += [
        Warn("overflow", f"{count} finite values of {name!r} became infinite in the cast")
        for name, count in outcome.overflow.items()
    ]
    return outcome


def _settings(job: Job, options: WriteOptions) -> Settings:
    default = _REMOTE_BUDGET_NBYTES if is_url(job.catalog.source.root) else _LOCAL_BUDGET_NBYTES
    return Settings(options.threads, options.budget_nbytes or default, options.verify, options.progress)


def _identity(job: Job) -> dict[str, str]:
    """What is written from what: an interrupted run is continued only if both are the same."""
    return {"source": _source_identity(job.catalog), "plan": _plan_hash(job.target)}


def _source_identity(catalog: Catalog) -> str:
    known = hashlib.sha256()
    root = catalog.source.root
    for file in sorted(catalog.files):
        known.update(f"{file}\0{_stamp(root, file)}\0".encode("utf-8", "surrogatepass"))
    return known.hexdigest()


def _stamp(root: str, file: str) -> str:
    try:
        status = os.stat(os.path.join(root, file))
    except OSError:
        return "?"
    return f"{status.st_size} {status.st_mtime_ns}"


def _plan_hash(target: Target) -> str:
    known = hashlib.sha256()
    for piece in target.pieces:
        entry = piece.entry
        line = f"{entry.name}\0{entry.source.name}\0{entry.dtype.name}\0{piece.file}\0{piece.offset}\0{piece.box}\n"
        known.update(line.encode("utf-8", "surrogatepass"))
    return known.hexdigest()


def timer() -> Callable[[], float]:
    """Seconds since the call."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start
