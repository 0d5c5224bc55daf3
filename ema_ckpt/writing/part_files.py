"""The files of a write plan as objects of a store that takes parts in any order.

A part is sent as soon as its last byte has come, by a few threads beside the workers. What is in
memory are parts that have begun: at most three a worker (where its job begins and ends, and where
the header of its item lies) and one for the header of the file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from typing import NamedTuple

from ema_ckpt.core.errors import EmaCkptError, SourceError, UsageError
from ema_ckpt.core.limits import default_budget
from ema_ckpt.core.text import format_size
from ema_ckpt.storage.multipart import LEAST_PART_NBYTES, MAX_PARTS, MultipartUpload, put_object
from ema_ckpt.storage.object_store import ObjectStore
from ema_ckpt.storage.remote import is_unanswered
from ema_ckpt.writing.options import WriteOptions
from ema_ckpt.writing.output_files import HeaderTime
from ema_ckpt.writing.publish_order import PublishOrder
from ema_ckpt.writing.upload_note import NoteFile

_MAX_PART_NBYTES = 16 << 20
_UNIT_NBYTES = 64 << 10
_SMALL_NBYTES = 64 << 10  # what is kept as it comes, before a part gets a buffer
_SENDERS = 4


class PartSizes(NamedTuple):
    """How a file is cut, and how many parts are being sent at a time."""

    nbytes: int
    senders: int


def divide_memory(
    options: WriteOptions, files: Mapping[str, int], given_nbytes: int = 0
) -> tuple[WriteOptions, PartSizes]:
    """Give a third of the memory to what is read, the rest to parts; return options for reading.

    Fewer workers are started where so many cannot have the parts that they need.

    Args:
        given_nbytes: of the parts of a run that is continued.

    Raises:
        UsageError: `usage` if one worker cannot.
    """
    budget = options.budget_nbytes or default_budget(remote=True)
    largest = max(files.values(), default=0)
    least = max(LEAST_PART_NBYTES, -(-largest // MAX_PARTS))
    least = given_nbytes or -(-least // _UNIT_NBYTES) * _UNIT_NBYTES
    room = budget - budget // 3
    for threads in range(options.threads, 0, -1):
        senders = min(threads, _SENDERS)
        # The client copies what it sends.
        nbytes = room // (3 * threads + 1 + 2 * senders) // _UNIT_NBYTES * _UNIT_NBYTES
        if nbytes >= least:
            sizes = PartSizes(given_nbytes or max(least, min(nbytes, _MAX_PART_NBYTES)), senders)
            reading = replace(options, threads=threads, budget_nbytes=budget // 3, forks=False)
            return reading, sizes
    needed = -(-least * 6 * 3 // 2 >> 20)
    reason = f"parts of a file of {format_size(largest)} in an object store take {needed}MiB"
    raise UsageError("usage", f"--max-memory {format_size(budget)}: {reason} or more")


def whole_memory(options: WriteOptions) -> tuple[WriteOptions, PartSizes]:
    """The same where a single part at a time is in memory: bytes are sent in order."""
    budget = options.budget_nbytes or default_budget(remote=True)
    nbytes = min(budget // 8 // _UNIT_NBYTES * _UNIT_NBYTES, _MAX_PART_NBYTES)
    return replace(options, budget_nbytes=budget // 2, forks=False), PartSizes(nbytes, 1)


class _Part:
    """Bytes of one part as they come."""

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.missing = nbytes
        self.pieces: list[tuple[int, bytes]] = []
        self.buffer: BytesIO | None = None
        self.view = memoryview(b"")

    def keeps(self, position: int, view: memoryview) -> bool:
        """Keep a small piece as it is, so that a header alone takes no buffer."""
        if self.buffer is not None or len(view) > _SMALL_NBYTES or len(self.pieces) > 1000:
            return False
        self.pieces.append((position, bytes(view)))
        return True

    def add(self, position: int, view: memoryview) -> None:
        """Copy bytes to where they belong."""
        self.view[position : position + len(view)] = view

    def make_buffer(self) -> None:
        """Give it room for all its bytes, unless it has."""
        if self.buffer is None:
            self.buffer = BytesIO(bytes(self.nbytes))
            self.view = self.buffer.getbuffer()

    def data(self) -> BytesIO:
        """Return all bytes of the part; nothing can be added after."""
        self.make_buffer()
        for position, piece in self.pieces:
            self.add(position, memoryview(piece))
        self.view.release()
        return self.buffer or BytesIO()


class _File:
    """A file in parts: those that have begun, and how many are sent."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.open_parts: dict[int, _Part] = {}
        self.left = nbytes
        self.upload: MultipartUpload | None = None
        self.held: BytesIO | None = None
        self.lock = threading.Lock()


