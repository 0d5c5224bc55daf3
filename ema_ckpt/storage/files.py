"""Positioned reads of a checkpoint's files, on a local disk or behind an fsspec URL."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import AccessError, RefusedError, SourceError, UnsafeError
from ema_ckpt.storage.http_ranges import (
    HttpFile,
    may_be_page,
    read_range,
    size_in_answer,
    strong_tag,
)
from ema_ckpt.storage.remote import (
    ReplacedError,
    ShortAnswerError,
    ask,
    in_turn,
    is_http,
    join_url,
    open_filesystem,
    read_part,
    reads_whole,
    stamp_of,
)
from ema_ckpt.storage.remote_folders import list_remote
from ema_ckpt.storage.s3_answers import is_s3
from ema_ckpt.storage.s3_ranges import S3Ranges
from ema_ckpt.storage.stamp import Stamp

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

AnswerT = TypeVar("AnswerT")
_URL = re.compile(r"(?!\++:)(?:[^\W_]|\+){2,}://")
_CHAINED_URL = re.compile(r"(?:[A-Za-z0-9+_-]+::)+[A-Za-z0-9+]{2,}:/")
_MANGLED_URL = re.compile(r"[A-Za-z0-9+]{2,}:/[^/]")
_UNSAFE_NAME = re.compile(r"\0|(?:^|/)\.{0,2}(?:/|\Z)")
# A long read of a remote file is a window of so long ranges, asked for at the same time.
_RANGE_NBYTES = 2 << 20
_MOST_NBYTES = 64 << 20  # of such a window
_HTTP_NBYTES = 16 << 20  # of one request over HTTP
# What a name says that no file can have, or none that lies there.
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_MOST_ASKED = 16  # files that are looked for again where one is missing
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def is_url(path: str) -> bool:
    """Whether `path` is an fsspec URL (`s3://…`, `memory://…`) rather than a local path."""
    return _URL.match(path) is not None


def is_mangled_url(path: str) -> bool:
    """Whether `path` looks like a URL that lost a slash as a `Path` (`s3:/bucket/key`)."""
    return _MANGLED_URL.match(path) is not None


def is_chained_url(path: str) -> bool:
    """Whether `path` is one of fsspec's chains (`simplecache::s3://…`), which is no local path."""
    return _CHAINED_URL.match(path) is not None


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
        UnsafeError: `unsafe-path` for absolute names, `..`, empty parts, NUL bytes and text that no
            file name can be.
    """
    if "\\" in name:
        raise _unsafe_name(name)
    return _below(name)


def _below(name: str) -> str:
    """Return `name` if it leads nowhere but below the root; a backslash is a letter like any."""
    if _UNSAFE_NAME.search(name) or not is_file_name(name):
        raise _unsafe_name(name)
    return name


def _unsafe_name(name: str) -> UnsafeError:
    message = f"the checkpoint names the file {name!r}, which is not a plain relative name"
    return UnsafeError("unsafe-path", message, file=name)


def is_file_name(text: str) -> bool:
    """Whether the system can be asked for a file of this name or path at all."""
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def max_open_files() -> int:
    """Files that one reader or writer may keep open: an eighth of the process' limit, 2–4096."""
    try:
        import resource
    except ImportError:  # not on this system
        return 64
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else min(max(soft // 8, 2), 4096)


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether anything has this name, be it a broken link.

    `os.path.lexists` takes any failure for no, and what is not there may be replaced or left out.

    Raises:
        OSError: the system does not tell.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_gone(path: str | os.PathLike[str]) -> bool:
    """Whether nothing has this name, as far as the system tells."""
    try:
        return not is_there(path)
    except OSError:
        return False


def close_read(fd: int) -> None:
    """Close what was only read, locked or synced: nothing can be lost, whatever the system says."""
    with contextlib.suppress(OSError):
        os.close(fd)


def open_files(root: str, *, are_listed: bool = False) -> Files:
    """Open a local directory or an fsspec URL. Raises as `open_filesystem`.

    `are_listed`: only names that a listing gave are asked for, whatever letters they have.
    """
    if is_url(root):
        return RemoteFiles(*open_filesystem(root), root)
    return LocalFiles(root, are_listed=are_listed)


def _missing(name: str, root: str) -> SourceError:
    return SourceError("missing-file", f"{name}: no such file in {root}", file=name)


def _changed(
    name: str, root: str, how: str, hint: str = "let its writer finish and try again"
) -> AccessError:
    message = f"{name}: {how} while it was read (in {root}); {hint}"
    return AccessError("source-changed", message, file=name)


def _removed(name: str, root: str) -> AccessError:
    hint = "something deletes the checkpoint, as retention jobs do; name the run again"
    return _changed(name, root, "was removed", hint)


def _check_bounds(name: str, offset: int, nbytes: int, size: int) -> None:
    if 0 <= offset <= offset + nbytes <= size:
        return
    message = f"{name}: expected {nbytes} bytes at {offset}, found {max(size - offset, 0)}"
    raise SourceError("truncated-file", f"{message}: the file is truncated", file=name)


class LocalFiles:
    """Files below a local directory, through `pread`.

    The first ones stay open; those beyond `max_open_files` are opened for each read, because a
    checkpoint may have more files than a process may open. No descriptor is ever closed that
    another thread may be reading from.

    Attributes:
        seen: what `stamps_of` would have said of each file when it was first opened.
    """

    def __init__(self, root: str | Path, *, are_listed: bool = False) -> None:
        self.root = str(root)
        self._are_listed = are_listed
        self._was_there = os.path.lexists(self.root)
        self.seen: dict[str, Stamp] = {}
        self._open: dict[str, tuple[int, int, bool]] = {}
        self._sizes: dict[str, int] = {}
        self._limit = max_open_files()
        self._lock = threading.Lock()
        self._ahead_nbytes = 0

    def read_ahead(self, nbytes: int) -> None:
        """Have `nbytes` fetched ahead of what is read, file by file.

        The kernel does so by itself for one reader of a file; forked processes that read different
        places share what it knows of the file, and take turns in misleading it.
        """
        self._ahead_nbytes = nbytes if hasattr(os, "posix_fadvise") else 0

    def _fetch_ahead(self, fd: int, offset: int, end: int) -> None:
        """Ask for the next window of a file where a read comes to the end of one."""
        window = self._ahead_nbytes
        if end // window != offset // window:
            start = (end // window + 1) * window
            with contextlib.suppress(OSError):  # it is advice; the read itself tells what is wrong
                os.posix_fadvise(fd, start, window, os.POSIX_FADV_WILLNEED)

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
        path = os.path.join(self.root, name if self._are_listed else _below(name))
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _NO_SUCH_FILE:
                reason = _removed if self._is_being_removed() else _missing
                raise reason(name, self.root) from None
            raise self._unreadable(name, error) from None
        try:
            status = os.fstat(fd)
        except OSError as error:
            close_read(fd)
            raise self._unreadable(name, error) from None
        if not stat.S_ISREG(status.st_mode):
            close_read(fd)
            message = f"{name}: not a regular file (in {self.root})"
            raise UnsafeError("unsafe-path", message, file=name)
        self.seen.setdefault(name, Stamp.of(status))
        return fd, status.st_size

    def stamp(self, name: str) -> Stamp:
        """Return the present state of a file: of the one that was opened, if it stays open.

        Raises:
            OSError: there is none, or it cannot be told.
        """
        opened = self._open.get(name)
        return Stamp.of(
            os.stat(os.path.join(self.root, name)) if opened is None else os.fstat(opened[0])
        )

    def _is_being_removed(self) -> bool:
        """Whether something that was there before is gone: the directory, or a file in it."""
        known = islice(chain(self._open, self._sizes), _MOST_ASKED)
        paths = [os.path.join(self.root, name) for name in known]
        if self._was_there:
            paths.append(self.root)
        return not all(map(os.path.lexists, paths))

    def _unreadable(self, name: str, error: OSError) -> AccessError:
        hint = "; raise `ulimit -n`" if error.errno in NO_DESCRIPTORS else ""
        message = f"{name}: {error.strerror} (in {self.root}){hint}"
        kind = RefusedError if isinstance(error, PermissionError) else AccessError
        return kind("unreadable", message, file=name)

    def size(self, name: str) -> int:
        size = self._sizes.get(name)
        if size is None:
            fd, size, stays_open = self._descriptor(name)
            if not stays_open:
                close_read(fd)
            self._sizes[name] = size
        return size

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        fd, size, stays_open = self._descriptor(name)
        try:
            _check_bounds(name, offset, nbytes, size)
            data = os.pread(fd, nbytes, offset)
        except OSError as error:
            raise self._unreadable(name, error) from None
        finally:
            if not stays_open:
                close_read(fd)
        if len(data) == nbytes:
            return data
        buffer = bytearray(nbytes)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        fd, size, stays_open = self._descriptor(name)
        done, nbytes = 0, len(buffer)
        try:
            if self._ahead_nbytes:
                self._fetch_ahead(fd, offset, offset + nbytes)
            while done < nbytes:
                count = os.preadv(fd, [buffer[done:] if done else buffer], offset + done)
                if not count:
                    _check_bounds(name, offset, nbytes, size)
                    raise _changed(name, self.root, "became shorter")
                done += count
        except OSError as error:
            raise self._unreadable(name, error) from None
        finally:
            if not stays_open:
                close_read(fd)

    def listing(self) -> list[str]:
        try:
            return sorted(os.listdir(self.root))
        except OSError as error:
            raise self._unreadable("", error) from None

    def close(self) -> None:
        with self._lock:
            while self._open:  # each is closed once, for its number may be another's after that
                _, (fd, _, _) = self._open.popitem()
                close_read(fd)

    def __del__(self) -> None:
        # Where an error was raised in between, nobody may be left to close it.
        if hasattr(self, "_lock"):
            self.close()


class RemoteFiles:
    """Files below an fsspec URL, through ranged reads.

    Attributes:
        seen: what `stamps_of` would have said of each file behind HTTP when it was first asked for.
    """

    def __init__(self, filesystem: AbstractFileSystem, root: str, url: str) -> None:
        self.root = url
        self._filesystem = filesystem
        self._place = root
        self._sizes: dict[str, int] = {}
        self.seen: dict[str, Stamp] = {}
        self._tags: dict[str, str] = {}  # entity tags, by path
        self._said: dict[str, dict[str, str]] = {}  # as HttpFile.said, by path
        is_async = bool(getattr(filesystem, "async_impl", False))
        self._is_concurrent = is_async and not reads_whole(filesystem)
        self._s3 = S3Ranges(filesystem) if is_s3(filesystem) else None

    def _path(self, name: str) -> str:
        return join_url(self._place, _below(name))

    def _ask(self, question: Callable[[], AnswerT], name: str) -> AnswerT:
        return ask(in_turn(self._filesystem, question), name, self.root)

    def size(self, name: str) -> int:
        if name not in self._sizes:
            path = self._path(name)
            try:
                info = self._ask(lambda: self._filesystem.info(path), name)
            except FileNotFoundError:
                reason = _removed if self._is_being_removed() else _missing
                raise reason(name, self.root) from None
            if not isinstance(info["size"], int):
                message = f"{name}: the server does not say how long it is (in {self.root})"
                raise AccessError("unreadable", f"{message}; download it first", file=name)
            size = info["size"]
            if is_http(self._filesystem):
                size = self._checked_size(name, path, size, info.get("mimetype"))
                self._tags[path], self.seen[name] = strong_tag(info), Stamp(stamp_of(info))
            self._sizes[name] = size
        return self._sizes[name]

    def _checked_size(self, name: str, path: str, size: int, kind: object) -> int:
        """Compare the length that HEAD gave, `size`, with that of an answer to GET; return it.

        `read` compares every answer, but asks for nothing beyond `size`: a file that HEAD makes too
        short would be truncated. So the first bytes are asked for here, of the first file and of
        all that HEAD calls empty or a page. Of empty ones the total of a range counts.
        """
        if self._sizes and size and not may_be_page(kind):
            return size
        try:
            said = self._ask(lambda: size_in_answer(self._filesystem, path), name)
        except FileNotFoundError:
            raise _removed(name, self.root) from None
        if said.is_page:
            message = f"{name}: the server sends a page in its place, as one to log in"
            raise AccessError("unreadable", f"{message} (in {self.root})", file=name)
        if said.nbytes is None or said.nbytes == size:
            return size
        if not size and said.is_of_range:
            return said.nbytes
        lengths = f"{size} bytes in its answer to HEAD, and {said.nbytes} in that to GET"
        message = f"{name}: the server says that it has {lengths} (in {self.root})"
        raise AccessError("unreadable", f"{message}; download it first", file=name)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        size = self.size(name)
        _check_bounds(name, offset, nbytes, size)
        if not nbytes:
            return b""
        path = self._path(name)
        try:
            return self._ask(lambda: self._fetch(path, size, offset, nbytes), name)
        except FileNotFoundError:
            raise _removed(name, self.root) from None
        except ReplacedError:
            raise _changed(name, self.root, "was replaced") from None

    def _is_being_removed(self) -> bool:
        """Whether the first file that was there before is gone."""
        known = next(iter(self._sizes), None)
        if known is None:
            return False
        path = self._path(known)
        try:
            self._ask(lambda: self._filesystem.info(path), known)
        except FileNotFoundError:
            return True
        return False

    def _fetch(self, path: str, size: int, offset: int, nbytes: int) -> bytes:
        if is_http(self._filesystem):
            file = HttpFile(path, size, self._tags.get(path, ""), self._said.setdefault(path, {}))
            data = read_range(self._filesystem, file, offset, offset + nbytes)
        elif self._s3 is not None:
            data = self._s3.read(path, offset, offset + nbytes)
        else:
            data = read_part(self._filesystem, path, offset, offset + nbytes)
        if len(data) != nbytes:
            raise ShortAnswerError(f"the server sent {len(data)} of {nbytes} bytes at {offset}")
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """A long buffer is filled piece by piece: the answer to one request has to end in time."""
        most = _HTTP_NBYTES if is_http(self._filesystem) else _MOST_NBYTES
        for start in range(0, len(buffer) or 1, most):
            self._read_piece(name, offset + start, buffer[start : start + most])

    def _read_piece(self, name: str, offset: int, buffer: memoryview) -> None:
        nbytes = len(buffer)
        if nbytes < 2 * _RANGE_NBYTES or is_http(self._filesystem) or not self._is_concurrent:
            buffer[:] = self.read(name, offset, nbytes)
            return
        _check_bounds(name, offset, nbytes, self.size(name))
        starts = list(range(0, nbytes, _RANGE_NBYTES))
        ends = [min(start + _RANGE_NBYTES, nbytes) for start in starts]
        answers = self._fetch_ranges(name, offset, starts, ends)
        for start, end, answer in zip(starts, ends, answers, strict=True):
            if isinstance(answer, bytes) and len(answer) == end - start:
                buffer[start:end] = answer
            else:  # asked once more alone, which says what is wrong
                buffer[start:end] = self.read(name, offset + start, end - start)

    def _fetch_ranges(
        self, name: str, offset: int, starts: list[int], ends: list[int]
    ) -> list[object]:
        """Ask for several ranges at a time; what fails is an exception among the answers."""
        path = self._path(name)
        begins = [offset + start for start in starts]
        if self._s3 is not None:
            ranges = [
                (offset + start, offset + end) for start, end in zip(starts, ends, strict=True)
            ]
            return self._s3.read_several(path, ranges)
        try:
            answers: list[object] = self._filesystem.cat_ranges(
                [path] * len(starts), begins, [offset + end for end in ends], on_error="return"
            )
        except Exception:  # noqa: BLE001  # whatever it is, each range is asked for again
            return [None] * len(starts)
        return answers

    def listing(self) -> list[str]:
        names = list_remote(self._filesystem, self._place, self.root)
        return sorted(names.folders + names.files)

    def close(self) -> None:
        pass  # nothing is held open
