"""What every writing verb does once it knows what goes where: check, stage, move, publish,
report.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypedDict

from ema_ckpt.comm.launched import Meeting, current
from ema_ckpt.core.catalog import Catalog, Diagnostic
from ema_ckpt.core.errors import SourceError, TargetError, UsageError, counted, shown
from ema_ckpt.core.text import parse_size
from ema_ckpt.core.write_plan import OutputTensor, WriteItem, WritePlan
from ema_ckpt.runtime.thread_pool import worker_count
from ema_ckpt.state_dicts.selection import Options, options
from ema_ckpt.storage.files import is_url, local_path
from ema_ckpt.writing.engine import run
from ema_ckpt.writing.journal import Journal
from ema_ckpt.writing.preflight import resolve_target
from ema_ckpt.writing.run_state import Outcome
from ema_ckpt.writing.schedule import MIN_BUDGET_NBYTES, Settings
from ema_ckpt.writing.staging import check_target, stage

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

# Without --resume a run this short is done anew rather than continued. Deleting a journal that has
# reached the disk costs tenths of a second where the file system discards freed blocks at once and
# the disk is busy.
_JOURNAL_AFTER_SECONDS = 10.0
_LOCAL_BUDGET_NBYTES = 16 << 20
_REMOTE_BUDGET_NBYTES = 256 << 20


class WriterArgs(TypedDict, total=False):
    """Keyword arguments of every writing verb: the options of the command line, by the same names.

    Attributes:
        match, exclude, keep_dtype: globs on names as they are written. rename: `OLD=NEW` prefixes,
            or a mapping.
        dtype: `keep`, `fp32`, `bf16` or `fp16`, for floating-point tensors of live and EMA trees.
        threads: workers; by default the usable processors, at most 8.
        max_memory: bytes of buffers in flight, a number or `16MiB`.
        dry_run: make every check, write nothing. no_verify: do not compare checksums stored in the
            source.
        no_fsync: do not wait for the disk. overwrite: replace a checkpoint at the target.
        resume: continue a killed run. strict: fail if anything would be left out.
        expand_ties: write tied weights under every name. keep_prefixes: keep wrapper prefixes of
            names.
        progress: is told the bytes of each finished range; less than none where they will be
            written anew.
    """

    match: Sequence[str]
    exclude: Sequence[str]
    rename: Sequence[str] | Mapping[str, str]
    dtype: str
    keep_dtype: Sequence[str]
    threads: int | None
    max_memory: int | str | None
    dry_run: bool
    no_verify: bool
    no_fsync: bool
    overwrite: bool
    resume: bool
    strict: bool
    expand_ties: bool
    keep_prefixes: bool
    progress: Callable[[int], None] | None


class Request(NamedTuple):
    """The arguments of a writing verb, checked. `budget_nbytes` None: what suits the source."""

    selection: Options
    threads: int
    budget_nbytes: int | None
    dry_run: bool
    verify: bool
    fsync: bool
    overwrite: bool
    resume: bool
    strict: bool
    expand_ties: bool
    progress: Callable[[int], None] | None


@dataclass(slots=True)
class Job:
    """A write that is laid out: from where, to where, what. `beside` are further local places that
    are read.
    """

    catalog: Catalog
    out: Path
    is_directory: bool
    target: WritePlan
    keep_foreign: bool = False
    warnings: list[Diagnostic] = field(default_factory=list)
    beside: Sequence[str] = ()

    @property
    def sources(self) -> list[str]:
        """Local places that are read, which the target may not touch."""
        read = local_path(self.catalog.resolved)
        return [*([] if read is None else [read]), *self.beside]


def request_of(args: WriterArgs) -> Request:
    """Check the arguments of a writing verb.

    Raises:
        UsageError: `usage` for less than one thread or 4 MiB of memory, an unknown dtype, a
            malformed rename.
        TypeError: for an argument that there is not.
    """
    unknown = args.keys() - WriterArgs.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")
    threads, max_memory = args.get("threads"), args.get("max_memory")
    if threads is not None and threads < 1:
        raise UsageError("usage", f"--threads {threads}: expected 1 or more")
    budget = None if max_memory is None else parse_size(max_memory)
    if budget is not None and budget < MIN_BUDGET_NBYTES:
        raise UsageError("usage", f"--max-memory {max_memory}: expected 4MiB or more")
    return Request(
        selection=options(
            match=args.get("match", ()),
            exclude=args.get("exclude", ()),
            rename=args.get("rename", ()),
            dtype=args.get("dtype", "keep"),
            keep_dtype=args.get("keep_dtype", ()),
            keep_prefixes=args.get("keep_prefixes", False),
        ),
        threads=worker_count(threads),
        budget_nbytes=budget,
        dry_run=args.get("dry_run", False),
        verify=not args.get("no_verify", False),
        fsync=not args.get("no_fsync", False),
        overwrite=args.get("overwrite", False),
        resume=args.get("resume", False),
        strict=args.get("strict", False),
        expand_ties=args.get("expand_ties", False),
        progress=args.get("progress"),
    )


def destination_of(out: str | os.PathLike[str]) -> Path:
    """The path of a target as it was given.

    Raises:
        UsageError: `usage` where nothing can be written: URLs, `/`, the current directory, mount
            points.
    """
    resolve_target(out)  # before a Path takes a slash from a URL
    return Path(out)


def payload_nbytes(parts: Iterable[OutputTensor | WriteItem]) -> int:
    """Bytes of tensor data that will be written: of whole entries, or of the pieces of a target."""
    return sum(part.nbytes for part in parts)


def write(job: Job, request: Request) -> Outcome | None:
    """Stage the target, move its bytes, switch it in; with `dry_run` make every check and return
    None.

    Raises:
        EmaCkptError: whatever stops the work; nothing of it stays.
    """
    nbytes = sum(job.target.files.values())
    if request.dry_run:
        check_target(
            job.out,
            is_directory=job.is_directory,
            sources=job.sources,
            overwrite=request.overwrite,
            keep_foreign=job.keep_foreign,
            nbytes=nbytes,
        )
        return None
    stamps = _stamps(job.catalog)
    crew = current()
    if crew is not None and crew.rank:
        _take_part(job, request, stamps, crew)
        return None
    with stage(
        job.out,
        is_directory=job.is_directory,
        sources=job.sources,
        overwrite=request.overwrite,
        keep_foreign=job.keep_foreign,
        nbytes=nbytes,
        fsync=request.fsync,
        resume=request.resume,
        identity=_identity(job, stamps),
        journal_after=_JOURNAL_AFTER_SECONDS if crew is None else 0.0,
    ) as staged:
        if crew is not None:
            crew.exchange((_identity(job, stamps), str(staged.path)))
            crew.exchange("the journal is open")
        outcome = run(
            job.catalog, job.target, staged.path, _settings(job, request), staged.journal, crew
        )
        _refuse_changed(job.catalog, stamps)
    job.warnings += staged.warnings
    if outcome is not None:
        job.warnings += _overflows(job, outcome)
    return outcome


def _take_part(job: Job, request: Request, stamps: Mapping[str, str], crew: Meeting) -> None:
    """Write this process' share into the stage that the first one made."""
    identity = _identity(job, stamps)
    (expected, place), *_ = crew.exchange((identity, None))
    if identity != expected:
        message = f"{job.catalog.resolved}: not the same to all processes (is it on a file system that all share?)"
        raise SourceError("source-changed", message)
    payload = Path(place)
    if not payload.parent.exists():
        message = f"{payload.parent}: made by the first process, not there for this one; all must share the file system"
        raise TargetError("not-found", message, file=place)
    with contextlib.closing(Journal(payload.parent, payload, identity)) as journal:
        # No line is written before everybody has read what an interrupted run left.
        crew.exchange("the journal is open")
        run(job.catalog, job.target, payload, _settings(job, request), journal, crew)


