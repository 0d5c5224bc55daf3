"""Where the ranks of one save write: a directory that all of them see, or a place behind a URL."""

from __future__ import annotations

import io
import logging
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ema_ckpt.core.crc import crc32
from ema_ckpt.core.display import displayed
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.ema.model.tensor_kinds import on_host
from ema_ckpt.formats.dcp.reader import METADATA_NAME
from ema_ckpt.formats.sidecar import SIDECAR
from ema_ckpt.formats.torch_zip.reader import read_archive
from ema_ckpt.resume.save_plan import Item
from ema_ckpt.runtime.held_signals import HeldSignals
from ema_ckpt.storage.files import LocalFiles
from ema_ckpt.storage.multipart import MAX_PARTS
from ema_ckpt.storage.object_store import ObjectStore, ObjectStream
from ema_ckpt.storage.remote import is_unanswered
from ema_ckpt.writing.destination import WriteRequest
from ema_ckpt.writing.leftovers import clear_uploads
from ema_ckpt.writing.object_destination import ObjectDestination
from ema_ckpt.writing.open_inside import create_inside
from ema_ckpt.writing.options import WriteOptions
from ema_ckpt.writing.publish_order import PublishOrder
from ema_ckpt.writing.staging import Staged, stage
from ema_ckpt.writing.switch import fsync_path
from ema_ckpt.writing.upload_note import NoteFile

_PART_NBYTES = 16 << 20
_PART_UNIT_NBYTES = 1 << 20
_ARCHIVE_NBYTES = 4 << 10  # of an item's archive around its payload, and more
_PIECE_NBYTES = 4 << 20


class WrittenItem(NamedTuple):
    """An item in a rank's file.

    Attributes:
        crc: CRC-32 of its payload, if that is known.
        is_contiguous: whether the payload is a tensor's bytes in row-major order.
    """

    item: Item
    file: str
    offset: int
    nbytes: int
    crc: int | None
    is_contiguous: bool


class SavePlace(Protocol):
    """Where the ranks of one save write, each its file; rank 0 publishes.

    Rank 0 calls `begin`, `put`, `publish`; every rank `join` and `write_items`; and `give_up` if
    the save fails anywhere.

    Attributes:
        name: of the target.
    """

    name: str

    def begin(self, nbytes: int, ranks: int) -> str:
        """Check the target and prepare it for so many bytes; return what the ranks need."""
        ...

    def join(self, begun: str) -> None:
        """Take what rank 0's `begin` has returned."""
        ...

    def write_items(self, rank: int, items: Sequence[Item]) -> list[WrittenItem]:
        """Write this rank's file, if it has anything to write, and make it durable."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file; the last one that is put makes the directory a checkpoint."""
        ...

    def publish(self, files: Mapping[str, int]) -> Path | str:
        """Make the target appear, which has these files of at least so many bytes; return it."""
        ...

    def give_up(self, rank: int, ranks: int, error: BaseException) -> None:
        """Remove what was written, because of an error, unless it has been published."""
        ...


