"""Read the pickle `.metadata` of `torch.distributed.checkpoint`, without torch.

The classes are those of `torch/distributed/checkpoint/metadata.py` and `filesystem.py` (torch 2.0
to 2.15). Instances of frequent classes are read by `metadata_fast`, anything else by the
interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from reprlib import repr as brief  # bounded: a hostile value may nest without end
from typing import TYPE_CHECKING, Any

from ema_ckpt.core.box import are_int64
from ema_ckpt.core.catalog import Ints, Path
from ema_ckpt.core.collisions import Collisions
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import EmaCkptError, SourceError, about
from ema_ckpt.formats.dcp.items import ItemDict, Items, TensorEntry
from ema_ckpt.formats.dcp.metadata_fast import Classes, Shortcuts
from ema_ckpt.formats.dcp.metadata_rows import BlockReader, RowReader
from ema_ckpt.formats.dcp.metadata_values import (
    ChunkBox,
    ItemKey,
    ItemPlace,
    Key,
    Values,
    differ_by_one_bit,
    is_memory_format,
    unexpected,
)
from ema_ckpt.formats.nesting import MAX_DEPTH
from ema_ckpt.formats.pickle.machine import loads
from ema_ckpt.formats.pickle.safe_globals import Global, Maker, Opaque, Replacement
from ema_ckpt.formats.pickle.several import Several
from ema_ckpt.formats.pickle.tensors import PLAIN_GLOBALS, attribute
from ema_ckpt.runtime.freed_memory import give_back

if TYPE_CHECKING:
    from ema_ckpt.formats.dcp.item_columns import ChunkColumns, ItemColumns
    from ema_ckpt.formats.dcp.metadata_columns import ColumnReader, ItemRows

_MANY = 1000  # keys of a dict, from which on some are chosen to collide
_PART_TYPES = frozenset({str, int})


@dataclass(slots=True, weakref_slot=True)
class Metadata:
    """The content of a `.metadata` file.

    Attributes:
        entries: a tensor entry, or None for an object, by flat name.
        paths: of entries; `spare`: names that have a path and are no entry.
        items: where each chunk or object lies.
        opaque: the class of each entry whose class is unknown.
        crc: CRC-32 of the file.
    """

    entries: dict[str, TensorEntry | None] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    items: Items = field(default_factory=ItemDict)
    opaque: dict[str, str] = field(default_factory=dict)
    spare: tuple[str, ...] = ()
    crc: int = 0


class _Fields(Replacement):
    """An instance whose state is a dict of its fields."""

    __slots__ = ("fields",)

    def __init__(self, *_args: object) -> None:
        self.fields: dict[str, object] = {}

    def setstate(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
            raise ValueError(f"the state of a {type(self).__name__} is no dict of fields")
        self.fields = state


class _Root(_Fields):
    __slots__ = ()


class _Tensor(_Fields):
    __slots__ = ()


class _Bytes(_Fields):
    __slots__ = ()


class _Chunk(_Fields):
    __slots__ = ()


class _Index(_Fields):
    __slots__ = ()


class _Info(_Fields):
    __slots__ = ()


class _Properties(Replacement):
    """`TensorProperties`: a tuple of five (six since torch 2.15), dtype first; once a dict."""

    __slots__ = ("dtype",)

    def __init__(self, *_args: object) -> None:
        self.dtype: object = None

    def setstate(self, state: object) -> None:
        if isinstance(state, dict):
            self.dtype = state["dtype"]
        elif isinstance(state, tuple) and len(state) in (5, 6) and is_memory_format(state[3]):
            self.dtype = state[0]
        else:
            raise ValueError("TensorProperties has a state of an unknown form")


def _memory_format(number: object) -> object:
    """Check a member of `_MEM_FORMAT_ENCODING`: contiguous, channels last or preserved."""
    if not is_memory_format(number):
        raise ValueError(f"a memory format is {brief(number)}")
    return number


def _attribute(owner: object = None, name: object = None, *rest: object) -> object:
    """Read a memory format that is pickled by its name, as by early versions of Python 3.11."""
    if not rest and isinstance(owner, Global) and owner.make is _memory_format:
        return _memory_format(_MEMORY_FORMATS.get(str(name)))
    return attribute(owner, name, *rest)


_MEMORY_FORMATS = {
    "TORCH_CONTIGUOUS_FORMAT": 0,
    "TORCH_CHANNELS_LAST": 1,
    "TORCH_PRESERVE_FORMAT": 2,
}

_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"  # torch <= 2.2
_ALLOWED: dict[tuple[str, str], Maker] = {
    **PLAIN_GLOBALS,
    ("builtins", "getattr"): _attribute,
    ("__builtin__", "getattr"): _attribute,
    (_METADATA, "Metadata"): _Root,
    (_METADATA, "StorageMeta"): _Fields,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    (_METADATA, "ChunkStorageMetadata"): _Chunk,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _memory_format,
    (_OLD_METADATA, "TensorProperties"): _Properties,
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"): _memory_format,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Info,
    # Kinds of items in the ranks' plans, which Megatron-core keeps here (`all_local_plans`).
    ("torch.distributed.checkpoint.planner", "WriteItemType"): lambda value: value,
    ("torch.distributed.checkpoint.planner", "LoadItemType"): lambda value: value,
}
_CLASSES = Classes(_Tensor, _Properties, _Chunk, _Index, _Info)
_CHUNK_NBYTES = 16  # at least, in the file: torch writes an instance of each, of 18 bytes or more
_MAX_DIMS = 1000
_GIVEN_BACK_FROM_NBYTES = 64 << 20  # of the file; what is freed for a smaller one is little
_COLUMNS_FROM_NBYTES = 1 << 20  # of the file; below that numpy takes longer to load than it saves


def parse(data: bytes, where: str, *, fast: bool = True) -> Metadata:
    """Read a `.metadata` (or per-rank `__R.metadata`) file.

    Args:
        fast: read frequent instances by `metadata_fast`; the result is the same without.

    Raises:
        UnsafeError: `unsafe-pickle` naming what would be called.
        SourceError: `unreadable` if it is no DCP metadata.
    """
    if fast:
        try:
            return _parse(data, where, fast=True)
        except EmaCkptError:
            pass  # the interpreter alone decides what is wrong with it
    return _parse(data, where, fast=False)


def _parse(data: bytes, where: str, *, fast: bool) -> Metadata:
    reader, prepare = None, None
    if fast:
        values = Values()
        rows: RowReader = BlockReader(values)
        if len(data) >= _COLUMNS_FROM_NBYTES:
            from ema_ckpt.formats.dcp.metadata_columns import ColumnReader

            rows = reader = ColumnReader(data, values)
        prepare = Shortcuts(_CLASSES, values, rows).prepare
    root = loads(data, _ALLOWED, where=where, prepare=prepare)
    try:
        if isinstance(root, Opaque):
            root = _derived_root(root)
        if not isinstance(root, _Root):
            message = f"{where}: no DCP metadata in it (found {brief(root)})"
            raise SourceError("unreadable", message, file=where)
        result = _metadata(root.fields, where, reader, len(data) // _CHUNK_NBYTES)
        if fast and reader is None:
            _check_different(root.fields, result.items)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        message = f"{where}: malformed DCP metadata ({error!r})"
        raise SourceError("unreadable", message, file=where) from None
    result.crc = crc32(data)
    if len(data) >= _GIVEN_BACK_FROM_NBYTES:
        del root, reader, prepare
        give_back()
    return result


def _derived_root(value: Opaque) -> Opaque | _Root:
    """Read an instance of a class derived from `Metadata` by its fields; others stay unread."""
    state = value.state
    is_derived = isinstance(state, dict) and {"state_dict_metadata", "storage_data"} <= state.keys()
    if value.called or not is_derived:
        return value
    _check_class(value)
    root = _Root()
    root.setstate(state)
    root.fields.setdefault("planner_data", None)
    return root


def _check_class(value: object) -> None:
    """Check that torch has the class of an instance, if the pickle says that it is torch's."""
    if isinstance(value, Opaque):
        if value.module.partition(".")[0] == "torch":
            raise ValueError(f"torch has no {value.module}.{value.name}")
        _check_spelling(value)


