"""The files of a write plan while they are being written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol

from ema_ckpt.storage.files import close_read, max_open_files
from ema_ckpt.writing.open_inside import open_directory, open_inside
from ema_ckpt.writing.switch import sync

# Linux keeps a file in folios of up to the length of a write, as far as their place in the file is
# a multiple of their size. Two writes that meet inside a page each take the lock, find the page and
# copy to it. Long writes ask for large free blocks, of which a machine that has run for hours has
# few: there 768 KiB take twice the system time of 192 KiB, which are never behind elsewhere.
_WRITE_NBYTES = 192 << 10
_ALIGNMENT = 64 << 10
# Not for reading too: NFS would then read the pages in which a write begins or ends, and send them
# whole, over what another machine has written there.
_WRITE = os.O_WRONLY
_CREATE = _WRITE | os.O_CREAT
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)


def write_end(offset: int, nbytes: int) -> int:
    """Choose where a write of at most `nbytes` bytes ends: at a multiple of 64 KiB if possible.

    2 GB in blocks of 768 KiB take two threads 0.27 s so, and 0.35 s where blocks begin and end
    inside pages.
    """
    end = (offset + nbytes) // _ALIGNMENT * _ALIGNMENT
    return end if end > offset else offset + nbytes


def preallocate(fd: int, nbytes: int) -> None:
    """Give an open file its final size, and its blocks where the file system can reserve them.

    One that is longer, as the stage of an interrupted run may hold, is cut.

    Raises:
        OSError: ENOSPC and the like, before a byte of payload is written.
    """
    size = os.fstat(fd).st_size
    if size > nbytes:
        os.ftruncate(fd, nbytes)
    if nbytes and not _reserve(fd, nbytes) and size < nbytes:
        os.ftruncate(fd, nbytes)


def _reserve(fd: int, nbytes: int) -> bool:
    """Reserve blocks, and extend the file to them; False where the file system cannot.

    There, `posix_fallocate` would write a zero into every 4 KiB whose byte at that place it found
    to be zero: on NFS, say, and over what another process has written in between.
    """
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:  # not on this system
        return False
    while call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        if code in _NO_FALLOCATE:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


# All at the end, each as soon as it is known, or before what lies behind it.
HeaderTime = Literal["last", "early", "in order"]


class Outputs(Protocol):
    """The files of a plan, wherever they go."""

    @property
    def headers(self) -> HeaderTime:
        """When the bytes around payloads are wanted."""
        ...

    def write(self, file: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        """Write all of `data` at `offset` of a file."""
        ...

    def write_items(
        self, file: str, offset: int, data: memoryview, extents: Iterable[tuple[int, int]]
    ) -> None:
        """Write the `extents` (start and length) of `data`; what is between them may be written."""
        ...

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Read back what an earlier run wrote."""
        ...

    def start_writeback(self, file: str, offset: int, nbytes: int) -> None:
        """Begin to make a range durable."""
        ...

    def close(self) -> None:
        """Release what is open; nothing can be written after."""
        ...


class OutputFiles:
    """Files at their final size; as many as may stay open do, the others are opened per use.

    They are opened in a directory that is held, and never through a symbolic link.
    """

    headers: HeaderTime = "last"

    def __init__(self, root: Path, files: Mapping[str, int]) -> None:
        """`files` are those of the directory `root`, or one named "", which is `root` itself."""
        self._root = root
        self._fds: dict[str, int] = {}
        self._written: set[str] = set()
        self._directory = open_directory(root.parent if "" in files else root)
        limit = max_open_files()
        try:
            for name, nbytes in files.items():
                if len(self._fds) < limit:
                    self._fds[name] = self._open(name, _CREATE)
                with self._opened(name, _CREATE) as fd:
                    preallocate(fd, nbytes)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, flags: int) -> int:
        try:
            return open_inside(self._directory, name or self._root.name, flags)
        except OSError as error:
            error.filename = str(self._root / name) if name else str(self._root)
            raise

    @contextmanager
    def _opened(self, name: str, flags: int = _WRITE) -> Iterator[int]:
        """Yield a descriptor; an OSError names the file."""
        try:
            kept = self._fds.get(name)
            fd = self._open(name, flags) if kept is None else kept
            try:
                yield fd
            finally:
                if kept is None:
                    os.close(fd)
        except OSError as error:
            error.filename = str(self._root / name) if name else str(self._root)
            raise

    def write(self, file: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data)
        self._written.add(file)
        with self._opened(file) as fd:
            while view:
                end = write_end(offset, _WRITE_NBYTES)
                done = os.pwrite(fd, view[: end - offset], offset)
                if not done:  # trying for ever would look like a slow disk
                    raise OSError(errno.EIO, "the file system takes no bytes and gives no reason")
                view, offset = view[done:], offset + done

    def write_items(
        self, file: str, offset: int, data: memoryview, extents: Iterable[tuple[int, int]]
    ) -> None:
        """Write all of `data` at once: what is between its items is written later."""
        _ = extents
        self.write(file, offset, data)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Read back what an earlier run wrote."""
        done = 0
        fd = self._open(file, os.O_RDONLY)
        try:
            while done < len(buffer):
                done += os.preadv(fd, [buffer[done:]], offset + done) or len(buffer)
        finally:
            close_read(fd)

    def start_writeback(self, file: str, offset: int, nbytes: int) -> None:
        """Start writing a range to the disk: `fsync` then has less to wait for.

        Linux starts to write dirty pages when told that they are not needed soon (`fadvise64`,
        DONTNEED), and keeps them in the page cache until they are clean.
        """
        fd = self._fds.get(file)
        if fd is not None and hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # it is advice; writing and syncing tell what is wrong
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Make durable what this process has written: one on another machine may not be able to."""
        for name in sorted(self._written):
            with self._opened(name) as fd:
                sync(fd)

    def refuse_losses(self) -> None:
        """Check that what was written still has its name.

        Raises:
            FileNotFoundError: something removed or replaced a file meanwhile.
        """
        for name in self._fds:
            with self._opened(name) as fd:
                is_lost = not os.fstat(fd).st_nlink
            if is_lost:
                path = self._root / name if name else self._root
                reason = f"something removed {path.name!r} from its stage meanwhile"
                raise FileNotFoundError(errno.ENOENT, reason, str(path))

    def close(self) -> None:
        """Close every file and the directory.

        Raises:
            OSError: the first failure: some network file systems write only now.
        """
        failure: OSError | None = None
        while self._fds:  # each is closed once, for its number may be another's after that
            name, fd = self._fds.popitem()
            try:
                os.close(fd)
            except OSError as error:
                error.filename = str(self._root / name) if name else str(self._root)
                failure = failure or error
        if self._directory >= 0:
            fd, self._directory = self._directory, -1
            with suppress(OSError):
                os.close(fd)
        if failure is not None:
            raise failure