class SharedDirectory:
    """A directory on a file system that all ranks share: staged, then renamed."""

    def __init__(self, target: Path, overwrite: bool) -> None:
        self.name = target.name
        self._target = target
        self._overwrite = overwrite
        self._stack = ExitStack()
        self._staged: Staged | None = None
        self._root = target
        self._small: dict[str, int] = {}  # sizes of what was put

    def begin(self, nbytes: int, ranks: int) -> str:
        _ = ranks
        self._staged = self._stack.enter_context(
            stage(self._target, is_directory=True, overwrite=self._overwrite, nbytes=nbytes)
        )
        return str(self._staged.path)

    def join(self, begun: str) -> None:
        self._root = Path(begun)

    def write_items(self, rank: int, items: Sequence[Item]) -> list[WrittenItem]:
        if not items:
            return []
        if not self._root.is_dir():
            message = (
                f"{self._root}: not to be seen from here; all ranks must share the file system"
            )
            raise FileNotFoundError(message)
        name = f"__{rank}_0.distcp"
        places = []
        with self._named(name):
            with create_inside(self._root, name) as stream:
                for item in in_order(items):
                    offset = stream.tell()
                    try:
                        write_item(item, stream)
                    except RuntimeError as error:  # of torch, as it ends an archive all the same
                        raise _refused_write(error) from error.__cause__
                    places.append((item, offset, stream.tell() - offset))
                stream.flush()
                os.fsync(stream.fileno())
            fsync_path(self._root)
        with closing(LocalFiles(self._root)) as files:
            return [
                WrittenItem(item, name, offset, n, *_stored_crc(files, name, offset, n, item))
                for item, offset, n in places
            ]

    def put(self, name: str, data: bytes) -> None:
        with self._named(name), create_inside(self._root, name) as stream:
            stream.write(data)
        self._small[name] = len(data)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Name the file in an error of writing or closing it, which does not."""
        try:
            yield
        except OSError as error:
            if error.errno is not None:  # without a number its text would not show
                error.filename = error.filename or str(self._root / name)
            raise

    def publish(self, files: Mapping[str, int]) -> Path:
        if self._staged is None:
            raise EmaCkptError("internal", "publish() before begin()")
        self._staged.expected = {**files, **self._small}
        self._staged.publish()
        self._stack.close()
        for warning in self._staged.warnings:
            logging.getLogger("ema_ckpt").warning(displayed(warning.message))
        return self._staged.target

    def give_up(self, rank: int, ranks: int, error: BaseException) -> None:
        _ = rank, ranks
        self._stack.__exit__(type(error), error, error.__traceback__)


class ObjectDirectory:
    """A directory behind a URL: each rank uploads its file, `.metadata` comes last."""

    def __init__(self, url: str, overwrite: bool) -> None:
        self._destination = ObjectDestination(url)
        self.name = self._destination.name
        self._store = ObjectStore(self._destination.url)
        options = WriteOptions(overwrite=overwrite)
        self._request = WriteRequest({}, METADATA_NAME, True, options)
        self._generation = 0
        self._note: NoteFile | None = None
        self._order: PublishOrder | None = None
        self._attempted: list[str] = []  # small files that may be there
        self._old: list[str] = []
        self._small: dict[str, bytes] = {}
        self._has_begun = self._is_published = False
        self._is_open = False  # whether the marker may yet appear

    def begin(self, nbytes: int, ranks: int) -> str:
        _ = nbytes
        destination = self._destination
        destination.leftovers.settle(self._request)
        self._old = destination.check_replaceable(self._store, self._request)
        self._generation = destination.generation
        files = dict.fromkeys([*map(self._file, range(ranks)), SIDECAR, METADATA_NAME], 0)
        request = self._request._replace(files=files)
        self._order = destination.publish_order(request)
        self._note = destination.note(self._order, request, _PART_NBYTES)
        self._has_begun = True
        return str(self._generation)

    def join(self, begun: str) -> None:
        self._generation = int(begun)
        self._has_begun = True

    def _file(self, rank: int) -> str:
        return f"__{rank}_{self._generation}.distcp"

    def write_items(self, rank: int, items: Sequence[Item]) -> list[WrittenItem]:
        if not items:
            return []
        name = self._file(rank)
        written = []
        with self._store.stream(name, part_nbytes(items)) as stream:
            counted = _Counted(stream)
            for item in in_order(items):
                offset = counted.position
                try:
                    host = write_item(item, counted)
                except RuntimeError as error:  # of torch, as it ends an archive all the same
                    raise counted.failure or _refused_write(error) from error.__cause__
                crc, is_contiguous = _computed_crc(item, host)
                nbytes = counted.position - offset
                written.append(WrittenItem(item, name, offset, nbytes, crc, is_contiguous))
            stream.complete()
        return written

    def put(self, name: str, data: bytes) -> None:
        self._small[name] = data

    def publish(self, files: Mapping[str, int]) -> str:
        names = [*files, *self._small]
        order = self._destination.publish_order(
            self._request._replace(files=dict.fromkeys(names, 0))
        )

        def put_small() -> None:
            for name, data in self._small.items():
                self._attempted.append(name)
                try:
                    self._store.put(name, data)
                except BaseException as error:
                    self._is_open = name == order.marker and is_unanswered(error)
                    raise

        if self._note is not None:
            self._note.refuse_loss()
        self._destination.refuse_made(self._store, order, self._request)
        try:
            with HeldSignals():  # an interrupt would not stop the request for the marker
                self._destination.publish(self._store, order, put_small)
                self._is_published = True
                self._end_published()
            left = [name for name in self._old if name not in names]
            for warning in self._destination.delete_old(self._store, left):
                logging.getLogger("ema_ckpt").warning(displayed(warning.message))
        except BaseException:
            if self._is_published:
                self._destination.say_complete(has_old=bool(self._old))
            raise
        return self._destination.url

    def _end_published(self) -> None:
        try:
            self._end()
        except EmaCkptError as error:
            text = f"{self._destination.url}: is complete, but some of this run is left: {error}"
            logging.getLogger("ema_ckpt").warning(displayed(text))

    def give_up(self, rank: int, ranks: int, error: BaseException) -> None:
        """Delete this rank's file; rank 0 deletes those of all, and aborts what dead ones left."""
        _ = error
        if self._is_published or not self._has_begun:
            return
        try:
            if not self._destination.is_silent():
                self._delete_written(rank, ranks)
        finally:
            if self._note is not None:
                self._note.end()  # whatever is left: the next run deletes it

    def _delete_written(self, rank: int, ranks: int) -> None:
        if rank:
            self._store.delete([self._file(rank)])
            return
        with suppress(EmaCkptError):
            if self._note is not None and self._note.is_lost():  # they are another run's by now
                return
        if self._order is not None:
            written = [*map(self._file, range(ranks)), *self._attempted]
            self._order.delete_written(self._store, written, is_open=self._is_open)
        self._end()

    def _end(self) -> None:
        """Abort the uploads that nobody will go on with, and delete the note."""
        try:
            clear_uploads(self._store, self._order.names.values() if self._order else (), "")
            if self._note is not None:
                self._note.delete()
        finally:
            if self._note is not None:
                self._note.end()