def _check_spelling(value: Opaque) -> None:
    """Check that the class of an instance is not one of torch's but for a bit."""
    found = f"{value.module}.{value.name}"
    meant = _meant(found)
    if meant is not None:
        raise ValueError(f"{found} stands in the place of {meant}")


@lru_cache(maxsize=64)  # every place of a large file may be of the same class
def _meant(found: str) -> str | None:
    """Return the global that is read whose name differs from this one by one bit, if any."""
    names = map(".".join, _ALLOWED)
    return next((named for named in names if differ_by_one_bit(found, named)), None)


def _metadata(
    fields: dict[str, object], where: str, reader: ColumnReader | None, most: int
) -> Metadata:
    entries, items = fields["state_dict_metadata"], fields.get("storage_data") or {}
    if not isinstance(entries, dict) or not isinstance(items, dict):
        raise ValueError("its tables are no dicts")
    _check_class(fields.get("storage_meta"))
    result, columns = Metadata(), None
    if reader is not None:
        from ema_ckpt.formats.dcp.item_columns import ChunkColumns

        columns = ChunkColumns(reader.numbered.tuples)
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise ValueError(f"a name is {brief(name)}")
        if isinstance(entry, Opaque):
            _check_spelling(entry)
            result.opaque[name] = f"{entry.module}.{entry.name}"
        elif isinstance(entry, _Bytes):
            result.entries[name] = None
        else:
            tensor = result.entries[name] = _tensor(entry, name, where, columns)
            most = _spend(most, len(tensor.chunks))
    paths = fields["planner_data"]  # torch writes it always, even if it is None
    if isinstance(paths, dict):
        _add_paths(result, paths, entries, where)
    if reader is None or columns is None:
        result.items = _items(items, where)
    else:
        result.items = _columns(items, columns, reader, where)
    return result


