"""Positioned reads of a checkpoint's files, on a local disk or behind an fsspec URL."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import SourceError, UnsafeError

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

_URL = re.compile(r"(?!\++:)(?:[^\W_]|\+){2,}://")
_MANGLED_URL = re.compile(r"[A-Za-z0-9+]{2,}:/[^/]")
_UNSAFE_NAME = re.compile(r"[\0\\]|(?:^|/)\.{0,2}(?:/|\Z)")


def is_url(path: str) -> bool:
    """Whether `path` is an fsspec URL (`s3://…`, `memory://…`) rather than a local path."""
    return _URL.match(path) is not None


def is_mangled_url(path: str) -> bool:
    """Whether `path` looks like a URL that lost a slash as a `Path` (`s3:/bucket/key`)."""
    return _MANGLED_URL.match(path) is not None


def local_path(path: str) -> str | None:
    """Local path of `path`, which may be a `file://` URL; None if it lies elsewhere."""
    if not is_url(path):
        return path
    scheme, _, rest = path.partition("://")
    return rest if scheme in ("file", "local") else None


def local_paths(paths: Iterable[str]) -> list[str]:
    """Return the local paths of those `paths` that lie on this machine."""
    return [path for path in map(local_path, paths) if path is not None]


def safe_name(name: str) -> str:
    """Return `name` if it is a plain relative file name; metadata may hold any.

    Raises:
        UnsafeError: `unsafe-path` for absolute names, `..`, empty parts and NUL bytes.
    """
    if _UNSAFE_NAME.search(name):
        message = f"the checkpoint names the file {name!r}, which is not a plain relative name"
        raise UnsafeError("unsafe-path", message, file=name)
    return name


def max_open_files() -> int:
    """Files that one reader or writer may keep open: an eighth of the process' limit, 16–4096."""
    try:
        import resource
    except ImportError:  # not on this system
        return 64
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else min(max(soft // 8, 16), 4096)


def open_filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Raises:
        SourceError: `missing-extra` if fsspec or the URL's own package is not installed.
    """
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        message = f"{url}: {error}; install the fsspec package for this URL"
        raise SourceError("missing-extra", message) from None
    return filesystem, str(path).rstrip("/")


def open_files(root: str) -> Files:
    """Open a local directory or an fsspec URL. Raises SourceError as `open_filesystem`."""
    if is_url(root):
        return RemoteFiles(*open_filesystem(root), root)
    return LocalFiles(root)


def _missing(name: str, root: str) -> SourceError:
    return SourceError("missing-file", f"{name}: no such file in {root}", file=name)


def _truncated(name: str, offset: int, expected: int, nbytes: int) -> SourceError:
    message = f"{name}: expected {expected} bytes at {offset}, found {max(nbytes, 0)}"
    return SourceError("truncated-file", f"{message}: the file is truncated", file=name)


def _check_bounds(name: str, offset: int, nbytes: int, size: int) -> None:
    if not 0 <= offset <= offset + nbytes <= size:
        raise _truncated(name, offset, nbytes, size - offset)


class LocalFiles:
    """Files below a local directory, through `pread`.

    The first ones stay open; those beyond `max_open_files` are opened for each read, because a
    checkpoint may have more files than a process may open. No descriptor is ever closed that
    another thread may be reading from.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = str(root)
        self._open: dict[str, tuple[int, int, bool]] = {}
        self._sizes: dict[str, int] = {}
        self._limit = max_open_files()
        self._lock = threading.Lock()

    def _descriptor(self, name: str) -> tuple[int, int, bool]:
        """A descriptor, the file's bytes, and whether it stays open; else the caller closes it."""
        opened = self._open.get(name)
        if opened is not None:
            return opened
        with self._lock:
            opened = self._open.get(name)
            if opened is None and len(self._open) < self._limit:
                opened = self._open[name] = (*self._open_regular(name), True)
        if opened is None:
            return (*self._open_regular(name), False)
        return opened

    def _open_regular(self, name: str) -> tuple[int, int]:
        path = os.path.join(self.root, safe_name(name))
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise _missing(name, self.root) from None
        except OSError as error:
            raise self._unreadable(name, error) from None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            message = f"{name}: not a regular file (in {self.root})"
            raise UnsafeError("unsafe-path", message, file=name)
        return fd, status.st_size

    def _unreadable(self, name: str, error: OSError) -> SourceError:
        message = f"{name}: {error.strerror} (in {self.root})"
        return SourceError("unreadable", message, file=name)

    def size(self, name: str) -> int:
        size = self._sizes.get(name)
        if size is None:
            fd, size, stays_open = self._descriptor(name)
            if not stays_open:
                os.close(fd)
            self._sizes[name] = size
        return size

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        fd, size, stays_open = self._descriptor(name)
        try:
            _check_bounds(name, offset, nbytes, size)
            data = os.pread(fd, nbytes, offset)
        finally:
            if not stays_open:
                os.close(fd)
        if len(data) == nbytes:
            return data
        buffer = bytearray(nbytes)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        fd, _, stays_open = self._descriptor(name)
        done, nbytes = 0, len(buffer)
        try:
            while done < nbytes:
                count = os.preadv(fd, [buffer[done:] if done else buffer], offset + done)
                if not count:
                    raise _truncated(name, offset, nbytes, done)
                done += count
        except OSError as error:
            raise self._unreadable(name, error) from None
        finally:
            if not stays_open:
                os.close(fd)

    def listing(self) -> list[str]:
        return sorted(os.listdir(self.root))

    def close(self) -> None:
        with self._lock:
            for fd, _, _ in self._open.values():
                os.close(fd)
            self._open.clear()


class RemoteFiles:
    """Files below an fsspec URL, through ranged reads."""

    def __init__(self, filesystem: AbstractFileSystem, root: str, url: str) -> None:
        self.root = url
        self._filesystem = filesystem
        self._base = root.rstrip("/")
        self._sizes: dict[str, int] = {}

    def _path(self, name: str) -> str:
        return f"{self._base}/{safe_name(name)}"

    def size(self, name: str) -> int:
        if name not in self._sizes:
            try:
                self._sizes[name] = int(self._filesystem.info(self._path(name))["size"])
            except FileNotFoundError:
                raise _missing(name, self.root) from None
        return self._sizes[name]

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        size = self.size(name)
        _check_bounds(name, offset, nbytes, size)
        if not nbytes:
            return b""
        path, end = self._path(name), offset + nbytes
        data = bytes(self._filesystem.cat_file(path, start=offset, end=end))
        if len(data) != nbytes:
            raise _truncated(name, offset, nbytes, len(data))
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(name, offset, len(buffer))

    def listing(self) -> list[str]:
        names = self._filesystem.ls(self._base, detail=False)
        return sorted([str(name).rstrip("/").rpartition("/")[2] for name in names])

    def close(self) -> None:
        pass  # nothing is held open