class PartFiles:
    """Objects that appear when they are published; short ones that replace nothing, at once."""

    headers: HeaderTime = "early"

    def __init__(
        self,
        store: ObjectStore,
        order: PublishOrder,
        sizes: PartSizes,
        note: NoteFile,
        uploads: Mapping[str, str],
    ) -> None:
        """Args: `note`: told of what is begun; `uploads`: those of an earlier run, by object."""
        self._note = note
        self._uploads = uploads
        self.sent = self.found = 0  # parts
        self._store = store
        self._sizes = sizes
        self._order = order
        self._files = {file: _File(order.names[file], n) for file, n in order.files.items()}
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(sizes.senders)
        self._senders = ThreadPoolExecutor(sizes.senders, thread_name_prefix="ema_ckpt-send")
        self._error: BaseException | None = None
        self._put: list[str] = []  # objects that are there
        self._is_open = False  # whether the marker may yet appear

    def write(self, file: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        """Take bytes of a file; with the last one of a part, have it sent."""
        target = self._files[file]
        view = memoryview(data)
        while view:
            number, position = divmod(offset, self._sizes.nbytes)
            count = min(self._sizes.nbytes - position, len(view))
            part = self._part(target, number)
            self._add(part, position, view[:count])
            with self._lock:
                part.missing -= count
                is_full = not part.missing
            if is_full:
                self._send(target, number, part)
            view, offset = view[count:], offset + count

    def write_items(
        self, file: str, offset: int, data: memoryview, extents: Iterable[tuple[int, int]]
    ) -> None:
        """Take the items alone: what lies between them comes later."""
        for start, nbytes in extents:
            self.write(file, offset + start, data[start : start + nbytes])

    def _part(self, file: _File, number: int) -> _Part:
        with self._lock:
            if self._error is not None:
                raise self._error
            part = file.open_parts.get(number)
            if part is None:
                start = number * self._sizes.nbytes
                part = _Part(start, min(self._sizes.nbytes, file.nbytes - start))
                file.open_parts[number] = part
            return part

    def _add(self, part: _Part, position: int, view: memoryview) -> None:
        with self._lock:
            if part.keeps(position, view):
                return
            part.make_buffer()
        part.add(position, view)

    def _send(self, file: _File, number: int, part: _Part) -> None:
        """Have a full part sent, as soon as one of the senders is free."""
        with self._lock:
            del file.open_parts[number]

        def send() -> None:
            try:
                if self._error is None:
                    self._send_now(file, number, part.data())
            except BaseException as error:  # noqa: BLE001 - raised where the next bytes come
                with self._lock:
                    self._error = self._error or error
            finally:
                self._slots.release()

        self._slots.acquire()
        self._senders.submit(send)

    def _send_now(self, file: _File, number: int, data: BytesIO) -> None:
        nbytes = data.getbuffer().nbytes
        if nbytes < file.nbytes:
            is_sent = self._upload(file).send(number + 1, data)
            with self._lock:
                self.sent += is_sent
                self.found += not is_sent
        elif file.name in self._order.late:
            file.held = data
        else:
            self._put_object(file, data)
        with self._lock:
            file.left -= nbytes

    def _put_object(self, file: _File, data: BytesIO) -> None:
        with self._lock:
            self._put.append(file.name)
        put_object(self._store, file.name, data)

    def _upload(self, file: _File) -> MultipartUpload:
        with file.lock:
            if file.upload is None:
                left = self._uploads.get(file.name)
                file.upload = MultipartUpload.resumed(self._store, file.name, left)
                self._note.begun(file.name, file.upload.upload_id)
            return file.upload

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Refuse: a range that an earlier run sent is known by its part alone."""
        raise SourceError(
            "internal", f"{file}: {len(buffer)} bytes at {offset} cannot be read back"
        )

    def start_writeback(self, file: str, offset: int, nbytes: int) -> None:
        """Nothing is to be done: what is sent is durable."""

    def finish(self) -> None:
        """Wait until everything is sent.

        Raises:
            EmaCkptError: what prevented it; `internal` if bytes of a file never came.
        """
        self._senders.shutdown(wait=True)
        if self._error is not None:
            raise self._error
        short = [file.name for file in self._files.values() if file.left]
        if short:
            raise EmaCkptError("internal", f"{short[0]}: some of its bytes were never written")

    def publish_early(self) -> None:
        """Make the objects appear whose order does not matter."""
        for file in self._files.values():
            if file.name not in self._order.late:
                self._complete(file)

    def publish_late(self) -> None:
        """Make the rest appear, in its order."""
        by_name = {file.name: file for file in self._files.values()}
        for name in self._order.late:
            try:
                self._complete(by_name[name])
            except BaseException as error:
                self._is_open = name == self._order.marker and is_unanswered(error)
                raise

    def _complete(self, file: _File) -> None:
        if file.upload is not None:
            self._put.append(file.name)
            file.upload.complete(file.nbytes)
            file.upload = None
        elif file.held is not None or not file.nbytes:
            self._put_object(file, file.held or BytesIO())

    def abort(self, *, is_lost: bool = False) -> None:
        """Delete everything that was sent or put, as far as it replaced nothing.

        `is_lost`: what was put stays, as it is another run's by now.
        """
        with self._lock:
            self._error = self._error or EmaCkptError("internal", "given up")
        self._senders.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            if file.upload is not None:
                file.upload.abort()
                file.upload = None
        put = () if is_lost else self._put
        self._order.delete_written(self._store, put, is_open=self._is_open)
        self._put.clear()

    def close(self) -> None:
        """Start no more sending."""
        self._senders.shutdown(wait=True)