def _spend(most: int, count: int) -> int:
    """Return how many more pieces may be listed: references of a few bytes could be endless."""
    if count > most:
        raise ValueError("the same pieces of tensors are listed over and over")
    return most - count


def _check_different(fields: dict[str, Any], items: Items) -> None:
    """Leave equal keys to the interpreter: which of them is the last is no longer known here."""
    if len(items) < len(fields.get("storage_data") or ()):
        raise unexpected()


def _items(items: dict[object, Any], where: str) -> ItemDict:
    keys: list[Key] = list(items)  # type: ignore[arg-type]
    if not _are_keys(keys):
        keys = [_key(key) for key in keys]
    if len(keys) > _MANY:
        Collisions().check_all(keys)
    places = list(items.values())
    if not set(map(type, places)) <= {ItemPlace}:
        pairs = zip(keys, places, strict=True)
        places = [_place(place, name, where) for (name, _), place in pairs]
    return ItemDict(zip(keys, places, strict=True))


def _columns(
    items: dict[object, Any], boxes: ChunkColumns, reader: ColumnReader, where: str
) -> ItemColumns:
    """Keep the items of a large file as columns: rows of them, and those that stand alone."""
    from ema_ckpt.formats.dcp.item_columns import ItemColumns
    from ema_ckpt.formats.dcp.metadata_columns import ItemRows

    def read() -> Iterator[ItemRows | tuple[Key, ItemPlace]]:
        for key, place in items.items():
            if isinstance(key, ItemRows):
                if place is not key:
                    raise unexpected()
                yield key
            else:
                item = _key(key)
                yield item, _place(place, item[0], where)

    columns = ItemColumns(read(), boxes, reader)
    reader.close()
    return columns


def _add_paths(
    result: Metadata, paths: dict[str, object], entries: dict[str, object], where: str
) -> None:
    # An index far beyond the number of entries would ask for a list of that length.
    max_index = len(entries) + 65536
    spare: list[str] = []
    for name, path in paths.items():
        if name in entries:
            result.paths[name] = _path(path, name, max_index, where)
        else:
            spare.append(str(name) if isinstance(name, str | int) else "?")
    result.spare = tuple(dict.fromkeys(spare))


def _tensor(entry: object, name: str, where: str, columns: ChunkColumns | None) -> TensorEntry:
    named, size, chunks = _fields_of_tensor(entry, name, columns)
    if not isinstance(named, Global) or named.module != "torch":
        raise ValueError(f"the dtype of {name!r} is missing")
    if not isinstance(chunks, list):
        raise ValueError(f"the chunks of {name!r} are no list")
    try:
        dtype = by_name(named.name)
    except SourceError as error:
        raise about(error, tensor=name, file=where) from None
    shape = _ints(size)
    if len(shape) > _MAX_DIMS:  # each piece could refer to the same offsets
        raise ValueError(f"{name!r} has the impossible shape of {len(shape)} dimensions")
    if columns is None:
        return TensorEntry(dtype, shape, _boxes(chunks, name, len(shape), where))
    rows = [
        chunk if isinstance(chunk, Several) else _chunk(chunk, name, len(shape), where)
        for chunk in chunks
    ]
    return TensorEntry(dtype, shape, columns.add(name, len(shape), rows))


def _fields_of_tensor(
    entry: object, name: str, columns: ChunkColumns | None
) -> tuple[object, object, object]:
    """Return what stands for the dtype, the size and the chunks of a tensor."""
    if columns is not None:
        from ema_ckpt.formats.dcp.metadata_columns import TensorRow

        if isinstance(entry, TensorRow):
            return entry.dtype, columns.tuples.values[entry.size_id], [entry.chunks]
    if not isinstance(entry, _Tensor):
        raise ValueError(f"the entry of {name!r} is a {type(entry).__name__}")
    properties = entry.fields["properties"]
    named = properties.dtype if isinstance(properties, _Properties) else None
    return named, entry.fields["size"], entry.fields["chunks"]


