"""`.metadata` written opcode by opcode, without torch, in the form that torch 2.4 to 2.14 reads.

The classes and their states are those of `torch/distributed/checkpoint/metadata.py`: frozen dataclasses give
their `__dict__`, `TensorProperties` a tuple of five. The opcodes are those of Python's own pickler at
protocol 4, so that whoever reads them fast reads these fast too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ema_ckpt.dtypes import DType

__all__ = ["StoredItem", "StoredTensor", "dump_metadata"]

Ints = tuple[int, ...]
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
            self.out += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)

    def _raw_text(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self.out += b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))
        self.out += data

    def text(self, text: str) -> None:
        self.once(text, lambda: self._raw_text(text))

    def number(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K" + bytes([value])
        elif 0 <= value < 65536:
            self.out += b"M" + struct.pack("<H", value)
        elif -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
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

    def tuple_of(self, parts: Iterable[Callable[[], None]]) -> None:
        items = list(parts)
        if not items:
            self.out += b")"
            return
        if len(items) > 3:
            self.out += b"("
        for write in items:
            write()
        self.out += b"t" if len(items) > 3 else bytes([0x84 + len(items)])
        self.memoize()

    def call(self, module: str, name: str, *args: Callable[[], None]) -> None:
        """A global applied to arguments."""
        self.found(module, name)
        self.tuple_of(args)
        self.out += b"R"
        self.memoize()

    def size(self, numbers: Ints) -> None:
        """A `torch.Size`."""
        self.call("torch", "Size", lambda: self.tuple_of([lambda n=n: self.number(n) for n in numbers]))  # type: ignore[misc]

    def instance(self, module: str, name: str, state: Mapping[str, Callable[[], None]]) -> None:
        """An instance made without arguments and given its fields."""
        self.found(module, name)
        self.out += b")\x81"
        self.memoize()
        if state:
            self.mapping((lambda key=key: self.text(key), write) for key, write in state.items())  # type: ignore[misc]
            self.out += b"b"

    def mapping(self, pairs: Iterable[tuple[Callable[[], None], Callable[[], None]]]) -> None:
        self.out += b"}"
        self.memoize()
        self.out += b"("
        for key, value in pairs:
            key()
            value()
        self.out += b"u"

    def sequence(self, items: Iterable[Callable[[], None]]) -> None:
        self.out += b"]"
        self.memoize()
        self.out += b"("
        for write in items:
            write()
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
        {
            "state_dict_metadata": lambda: out.mapping(_entries(out, entries, items)),
            "planner_data": lambda: out.mapping(_paths(out, paths)),
            "storage_data": lambda: out.mapping(_places(out, entries, items)),
            "storage_meta": lambda: _storage_meta(out),
            "version": lambda: out.text("1.0.0"),
        },
    )
    out.out += b"."
    return bytes(out.out)


Pair = tuple[Callable[[], None], Callable[[], None]]


def _entries(
    out: _Emitter, entries: Mapping[str, StoredTensor | None], items: Mapping[str, tuple[StoredItem, ...]]
) -> Iterable[Pair]:
    for name, entry in entries.items():
        key = lambda name=name: out.text(name)  # noqa: E731
        if entry is None:
            yield key, lambda: out.instance(_METADATA, "BytesStorageMetadata", {})
        else:
            yield key, lambda entry=entry, name=name: _tensor(out, entry, items[name])  # type: ignore[misc]


def _tensor(out: _Emitter, entry: StoredTensor, chunks: tuple[StoredItem, ...]) -> None:
    out.instance(
        _METADATA,
        "TensorStorageMetadata",
        {
            "properties": lambda: _properties(out, entry.dtype),
            "size": lambda: out.size(entry.shape),
            "chunks": lambda: out.sequence([lambda chunk=chunk: _chunk(out, chunk) for chunk in chunks]),  # type: ignore[misc]
        },
    )


def _chunk(out: _Emitter, chunk: StoredItem) -> None:
    state = {"offsets": lambda: out.size(chunk.offsets or ()), "sizes": lambda: out.size(chunk.sizes)}
    out.instance(_METADATA, "ChunkStorageMetadata", state)


def _properties(out: _Emitter, dtype: DType) -> None:
    out.found(_METADATA, "TensorProperties")
    out.out += b")\x81"
    out.memoize()
    out.tuple_of(
        [
            lambda: out.found("torch", dtype.name),
            lambda: out.call("torch.serialization", "_get_layout", lambda: out.text("torch.strided")),
            lambda: out.constant(False),
            lambda: out.call(_METADATA, "_MEM_FORMAT_ENCODING", lambda: out.number(0)),
            lambda: out.constant(False),
        ]
    )
    out.out += b"b"


def _paths(out: _Emitter, paths: Mapping[str, tuple[str | int, ...]]) -> Iterable[Pair]:
    for name, path in paths.items():
        yield (
            lambda name=name: out.text(name),  # type: ignore[misc]
            lambda path=path: out.tuple_of([lambda part=part: _part(out, part) for part in path]),  # type: ignore[misc]
        )


def _part(out: _Emitter, part: str | int) -> None:
    if isinstance(part, str):
        out.text(part)
    else:
        out.number(part)


def _places(
    out: _Emitter, entries: Mapping[str, StoredTensor | None], items: Mapping[str, tuple[StoredItem, ...]]
) -> Iterable[Pair]:
    for name in entries:
        for index, item in enumerate(items[name]):
            yield (
                lambda name=name, item=item, index=index: _index(out, name, item, index),  # type: ignore[misc]
                lambda item=item: _place(out, item),  # type: ignore[misc]
            )


def _index(out: _Emitter, name: str, item: StoredItem, index: int) -> None:
    offsets = item.offsets
    state: dict[str, Callable[[], None]] = {"fqn": lambda: out.text(name)}
    if offsets is None:
        state |= {"offset": lambda: out.constant(None), "index": lambda: out.constant(None)}
    else:
        state |= {"index": lambda: out.number(index), "offset": lambda: out.size(offsets)}
    out.instance(_METADATA, "MetadataIndex", state)


def _place(out: _Emitter, item: StoredItem) -> None:
    state: dict[str, Callable[[], None]] = {
        "relative_path": lambda: out.text(item.file),
        "offset": lambda: out.number(item.offset),
        "length": lambda: out.number(item.nbytes),
    }
    out.instance(_FILESYSTEM, "_StorageInfo", state)


def _storage_meta(out: _Emitter) -> None:
    # torch notes the path of the training job here; a checkpoint that is passed on should not.
    state: dict[str, Callable[[], None]] = {
        "checkpoint_id": lambda: out.constant(None),
        "save_id": lambda: out.constant(None),
        "load_id": lambda: out.constant(None),
        "modules": lambda: out.sequence([]),
    }
    out.instance(_METADATA, "StorageMeta", state)
