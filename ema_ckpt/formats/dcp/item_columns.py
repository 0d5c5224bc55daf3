"""The chunks and items of a large `.metadata` as columns of numbers.

Six million named tuples would take gigabytes; here a chunk takes eight bytes and an item 32, and
what is equal is kept once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np

from ema_ckpt.core.catalog import Chunk, Ints
from ema_ckpt.formats.dcp.items import Entries, TensorEntry
from ema_ckpt.formats.dcp.metadata_columns import ChunkRows, ColumnReader, ItemRows
from ema_ckpt.formats.dcp.metadata_values import ItemPlace, Key, unexpected
from ema_ckpt.formats.pickle.several import Several

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ema_ckpt.formats.dcp.metadata_batches import TextIds, TupleIds

    Numbers = NDArray[np.int64]
    Identifiers = NDArray[np.int32]

_NO_OFFSETS = -1  # of an object
_MAX_NUMBER = 1 << 62


class ChunkColumns:
    """Offsets and sizes of the chunks of all tensors, tensor by tensor.

    Attributes:
        tuples: the offsets and sizes. offset_ids, size_ids: their numbers, after `finish`.
        tensors: names, and the number of chunks of each.
    """

    def __init__(self, tuples: TupleIds) -> None:
        self.tuples = tuples
        self.tensors: list[str] = []
        self.counts: list[int] = []
        self.offset_ids: Identifiers = np.zeros(0, np.int32)
        self.size_ids: Identifiers = np.zeros(0, np.int32)
        self._dims: list[int] = []
        self._offset_parts: list[Identifiers] = []
        self._size_parts: list[Identifiers] = []
        self._count = 0

    def add(self, name: str, dims: int, chunks: Iterable[Several | tuple[Ints, Ints]]) -> BoxRows:
        """Add the chunks of a tensor: rows of them, and offsets and sizes.

        Raises:
            SourceError: if there are rows of something else.
        """
        first = self._count
        for chunk in chunks:
            if isinstance(chunk, ChunkRows):
                self._add_part(chunk.offset_ids, chunk.size_ids)
            elif isinstance(chunk, Several):
                raise unexpected()
            else:
                pair = [self.tuples.id_of(numbers) for numbers in chunk]
                self._add_part(np.array(pair[:1], np.int32), np.array(pair[1:], np.int32))
        self.tensors.append(name)
        self.counts.append(self._count - first)
        self._dims.append(dims)
        return BoxRows(self, first, self._count)

    def finish(self) -> None:
        """Join the parts. Raises SourceError if chunks have other dimensions than their tensor."""
        if self._count:
            self.offset_ids = np.concatenate(self._offset_parts)
            self.size_ids = np.concatenate(self._size_parts)
        self._offset_parts, self._size_parts = [], []
        dims_of = np.array([len(numbers) for numbers in self.tuples.values], np.int64)
        dims = np.repeat(np.array(self._dims, np.int64), self.counts)
        for ids in (self.offset_ids, self.size_ids):
            if (dims_of[ids] != dims).any():
                raise unexpected()

    def _add_part(self, offset_ids: Identifiers, size_ids: Identifiers) -> None:
        self._offset_parts.append(offset_ids)
        self._size_parts.append(size_ids)
        self._count += len(offset_ids)


class BoxRows(Sequence[tuple[Ints, Ints]]):
    """Offsets and sizes of the chunks of one tensor, in order."""

    __slots__ = ("_columns", "first", "stop")

    def __init__(self, columns: ChunkColumns, first: int, stop: int) -> None:
        self._columns, self.first, self.stop = columns, first, stop

    def __len__(self) -> int:
        return self.stop - self.first

    def __iter__(self) -> Iterator[tuple[Ints, Ints]]:
        columns, values = self._columns, self._columns.tuples.values
        offsets = columns.offset_ids[self.first : self.stop].tolist()
        sizes = columns.size_ids[self.first : self.stop].tolist()
        return zip(map(values.__getitem__, offsets), map(values.__getitem__, sizes), strict=True)

    @overload
    def __getitem__(self, index: int) -> tuple[Ints, Ints]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[Ints, Ints], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[Ints, Ints] | tuple[tuple[Ints, Ints], ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, BoxRows)) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


class _Columns(NamedTuple):
    """Columns of items: names, offsets and files by number, and bytes."""

    names: Identifiers
    offsets: Identifiers
    files: Identifiers
    starts: Numbers
    nbytes: Numbers


_NO_IDS, _NO_NUMBERS = np.zeros(0, np.int32), np.zeros(0, np.int64)
_NO_ITEMS = _Columns(_NO_IDS, _NO_IDS, _NO_IDS, _NO_NUMBERS, _NO_NUMBERS)


class ItemColumns(Mapping[Key, ItemPlace]):
    """Where each chunk or object lies, in order.

    Attributes:
        transforms: extensions that encoded an item, by its row.
    """

    def __init__(
        self,
        items: Iterable[ItemRows | tuple[Key, ItemPlace]],
        boxes: ChunkColumns,
        reader: ColumnReader,
    ) -> None:
        """Take rows of items, and keys with places; `boxes` are all chunks that there are.

        Raises:
            SourceError: if one is not as the shortcuts read it, or two have equal keys.
        """
        boxes.finish()
        self._boxes = boxes
        self._stored: StoredChunks | None = None
        self._strays: Numbers | None = None
        self.transforms: dict[int, tuple[str, ...]] = {}
        self._texts, self._tuples = reader.numbered.texts, reader.numbered.tuples
        parts, count = [_NO_ITEMS], 0
        for item in items:
            if isinstance(item, ItemRows):
                part = _columns_of_rows(item, reader)
            else:
                part = self._columns_of(*item)
                if item[1].transforms:
                    self.transforms[count] = item[1].transforms
            parts.append(part)
            count += len(part.names)
        columns = zip(*parts, strict=True)
        self._columns = _Columns._make([np.concatenate(column) for column in columns])
        keys = _keys(self._columns.names, self._columns.offsets)
        self._order = np.argsort(keys, kind="stable")
        self._sorted_keys = keys[self._order]
        if (self._sorted_keys[1:] == self._sorted_keys[:-1]).any():
            raise unexpected()

    def _columns_of(self, key: Key, place: ItemPlace) -> _Columns:
        """Return the columns of one item."""
        name, offsets = key
        if max(place.offset, place.nbytes) >= _MAX_NUMBER:
            raise unexpected()
        offset_id = _NO_OFFSETS if offsets is None else self._tuples.id_of(offsets)
        numbers = (self._texts.id_of(name), offset_id, self._texts.id_of(place.file))
        names, offset_ids, files = (np.array([number], np.int32) for number in numbers)
        starts, nbytes = (np.array([number]) for number in (place.offset, place.nbytes))
        return _Columns(names, offset_ids, files, starts, nbytes)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Key]:
        return map(self._key, range(len(self)))

    def __getitem__(self, key: Key) -> ItemPlace:
        name, offsets = key
        offset_id = _NO_OFFSETS if offsets is None else self._tuples.find(offsets)
        if offset_id is None:
            raise KeyError(key)
        names, offset_ids = np.array([self._texts.find(name)]), np.array([offset_id])
        (row,) = self._find(_keys(names, offset_ids)).tolist()
        if row < 0:
            raise KeyError(key)
        return self._place(row)

    def _key(self, row: int) -> Key:
        name, offset_id = self._columns.names[row], self._columns.offsets[row]
        offsets = None if offset_id == _NO_OFFSETS else self._tuples.values[offset_id]
        return self._texts.values[name], offsets

    def _place(self, row: int) -> ItemPlace:
        columns = self._columns
        file, transforms = self._texts.values[columns.files[row]], self.transforms.get(row, ())
        return ItemPlace(file, int(columns.starts[row]), int(columns.nbytes[row]), transforms)

    def chunks_of(self, _name: str, entry: TensorEntry) -> tuple[Chunk, ...]:
        """Return the chunks of a tensor with their places; those that are nowhere have no file."""
        if self._stored is None:
            rows = self._rows_of_boxes()
            self._stored = StoredChunks(self._boxes, self._texts, self._columns, rows)
        return self._stored.of(entry.chunks)

    def add_places(self, places: dict[str, list[ItemPlace]]) -> None:
        """Add the places of all items whose names are keys."""
        ids = [self._texts.find(name) for name in places]
        for row in np.flatnonzero(np.isin(self._columns.names, ids)).tolist():
            places[self._key(row)[0]].append(self._place(row))

    def ends(self) -> dict[str, int]:
        """Return the byte up to which each file is used, by its name."""
        columns = self._columns
        ends = np.zeros(len(self._texts.values), np.int64)
        np.maximum.at(ends, columns.files, columns.starts + columns.nbytes)
        files, first = np.unique(columns.files, return_index=True)
        in_order = files[np.argsort(first)].tolist()
        return {self._texts.values[file]: int(ends[file]) for file in in_order}

    def transformed(self) -> list[ItemPlace]:
        """Return the places of items that an extension encoded."""
        return [self._place(row) for row in self.transforms]

    def strays(self, _entries: Entries) -> Iterator[tuple[Key, ItemPlace]]:
        """Return the items of which no chunk has the name and the offsets."""
        if self._strays is None:
            self._rows_of_boxes()
        for row in self._strays.tolist() if self._strays is not None else ():
            yield self._key(row), self._place(row)

    def _rows_of_boxes(self) -> Numbers:
        """Return the row of each chunk, or -1; keep the rows that are no chunk's."""
        rows = self._find(self._keys_of_boxes())
        is_stray = np.ones(len(self), bool)
        is_stray[rows[rows >= 0]] = False
        self._strays = np.flatnonzero(is_stray)
        return rows

    def _keys_of_boxes(self) -> Numbers:
        """Return the key of each chunk; of one that is nowhere it is no item's."""
        boxes = self._boxes
        names = np.array([self._texts.find(name) for name in boxes.tensors], np.int64)
        return _keys(np.repeat(names, boxes.counts), boxes.offset_ids)

    def _find(self, keys: Numbers) -> Numbers:
        """Return the row of each key, or -1."""
        if not len(self._sorted_keys):
            return np.full(len(keys), -1, np.int64)
        places = np.minimum(np.searchsorted(self._sorted_keys, keys), len(self._sorted_keys) - 1)
        return np.where(self._sorted_keys[places] == keys, self._order[places], -1)