def _overflows(job: Job, outcome: Outcome) -> Iterable[Diagnostic]:
    names = (
        dict.fromkeys(piece.output.name for piece in job.target.items) if outcome.overflow else {}
    )
    for name in names:  # workers end in any order, the warnings stand in that of the tensors
        if name in outcome.overflow:
            values = counted(outcome.overflow[name], "finite value")
            yield Diagnostic(
                "overflow", f"{values} of {name!r} became infinite in the cast; keep its dtype"
            )


def _settings(job: Job, request: Request) -> Settings:
    default = _REMOTE_BUDGET_NBYTES if is_url(job.catalog.source.root) else _LOCAL_BUDGET_NBYTES
    budget = request.budget_nbytes or default
    return Settings(
        request.threads, budget, request.verify, request.progress, durable=request.fsync
    )


def _identity(job: Job, stamps: Mapping[str, str]) -> dict[str, str]:
    """What is written from what: an interrupted run is continued only if both are the same."""
    source = hashlib.sha256()
    for file, stamp in stamps.items():
        source.update(f"{file}\0{stamp}\0".encode("utf-8", "surrogatepass"))
    return {"source": source.hexdigest(), "plan": _plan_hash(job.target)}


def _stamps(catalog: Catalog) -> dict[str, str]:
    """Size and time of change of every file of the source."""
    return {file: _stamp(catalog.source.root, file) for file in sorted(catalog.files)}


def _refuse_changed(catalog: Catalog, before: Mapping[str, str]) -> None:
    changed = [file for file, stamp in _stamps(catalog).items() if stamp != before[file]]
    if changed:
        message = f"{catalog.resolved}: {shown(changed)} changed while being read; let the writer finish and try again"
        raise SourceError("source-changed", message, file=changed[0])


def _stamp(root: str, file: str) -> str:
    try:
        status = os.stat(os.path.join(root, file))
    except OSError:
        return "?"
    return f"{status.st_size} {status.st_mtime_ns}"


def _plan_hash(target: WritePlan) -> str:
    known = hashlib.sha256()
    for piece in target.items:
        entry = piece.output
        line = f"{entry.name}\0{entry.source.name}\0{entry.dtype.name}\0{piece.file}\0{piece.offset}\0{piece.box}\n"
        known.update(line.encode("utf-8", "surrogatepass"))
    return known.hexdigest()


def timer() -> Callable[[], float]:
    """Seconds since the call."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start
