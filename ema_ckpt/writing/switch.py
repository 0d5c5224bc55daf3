"""The switch: a finished file or directory takes the target's name in one step.

rename(2) with `RENAME_NOREPLACE` and `RENAME_EXCHANGE` does it where kernel and file system offer
them (ext4, xfs, btrfs, tmpfs; since Linux 3.15). Elsewhere `switch` takes the longer way that
`stagedir` describes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path

from ema_ckpt.core.errors import TargetError
from ema_ckpt.storage.files import close_read, is_there
from ema_ckpt.storage.stage_names import NOTE, OLD, interrupted_switch
from ema_ckpt.writing.open_inside import create_inside

NOREPLACE, EXCHANGE = 1, 2

_AT_FDCWD = -100
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def renameat2(old: Path, new: Path, flags: int) -> bool:
    """Rename with flags; False, and nothing done, where kernel or file system lack them."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)  # absent from glibc before 2.28
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), ctypes.c_uint(flags)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(new))


def put(new: Path, target: Path, *, plain: bool = False) -> None:
    """Rename `new` to `target`, which must not exist; `plain` uses no flags.

    Raises:
        FileExistsError: something is there already; it is left alone.
    """
    if not plain and renameat2(new, target, NOREPLACE):
        return
    if is_there(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    if not new.is_dir():
        try:
            os.link(new, target)  # never replaces, on any file system that has links
        except FileExistsError:
            raise
        except OSError:
            os.rename(new, target)
        else:
            os.unlink(new)
        return
    # rename(2) itself refuses files and directories with something in them: nothing can be lost.
    try:
        os.rename(new, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        raise


def exchange(new: Path, target: Path, *, plain: bool = False, fsync: bool = True) -> None:
    """Replace `target`, which exists, by `new`; the old one is left in `new`'s directory.

    Raises:
        FileNotFoundError: there is no `target` any more.
        OSError: `target` is as it was.
        TargetError: `unreadable`: neither could be renamed to `target`; says where both are.
    """
    if not plain and renameat2(new, target, EXCHANGE):
        return
    if new.is_file() and target.is_file():
        os.replace(new, target)
        return
    stage = new.parent
    draft = stage / f"{NOTE}.tmp"
    with create_inside(stage, draft.name) as note:
        note.write(json.dumps({"old": OLD, "new": new.name}).encode())
    if fsync:
        fsync_path(draft)
    os.rename(draft, stage / NOTE)
    if fsync:
        fsync_path(stage)
    os.rename(target, stage / OLD)
    try:
        os.rename(new, target)
    except OSError as error:
        _put_back(stage / OLD, target, new, error)
        raise


def take_back(new: Path, target: Path) -> bool:
    """Undo an exchange: `target` is the old one again, and `new` what had replaced it.

    Returns False, and does nothing, where the old one is gone, as a file that was renamed over.
    """
    old = new.parent / OLD
    if is_there(new):
        return renameat2(new, target, EXCHANGE)
    if not is_there(old):
        return False
    (new.parent / NOTE).unlink(missing_ok=True)  # by which a later run would finish the switch
    os.rename(target, new)
    os.rename(old, target)
    return True


def _put_back(old: Path, target: Path, new: Path, failure: OSError) -> None:
    """Give the old target its name again after the new one could not take it."""
    try:
        os.rename(old, target)
    except OSError:
        where = f"the new one is complete in {new}, the old one in {old}"
        remedy = f"rename one of them to {target}, or repeat the command"
        message = f"{target}: cannot be replaced: {failure.strerror}; {where}; {remedy}"
        raise TargetError("unreadable", message, file=str(target)) from failure


def finish(stage: Path, target: Path) -> bool:
    """Complete a switch that was cut in two: `target` is missing, `stage` has its successor."""
    new = interrupted_switch(stage)
    if new is None or is_there(target):
        return False
    try:
        put(new, target)
    except FileExistsError:
        return False
    return True


def may_hold_target(stage: Path, target: Path) -> bool:
    """Whether the old target may be in `stage` and nowhere else: then that must not be deleted."""
    try:
        return not is_there(target) and OLD in os.listdir(stage)
    except FileNotFoundError:
        return False  # there is no such stage any more
    except OSError:
        return True


def fsync_path(path: Path) -> None:
    """Flush a file or directory to the disk, unless it is a directory that may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        sync(fd)
    finally:
        close_read(fd)


def sync(fd: int) -> None:
    """Flush an open file or directory to the disk."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems without a disk below
            raise


def empty_cache(fd: int) -> None:
    """Have what is read next from a file come from the disk.

    Linux keeps pages that the disk refused as if it had them. No later sync writes them, and ext4
    loses what is written to them again.

    Raises:
        OSError: some of what was written to the file could not be stored.
    """
    try:
        sync(fd)
    finally:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # it is advice
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def fsync_tree(path: Path, *, has_links: bool = False) -> None:
    """Flush a file, or a directory with all in it, contents before directories.

    `has_links`: leave files with several links alone, which were there before; of twenty thousand
    that are carried, each would be waited for.
    """
    # Links, FIFOs, sockets and devices have no contents: opening one might wait for ever.
    if path.is_dir():
        for parent, _, files in os.walk(path, topdown=False):
            for name in files:
                status = os.lstat(os.path.join(parent, name))
                if stat.S_ISREG(status.st_mode) and not (has_links and status.st_nlink > 1):
                    fsync_path(Path(parent, name))
            fsync_path(Path(parent))
    else:
        fsync_path(path)
