"""Whether a place may be written to: every check that can be made before, and without, writing
anything.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.errors import SourceError, TargetError, UsageError
from ema_ckpt.core.names import TORCH_SUFFIXES
from ema_ckpt.core.text import shown
from ema_ckpt.storage.files import is_mangled_url, is_url
from ema_ckpt.storage.stage_names import stage_path

# What --overwrite may delete with a directory. Everything else in it is somebody's work.
_CHECKPOINT_FILES = (
    ".metadata",
    "__*.metadata",
    "*.distcp",
    "*.safetensors",
    "*.index.json",
    "*.index.*.json",
    "ema_ckpt.json",
)
_TORCH_FILES = tuple(f"*{suffix}" for suffix in TORCH_SUFFIXES)
# Torch files by name, but never weights: a weights directory that replaces the old one keeps them.
_TRAINING_FILES = (
    "scheduler.*",
    "optimizer.*",
    "*random_state*",
    "rng_state*",
    "training_args.bin",
    "*trainer_state*",
)
_TORCH_HEADS = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EISDIR,
)


class OverwritePolicy(NamedTuple):
    """On what terms a target is written.

    Attributes:
        is_directory: the target becomes a directory. overwrite: it may replace what is there.
        keep_foreign: what is no checkpoint's file in the old directory is carried into the new one.
    """

    is_directory: bool
    overwrite: bool = False
    keep_foreign: bool = False


def resolve_target(target: str | os.PathLike[str]) -> Path:
    """The real place of `target`: symbolic links are followed, so that they stay and what they name
    changes.

    Raises:
        UsageError: `usage` for URLs, `/`, the current directory and those above it, and mount
            points.
    """
    text = os.fspath(target)
    if is_url(text):
        raise UsageError(
            "usage", f"{text}: cannot write to a URL; write to a local path and copy it from there"
        )
    if is_mangled_url(text) and not os.path.lexists(text.partition("/")[0]):
        raise UsageError(
            "usage", f"{text}: cannot write to a URL (a URL loses a slash when it becomes a Path)"
        )
    if not text or "\0" in text:
        raise UsageError("usage", f"{text!r} is not a path to write to")
    path = Path(os.path.realpath(text))
    here = Path(os.path.realpath(os.getcwd()))
    if path == here or path in here.parents or not path.name:
        raise UsageError(
            "usage",
            f"{text}: refusing to replace the current directory or one above it; name a new path",
        )
    if os.path.ismount(path) or str(path) in _mount_points():
        raise UsageError(
            "usage", f"{text}: is a mount point and cannot be replaced; name a path inside it"
        )
    return path


def check_place(path: Path, sources: Iterable[str | os.PathLike[str]]) -> None:
    """Check that `path` (resolved) lies in a writable directory, apart from all of `sources`.

    Raises:
        TargetError: `target-is-source` if it is a source, inside one or around one; `not-found`
            without a parent directory; `usage` where that is no directory or not writable.
    """
    for source in sources:
        if not is_url(os.fspath(source)):
            _check_apart(path, Path(os.path.realpath(source)))
    parent = path.parent
    if not os.path.lexists(parent):
        raise TargetError(
            "not-found", f"{path}: the directory {parent} does not exist; create it first"
        )
    if not parent.is_dir():
        raise TargetError("usage", f"{path}: {parent} is not a directory")
    if not os.access(
        parent, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids
    ):
        raise TargetError("usage", f"{path}: no permission to write in {parent}")
    if len(os.fsencode(stage_path(path, "00000000").name)) > os.pathconf(parent, "PC_NAME_MAX"):
        raise TargetError(
            "usage", f"{path}: the name is too long to write beside it; use a shorter one"
        )


def check_replaceable(path: Path, terms: OverwritePolicy) -> list[str]:
    """Check that what is at `path` now, if anything, may be replaced.

    Returns:
        Names of foreign entries of the old directory that have to be carried into the new one.

    Raises:
        TargetError: `target-exists` without `terms.overwrite`; `foreign-files` if replacing would
            delete anything that is not part of a checkpoint; `usage` for devices, FIFOs and
            sockets.
    """
    if not os.path.lexists(path):
        return []
    mode = os.lstat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise TargetError(
            "usage", f"{path}: is neither a file nor a directory and is never replaced"
        )
    if not terms.overwrite:
        message = f"{path}: already exists; name another path, or pass --overwrite (overwrite=True)"
        raise TargetError("target-exists", message)
    if stat.S_ISDIR(mode):
        foreign = foreign_entries(path)
        if foreign and not (terms.keep_foreign and terms.is_directory):
            raise _foreign(path, foreign)
        return foreign
    if terms.is_directory and not _is_checkpoint_file(path):
        raise _foreign(path, [path.name])
    return []


def check_space(path: Path, nbytes: int) -> None:
    """Check that the file system of `path`'s directory has `nbytes` bytes free.

    Raises:
        TargetError: `no-space`, with both numbers.
    """
    status = os.statvfs(path.parent)
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and free < nbytes:  # some network file systems report no sizes at all
        raise TargetError(
            "no-space", f"{path}: needs {nbytes:,} bytes, {path.parent} has {free:,} free"
        )


def foreign_entries(directory: Path) -> list[str]:
    """Names in `directory` that are not files of a known checkpoint format, sorted. Subdirectories
    always are.
    """
    return sorted(
        entry.name for entry in os.scandir(directory) if not _is_checkpoint_file(Path(entry.path))
    )


def write_error(path: Path, error: OSError) -> TargetError:
    """The one line that says why `path` could not be written."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return TargetError(
            "no-space", f"{path}: {reason} while writing; free some space and run it again"
        )
    if error.errno == errno.EXDEV:
        # overlayfs cannot rename a directory of a lower layer (an image's, say), with any flags.
        reason = "the file system cannot move the directory that is there; delete it, or name another path"
    code = (
        "usage"
        if error.errno in _REFUSED
        else "not-found"
        if error.errno == errno.ENOENT
        else "unreadable"
    )
    return TargetError(code, f"{path}: cannot be written: {reason}")


