"""Files in a stage, which anybody may have touched while no writer held it.

None may lead out of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import struct
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from ema_ckpt.core.errors import TargetError
from ema_ckpt.storage.files import close_read, is_gone
from ema_ckpt.storage.stage_names import JOURNAL, LOCK
from ema_ckpt.writing.switch import empty_cache

_ACCESS_LIST = "system.posix_acl_access"
_MASKED, _MASK = (2, 4, 8), 16  # a user, the group, a further group; what these have at most
_NO_LIST = (errno.ENODATA, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # as for `cp -p`
_DELETE_ATTEMPTS = 3
_OVERFLOW = 65534
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

    What is written in it then has the target's group, where that may be given.

    Raises:
        OSError: the target is gone, or its permissions cannot be told.
    """
    old, before = os.lstat(target), stat.S_IMODE(os.lstat(root).st_mode)
    mode, read = before, old.st_mode
    if not _give_group(root, old):
        read = _without_group(read)
    elif stat.S_ISDIR(read):
        mode |= read & stat.S_ISGID
    if not read & stat.S_IRGRP or not _admits_no_more(root, target):
        mode &= ~stat.S_IRWXG  # which takes `S_ISGID` from one who is not of the group
    if not read & stat.S_IROTH:
        mode &= ~stat.S_IRWXO
    if mode != before:
        os.chmod(root, mode)


def take_permissions(new: Path, target: Path) -> str | None:
    """Give what replaces a target of its kind the target's permissions, as a copy over it has.

    Those are its mode, its group and its access list, and to root its owner. A group that may not
    be given has no rights that others lack: its members are other people.

    Returns:
        Why that cannot be, as on a file system where they are fixed.

    Raises:
        FileNotFoundError: the target is gone.
    """
    old, own = os.lstat(target), os.lstat(new)
    mode = stat.S_IMODE(old.st_mode)
    if stat.S_IFMT(old.st_mode) != stat.S_IFMT(own.st_mode):
        return None
    if not stat.S_ISDIR(old.st_mode):
        mode &= 0o777  # as for whoever writes to a file
    if old.st_uid != own.st_uid:
        _give_owner(new, old)
    failure = None
    if not _give_group(new, old) and _without_group(mode) != mode:
        mode, failure = _without_group(mode), "its group may not be given"
    if failure is None:
        try:
            _give_access_list(new, target)  # which sets some of the mode
        except OSError as error:  # and without it the mode would let in the group
            mode, failure = _without_group(mode), error.strerror or str(error)
    try:
        if stat.S_IMODE(os.lstat(new).st_mode) != mode:
            os.chmod(new, mode)
    except OSError as error:
        return error.strerror or str(error)
    return failure


def _give_owner(path: Path, old: os.stat_result) -> None:
    if not _is_unmapped("uid", old.st_uid):
        with contextlib.suppress(OSError):  # only root may
            os.chown(path, old.st_uid, -1, follow_symlinks=False)


def _give_group(path: Path, old: os.stat_result) -> bool:
    """Give a file or directory the group of another one; whether it has that now."""
    if os.lstat(path).st_gid != old.st_gid:
        if _is_unmapped("gid", old.st_gid):
            return False
        try:
            os.chown(path, -1, old.st_gid, follow_symlinks=False)
        except OSError:
            return False
    return True


def _is_unmapped(kind: str, number: int) -> bool:
    """Whether this is how a container shows all owners or groups that it has no number for."""
    if number != _OVERFLOW:
        return False
    try:
        mapped = Path(f"/proc/self/{kind}_map").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return mapped != ["0", "0", str(2**32 - 1)]


def _without_group(mode: int) -> int:
    """Return a mode in which a group may do no more than everybody."""
    return mode & ~(stat.S_IRWXG | stat.S_ISGID) | mode & (mode & stat.S_IRWXO) << 3


def _give_access_list(new: Path, target: Path) -> None:
    """Give what replaces a target its list of further users, or none."""
    given, own = _access_list(target), _access_list(new)
    if given and given != own:
        os.setxattr(new, _ACCESS_LIST, given, follow_symlinks=False)
    elif own and not given:
        os.removexattr(new, _ACCESS_LIST, follow_symlinks=False)


def _access_list(path: Path) -> bytes:
    if not hasattr(os, "getxattr"):
        return b""
    try:
        return os.getxattr(path, _ACCESS_LIST, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LIST:
            return b""
        raise


def _admits_no_more(root: Path, target: Path) -> bool:
    """Whether a stage has by inheritance a list by which nobody reads it who cannot the target."""
    own, given = _access_list(root), _access_list(target)
    return not given or (bool(own) and _readers(own) <= _readers(given))


def _readers(access_list: bytes) -> set[tuple[int, int]]:
    """Return the users and groups that read by an access list, the owner and all others aside."""
    entries = [*struct.iter_unpack("<HHI", access_list[4:])]
    mask = next((rights for kind, rights, _ in entries if kind == _MASK), 7)
    return {(kind, who) for kind, rights, who in entries if kind in _MASKED and rights & mask & 4}


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
