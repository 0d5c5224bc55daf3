"""Write `.metadata` without torch, in the form that torch 2.4 to 2.14 reads.

The classes and their states are those of `torch/distributed/checkpoint/metadata.py`: frozen
dataclasses give their `__dict__`, `TensorProperties` a tuple of five.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple, cast

from ema_ckpt.core.catalog import Ints, Path
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.dtypes import DType
from ema_ckpt.formats.pickle.safe_globals import Global
from ema_ckpt.formats.pickle.writer import (
    Call,
    Encoded,
    Instance,
    Listed,
    Pairs,
    PickleWriter,
    encode_int,
)

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_CHUNK = (_METADATA, "ChunkStorageMetadata")
_INDEX = (_METADATA, "MetadataIndex")
_INFO = (_FILESYSTEM, "_StorageInfo")
_SIZE = ("torch", "Size")
_STRIDED = Call("torch.serialization", "_get_layout", ("torch.strided",), is_shared=True)
_CONTIGUOUS = Call(_METADATA, "_MEM_FORMAT_ENCODING", (0,), is_shared=True)
# Opcodes of the frequent instances: from the class to the first field, and behind the numbers of a
# `torch.Size`, and from the last field to the end. Eight, five and two objects are memoized in a
# chunk, an index and a place.
_OPENED = b")\x81\x94}\x94("
_SIZED = b"\x94\x85\x94R\x94"
_BUILT = b"ub"
_MAX_RUN = 4096  # items
_MAX_KNOWN = 64  # tensors
_PIECE_NBYTES = 1 << 20
_KEPT_NBYTES = 16 << 20  # 0.1 million items
_NOTHING = Encoded(b"", 0)


class StoredItem(NamedTuple):
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


Boxes = tuple[tuple[Ints, Ints], ...]
Entries = Mapping[str, StoredTensor | None]
Items = Mapping[str, Sequence[StoredItem]]


class MetadataPickle:
    """The pickle of a `Metadata`, in pieces: of millions of items it has hundreds of megabytes.

    Args:
        entries: tensors, or None for an object, by flat name in the order of the state dict.
        items: where the chunks (or the object) of each name lie.
        paths: the path of each name in the nested state dict.
        boxes: of the chunks of each tensor, if they are known apart from `items`; the same ones of
            several tensors are encoded once.
        checkpoint_id, save_id: name of the checkpoint and id of the save, where known.

    Attributes:
        nbytes: of the pickle.
        crc: CRC-32 of the pickle.
    """

    def __init__(
        self,
        entries: Entries,
        items: Items,
        paths: Mapping[str, Path],
        checkpoint_id: str | None = None,
        save_id: str | None = None,
        boxes: Mapping[str, Boxes] | None = None,
    ) -> None:
        self._entries, self._items, self._paths, self._boxes = entries, items, paths, boxes
        self._ids = {"checkpoint_id": checkpoint_id, "save_id": save_id}
        self._kept: list[bytearray] | None = []
        self.nbytes = self.crc = 0
        for piece in self._encode():
            self.nbytes += len(piece)
            self.crc = crc32(piece, self.crc)
            if self._kept is not None:
                self._kept.append(piece)
            if self.nbytes > _KEPT_NBYTES:
                self._kept = None  # made once more when it is written

    def pieces(self) -> Iterable[bytearray]:
        """Iterate over the bytes."""
        return self._encode() if self._kept is None else self._kept

    def _encode(self) -> Iterator[bytearray]:
        # Never the path of the training job, which torch notes here.
        storage_meta: dict[str, object] = {**self._ids, "load_id": None, "modules": []}
        writer = PickleWriter(4)
        fields = {
            "state_dict_metadata": Pairs(partial(self._entries_with_chunks, writer)),
            "planner_data": Pairs(self._paths.items),
            "storage_data": Pairs(partial(_storage_data, self._entries, self._items, writer)),
            "storage_meta": Instance(_METADATA, "StorageMeta", storage_meta),
            "version": "1.0.0",
        }
        return writer.pieces(Instance(_METADATA, "Metadata", fields), _PIECE_NBYTES)

    def _entries_with_chunks(self, writer: PickleWriter) -> Iterator[tuple[str, Instance]]:
        chunks = _Chunks(writer)
        for name, tensor in self._entries.items():
            if tensor is None:
                yield name, Instance(_METADATA, "BytesStorageMetadata")
                continue
            if self._boxes is None:
                items = self._items[name]
                boxes = tuple([(item.offsets or (), item.sizes) for item in items])
            else:
                boxes = self._boxes[name]
            yield name, _tensor_entry(tensor, Listed(partial(chunks.encode, boxes)))


class _Run:
    """Opcodes of items that follow each other, to be written at once.

    Attributes:
        count: items so far.
    """

    def __init__(self, memoized: int) -> None:
        self.parts: list[bytes] = []
        self.count = 0
        self._memoized = memoized  # objects of an item

    def take(self) -> Encoded:
        """Return what is there, and begin anew."""
        run = Encoded(b"".join(self.parts), self.count * self._memoized)
        self.parts, self.count = [], 0
        return run


def _tensor_entry(tensor: StoredTensor, chunks: Listed) -> Instance:
    properties = (
        Global("torch", tensor.dtype.name, None),
        _STRIDED,
        False,
        _CONTIGUOUS,
        False,
    )
    fields = {
        "properties": Instance(_METADATA, "TensorProperties", properties),
        "size": _size(tensor.shape),
        "chunks": chunks,
    }
    return Instance(_METADATA, "TensorStorageMetadata", fields)


class _Chunks:
    """Encodes the chunks of tensors; the first of all is written as any other object is."""

    def __init__(self, writer: PickleWriter) -> None:
        self._writer = writer
        self._opcodes: _ChunkOpcodes | None = None
        self._known: dict[Boxes, Encoded] = {}  # of few tensors: layers have the same shapes

    def encode(self, boxes: Boxes) -> Iterator[Instance | Encoded]:
        """Yield the chunks of a tensor."""
        known = self._known.get(boxes)
        if known is not None:
            yield known
            return
        run = _Run(8)
        for offsets, sizes in boxes:
            opcodes = self._opcodes = self._opcodes or _chunk_opcodes(self._writer)
            if opcodes is None or not offsets:
                yield run.take()
                yield Instance(*_CHUNK, {"offsets": _size(offsets), "sizes": _size(sizes)})
                continue
            first, second, last = opcodes
            run.parts += (first, _encode_numbers(offsets), second, _encode_numbers(sizes), last)
            run.count += 1
            if run.count == _MAX_RUN:
                yield run.take()
        is_whole = run.count == len(boxes)
        rest = run.take()
        if is_whole and len(self._known) < _MAX_KNOWN:
            self._known[boxes] = rest
        yield rest


def _storage_data(
    entries: Entries, items: Items, writer: PickleWriter
) -> Iterator[tuple[Instance | Encoded, Instance | Encoded]]:
    """Yield where each item lies: an index, and a place in a file."""
    run = _Run(7)
    for name in entries:
        opcodes: _PlaceOpcodes | None = None
        for number, item in enumerate(items[name]):
            opcodes = opcodes or _place_opcodes(writer, name)
            file = writer.reference(item.file)
            if opcodes is None or file is None or not item.offsets:
                yield run.take(), _NOTHING
                yield _index(name, number, item), _info(item)
                continue
            run.parts += (opcodes.number, encode_int(number), opcodes.offset)
            run.parts += (_encode_numbers(item.offsets), opcodes.path, file)
            run.parts += (opcodes.start, encode_int(item.offset))
            run.parts += (opcodes.length, encode_int(item.nbytes), _BUILT)
            run.count += 1
            if run.count == _MAX_RUN:
                yield run.take(), _NOTHING
    yield run.take(), _NOTHING


class _ChunkOpcodes(NamedTuple):
    """Opcodes of a chunk before, between and behind its numbers."""

    first: bytes
    second: bytes
    last: bytes


def _chunk_opcodes(writer: PickleWriter) -> _ChunkOpcodes | None:
    """Refer to what a chunk names, once all of it has been written."""
    found = _references(writer, _CHUNK, "offsets", "sizes", _SIZE)
    if found is None:
        return None
    named, offsets, sizes, size = found
    return _ChunkOpcodes(named + _OPENED + offsets + size, _SIZED + sizes + size, _SIZED + _BUILT)


class _PlaceOpcodes(NamedTuple):
    """Opcodes of an item of one tensor: before each field of its index and of its place."""

    number: bytes
    offset: bytes
    path: bytes
    start: bytes
    length: bytes


def _place_opcodes(writer: PickleWriter, name: str) -> _PlaceOpcodes | None:
    """Refer to what an index and a place name, once all of it has been written."""
    index = _references(writer, _INDEX, "fqn", name, "index", "offset", _SIZE)
    place = _references(writer, _INFO, "relative_path", "offset", "length")
    if index is None or place is None:
        return None
    named, fqn, text, number, offset, size = index
    named_info, path, start, length = place
    return _PlaceOpcodes(
        named + _OPENED + fqn + text + number,
        offset + size,
        _SIZED + _BUILT + named_info + _OPENED + path,
        start,
        length,
    )


def _index(name: str, number: int, item: StoredItem) -> Instance:
    index: dict[str, object] = {"fqn": name, "offset": None, "index": None}
    if item.offsets is not None:
        index = {"fqn": name, "index": number, "offset": _size(item.offsets)}
    return Instance(*_INDEX, index)


def _info(item: StoredItem) -> Instance:
    info = {"relative_path": item.file, "offset": item.offset, "length": item.nbytes}
    return Instance(*_INFO, info)


def _size(numbers: Ints) -> Call:
    return Call(*_SIZE, (numbers,))


def _references(writer: PickleWriter, *keys: object) -> list[bytes] | None:
    """Return the opcodes that refer to texts and globals, once all have been written."""
    found = [writer.reference(key) for key in keys]
    return None if None in found else cast("list[bytes]", found)


@lru_cache(maxsize=1 << 16)
def _encode_numbers(numbers: Ints) -> bytes:
    """Return the opcodes of a tuple of numbers, without that which memoizes it."""
    opcodes = b"".join([encode_int(number) for number in numbers])
    if len(numbers) > 3:
        return b"(" + opcodes + b"t"
    return opcodes + (b"\x85", b"\x86", b"\x87")[len(numbers) - 1]