def _mount_points() -> set[str]:
    """Mount points the kernel lists; unlike `ismount` it knows bind mounts within one file
    system.
    """
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
            fields = [line.split(" ", 5)[4] for line in table]
    except (OSError, IndexError):
        return set()
    return {re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field) for field in fields}


def _check_apart(path: Path, source: Path) -> None:
    """Compare by inode as well as by name: bind mounts give one directory two names."""
    if _is_among(source, [path, *path.parents]) or _is_among(path, [source, *source.parents]):
        raise TargetError(
            "target-is-source",
            f"{path}: is the source {source}, inside it or around it; write beside it instead",
        )


def _is_among(path: Path, chain: list[Path]) -> bool:
    if path in chain:
        return True
    try:
        own = os.stat(path)
    except OSError:
        return False
    return any(other.exists() and os.path.samestat(own, other.stat()) for other in chain)


def _is_checkpoint_file(path: Path) -> bool:
    name, mode = path.name, os.lstat(path).st_mode
    if not (stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and path.is_file())):
        return False
    if any(fnmatchcase(name, pattern) for pattern in _TRAINING_FILES):
        return False
    if any(fnmatchcase(name, pattern) for pattern in _CHECKPOINT_FILES):
        return True
    return any(fnmatchcase(name, pattern) for pattern in _TORCH_FILES) and _looks_like_torch(path)


def _looks_like_torch(path: Path) -> bool:
    """`.bin` and `.pt` are anybody's suffixes: a zip or a pickle must be behind them."""
    try:
        with open(path, "rb") as file:
            head = file.read(2)
    except OSError:
        return False
    return not head or head in _TORCH_HEADS


def _foreign(path: Path, names: list[str]) -> TargetError:
    return TargetError(
        "foreign-files",
        f"{path}: --overwrite would delete what is no checkpoint: {shown(names)}; move it away or name another path",
    )


# Sources.


def check_sources(catalog: Catalog, tensors: Iterable[Tensor]) -> None:
    """Check that every tensor is covered, and that its files are present and long enough.

    Raises:
        SourceError: `hole overlap out-of-bounds incomplete missing-file truncated-file`, naming
            tensor and file.
    """
    users: dict[str, dict[str, None]] = {}
    for tensor in tensors:
        for index in prove(tensor):
            users.setdefault(tensor.chunks[index].file, {})[tensor.name] = None
    sizes: dict[str, int] = {}
    errors: dict[str, SourceError] = {}
    for file in users:
        try:
            sizes[file] = catalog.source.size(file)
        except SourceError as error:
            errors[file] = error
    missing = [file for file, error in errors.items() if error.code == "missing-file"]
    if missing:
        raise _missing(catalog, missing, users)
    for file, tensors_of_file in users.items():
        names = list(tensors_of_file)
        if file in errors:
            cause = errors[file]
            message = f"{cause}; it holds {shown(names)}"
            raise type(cause)(cause.code, message, tensor=names[0], file=file)
        expected = catalog.files.get(file, 0)
        if sizes[file] < expected:
            sized = f"expected at least {expected} bytes, found {sizes[file]}"
            message = f"{file}: {sized}: the file is truncated; it holds {shown(names)}"
            raise SourceError("truncated-file", message, tensor=names[0], file=file)


def _missing(
    catalog: Catalog, files: Sequence[str], users: Mapping[str, Iterable[str]]
) -> SourceError:
    """Return one error for all missing files: nodes with disks of their own each have a part."""
    names = list(dict.fromkeys(name for file in files for name in users[file]))
    what = f"{files[0]}: no such file in {catalog.resolved}"
    if len(files) > 1:
        count = f"{len(files)} of {len(users)} files are missing"
        what = f"{catalog.resolved}: {count}: {shown(files)}"
    hint = "copy all files of the checkpoint into one directory (each node may have saved its own)"
    message = f"{what}, with parts of {shown(names)}; {hint}"
    return SourceError("missing-file", message, tensor=names[0], file=files[0])
