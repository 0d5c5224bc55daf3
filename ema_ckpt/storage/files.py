"""Positioned reads of a checkpoint's files, on a local disk or behind an fsspec URL."""

from __future__ import annotations

import os
import re
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import SourceError, UnsafeError

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

_MANGLED_URL = re.compile(r"[A-Za-z0-9+]{2,}:/[^/]")


def is_url(path: str) -> bool:
    """Whether `path` names a place behind fsspec (`s3://…`, `memory://…`) rather than on this
    machine.
    """
    scheme, found, _ = path.partition("://")
    return bool(found) and scheme.replace("+", "").isalnum() and len(scheme) > 1


def is_mangled_url(path: str) -> bool:
    """Whether `path` looks like a URL that lost a slash as it became a `Path`
    (`s3:/bucket/key`).
    """
    return _MANGLED_URL.match(path) is not None


def local_path(path: str) -> str | None:
    """Where on this machine `path` lies, `file://` URLs included; None for a place elsewhere."""
    if not is_url(path):
        return path
    scheme, _, rest = path.partition("://")
    return rest if scheme in ("file", "local") else None


def safe_name(name: str) -> str:
    """Return `name` if it is a plain relative file name; names come from metadata that nobody
    vouches for.

    Raises:
        UnsafeError: `unsafe-path` for absolute names, `..`, empty parts and NUL bytes.
    """
    if (
        not name
        or "\0" in name
        or "\\" in name
        or any(part in ("", ".", "..") for part in name.split("/"))
    ):
        raise UnsafeError(
            "unsafe-path",
            f"the checkpoint names the file {name!r}, which is not a plain relative name",
            file=name,
        )
    return name


def _truncated(name: str, offset: int, expected: int, found: int) -> SourceError:
    message = f"{name}: expected {expected} bytes at {offset}, found {found}: the file is truncated"
    return SourceError("truncated-file", message, file=name)


def held_limit() -> int:
    """How many files one reader or writer may keep open: an eighth of what the process may, 16 to
    4096.
    """
    try:
        import resource
    except ImportError:  # no such limit to ask for
        return 64
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else min(max(soft // 8, 16), 4096)


class LocalFiles:
    """Files below a local directory, through `pread`.

    The first ones stay open; those beyond `held_limit` are opened for each read, because a
    checkpoint may have more files than a process may open. No descriptor is ever closed that
    another thread may be reading from.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = str(root)
        self._open: dict[str, tuple[int, int, bool]] = {}
        self._sizes: dict[str, int] = {}
        self._limit = held_limit()
        self._lock = threading.Lock()

    def _take(self, name: str) -> tuple[int, int, bool]:
        """A descriptor, the file's bytes, and whether it stays open; if not, the caller closes
        it.
        """
        with self._lock:
            found = self._open.get(name)
            if found is None and len(self._open) < self._limit:
                found = self._open[name] = (*self._open_regular(name), True)
        return found or (*self._open_regular(name), False)

    def _open_regular(self, name: str) -> tuple[int, int]:
        path = os.path.join(self.root, safe_name(name))
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise SourceError(
                "missing-file", f"{name}: no such file in {self.root}", file=name
            ) from None
        except OSError as error:
            raise SourceError(
                "unreadable", f"{name}: {error.strerror} (in {self.root})", file=name
            ) from None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise UnsafeError(
                "unsafe-path", f"{name}: not a regular file (in {self.root})", file=name
            )
        return fd, status.st_size

    def size(self, name: str) -> int:
        """Bytes of a file."""
        known = self._sizes.get(name)
        if known is None:
            fd, known, held = self._open.get(name) or self._take(name)
            if not held:
                os.close(fd)
            self._sizes[name] = known
        return known

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes at `offset`."""
        fd, size, held = self._open.get(name) or self._take(name)
        try:
            if offset < 0 or nbytes < 0 or offset + nbytes > size:
                raise _truncated(name, offset, nbytes, max(size - offset, 0))
            data = os.pread(fd, nbytes, offset)
        finally:
            if not held:
                os.close(fd)
        if len(data) == nbytes:
            return data
        buffer = bytearray(nbytes)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        fd, _, held = self._open.get(name) or self._take(name)
        try:
            self._fill(fd, name, offset, buffer)
        finally:
            if not held:
                os.close(fd)

    def _fill(self, fd: int, name: str, offset: int, buffer: memoryview) -> None:
        done, nbytes = 0, len(buffer)
        while done < nbytes:
            try:
                count = os.preadv(fd, [buffer[done:] if done else buffer], offset + done)
            except OSError as error:
                raise SourceError(
                    "unreadable", f"{name}: {error.strerror} (in {self.root})", file=name
                ) from None
            if not count:
                raise _truncated(name, offset, nbytes, done)
            done += count

    def listing(self) -> list[str]:
        """Names directly inside the directory, sorted."""
        return sorted(os.listdir(self.root))

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            for fd, _, _ in self._open.values():
                os.close(fd)
            self._open.clear()


class RemoteFiles:
    """Files below an fsspec URL, through ranged reads."""

    def __init__(self, filesystem: AbstractFileSystem, root: str, url: str) -> None:
        self.root = url
        self._fs = filesystem
        self._base = root.rstrip("/")
        self._sizes: dict[str, int] = {}

    def _path(self, name: str) -> str:
        return f"{self._base}/{safe_name(name)}"

    def size(self, name: str) -> int:
        """Bytes of a file."""
        if name not in self._sizes:
            try:
                self._sizes[name] = int(self._fs.info(self._path(name))["size"])
            except FileNotFoundError:
                raise SourceError(
                    "missing-file", f"{name}: no such file in {self.root}", file=name
                ) from None
        return self._sizes[name]

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes at `offset`."""
        size = self.size(name)
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise _truncated(name, offset, nbytes, max(size - offset, 0))
        data = (
            bytes(self._fs.cat_file(self._path(name), start=offset, end=offset + nbytes))
            if nbytes
            else b""
        )
        if len(data) != nbytes:
            raise _truncated(name, offset, nbytes, len(data))
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        buffer[:] = self.read(name, offset, len(buffer))

    def listing(self) -> list[str]:
        """Names directly inside the directory, sorted."""
        names = self._fs.ls(self._base, detail=False)
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in names)

    def close(self) -> None:
        """Nothing is held open."""


def open_files(root: str) -> Files:
    """Files of a local directory or of an fsspec URL.

    Raises:
        SourceError: `missing-extra` if fsspec or the URL's own package is not installed.
    """
    if not is_url(root):
        return LocalFiles(root)
    try:
        import fsspec

        filesystem, base = fsspec.core.url_to_fs(root)
    except (ImportError, ValueError) as error:
        raise SourceError(
            "missing-extra", f"{root}: {error}; install the fsspec package for this URL"
        ) from None
    return RemoteFiles(filesystem, str(base), root)