def _columns_of_rows(rows: ItemRows, reader: ColumnReader) -> _Columns:
    """Return the columns of items. Raises SourceError if one refers to what comes after it."""
    batch, span = rows.batch, slice(rows.first, rows.stop)
    names, files = batch.names[span], batch.files[span]
    memo_counts = rows.memo_count + batch.memo[span] - batch.memo[rows.first]
    if (names >= memo_counts).any() or (files >= memo_counts).any():
        raise unexpected()
    ids = reader.ids_of_texts(names), batch.offset_ids[span], reader.ids_of_texts(files)
    return _Columns(*ids, batch.starts[span], batch.nbytes[span])


def _keys(names: NDArray[np.integer], offsets: NDArray[np.integer]) -> Numbers:
    """Return one number for each name and offsets."""
    return names.astype(np.int64) * (1 << 31) + offsets + 1


class StoredChunks:
    """The chunks of all tensors, each with its place."""

    def __init__(
        self, boxes: ChunkColumns, texts: TextIds, columns: _Columns, rows: Numbers
    ) -> None:
        self._boxes = boxes
        self._texts = texts.values
        self._tuples = boxes.tuples.values
        placed = np.flatnonzero(rows >= 0)
        self._files = np.full(len(rows), texts.id_of(""), np.int32)
        self._starts, nbytes = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for target, column in (
            (self._files, columns.files),
            (self._starts, columns.starts),
            (nbytes, columns.nbytes),
        ):
            target[placed] = column[rows[placed]]
        # Few different ones: so that each is one number in memory.
        different, numbers = np.unique(nbytes, return_inverse=True)
        self._nbytes: list[int] = different.tolist()
        self._nbytes_ids = numbers.reshape(-1).astype(np.int32)

    def of(self, rows: Sequence[tuple[Ints, Ints]]) -> tuple[Chunk, ...]:
        """Return the chunks of a tensor, given by its rows in the columns."""
        if not isinstance(rows, BoxRows):
            raise TypeError("chunks of another file")
        span, tuple_of = slice(rows.first, rows.stop), self._tuples.__getitem__
        fields = zip(
            map(tuple_of, self._boxes.offset_ids[span].tolist()),
            map(tuple_of, self._boxes.size_ids[span].tolist()),
            map(self._texts.__getitem__, self._files[span].tolist()),
            self._starts[span].tolist(),
            map(self._nbytes.__getitem__, self._nbytes_ids[span].tolist()),
            strict=True,
        )
        return tuple(map(tuple.__new__, repeat(Chunk), fields))
