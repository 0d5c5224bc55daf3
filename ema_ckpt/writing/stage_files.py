"""Files in a stage, which anybody may have touched while no writer held it.

None may lead out of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from ema_ckpt.core.errors import TargetError
from ema_ckpt.storage.files import close_read, is_gone
from ema_ckpt.storage.stage_names import JOURNAL, LOCK
from ema_ckpt.writing.switch import empty_cache

_DELETE_ATTEMPTS = 3
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def open_directory(path: Path) -> int:
    """Open a directory that is no symbolic link, to open files in it."""
    return os.open(path, _DIRECTORY)


@contextlib.contextmanager
def kept_open(path: Path) -> Iterator[int | None]:
    """Keep a file or directory open, so that nothing else gets its inode; None if it cannot be."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        close_read(fd)


def open_inside(directory: int, name: str, flags: int) -> int:
    """Open the file `name` of an open directory; a symbolic link of that name is an OSError."""
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666, dir_fd=directory)


def find_stranger(
    stage: Path, payload: str, files: Container[str] | None, *, is_directory: bool
) -> str | None:
    """Name an entry of a stage that no writer of these `files` has made, or return None.

    A link, symbolic or hard, leads to what belongs to somebody else, and a further file would be
    published with the others.

    Args:
        payload: name of the file or directory that is written, and `is_directory` which of the two.
        files: those in the directory, or None for whatever names.
    """
    plain = (JOURNAL, LOCK) if is_directory else (JOURNAL, LOCK, payload)
    for entry in _entries(stage):
        if is_directory and entry.name == payload and entry.is_dir(follow_symlinks=False):
            for inner in _entries(entry.path):
                is_known = files is None or inner.name in files
                if not is_known or not _is_plain(inner):
                    return f"{payload}/{inner.name}"
        elif entry.name not in plain or not _is_plain(entry):
            return entry.name
    return None


def _entries(path: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return list(entries)


def _is_plain(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def find_lost(stage: Path) -> str | None:
    """Say which file of a stage the disk could not store, and why; else read all from the disk."""
    for parent, _, files in os.walk(stage):
        for name in files:
            path = os.path.join(parent, name)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    empty_cache(fd)
                finally:
                    close_read(fd)
            except OSError as error:
                return f"the disk could not store {name!r}: {error.strerror}"
    return None


def refuse_losses(payload: Path, files: Mapping[str, int], target: Path) -> None:
    """Check that files of at least so many bytes still have their names: anybody may reach them.

    Args:
        payload: the directory that they are in, or with the name "" the file itself.

    Raises:
        TargetError: `not-found`: something removed or shortened one.
    """
    for name, nbytes in files.items():
        try:
            is_lost = os.lstat(payload / name).st_size < nbytes
        except FileNotFoundError:
            is_lost = True
        if is_lost:
            reason = f"something removed or shortened {name or payload.name!r} in its stage"
            raise TargetError("not-found", f"{target}: cannot be written: {reason} meanwhile")


def close_as(root: Path, target: Path) -> None:
    """Keep those out of a stage who cannot read the target that it is to replace.

    Raises:
        OSError: the target is gone, or its permissions cannot be told.
    """
    mode = stat.S_IMODE(os.lstat(root).st_mode)
    read = os.lstat(target).st_mode
    closed = (0 if read & stat.S_IRGRP else stat.S_IRWXG) | (
        0 if read & stat.S_IROTH else stat.S_IRWXO
    )
    if mode & closed:
        os.chmod(root, mode & ~closed)


def take_permissions(new: Path, target: Path) -> str | None:
    """Give what replaces a target of its kind the target's permissions, as a copy over it has.

    Returns:
        Why that cannot be, as on a file system where they are fixed.

    Raises:
        FileNotFoundError: the target is gone.
    """
    mode, own = os.lstat(target).st_mode, os.lstat(new).st_mode
    if mode == own or stat.S_IFMT(mode) != stat.S_IFMT(own):
        return None
    try:
        os.chmod(new, stat.S_IMODE(mode))
    except OSError as error:
        return error.strerror or str(error)
    return None


def allocated(root: Path) -> int:
    """Bytes that the files below `root` occupy on the disk."""
    nbytes = 0
    for parent, _, files in os.walk(root):
        for name in files:
            nbytes += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return nbytes


def delete_stage(stage: Path) -> bool:
    """Delete a stage as far as that works; whether nothing of it is left.

    Where several processes write to it, another one may make a file in it meanwhile.
    """
    for _ in range(_DELETE_ATTEMPTS):
        shutil.rmtree(stage, ignore_errors=True)
        if is_gone(stage):
            return True
    return False
