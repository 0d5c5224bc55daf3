"""Where each chunk or object lies, as a `.metadata` of ordinary size lists it.

`item_columns.ItemColumns` is the same for large ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from ema_ckpt.core.catalog import Chunk, Ints
from ema_ckpt.core.dtypes import DType
from ema_ckpt.formats.dcp.metadata_values import ItemPlace, Key

_NO_PLACE = ItemPlace("", 0, 0)


class TensorEntry(NamedTuple):
    """A tensor of the state dict: dtype, global shape, (offsets, sizes) of its chunks in order."""

    dtype: DType
    shape: Ints
    chunks: Sequence[tuple[Ints, Ints]]


Entries = Mapping[str, TensorEntry | None]
"""A tensor, or None of an object, by flat name."""


class Items(Protocol):
    """Places by name and offsets, as in a dict."""

    def get(self, key: Key, default: ItemPlace, /) -> ItemPlace:
        """Return the place of an item, or `default`."""
        ...

    def __iter__(self) -> Iterator[Key]: ...
    def __len__(self) -> int: ...

    def chunks_of(self, name: str, entry: TensorEntry) -> tuple[Chunk, ...]:
        """Return the chunks of a tensor with their places; those that are nowhere have no file."""
        ...

    def add_places(self, places: dict[str, list[ItemPlace]]) -> None:
        """Add the places of all items whose names are keys."""
        ...

    def ends(self) -> dict[str, int]:
        """Return the byte up to which each file is used, by its name."""
        ...

    def transformed(self) -> list[ItemPlace]:
        """Return the places of items that an extension encoded."""
        ...

    def strays(self, entries: Entries) -> Iterator[tuple[Key, ItemPlace]]:
        """Return the items of which no chunk has the name and the offsets."""
        ...


class ItemDict(dict[Key, ItemPlace]):
    """Places by name and offsets."""

    def chunks_of(self, name: str, entry: TensorEntry) -> tuple[Chunk, ...]:
        """Return the chunks of a tensor with their places; those that are nowhere have no file."""
        find, chunks = self.get, []
        for offsets, sizes in entry.chunks:
            file, start, nbytes, _ = find((name, offsets), _NO_PLACE)
            chunks.append(Chunk(offsets, sizes, file, start, nbytes))
        return tuple(chunks)

    def add_places(self, places: dict[str, list[ItemPlace]]) -> None:
        """Add the places of all items whose names are keys."""
        for (name, _), place in self.items():
            if name in places:
                places[name].append(place)

    def ends(self) -> dict[str, int]:
        """Return the byte up to which each file is used, by its name."""
        ends: dict[str, int] = {}
        for file, offset, nbytes, _ in self.values():
            if offset + nbytes > ends.get(file, -1):
                ends[file] = offset + nbytes
        return ends

    def transformed(self) -> list[ItemPlace]:
        """Return the places of items that an extension encoded."""
        return [place for place in self.values() if place.transforms]

    def strays(self, entries: Entries) -> Iterator[tuple[Key, ItemPlace]]:
        """Return the items of which no chunk has the name and the offsets."""
        begins = {
            name: {offsets for offsets, _ in entry.chunks}
            for name, entry in entries.items()
            if entry is not None
        }
        for key, place in self.items():
            if key[1] not in begins.get(key[0], ()):
                yield key, place