def _boxes(chunks: list[Any], name: str, rank: int, where: str) -> tuple[tuple[Ints, Ints], ...]:
    boxes = tuple(chunks)
    if not _are_boxes(boxes, rank):
        boxes = tuple([_chunk(chunk, name, rank, where) for chunk in chunks])
    if len(boxes) > _MANY:
        Collisions().check(boxes)
    return boxes


def _are_boxes(chunks: Sequence[Any], rank: int) -> bool:
    """Whether all are as the shortcuts read chunks, with nothing wrong: `_chunk` says what is."""
    if not set(map(type, chunks)) <= {ChunkBox}:
        return False
    runs: list[Any] = list(chain.from_iterable(chunks))
    if not set(map(type, runs)) <= {tuple} or not set(map(len, runs)) <= {rank}:
        return False
    numbers = list(chain.from_iterable(runs))
    return set(map(type, numbers)) <= {int} and min(numbers, default=0) >= 0


def _chunk(chunk: object, name: str, rank: int, where: str) -> tuple[Ints, Ints]:
    """Check one chunk of a tensor of `rank` dimensions; return its offsets and sizes."""
    if isinstance(chunk, _Chunk):
        chunk = chunk.fields["offsets"], chunk.fields["sizes"]
    elif not isinstance(chunk, ChunkBox):
        raise ValueError(f"a chunk of {name!r} is {brief(chunk)}")
    offsets, sizes = map(_ints, chunk)
    if not len(offsets) == len(sizes) == rank:
        counts = f"{len(offsets)} offsets and {len(sizes)} sizes"
        raise ValueError(f"{name!r} has {rank} dimensions, a chunk of it {counts}")
    if sizes and min(sizes) < 0:
        message = f"{where}: {name!r} is said to have a chunk of {list(sizes)} elements"
        raise SourceError("out-of-bounds", message, tensor=name, file=where)
    return offsets, sizes


def _path(path: object, name: str, max_index: int, where: str) -> Path:
    if not isinstance(path, tuple) or not path or not _PART_TYPES.issuperset(map(type, path)):
        raise ValueError(f"the path of {name!r} is {brief(path)}")
    if len(path) > MAX_DEPTH:
        message = f"{where}: {name!r} lies in containers that are nested more than {MAX_DEPTH} deep"
        raise SourceError("unsupported", message, tensor=name, file=where)
    for part in path:
        if isinstance(part, int) and not 0 <= part < max_index:
            item = f"{name!r} is said to be item {part} of a list"
            message = f"{where}: {item}, in a checkpoint of far fewer entries"
            raise SourceError("out-of-bounds", message, tensor=name, file=where)
    return path


def _are_keys(keys: Sequence[Any]) -> bool:
    """Whether all are as the shortcuts read indices of chunks, with nothing wrong."""
    if not set(map(type, keys)) <= {ItemKey}:
        return False
    names, offsets = zip(*keys, strict=True) if keys else ((), ())
    if not set(map(type, names)) <= {str} or not set(map(type, offsets)) <= {tuple}:
        return False
    return set(map(type, chain.from_iterable(offsets))) <= {int}


def _key(key: object) -> Key:
    name: object = key
    offsets: object = None
    if isinstance(key, _Index):
        name, offsets = key.fields["fqn"], key.fields.get("offset")
    elif isinstance(key, ItemKey):
        name, offsets = key
    if not isinstance(name, str):
        raise ValueError(f"an item has no name, but {brief(name)}")
    return name, None if offsets is None else _ints(offsets)


def _place(place: object, name: str, where: str) -> ItemPlace:
    if isinstance(place, ItemPlace):
        return place
    fields = _fields_of_place(place)
    file, offset, nbytes = (fields.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or type(offset) is not int or type(nbytes) is not int:
        raise ValueError("an item has no place")
    if not are_int64((offset, nbytes)):
        raise ValueError("an item has no place")
    if offset < 0 or nbytes < 0:
        message = f"{where}: {name!r} is said to be {nbytes} bytes at {offset} of {file}"
        raise SourceError("out-of-bounds", message, tensor=name, file=where)
    transforms = fields.get("transform_descriptors") or ()
    if not isinstance(transforms, list | tuple):
        raise ValueError("an item has no place")
    return ItemPlace(file, offset, nbytes, tuple(map(_transform_name, transforms)))


def _fields_of_place(place: object) -> dict[str, object]:
    """Return the fields of a place; a class of another package, as OLMo-core's, has the same."""
    if isinstance(place, _Info):
        return place.fields
    if isinstance(place, Opaque) and not place.called and isinstance(place.state, dict):
        _check_class(place)
        return place.state
    return {}


def _transform_name(value: object) -> str:
    return value if isinstance(value, str) else brief(value)


def _ints(value: object) -> Ints:
    if isinstance(value, tuple) and are_int64(value):
        return value
    raise ValueError(f"a shape or offset is {brief(value)}")
