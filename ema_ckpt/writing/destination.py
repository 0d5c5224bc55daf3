"""Where output goes: a path of this machine, or a place behind an fsspec URL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from ema_ckpt.core.catalog import Diagnostic
from ema_ckpt.writing.journal import Journal
from ema_ckpt.writing.options import WriteOptions
from ema_ckpt.writing.output_files import OutputFiles, Outputs
from ema_ckpt.writing.staging import check_target, stage


class WriteRequest(NamedTuple):
    """What is to be written.

    Attributes:
        files: bytes of every file, by name in the directory (`""` for a single file).
        marker: the one that makes the others a checkpoint.
        sources: what is read, which the destination may not touch.
        keep_foreign: other files of a directory that is replaced stay.
        replaces: names that are written anew, whatever files those are.
        identity: digests of source and plan.
        journal_after: seconds after which the journal of a run without `resume` is on the disk.
    """

    files: Mapping[str, int]
    marker: str
    is_directory: bool
    options: WriteOptions
    sources: Sequence[str] = ()
    keep_foreign: bool = False
    replaces: Sequence[str] = ()
    identity: Mapping[str, str] = {}
    journal_after: float = 0.0


@dataclass(slots=True)
class Draft:
    """A destination being written.

    Attributes:
        options: those to write with: memory and workers fit the destination.
        path: where the draft lies on this machine, for other processes that write to it.
    """

    outputs: Outputs
    options: WriteOptions
    journal: Journal | None = None
    path: Path | None = None
    warnings: list[Diagnostic] = field(default_factory=list)


class Destination(Protocol):
    """Where output goes: it appears there complete, or not at all.

    Attributes:
        name: its last component.
        is_local: whether it is a path of this machine.
    """

    name: str
    is_local: bool

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        ...

    @property
    def generation(self) -> int:
        """Number that goes into the names of data files, where old ones lie beside new ones."""
        ...

    def check(self, request: WriteRequest) -> list[Diagnostic]:
        """Make every check of `open`, write nothing; return what could not be checked.

        Raises:
            EmaCkptError: as `open`.
        """
        ...

    def open(self, request: WriteRequest) -> AbstractContextManager[Draft]:
        """Write in the block of a `with` statement; published if that ends without an exception.

        Raises:
            TargetError: `target-exists target-is-source foreign-files no-space busy resume-mismatch
                usage`.
        """
        ...


class LocalDestination:
    """A path of this machine: staged beside it, and renamed."""

    is_local = True
    generation = 0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def __str__(self) -> str:
        return str(self.path)

    @property
    def suffix(self) -> str:
        return self.path.suffix

    def check(self, request: WriteRequest) -> list[Diagnostic]:
        check_target(
            self.path,
            is_directory=request.is_directory,
            sources=request.sources,
            overwrite=request.options.overwrite,
            keep_foreign=request.keep_foreign,
            replaces=request.replaces,
            nbytes=sum(request.files.values()),
        )
        return []

    @contextmanager
    def open(self, request: WriteRequest) -> Iterator[Draft]:
        options = request.options
        with stage(
            self.path,
            is_directory=request.is_directory,
            sources=request.sources,
            overwrite=options.overwrite,
            keep_foreign=request.keep_foreign,
            replaces=request.replaces,
            nbytes=sum(request.files.values()),
            fsync=options.fsync,
            resume=options.resume,
            identity=request.identity,
            files=request.files,
            journal_after=request.journal_after,
        ) as staged:
            outputs = OutputFiles(staged.path, request.files)
            try:
                yield Draft(outputs, options, staged.journal, staged.path, staged.warnings)
                outputs.refuse_losses()
                staged.expected = request.files
            finally:
                with staged.journal.ends_on_failure():
                    outputs.close()
