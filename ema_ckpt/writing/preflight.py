"""Checks of destination and sources that need no write, made before anything is written."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.errors import SourceError, TargetError, UsageError
from ema_ckpt.core.names import TORCH_SUFFIXES
from ema_ckpt.core.text import path_text, shown
from ema_ckpt.storage.files import (
    NO_DESCRIPTORS,
    is_chained_url,
    is_file_name,
    is_mangled_url,
    is_there,
    is_url,
)
from ema_ckpt.storage.stage_names import JOURNAL, stage_path

# What --overwrite may delete with a directory. Everything else in it is somebody's work.
_CHECKPOINT_FILES = (
    ".metadata __*.metadata *.distcp *.safetensors *.index.json *.index.*.json ema_ckpt.json"
).split()
# What NFS and FUSE call a file that was deleted while a process of this host had it open.
_DELETED_FILES = (f".nfs{'[0-9a-f]' * 24}", f".fuse_hidden{'[0-9a-f]' * 16}")
_TORCH_FILES = tuple(f"*{suffix}" for suffix in TORCH_SUFFIXES)
# Torch files by name, but never weights: a weights directory that replaces the old one keeps them.
_TRAINING_FILES = (
    "scheduler.* optimizer.* *random_state* rng_state* training_args.bin *trainer_state*"
).split()
_TORCH_HEADS = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG}
    | {errno.ELOOP, errno.EISDIR}
)


class OverwritePolicy(NamedTuple):
    """What may be replaced.

    Attributes:
        is_directory: the target becomes a directory. overwrite: it may replace what is there.
        keep_foreign: other files of the old directory are carried into the new one.
        replaces: names in the old directory that the new one has anew.
    """

    is_directory: bool
    overwrite: bool = False
    keep_foreign: bool = False
    replaces: frozenset[str] = frozenset()


def resolve_target(target: str | os.PathLike[str]) -> Path:
    """Resolve symbolic links of `target`: they stay, and what they point to is replaced.

    Raises:
        UsageError: `usage` for URLs, `/`, the current directory and those above it, mount points.
    """
    text = path_text(target)
    if is_url(text):
        reason = "this is written to a local path only; copy it from there"
        raise UsageError("usage", f"{text}: {reason}")
    if is_mangled_url(text) and not os.path.lexists(text.partition("/")[0]):
        reason = "is no path; give a URL as text (a URL loses a slash when it becomes a Path)"
        raise UsageError("usage", f"{text}: {reason}")
    if is_chained_url(text):
        raise UsageError("usage", f"{text}: is a chain of URLs; name the last one alone")
    if not is_file_name(text):
        raise UsageError("usage", f"{text!r} is not a path to write to")
    current = _current_directory(text)
    path = Path(os.path.realpath(text))
    if path in current or not path.name:
        reason = "refusing to replace the current directory or one above it; name a new path"
        raise UsageError("usage", f"{text}: {reason}")
    # A file of an overlay may be on another device than its directory without being a mount point.
    is_mount = os.path.isdir(path) and os.path.ismount(path)
    if is_mount or str(path) in _mount_points():
        reason = "is a mount point and cannot be replaced; name a path inside it"
        raise UsageError("usage", f"{text}: {reason}")
    return path


def unresolved(target: str) -> str:
    """Return the full path of `target` without looking it up, in a directory that is resolved.

    A client of a network file system remembers for up to a minute that a name was not there. Where
    one process makes `target` for several hosts, the others must not ask for it before.
    """
    parent, name = os.path.split(os.path.abspath(target))
    return os.path.join(os.path.realpath(parent), name)


def look_again(directory: Path) -> None:
    """Have this host see a directory that another one has just made, and may be remembered absent.

    To make it is what no client answers from memory. Where that succeeds the file system is
    another one, and what was made is removed.
    """
    missing = [path for path in (directory, *directory.parents) if not os.path.isdir(path)]
    for path in reversed(missing):
        try:
            os.mkdir(path)
        except FileExistsError:
            continue
        except OSError:
            return
        _remove_soon(path)
        return


def _remove_soon(directory: Path) -> None:
    """Remove an empty directory, in which other processes of this host may look at the moment."""
    for _ in range(50):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)
        else:
            return


def _current_directory(target: str) -> Sequence[Path]:
    """Return the current directory and those above it; none if it was deleted, as a job's may be.

    Raises:
        UsageError: `usage` if it was deleted and the target lies in it.
    """
    try:
        current = Path(os.path.realpath(os.getcwd()))
    except FileNotFoundError:
        if os.path.isabs(target):
            return ()
        message = f"{target}: the current directory was deleted; name a full path"
        raise UsageError("usage", message) from None
    return (current, *current.parents)


def check_place(path: Path, sources: Iterable[str | os.PathLike[str]]) -> None:
    """Check that `path` (resolved) can be made, apart from all of `sources`.

    Parent directories may be missing; `make_parents` makes them.

    Raises:
        TargetError: `target-is-source` if it is a source, inside one or around one; `usage` where
            the nearest parent that is there is no directory or not writable.
    """
    for source in sources:
        if not is_url(path_text(source)):
            _check_apart(path, Path(os.path.realpath(source)))
    parent, reason = _existing_parent(path), ""
    names = [stage_path(path, "0" * 8).name, *path.parent.relative_to(parent).parts]
    if not parent.is_dir():
        reason = f"{parent} is not a directory"
    elif not _may(os.W_OK | os.X_OK, parent):
        is_fixed = os.statvfs(parent).f_flag & os.ST_RDONLY  # `access` is false for it, too
        why = "the file system is read-only:" if is_fixed else "no permission to write in"
        reason = f"{why} {parent}"
    elif max(len(os.fsencode(n)) for n in names) > os.pathconf(parent, "PC_NAME_MAX"):
        reason = "the name is too long to write beside it; use a shorter one"
    elif _stage_nbytes(path) >= os.pathconf(parent, "PC_PATH_MAX"):
        reason = "the path is too long to write beside it; use a shorter one"
    if reason:
        raise TargetError("usage", f"{path}: {reason}")


def _stage_nbytes(path: Path) -> int:
    """Return the length of the longest path in the stage of `path`, as far as names are known."""
    stage = stage_path(path, "0" * 8)
    return max(len(os.fsencode(stage / name)) for name in (path.name, f"{JOURNAL}.tmp"))


def _existing_parent(path: Path) -> Path:
    """Return the nearest parent of `path` that is there; the root always is."""
    return next(filter(os.path.lexists, path.parents), path.parents[-1])


def make_parents(path: Path) -> list[Path]:
    """Make the missing parent directories of `path`; return those that were made, outermost first.

    Raises:
        OSError: one could not be made; then none stays.
    """
    made: list[Path] = []
    missing = [parent for parent in path.parents if not os.path.lexists(parent)]
    try:
        for parent in reversed(missing):
            with contextlib.suppress(FileExistsError):  # somebody else has just made it
                parent.mkdir()
                made.append(parent)
    except OSError:
        remove_empty(made)
        raise
    return made


def remove_empty(directories: Sequence[Path]) -> None:
    """Remove directories, the last one first, as long as there is nothing in them."""
    with contextlib.suppress(OSError):
        for directory in reversed(directories):
            directory.rmdir()


def check_replaceable(path: Path, policy: OverwritePolicy) -> list[str]:
    """Check that what is at `path` now, if anything, may be replaced.

    Returns:
        Names of foreign entries of the old directory that have to be carried into the new one.

    Raises:
        TargetError: `target-exists` without `policy.overwrite`; `foreign-files` if replacing would
            delete anything that is not part of a checkpoint; `usage` for devices, FIFOs, sockets.
    """
    if not is_there(path):
        return []
    mode = os.lstat(path).st_mode
    if stat.S_IFMT(mode) not in (stat.S_IFREG, stat.S_IFDIR):
        reason = "is neither a file nor a directory and is never replaced"
        raise TargetError("usage", f"{path}: {reason}")
    if not policy.overwrite:
        reason = "already exists; name another path, or pass --overwrite (overwrite=True)"
        raise TargetError("target-exists", f"{path}: {reason}")
    _check_movable(path)
    foreign = foreign_parts(path, policy)
    is_carried = policy.keep_foreign and policy.is_directory and stat.S_ISDIR(mode)
    carried = foreign if is_carried else []
    if foreign != carried:
        listed = f"{shown(foreign)}; move it away or name another path"
        message = f"{path}: --overwrite would delete what is no checkpoint: {listed}"
        raise TargetError("foreign-files", message)
    return carried


def foreign_parts(path: Path, policy: OverwritePolicy, place: Path | None = None) -> list[str]:
    """Name what is lost if `path` is deleted, sorted.

    Those are foreign entries of a directory, or a foreign file that becomes a directory itself.

    Args:
        place: where `path` was before it was moved, which tells its name and whither links in it
            lead.
    """
    if stat.S_ISDIR(os.lstat(path).st_mode):
        entries = foreign_entries(path, place)
        return [one for one in entries if one not in policy.replaces or (path / one).is_dir()]
    is_foreign = policy.is_directory and not _is_checkpoint_file(path, place)
    return [(place or path).name] if is_foreign else []


def _check_movable(path: Path) -> None:
    """Check that the switch may move what is at `path`: hours of writing come before it.

    Raises:
        TargetError: `usage`.
    """
    own, parent, user = os.lstat(path), os.stat(path.parent), os.geteuid()
    reason = ""
    if user and parent.st_mode & stat.S_ISVTX and user not in (own.st_uid, parent.st_uid):
        reason = f"belongs to another user, and in {path.parent} only owners may replace files"
    elif stat.S_ISDIR(own.st_mode) and not _may(os.W_OK, path):  # its `..` changes
        reason = "no permission to write in the directory that is to be replaced"
    elif inside := [point for point in _mount_points() if path in Path(point).parents]:
        # Deleting the old directory would delete what is mounted there, wherever that belongs.
        reason = f"has a mount point in it: {shown(inside)}"
    if reason:
        raise TargetError("usage", f"{path}: {reason}; name another path")


def _may(mode: int, path: Path) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def check_space(path: Path, nbytes: int) -> None:
    """Check that the file system of `path`'s directory has `nbytes` bytes free.

    Raises:
        TargetError: `no-space`, with both numbers.
    """
    parent = _existing_parent(path)
    status = os.statvfs(parent)
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and free < nbytes:  # some network file systems report no sizes at all
        message = f"{path}: needs {nbytes:,} bytes, {parent} has {free:,} free"
        raise TargetError("no-space", message)


def foreign_entries(directory: Path, place: Path | None = None) -> list[str]:
    """List entries that are no files of a checkpoint format, sorted; subdirectories never are.

    Args:
        place: where the directory was before it was moved: relative links lead from there.
    """
    place = place or directory
    names = os.listdir(directory)
    return sorted(n for n in names if not _is_checkpoint_file(directory / n, place / n))


def write_error(path: Path, error: OSError) -> TargetError:
    """Return the one line that says why `path` could not be written."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        hint = "free some space and run it again"
        if error.errno == errno.EFBIG:
            hint = "raise `ulimit -f`, or write smaller files"
        return TargetError("no-space", f"{path}: {reason} while writing; {hint}")
    code = "unreadable"
    if error.errno == errno.EXDEV:
        # overlayfs cannot rename a directory of a lower layer (an image's, say), with any flags.
        hint = "delete it, or name another path"
        reason = f"the file system cannot move the directory that is there; {hint}"
    elif error.errno in NO_DESCRIPTORS:
        reason = f"{reason}; raise `ulimit -n`"
    elif error.errno in _REFUSED:
        code = "usage"
    elif error.errno == errno.ENOENT:
        code = "not-found"
    return TargetError(code, f"{path}: cannot be written: {reason}")


