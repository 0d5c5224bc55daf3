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
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ema_ckpt.core.errors import TargetError
from ema_ckpt.storage.files import close_read, is_gone
from ema_ckpt.storage.stage_names import JOURNAL, LOCK
from ema_ckpt.writing.open_inside import set_mode
from ema_ckpt.writing.switch import empty_cache

_ACCESS_LIST = "system.posix_acl_access"
_ENTRY = "<HHI"  # its kind, rights, and whose they are
_USER, _GROUP = 2, 4
_MASKED = (_USER, _GROUP, 8)  # the last is a further group; all have what the mask has at most
_NOBODY = 2**32 - 1  # whose an entry is that needs no name
_NO_LIST = (errno.ENODATA, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # as for `cp -p`
_DELETE_ATTEMPTS = 3
_OVERFLOW = 65534
_READ_OR_WRITE = 0o666


class _Entry(NamedTuple):
    """A line of an access list."""

    kind: int
    rights: int
    who: int


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

    And those who could write in it, and may not write to the target. What is written in it then
    has the target's group, where that may be given. What cannot be done is said at the switch, if
    the target still is there.
    """
    with contextlib.suppress(OSError):
        _close_as(root, target)


def _close_as(root: Path, target: Path) -> None:
    old, before = os.lstat(target), stat.S_IMODE(os.lstat(root).st_mode)
    mode, as_old, closed = before, old.st_mode, stat.S_IRWXG | stat.S_IRWXO
    has_group = _give_group(root, old)
    with contextlib.suppress(OSError):  # a list that cannot be read may keep out anybody
        given, own = _entries_of(target), _entries_of(root)
        if not has_group:
            as_old = _without_group(as_old, given)
        closed = _closed(_Admitted(before, own), _Admitted(as_old, given))
    if has_group and stat.S_ISDIR(as_old):
        mode |= as_old & stat.S_ISGID
    mode &= ~closed  # which takes `S_ISGID` from one who is not of the group
    if mode != before:
        set_mode(root, mode)


def take_permissions(new: Path, target: Path) -> str | None:
    """Give what replaces a target the target's permissions, as a copy over it has.

    Those are its mode, its group and its access list, and to root its owner. A group that may not
    be given has no rights that others lack: its members are other people. Who may read a file may
    search the directory that replaces it.

    Returns:
        Why that cannot be, as on a file system where they are fixed.

    Raises:
        FileNotFoundError: the target is gone.
    """
    old, own = os.lstat(target), os.lstat(new)
    mode = _mode_like(old.st_mode, own.st_mode)
    closed, failure = _without_group(mode), None
    with contextlib.suppress(OSError):  # said below
        closed = _without_group(mode, _entries_of(target))
    if not _give_group(new, old) and closed != mode:
        mode, failure = closed, "its group may not be given"
    if failure is None:
        try:
            _give_access_list(new, target)  # which sets some of the mode
        except OSError as error:  # and without it the mode would let in the group
            mode, failure = closed, error.strerror or str(error)
    try:
        if stat.S_IMODE(os.lstat(new).st_mode) != mode:
            set_mode(new, mode)
    except OSError as error:
        return error.strerror or str(error)
    if failure is None and (os.lstat(new).st_mode ^ mode) & _READ_OR_WRITE:
        failure = "the file system keeps its own"  # and says nothing of it
    if old.st_uid != own.st_uid:
        _give_owner(new, old)  # last: not every root may change what is another's
    return failure


def _mode_like(old: int, own: int) -> int:
    """Return the mode of a target for what replaces it, which may be of the other kind."""
    if not stat.S_ISDIR(own):
        return _rights_like(stat.S_IMODE(old) & 0o777, old, own)  # as for whoever writes to a file
    if stat.S_ISDIR(old):
        return stat.S_IMODE(old)
    # Only a directory that its owner may write to can be moved.
    return _rights_like(old & 0o777, old, own) | stat.S_IRWXU | own & stat.S_ISGID


def _rights_like(rights: int, old: int, own: int) -> int:
    if stat.S_IFMT(old) == stat.S_IFMT(own):
        return rights
    return rights & 0o666 | (rights & 0o444) >> 2 if stat.S_ISDIR(own) else rights & 0o666


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


def _without_group(mode: int, access_list: Iterable[_Entry] = ()) -> int:
    """Return a mode in which a group may do no more than everybody, for another group.

    Whom the old group or the list kept out is among all others then: these may do no more either.
    """
    rights = mode >> 3 & mode & 7
    for entry in access_list:
        rights &= entry.rights if entry.kind in _MASKED else 7
    return mode & ~(stat.S_IRWXG | stat.S_IRWXO | stat.S_ISGID) | rights << 3 | rights


def _give_access_list(new: Path, target: Path) -> None:
    """Give what replaces a target its list of further users, or none."""
    given, own = _access_list(target), _access_list(new)
    modes = os.lstat(target).st_mode, os.lstat(new).st_mode
    if given:
        entries = [
            (kind, _rights_like(rights, *modes), who) for kind, rights, who in _entries_of(target)
        ]
        given = given[:4] + b"".join(struct.pack(_ENTRY, *entry) for entry in entries)
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


def _entries_of(path: Path) -> list[_Entry]:
    return [_Entry(*entry) for entry in struct.iter_unpack(_ENTRY, _access_list(path)[4:])]


class _Admitted(NamedTuple):
    """Whom a mode and an access list let in."""

    mode: int
    entries: Sequence[_Entry]

    def by_group(self, right: int) -> set[tuple[int, int]]:
        """Return who has a right by group or list; without a list that is the group, if it may."""
        if not self.mode & right << 3:  # where there is a list, its mask
            return set()
        entries = self.entries or [_Entry(_GROUP, right, _NOBODY)]
        masked = [one for one in entries if one.kind in _MASKED]
        return {(one.kind, one.who) for one in masked if one.rights & right}

    def kept_out(self, right: int) -> set[tuple[int, int]]:
        """Return whom the list names without that right: they have none by a group or as others."""
        named = [one for one in self.entries if one.kind in _MASKED]
        return {(one.kind, one.who) for one in named} - self.by_group(right)


def _closed(own: _Admitted, given: _Admitted) -> int:
    """Return what to take from the mode of a stage, so that it admits nobody whom another does not.

    Who may write in it could put another file in the place of one, or keep one open for writing.
    Without the right to search it nothing in it can be opened; who may read the target may still
    list and lock it: the next writer finds whether this one is there.
    """
    closed = 0
    for right, taken in ((4, 7), (2, 3)):
        admitted, kept_out = own.by_group(right), given.kept_out(right)
        named = {one for one in kept_out - own.kept_out(right) if one[0] == _USER}
        if admitted and (named or not admitted <= given.by_group(right)):
            closed |= taken << 3
        if own.mode & right and (kept_out or not given.mode & right):
            closed |= taken
    return closed


def allocated(root: Path) -> int:
    """Bytes that the files below `root` occupy on the disk, as far as that can be told."""
    nbytes = 0
    for parent, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(OSError):  # it is gone by now, or another user's
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
