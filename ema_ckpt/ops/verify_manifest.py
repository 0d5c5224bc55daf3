"""`verify --manifest`: write the SHA-256 of a checkpoint's files, or compare the files with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ema_ckpt.analysis.manifest import format_manifest, hash_files, parse_manifest
from ema_ckpt.core.catalog import Diagnostic, Files, Problem
from ema_ckpt.core.errors import SourceError, TargetError, UsageError
from ema_ckpt.core.text import counted, shown
from ema_ckpt.ops.draft_file import draft_beside
from ema_ckpt.ops.results.verify import ManifestResult
from ema_ckpt.reading.unchanged import FileStates
from ema_ckpt.runtime import executor
from ema_ckpt.runtime.executor import Workers
from ema_ckpt.storage.directories import is_folder, join, walk_files
from ema_ckpt.storage.files import is_url, local_path, open_files, safe_name
from ema_ckpt.writing.switch import put

_MAX_NBYTES = 1 << 30
_OTHER_COPY = "copy the file again, or use another copy of the checkpoint"


class FilesToHash(NamedTuple):
    """Files below a directory or URL, by names relative to it."""

    root: str
    names: tuple[str, ...]


class HashedFiles(NamedTuple):
    """What came of it: the result, problems, warnings, and the names that match the manifest."""

    result: ManifestResult
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()
    matching: frozenset[str] = frozenset()


def check_manifest_path(path: str | os.PathLike[str], must_exist: bool) -> Path:
    """Return the manifest's path.

    Raises:
        UsageError: `usage` for a URL, or what is no file; `not-found` if it has to be there.
    """
    text = os.fspath(path)
    if is_url(text):
        raise UsageError("usage", f"--manifest {text}: expected a local file")
    file = Path(text)
    if file.exists() and not file.is_file():
        raise UsageError("usage", f"--manifest {text}: is no regular file")
    if must_exist and not file.exists():
        message = f"--manifest {text}: no such file; without --check it is written"
        raise UsageError("not-found", message)
    return file


def files_of(resolved: str, root: str, names: Iterable[str], manifest: Path) -> FilesToHash:
    """List all files of a checkpoint that is a directory, else `names` below `root`.

    The manifest itself is left out.
    """
    is_directory = is_folder(resolved)
    place = resolved if is_directory else root
    found = walk_files(resolved) if is_directory else sorted(set(names))
    own = os.path.realpath(manifest)
    local = local_path(place)
    if local is not None:
        found = [name for name in found if os.path.realpath(join(local, name)) != own]
    return FilesToHash(place, tuple(found))


def write_manifest(
    files: FilesToHash,
    manifest: Path,
    workers: Workers,
    progress: Callable[[int], None] | None,
    states: Iterable[FileStates],
) -> HashedFiles:
    """Write the manifest, if the files are still those of which `states` were taken.

    Raises:
        TargetError: `usage` if it cannot be written, `target-exists` if it is there by now.
        SourceError: of a file that cannot be read; `source-changed`.
    """
    sizes, digests = _hash(files, files.names, workers, progress)
    is_suspicious = any(isinstance(found, SourceError) for found in digests.values())
    _refuse_changes(states, suspicious=is_suspicious)
    sums: dict[str, str] = {}
    for name, found in digests.items():
        if isinstance(found, SourceError):
            raise found
        sums[name] = found
    _publish(manifest, format_manifest(sums))
    return HashedFiles(ManifestResult(str(manifest), True, len(sums), sum(sizes.values())))


def _publish(manifest: Path, content: bytes) -> None:
    """Write beside the place and move it there, so that nobody reads half and none is replaced."""
    try:
        with draft_beside(manifest, content) as draft:
            put(draft, manifest)
    except FileExistsError:
        message = f"--manifest {manifest}: another process wrote it meanwhile; run again"
        raise TargetError("target-exists", message) from None
    except OSError as error:
        message = f"--manifest {manifest}: cannot be written: {error.strerror}"
        raise TargetError("usage", message) from None


def _refuse_changes(states: Iterable[FileStates], *, suspicious: bool) -> None:
    for one in states:
        one.refuse_changes(suspicious=suspicious)


def compare_manifest(
    files: FilesToHash,
    manifest: Path,
    workers: Workers,
    progress: Callable[[int], None] | None,
    states: Iterable[FileStates],
) -> HashedFiles:
    """Compare the files with the manifest; what is missing, differs or is not listed is said.

    Raises:
        SourceError: `unreadable` for a manifest that sha256sum would not read; `source-changed` for
            files that are no longer those of which `states` were taken.
        UnsafeError: `unsafe-path` for a name in it that leaves the checkpoint.
    """
    listed = _read(manifest)
    there = frozenset(files.names)
    missing = [safe_name(name) for name in listed if name not in there]
    problems = []
    for name in missing:
        message = f"{name}: no such file in {files.root}, though {manifest} lists it; {_OTHER_COPY}"
        problems.append(Problem("missing-file", None, name, message))
    chosen = [name for name in files.names if name in listed]
    sizes, digests = _hash(files, chosen, workers, progress)
    matching = set[str]()
    for name in chosen:
        found = digests[name]
        if isinstance(found, SourceError):
            problems.append(Problem.of(found))
        elif found == listed[name]:
            matching.add(name)
        else:
            values = f"expected SHA-256 {listed[name]} as in {manifest}, found {found}"
            problems.append(Problem("checksum", None, name, f"{name}: {values}; {_OTHER_COPY}"))
    _refuse_changes(states, suspicious=bool(problems))
    extra = [name for name in files.names if name not in listed]
    nbytes = sum(sizes.values())
    result = ManifestResult(str(manifest), False, len(matching), nbytes, tuple(extra))
    return HashedFiles(result, tuple(problems), _unlisted(extra, manifest), frozenset(matching))


def _read(manifest: Path) -> dict[str, str]:
    try:
        nbytes = manifest.stat().st_size
        if nbytes > _MAX_NBYTES:
            message = f"{manifest}: {nbytes} bytes is no manifest"
            raise SourceError("unreadable", message)
        return parse_manifest(manifest.read_bytes(), str(manifest))
    except OSError as error:
        raise UsageError("unreadable", f"--manifest {manifest}: {error.strerror}") from None


def _hash(
    files: FilesToHash,
    names: Sequence[str],
    workers: Workers,
    progress: Callable[[int], None] | None,
) -> tuple[Mapping[str, int], Mapping[str, str | SourceError]]:
    """Sizes and SHA-256 of files by name; those of which not even the size is known have none."""
    source: Files = open_files(files.root, are_listed=True)
    sizes: dict[str, int] = {}
    errors: dict[str, str | SourceError] = {}
    try:
        for name in names:
            try:
                sizes[name] = source.size(name)
            except SourceError as error:
                errors[name] = error
        executor.expect(progress, sum(sizes.values()))
        return sizes, errors | hash_files(source, sizes, workers, progress)
    finally:
        source.close()


def _unlisted(names: Sequence[str], manifest: Path) -> tuple[Diagnostic, ...]:
    if not names:
        return ()
    which = f"{counted(len(names), 'file')} beside those that it lists: {shown(names)}"
    return (Diagnostic("unchecked", f"{manifest}: {which}; not compared"),)
