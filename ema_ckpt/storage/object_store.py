"""Write behind an fsspec URL: whole objects, and long ones from their start to their end.

Nobody sees half an object. What an object store is sent appears when it is closed; elsewhere (a
disk behind sftp, memory) a temporary name is written and then renamed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ema_ckpt.core.errors import AccessError, TargetError, UsageError
from ema_ckpt.storage.directories import join
from ema_ckpt.storage.remote import (
    HTTP,
    ONCE,
    UPLOAD_PATIENCE,
    Patience,
    ask,
    in_turn,
    is_http,
    is_unanswered,
    open_filesystem,
    protocols_of,
    read_part,
    turn,
)
from ema_ckpt.storage.stage_names import stage_name

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

AnswerT = TypeVar("AnswerT")
_SILENT_SECONDS = 30.0
PROBE = "probe"  # what a file is called that is opened to see what its class is
# Whose files have the class of those that appear when they are closed, and appear before that.
_IN_PLACE = {"ftp", "webhdfs", "dbfs", "jupyter"}


class ObjectStore:
    """A directory behind a URL, to write in; names are relative to it.

    Attributes:
        url: of the directory. base: its path in `filesystem`.
    """

    def __init__(self, url: str) -> None:
        """Open the file system of `url`. Raises as `open_filesystem`, and UsageError for HTTP."""
        refusal = f"{url}: HTTP can only be read; name a store or a local path"
        if url.startswith(HTTP):  # whether the packages that read it are installed or not
            raise UsageError("usage", refusal)
        self.url = url
        self.filesystem, self.base = open_filesystem(url)
        if is_http(self.filesystem):
            raise UsageError("usage", refusal)
        self._shows_unfinished: bool | None = None

    def path(self, name: str) -> str:
        """Path of an object in the file system."""
        return f"{self.base}/{name}"

    def request(
        self, action: Callable[[], AnswerT], name: str, patience: Patience = UPLOAD_PATIENCE
    ) -> AnswerT:
        """Do what may be done twice, with the patience that an upload takes.

        Raises:
            TargetError: `not-found`: there is no such bucket; `unsupported`: nothing can be written
                there.
            AccessError: as `remote.ask`.
        """
        place = join(self.url, name)
        try:
            return ask(in_turn(self.filesystem, action), place, place, patience)
        except FileNotFoundError as error:
            cause = next(iter(str(error.__cause__).splitlines()), "")
            message = f"{place}: cannot be written: not found: {cause}"
            raise TargetError("not-found", message) from error
        except NotImplementedError as error:
            message = f"{place}: this file system cannot be written to"
            raise TargetError("unsupported", message) from error

    def _ask(self, question: Callable[[], AnswerT], name: str) -> AnswerT:
        """Ask with the patience of reading. Raises as `remote.ask`."""
        place = join(self.url, name)
        return ask(in_turn(self.filesystem, question), place, place)

    def put(self, name: str, data: bytes) -> None:
        """Write a small object at once."""

        if self.shows_unfinished():
            with self.stream(name) as stream:
                stream.write(data)
                stream.complete()
        else:
            self.request(lambda: self.filesystem.pipe_file(self.path(name), data), name)
            self.filesystem.invalidate_cache()

    def read(self, name: str) -> bytes | None:
        """Read a small object; None if it is not there."""
        try:
            return self._ask(lambda: bytes(self.filesystem.cat_file(self.path(name))), name)
        except FileNotFoundError:
            return None

    def read_head(self, name: str) -> bytes:
        """Read the first two bytes of an object."""
        path = self.path(name)
        return self._ask(lambda: read_part(self.filesystem, path, 0, 2), name)

    def refuse_length(self, name: str, nbytes: int) -> None:
        """Refuse an object that has not `nbytes`, if the store tells. Raises AccessError."""
        path, there = self.path(name), None
        self.filesystem.invalidate_cache()
        with contextlib.suppress(FileNotFoundError, AccessError):
            there = self._ask(lambda: self.filesystem.info(path), name).get("size")
        if isinstance(there, int) and there != nbytes:
            message = f"has {there} bytes, though {nbytes} were sent; write it again"
            raise AccessError("unreadable", f"{join(self.url, name)}: {message}")

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there count as deleted."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._ask(partial(self._remove, self.path(name)), name)
        self.filesystem.invalidate_cache()

    def _remove(self, path: str) -> None:
        try:
            self.filesystem.rm_file(path)
        except Exception:
            self.filesystem.invalidate_cache()
            self.filesystem.info(path)  # FTP says of what is not there what it says of a refusal
            raise

    def refuse_there(self, temporary: str, name: str) -> None:
        """Refuse an object that has kept its temporary name, as HDFS does where `name` is taken.

        Raises:
            AccessError: `unreadable`.
        """
        path = self.path(temporary)
        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: self.filesystem.info(path), temporary)
            reason = "did not give the new object its name; delete the old one, or name another"
            raise AccessError("unreadable", f"{join(self.url, name)}: the store {reason}")

    def answers(self) -> bool:
        """Whether the store says anything within half a minute, be it that nothing is there.

        Where it does not, every request that is to delete something would wait for many minutes.
        """
        is_heard, has_ended = False, threading.Event()

        def question() -> None:
            nonlocal is_heard
            try:
                with turn(self.filesystem):
                    self.filesystem.invalidate_cache()
                    self.filesystem.info(self.base or "/")
                is_heard = True
            except Exception as error:  # noqa: BLE001  # a refusal is an answer
                is_heard = not is_unanswered(error)
            has_ended.set()

        threading.Thread(target=question, name="ema_ckpt-probe", daemon=True).start()
        return has_ended.wait(_SILENT_SECONDS) and is_heard

    def stream(self, name: str, part_nbytes: int = 0) -> ObjectStream:
        """Begin an object that is written from its start to its end, in parts of so many bytes."""
        return ObjectStream(self, name, part_nbytes)

    def shows_unfinished(self) -> bool:
        """Whether files are there before they are closed, as the class of one tells."""
        from fsspec.spec import AbstractBufferedFile

        if protocols_of(self.filesystem) & _IN_PLACE:
            return True
        if self._shows_unfinished is None:
            name = _temporary_name(PROBE)
            path = self.path(name)
            try:
                probe = self.request(lambda: self.filesystem.open(path, "wb"), "")
            except TargetError as error:
                if error.code != "not-found":
                    raise
                return True  # a file system with directories, and this one is to be made yet
            self._shows_unfinished = not isinstance(probe, AbstractBufferedFile)
            if self._shows_unfinished:
                try:
                    with turn(self.filesystem):
                        probe.close()
                except Exception:  # noqa: BLE001  # it shows when something else is to be written
                    _discard(self.filesystem, probe)
                self.delete([name])
            else:
                probe.closed = True  # nothing is sent
        return self._shows_unfinished


class ObjectStream:
    """An object being written in order; it appears with `complete`, or never.

    As a context manager it is given up at the end of the block, unless it is complete.
    """

    def __init__(self, store: ObjectStore, name: str, part_nbytes: int = 0) -> None:
        self._store = store
        self._name = name
        self._temporary = ""
        self._is_open = False
        self._nbytes = 0
        options = {"block_size": part_nbytes} if part_nbytes else {}
        if store.shows_unfinished():
            self._temporary = _temporary_name(name)
            options = {}
            if store.base:
                store.request(lambda: store.filesystem.makedirs(store.base, exist_ok=True), name)
        path = store.path(self._temporary or name)
        self._file: Any = store.request(lambda: store.filesystem.open(path, "wb", **options), name)
        self._is_open = True

    def write(self, data: memoryview | bytes | bytearray) -> int:
        """Append bytes. What fails halfway cannot be tried again here; the client's own does."""
        self._store.request(lambda: self._file.write(data), self._name, ONCE)
        self._nbytes += len(data)
        return len(data)

    def complete(self) -> None:
        """Make the object appear.

        Raises:
            AccessError: `unreadable`: the store has another number of bytes than it was sent. A
                piece that was sent again because its answer was lost may be there twice.
        """
        self._store.request(self._file.close, self._name, ONCE)
        self._store.refuse_length(self._temporary or self._name, self._nbytes)
        if self._temporary:
            paths = self._store.path(self._temporary), self._store.path(self._name)
            self._store.request(lambda: self._store.filesystem.mv(*paths), self._name, ONCE)
            self._store.refuse_there(self._temporary, self._name)
        self._is_open = False
        self._store.filesystem.invalidate_cache()

    def abort(self) -> None:
        """Give the object up, unless it is complete: nothing of it stays, as far as that works."""
        if not self._is_open:
            return
        self._is_open = False
        is_answered = self._store.answers()
        if is_answered:
            _discard(self._store.filesystem, self._file)
        with contextlib.suppress(AttributeError):  # of a class that does not let it be set
            self._file.closed = True  # or its end would be sent when it is collected
        if self._temporary and is_answered:
            self._store.delete([self._temporary])

    def __enter__(self) -> ObjectStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


def _discard(filesystem: AbstractFileSystem, file: Any) -> None:
    """Give an open file up, as far as that works; else it would be sent when it is collected."""
    with contextlib.suppress(Exception), turn(filesystem):
        file.discard()


def _temporary_name(name: str) -> str:
    return stage_name(name, os.urandom(4).hex())
