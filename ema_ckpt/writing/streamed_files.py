"""The files of a write plan as objects that can only be written from their start to their end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.write_plan import HeaderBytes
from ema_ckpt.storage.object_store import ObjectStore, ObjectStream
from ema_ckpt.storage.remote import is_unanswered
from ema_ckpt.writing.output_files import HeaderTime
from ema_ckpt.writing.publish_order import PublishOrder


class StreamedFiles:
    """Objects written one after the other; they appear when they are whole, or are published."""

    headers: HeaderTime = "in order"

    def __init__(self, store: ObjectStore, order: PublishOrder, part_nbytes: int) -> None:
        self._store = store
        self._publish_order = order
        self._names, self._sizes = order.names, order.files
        self._order = {file: index for index, file in enumerate(order.files)}
        self._part_nbytes = part_nbytes
        self._headers: Iterator[HeaderBytes] = iter(())
        self._next: HeaderBytes | None = None
        self._streams: dict[str, ObjectStream] = {}
        self._ends: dict[str, int] = {}
        self._put: list[str] = []
        self._is_open = False  # whether the marker may yet appear

    def follow(self, headers: Iterator[HeaderBytes]) -> None:
        """Write these bytes where they belong, between payloads; in the order of the files."""
        self.catch_up()
        self._headers = headers
        self._next = next(headers, None)

    def write(self, file: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        """Append the headers that lie before these bytes, and then them."""
        self._catch_up(self._order[file], offset)
        self._append(file, offset, data)

    def write_items(
        self, file: str, offset: int, data: memoryview, extents: Iterable[tuple[int, int]]
    ) -> None:
        """Append items, and the headers between them."""
        for start, nbytes in extents:
            self.write(file, offset + start, data[start : start + nbytes])

    def catch_up(self) -> None:
        """Append all headers that are left."""
        self._catch_up(len(self._order), 0)

    def _catch_up(self, order: int, offset: int) -> None:
        while self._next is not None:
            header = self._next
            if (self._order[header.file], header.offset) >= (order, offset):
                return
            self._append(header.file, header.offset, header.data)
            self._next = next(self._headers, None)

    def _append(self, file: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        if not len(data):
            return
        end = self._ends.get(file, 0)
        if end != offset:
            message = f"{self._names[file]}: bytes for {offset} came after {end} bytes"
            raise SourceError("internal", message)
        if file not in self._streams:
            name = self._names[file]
            self._streams[file] = self._store.stream(name, self._part_nbytes)
        self._streams[file].write(data)
        self._ends[file] = end + len(data)
        is_late = self._names[file] in self._publish_order.late
        if self._ends[file] == self._sizes[file] and not is_late:
            self._complete(file)

    def _complete(self, file: str) -> None:
        self._put.append(self._names[file])
        self._streams[file].complete()
        del self._streams[file]

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Refuse: nothing is written twice, so nothing is read back."""
        raise SourceError(
            "internal", f"{file}: {len(buffer)} bytes at {offset} cannot be read back"
        )

    def start_writeback(self, file: str, offset: int, nbytes: int) -> None:
        """Nothing is to be done: what is sent is durable."""

    def finish(self) -> None:
        """Check that all is there. Raises SourceError `internal` if bytes never came."""
        for file, nbytes in self._sizes.items():
            if self._ends.get(file, 0) != nbytes:
                message = f"{self._names[file]}: some of its bytes were never written"
                raise SourceError("internal", message)

    def publish_early(self) -> None:
        """Make the objects appear that have no bytes; others have, when they were whole."""
        for file, nbytes in self._sizes.items():
            if not nbytes:
                self._put.append(self._names[file])
                self._store.put(self._names[file], b"")

    def publish_late(self) -> None:
        """Make the rest appear, in its order."""
        files = {name: file for file, name in self._names.items()}
        for name in self._publish_order.late:
            try:
                if files[name] in self._streams:
                    self._complete(files[name])
            except BaseException as error:
                self._is_open = name == self._publish_order.marker and is_unanswered(error)
                raise

    def abort(self, *, is_lost: bool = False) -> None:
        """Delete everything that was written, as far as it replaced nothing.

        `is_lost`: what was put stays, as it is another run's by now.
        """
        for stream in self._streams.values():
            stream.abort()
        self._streams.clear()
        put = () if is_lost else self._put
        self._publish_order.delete_written(self._store, put, is_open=self._is_open)
        self._put.clear()

    def close(self) -> None:
        """Nothing is to be done: streams stay open until they are published or given up."""
