"""Catalogs built by hand, for tests of what is decided from metadata alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ema_ckpt.core.catalog import Catalog, Chunk, Object, Payload, Tensor
from ema_ckpt.core.dtypes import by_name


@dataclass(frozen=True)
class T:
    """A tensor leaf: shape, dtype, and a storage key for tied ones."""

    shape: tuple[int, ...] = (2, 3)
    dtype: str = "float32"
    storage: str | None = None


INT = T((), "int64")
SCALAR = T((), "float32")


class Memory:
    """Files and reader of a catalog whose payloads are bytes in memory, one file a tensor."""

    root = "memory"

    def __init__(self, data: dict[str, bytes] | None = None) -> None:
        self.data = data or {}

    def size(self, name: str) -> int:
        return len(self.data[name])

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return self.data[name][offset : offset + nbytes]

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(name, offset, len(buffer))

    def listing(self) -> list[str]:
        return sorted(self.data)

    def close(self) -> None:
        pass

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        return tuple(Payload(chunk.file, chunk.offset, chunk.nbytes) for chunk in tensor.chunks)

    def load(self, item: Object) -> object:
        return item.inline


def leaves(
    tree: object, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """Paths and leaves of nested dicts and lists; a list without tensors is a leaf."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list) and any(isinstance(value, T) for value in tree):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


def catalog_of(
    tree: dict, *, nested: bool = True, data: dict[str, bytes] | None = None, **fields: object
) -> Catalog:
    """A catalog of nested dicts whose leaves are `T` or plain values; `nested=False` forgets the nesting."""
    tensors, objects = [], []
    for path, leaf in leaves(tree):
        name = ".".join(map(str, path))
        place = path if nested else (name,)
        if isinstance(leaf, T):
            dtype = by_name(leaf.dtype)
            tensor = Tensor(
                name, place, leaf.shape, dtype, (), (leaf.storage,) if leaf.storage else None
            )
            chunk = Chunk(
                (0,) * len(leaf.shape), leaf.shape, leaf.storage or name, 0, tensor.nbytes
            )
            tensors.append(Tensor(name, place, leaf.shape, dtype, (chunk,), tensor.storage))
        else:
            objects.append(Object(name, place, "objects", inline=leaf, is_inline=True))
    memory = Memory(data)
    kind = str(fields.pop("format", "dcp"))
    return Catalog(
        "ckpt", "ckpt", kind, tuple(tensors), tuple(objects), memory, memory, nested, **fields
    )  # type: ignore[arg-type]