def place_of(target: Path | str, overwrite: bool) -> SavePlace:
    """Return where to write: a URL is text, a place on this machine a path."""
    if isinstance(target, str):
        return ObjectDirectory(target, overwrite)
    return SharedDirectory(target, overwrite)


def part_nbytes(items: Sequence[Item]) -> int:
    """Return into how large parts the upload of a rank's file is cut: S3 takes 10 000 of them."""
    total = 0
    for item in items:
        data = item.data
        n = len(data) if isinstance(data, bytes) else data.numel() * data.element_size()
        total += n + _ARCHIVE_NBYTES
    least = -(-total // MAX_PARTS)
    return max(_PART_NBYTES, -(-least // _PART_UNIT_NBYTES) * _PART_UNIT_NBYTES)


def in_order(items: Sequence[Item]) -> list[Item]:
    """Sort objects before tensors, as torch's writer does."""
    return sorted(items, key=lambda item: item.box is not None)


def write_item(item: Item, stream: Any) -> torch.Tensor | None:
    """Append the archive of an item; return the tensor that it holds, in host memory."""
    if isinstance(item.data, bytes):
        stream.write(item.data)
        return None
    host = on_host(item.data)
    if host.untyped_storage().nbytes() != host.numel() * host.element_size():
        host = host.clone()  # torch.save writes whole storages
    torch.save(host, stream)
    return host


def _refused_write(error: RuntimeError) -> BaseException:
    """Return what the disk answered, or an interrupt: torch's error says nothing of either."""
    cause = error.__context__
    if cause is None or (isinstance(cause, Exception) and not isinstance(cause, OSError)):
        return error
    return cause


def _stored_crc(
    files: LocalFiles, name: str, offset: int, nbytes: int, item: Item
) -> tuple[int | None, bool]:
    """Return the CRC-32 of an item's payload, and whether that is a tensor's in row-major order.

    torch put it into the archive's directory; no payload is read again.
    """
    records = read_archive(files, name, offset, nbytes).records
    if isinstance(item.data, bytes):
        return records["data.pkl"].crc, False
    if not item.data.numel():
        return 0, True
    return records["data/0"].crc, item.data.is_contiguous()


def _computed_crc(item: Item, host: torch.Tensor | None) -> tuple[int, bool]:
    """Return the same from memory, for what is not read back."""
    if isinstance(item.data, bytes):
        with zipfile.ZipFile(io.BytesIO(item.data)) as archive:
            named = {info.filename.partition("/")[2]: info.CRC for info in archive.infolist()}
        return named["data.pkl"], False
    if host is None or not host.numel():
        return 0, True
    stored = torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage())
    return crc32(stored.numpy().data), item.data.is_contiguous()


class _Counted:
    """An upload as `torch.save` writes to it: in pieces that are copied one at a time."""

    def __init__(self, stream: ObjectStream) -> None:
        self.position = 0
        self.failure: EmaCkptError | None = None
        self._stream = stream

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        try:
            for start in range(0, len(view), _PIECE_NBYTES):
                self._stream.write(view[start : start + _PIECE_NBYTES])
        except EmaCkptError as error:
            self.failure = self.failure or error
            raise
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is to be done: an upload ends with its last byte."""