def _mount_points() -> set[str]:
    """List the kernel's mount points; unlike `ismount`, with bind mounts of one file system."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
            fields = [line.split(" ", 5)[4] for line in table]
    except (OSError, IndexError):
        return set()
    return {re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field) for field in fields}


def _check_apart(path: Path, source: Path) -> None:
    """Compare by inode as well as by name: bind mounts give one directory two names."""
    if _is_among(source, [path, *path.parents]) or _is_among(path, [source, *source.parents]):
        reason = f"is the source {source}, inside it or around it; write beside it instead"
        raise TargetError("target-is-source", f"{path}: {reason}")


def _is_among(path: Path, chain: list[Path]) -> bool:
    if path in chain:
        return True
    try:
        own = os.stat(path)
    except OSError:
        return False
    return any(other.exists() and os.path.samestat(own, other.stat()) for other in chain)


def _is_checkpoint_file(path: Path, place: Path | None = None) -> bool:
    """Check a file, which was at `place` before it was moved."""
    place = place or path
    mode, leads_to = os.lstat(path).st_mode, path
    if stat.S_ISREG(mode) and _matches(path.name, _DELETED_FILES):
        return True
    if stat.S_ISLNK(mode) and not path.is_file():
        leads_to = place.parent / os.readlink(path)
    if not (stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and leads_to.is_file())):
        return False

    def read_head() -> bytes:
        with open(leads_to, "rb") as file:
            return file.read(2)

    try:
        return is_checkpoint_file(place.name, read_head)
    except OSError:
        return False


def is_checkpoint_file(name: str, read_head: Callable[[], bytes]) -> bool:
    """Check whether a file is one of a checkpoint format; `read_head` reads its first two bytes."""
    if _matches(name, _TRAINING_FILES):
        return False
    if _matches(name, _CHECKPOINT_FILES):
        return True
    if not _matches(name, _TORCH_FILES):
        return False
    # Anybody uses `.bin` and `.pt`: a zip or a pickle must be behind them.
    head = read_head()
    return not head or head in _TORCH_HEADS


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


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
