"""`.metadata` written opcode by opcode, without torch, in the form that torch 2.4 to 2.14 reads.

The classes and their states are those of `torch/distributed/checkpoint/metadata.py`: frozen
dataclasses give their `__dict__`, `TensorProperties` a tuple of five. The opcodes are those of
Python's own pickler at protocol 4, so that whoever reads them fast reads these fast too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ema_ckpt.core.dtypes import DType

Ints = tuple[int, ...]
Item = TypeVar("Item")
Write = Callable[[Any], None]
Field = tuple[str, Write, Any]  # its name, how to write its value, and that
_U2, _U4, _I4 = (struct.Struct(layout) for layout in ("<H", "<I", "<i"))
_SHORT_TUPLES = (b")", b"\x85\x94", b"\x86\x94", b"\x87\x94")
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Where an item lies: offsets of its chunk (None for an object), file, first byte, bytes."""

    offsets: Ints | None
    sizes: Ints
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's entry: dtype and global shape; its items are its chunks, in order."""

    dtype: DType
    shape: Ints


class _Emitter:
    """Opcodes so far; every object that Python's pickler would memoize takes a number."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x04")
        self._count = 0
        self._known: dict[object, int] = {}

    def memoize(self) -> None:
        self.out += b"\x94"
        self._count += 1

    def once(self, key: object, write: Callable[[], None]) -> None:
        """Write something the first time, refer to it after that."""
        index = self._known.get(key)
        if index is None:
            write()
            self._known[key] = self._count
            self.memoize()
        else:
            self.out += b"h%c" % index if index < 256 else b"j" + _U4.pack(index)

    def _raw_text(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self.out += b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + _U4.pack(len(data))
        self.out += data

    def text(self, text: str) -> None:
        self.once(text, lambda: self._raw_text(text))

    def number(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K%c" % value
        elif 0 <= value < 65536:
            self.out += b"M" + _U2.pack(value)
        elif -(2**31) <= value < 2**31:
            self.out += b"J" + _I4.pack(value)
        else:
            data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
            self.out += b"\x8a" + bytes([len(data)]) + data

    def found(self, module: str, name: str) -> None:
        """A global."""

        def write() -> None:
            self.text(module)
            self.text(name)
            self.out += b"\x93"

        self.once((module, name), write)

    def tuple_of(self, write: Callable[[Item], None], items: Sequence[Item]) -> None:
        """A tuple, each part through `write`."""
        if not items:
            self.out += b")"
            return
        if len(items) > 3:
            self.out += b"("
        for item in items:
            write(item)
        self.out += b"t\x94" if len(items) > 3 else _SHORT_TUPLES[len(items)]
        self._count += 1

    def call(self, module: str, name: str, write: Callable[[Item], None], *args: Item) -> None:
        """A global applied to arguments."""
        self.found(module, name)
        self.tuple_of(write, args)
        self.out += b"R\x94"
        self._count += 1

    def size(self, numbers: Ints) -> None:
        """A `torch.Size`."""
        self.call("torch", "Size", self.numbers, numbers)

    def numbers(self, numbers: Ints) -> None:
        """A tuple of integers."""
        self.tuple_of(self.number, numbers)

    def instance(self, module: str, name: str, *state: Field) -> None:
        """An instance made without arguments and given its fields."""
        self.found(module, name)
        self.out += b")\x81\x94"
        self._count += 1
        if state:
            self.out += b"}\x94("
            self._count += 1
            for key, write, value in state:
                self.text(key)
                write(value)
            self.out += b"ub"

    def mapping(self, pairs: Iterable[tuple[Write, Any, Write, Any]]) -> None:
        """A dict: for each pair, how to write the key and the key, how to write the value and the
        value.
        """
        self.out += b"}\x94("
        self._count += 1
        for write_key, key, write_value, value in pairs:
            write_key(key)
            write_value(value)
        self.out += b"u"

    def sequence(self, write: Callable[[Item], None], items: Sequence[Item]) -> None:
        """A list, each part through `write`."""
        self.out += b"]\x94("
        self._count += 1
        for item in items:
            write(item)
        self.out += b"e"

    def constant(self, value: bool | None) -> None:
        self.out += b"N" if value is None else b"\x88" if value else b"\x89"


def dump_metadata(
    entries: Mapping[str, StoredTensor | None],
    items: Mapping[str, tuple[StoredItem, ...]],
    paths: Mapping[str, tuple[str | int, ...]],
) -> bytes:
    """The pickle of a `Metadata`.

    Args:
        entries: tensors, or None for an object, by flat name in the order of the state dict.
        items: where the chunks (or the object) of each name lie.
        paths: the path of each name in the nested state dict.
    """
    out = _Emitter()
    out.instance(
        _METADATA,
        "Metadata",
        ("state_dict_metadata", out.mapping, _entries(out, entries, items)),
        ("planner_data", out.mapping, _paths(out, paths)),
        ("storage_data", out.mapping, _places(out, entries, items)),
        ("storage_meta", _storage_meta, out),
        ("version", out.text, "1.0.0"),
    )
    out.out += b"."
    return bytes(out.out)


Pair = tuple[Write, Any, Write, Any]


def _entries(
    out: _Emitter,
    entries: Mapping[str, StoredTensor | None],
    items: Mapping[str, tuple[StoredItem, ...]],
) -> Iterable[Pair]:
    for name, entry in entries.items():
        yield out.text, name, partial(_entry, out), (entry, items[name] if entry else ())


def _entry(out: _Emitter, held: tuple[StoredTensor | None, tuple[StoredItem, ...]]) -> None:
    entry, chunks = held
    if entry is None:
        out.instance(_METADATA, "BytesStorageMetadata")
        return
    out.instance(
        _METADATA,
        "TensorStorageMetadata",
        ("properties", partial(_properties, out), entry.dtype),
        ("size", out.size, entry.shape),
        ("chunks", partial(out.sequence, partial(_chunk, out)), chunks),
    )


def _chunk(out: _Emitter, chunk: StoredItem) -> None:
    state = ("offsets", out.size, chunk.offsets or ()), ("sizes", out.size, chunk.sizes)
    out.instance(_METADATA, "ChunkStorageMetadata", *state)


def _properties(out: _Emitter, dtype: DType) -> None:
    out.found(_METADATA, "TensorProperties")
    out.out += b")\x81"
    out.memoize()
    parts: list[Callable[[], None]] = [
        lambda: out.found("torch", dtype.name),
        lambda: out.call("torch.serialization", "_get_layout", out.text, "torch.strided"),
        lambda: out.constant(False),
        lambda: out.call(_METADATA, "_MEM_FORMAT_ENCODING", out.number, 0),
        lambda: out.constant(False),
    ]
    out.tuple_of(lambda write: write(), parts)
    out.out += b"b"


def _paths(out: _Emitter, paths: Mapping[str, tuple[str | int, ...]]) -> Iterable[Pair]:
    part = partial(_part, out)
    for name, path in paths.items():
        yield out.text, name, partial(out.tuple_of, part), path


def _part(out: _Emitter, part: str | int) -> None:
    if isinstance(part, str):
        out.text(part)
    else:
        out.number(part)


def _places(
    out: _Emitter,
    entries: Mapping[str, StoredTensor | None],
    items: Mapping[str, tuple[StoredItem, ...]],
) -> Iterable[Pair]:
    write_index, write_place = partial(_index, out), partial(_place, out)
    for name in entries:
        for index, item in enumerate(items[name]):
            yield write_index, (name, index, item.offsets), write_place, item


def _index(out: _Emitter, key: tuple[str, int, Ints | None]) -> None:
    name, index, offsets = key
    rest: tuple[Field, Field] = ("index", out.number, index), ("offset", out.size, offsets)
    if offsets is None:
        rest = ("offset", out.constant, None), ("index", out.constant, None)
    out.instance(_METADATA, "MetadataIndex", ("fqn", out.text, name), *rest)


def _place(out: _Emitter, item: StoredItem) -> None:
    out.instance(
        _FILESYSTEM,
        "_StorageInfo",
        ("relative_path", out.text, item.file),
        ("offset", out.number, item.offset),
        ("length", out.number, item.nbytes),
    )


def _storage_meta(out: _Emitter) -> None:
    # torch notes the path of the training job here; a checkpoint that is passed on should not.
    out.instance(
        _METADATA,
        "StorageMeta",
        ("checkpoint_id", out.constant, None),
        ("save_id", out.constant, None),
        ("load_id", out.constant, None),
        ("modules", partial(out.sequence, out.text), ()),
    )
