"""Write `.metadata` without torch, in the form that torch 2.4 to 2.14 reads.

The classes and their states are those of `torch/distributed/checkpoint/metadata.py`: frozen
dataclasses give their `__dict__`, `TensorProperties` a tuple of five.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ema_ckpt.core.catalog import Ints, Path
from ema_ckpt.core.dtypes import DType
from ema_ckpt.formats.pickle.safe_globals import Global
from ema_ckpt.formats.pickle.writer import Call, Instance, Pairs, PickleWriter

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


Entries = Mapping[str, StoredTensor | None]
Items = Mapping[str, Sequence[StoredItem]]


def dump_metadata(
    entries: Entries,
    items: Items,
    paths: Mapping[str, Path],
    checkpoint_id: str | None = None,
    save_id: str | None = None,
) -> bytes:
    """Write the pickle of a `Metadata`.

    Args:
        entries: tensors, or None for an object, by flat name in the order of the state dict.
        items: where the chunks (or the object) of each name lie.
        paths: the path of each name in the nested state dict.
        checkpoint_id, save_id: name of the checkpoint and id of the save, where known.
    """
    storage_meta: dict[str, object] = {
        # Never the path of the training job, which torch notes here.
        "checkpoint_id": checkpoint_id,
        "save_id": save_id,
        "load_id": None,
        "modules": [],
    }
    fields = {
        "state_dict_metadata": Pairs(partial(_entries, entries, items)),
        "planner_data": Pairs(paths.items),
        "storage_data": Pairs(partial(_storage_data, entries, items)),
        "storage_meta": Instance(_METADATA, "StorageMeta", storage_meta),
        "version": "1.0.0",
    }
    writer = PickleWriter(4)
    writer.write(Instance(_METADATA, "Metadata", fields))
    return bytes(writer.out + b".")


def _entries(entries: Entries, items: Items) -> Iterator[tuple[str, Instance]]:
    for name, tensor in entries.items():
        if tensor is None:
            yield name, Instance(_METADATA, "BytesStorageMetadata")
        else:
            yield name, _tensor_entry(tensor, items[name])


def _tensor_entry(tensor: StoredTensor, items: Sequence[StoredItem]) -> Instance:
    properties = (
        Global("torch", tensor.dtype.name, None),
        Call("torch.serialization", "_get_layout", ("torch.strided",)),
        False,
        Call(_METADATA, "_MEM_FORMAT_ENCODING", (0,)),
        False,
    )
    chunks = []
    for item in items:
        chunk = {"offsets": _size(item.offsets or ()), "sizes": _size(item.sizes)}
        chunks.append(Instance(_METADATA, "ChunkStorageMetadata", chunk))
    fields = {
        "properties": Instance(_METADATA, "TensorProperties", properties),
        "size": _size(tensor.shape),
        "chunks": chunks,
    }
    return Instance(_METADATA, "TensorStorageMetadata", fields)


def _size(numbers: Ints) -> Call:
    return Call("torch", "Size", (numbers,))


def _storage_data(entries: Entries, items: Items) -> Iterator[tuple[Instance, Instance]]:
    for name in entries:
        for number, item in enumerate(items[name]):
            index: dict[str, object] = {"fqn": name, "offset": None, "index": None}
            if item.offsets is not None:
                index = {"fqn": name, "index": number, "offset": _size(item.offsets)}
            info = {"relative_path": item.file, "offset": item.offset, "length": item.nbytes}
            key = Instance(_METADATA, "MetadataIndex", index)
            yield key, Instance(_FILESYSTEM, "_StorageInfo", info)
