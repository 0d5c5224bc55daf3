"""Read pickles that are no zip: `torch.save` before 1.6, and bare pickles of tensors or arrays.

The form before 1.6 is a row of pickles: a magic number, a version, facts of the machine, the
value, the keys of its storages; then each storage, its number of elements in 8 bytes before it
(torch/serialization.py, `_legacy_save`). A bare pickle has the bytes of its arrays in itself, and
of each tensor such a file of its storage. All lie in the file as they are and are read in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.pickle.arrays import ARRAY_GLOBALS, Array
from ema_ckpt.formats.pickle.byte_values import LocatedBytes
from ema_ckpt.formats.pickle.machine import load_at
from ema_ckpt.formats.pickle.safe_globals import Global, Opaque, within
from ema_ckpt.formats.pickle.tensors import TENSOR_GLOBALS, StorageRef, Storages, TensorRef
from ema_ckpt.formats.torch_file.lenient import LenientGlobals, Unreadable
from ema_ckpt.formats.torch_zip.reader import Archive, Record, Window

_MAGIC = 0x1950A86A20F9469CFC6C
_GLOBALS = {**TENSOR_GLOBALS, **ARRAY_GLOBALS}
# Bytes of an element; those of 2 and 4 bits are counted in bytes.
_QUANTIZED_NBYTES = {
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QInt32Storage": 4,
    "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
}
_FIRST_NBYTES = 1 << 20
_MAX_NBYTES = 1 << 32


class Pickled(NamedTuple):
    """The value of a pickle, its storages as the records of an archive, and bytes of the pickle."""

    root: object
    archive: Archive
    nbytes: int
    is_big_endian: bool


def read_pickled(source: Files, file: str, lenient: LenientGlobals) -> Pickled:
    """Read a file that is a pickle or begins with pickles.

    Raises:
        SourceError: `unreadable`, `truncated-file`, `unsupported`. UnsafeError: `unsafe-pickle`.
    """
    size, limit = source.size(file), _FIRST_NBYTES
    while True:
        nbytes = min(size, limit, _MAX_NBYTES)
        lenient.unsafe.clear()
        try:
            return _Reader(source, file, source.read(file, 0, nbytes), lenient).read()
        except SourceError as error:
            if error.code != "unreadable" or nbytes in (size, _MAX_NBYTES):
                raise
        limit *= 16  # the pickles may be longer; storages after them are not read


@dataclass(slots=True)
class _Reader:
    """Reads the pickles in `data`, which are the first bytes of the file."""

    source: Files
    file: str
    data: bytes
    lenient: LenientGlobals
    records: dict[str, Record] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)  # bytes of storages that are not read
    inner: dict[int, StorageRef] = field(default_factory=dict)  # by position of their bytes

    def read(self) -> Pickled:
        first, end = self.load(self.data, 0)
        swapped = False
        if first == _MAGIC:
            first, end, swapped = self.read_legacy(self.data, end, 0)
        elif not any(isinstance(value, TensorRef | Array | Unreadable) for value in within(first)):
            message = f"{self.file}: a bare pickle without tensors or arrays"
            raise SourceError("unsupported", message, file=self.file)
        self.add_arrays(first)
        window = Window(self.source, self.file, 0, self.source.size(self.file))
        return Pickled(first, Archive(self.file, self.records, window), end, swapped)

    def load(
        self, data: bytes, position: int, storages: Storages | None = None
    ) -> tuple[object, int]:
        """Read one pickle; the storages that it refers to are added to `storages`."""
        persistent = None if storages is None else partial(self.storage, storages)
        return load_at(
            data, position, _GLOBALS, where=self.file, persistent=persistent, prepare=self.prepare
        )

    def prepare(self, named: Global) -> None:
        """Replace the globals that only such pickles name, then those that stop a strict reader."""
        if (named.module, named.name) == ("torch.storage", "_load_from_bytes"):
            named.make = self.storage_in
        self.lenient.prepare(named)

    def read_legacy(self, data: bytes, position: int, start: int) -> tuple[object, int, bool]:
        """Read what follows the magic number in `data`, which begins at byte `start` of the file.

        Records are named by the position of their bytes; returns the value, where its pickles end,
        and whether its numbers are big-endian.
        """
        storages = Storages()
        self.skipped.clear()
        _, position = self.load(data, position)
        machine, position = self.load(data, position)
        value, position = self.load(data, position, storages)
        keys, end = self.load(data, position)
        if not isinstance(keys, list) or not isinstance(machine, dict):
            raise SourceError("unreadable", f"{self.file}: lists no storages", file=self.file)
        offset = start + end
        for key in keys:
            if isinstance(key, str) and key in self.skipped:
                offset += 8 + self.skipped[key]
                continue
            storage = storages.by_key.get(key) if isinstance(key, str) else None
            if storage is None:
                message = f"{self.file}: holds a storage {key!r} that no tensor refers to"
                raise SourceError("unreadable", message, file=self.file)
            offset = self.add_storage(storage, offset)
        size = self.source.size(self.file)
        if offset > size:
            problem = f"expected {offset} bytes, found {size}: the file is truncated"
            raise SourceError("truncated-file", f"{self.file}: {problem}", file=self.file)
        return value, end, not machine.get("little_endian", True)

    def add_storage(self, storage: StorageRef, offset: int) -> int:
        """Record the storage at `offset`; return where it ends."""
        numel = int.from_bytes(self.source.read(self.file, offset, 8), "little")
        if numel != storage.numel:
            problem = f"expected {storage.numel} elements of storage {storage.key!r}, found {numel}"
            raise SourceError("bad-header", f"{self.file}: {problem}", file=self.file)
        record = Record(f"data/{storage.key}", offset + 8, storage.nbytes, None)
        self.records[record.name] = record
        return record.offset + record.nbytes

    def add_arrays(self, root: object) -> None:
        """Record the bytes of every array."""
        for value in within(root):
            if isinstance(value, Array) and value.ref is not None:
                storage = value.ref.storage
                record = Record(f"data/{storage.key}", int(storage.key), storage.nbytes, None)
                self.records[record.name] = record

    def storage_in(self, data: object) -> object:
        """Find the one storage in the file of torch that `data`, bytes of this pickle, is."""
        if not isinstance(data, LocatedBytes):
            reason = "the pickle has its bytes as text; pickle it again with protocol 4"
            raise SourceError("unsupported", reason)
        if data.position not in self.inner:
            self.inner[data.position] = self.read_storage(data)
        return self.inner[data.position]

    def read_storage(self, data: LocatedBytes) -> StorageRef:
        """Read what `storage_in` finds."""
        inner = _Reader(self.source, self.file, data, self.lenient)
        magic, position = inner.load(data, 0)
        if magic != _MAGIC:
            raise SourceError("unsupported", "a storage in a pickle has an unknown form")
        storage, _, swapped = inner.read_legacy(data, position, data.position)
        if swapped or not isinstance(storage, StorageRef):
            raise SourceError("unsupported", "a storage in a pickle is big-endian, or none")
        record = inner.records[f"data/{storage.key}"]
        key = f"{record.offset}"
        self.records[f"data/{key}"] = record._replace(name=f"data/{key}")
        return StorageRef(key, storage.dtype, storage.numel)

    def storage(self, storages: Storages, pid: object) -> object:
        """Return what a persistent id means: a storage, or the class of a module with its source.

        That of a storage has a sixth part: the view that it is.
        """
        match pid:
            case ("module", Global() as kind, *_):
                return kind
        if not isinstance(pid, tuple) or len(pid) != 6 or pid[0] != "storage" or pid[5] is not None:
            return Opaque("torch", "persistent", (pid,), called=False)
        storage = storages.add(pid[:5])
        if isinstance(storage, Opaque):
            if storage.name not in _QUANTIZED_NBYTES:
                raise SourceError("unsupported", f"a storage of class {storage.name} is not read")
            self.skipped[pid[2]] = pid[4] * _QUANTIZED_NBYTES[storage.name]
        return storage
