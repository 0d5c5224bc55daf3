"""Locks that keep writers of one target apart: the kernel drops them with the process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ema_ckpt.core.errors import TargetError
from ema_ckpt.storage.files import close_read
from ema_ckpt.storage.stage_names import LOCK
from ema_ckpt.writing.open_inside import open_directory

_LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_LOCKED = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # Lustre without `-o flock`, say


@contextlib.contextmanager
def lock_parent(parent: Path) -> Iterator[None]:
    """Keep other writers from looking for leftovers in `parent`, for a second at most.

    Without this lock a race is still decided by the lock of the stage, and by the switch.
    """
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(100):
            try:
                _lock(fd)
                break
            except OSError:
                time.sleep(0.01)
        yield
    finally:
        close_read(fd)


def lock_stage(root: Path, target: Path) -> list[int]:
    """Lock a stage; return descriptors that hold the lock until they are closed.

    Raises:
        TargetError: `busy` if a process holds it.
    """
    fds: list[int] = []
    try:
        fds.append(open_directory(root))
        if not _lock(fds[0]):
            # NFS locks only what is open for writing, which a directory never is.
            fds.append(os.open(root / LOCK, _LOCK_FILE, 0o666))
            fcntl.flock(fds[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        for fd in fds:
            close_read(fd)
        # Another user's; with a name an error is one of opening, and none of a lock that is held.
        if isinstance(error, PermissionError) and error.filename:
            reason = "may be another run's, and may not be opened; wait for it to end, or delete it"
            raise TargetError("busy", f"{target}: {root} {reason}") from None
        if error.errno in _NO_LOCKS:
            hint = "mount it with `flock`, or write to another one"
            reason = f"its file system has no locks ({error.strerror}), which keep writers apart"
            raise TargetError("unsupported", f"{target}: {reason}; {hint}") from None
        if error.errno not in _LOCKED:
            raise
        message = f"{target}: another process is writing it, in {root.name}; wait for it to end"
        raise TargetError("busy", message) from None
    return fds


def _lock(fd: int) -> bool:
    """Take `flock` on a directory; False if its file system has none for directories."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED:
            raise
        return False
    return True
