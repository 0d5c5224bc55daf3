"""Read rows of chunks and of items as columns of numbers, which a large `.metadata` is made of.

A checkpoint of 2 900 tensors on 1 000 ranks has six million instances in these rows. They are
found by the bytes that begin each, read side by side by `Cursors`, and taken run by run as the
interpreter comes to them; it reads what is different, as where a frame of the pickle begins.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ema_ckpt.core.collisions import Collisions
from ema_ckpt.formats.dcp.metadata_values import (
    BUILT,
    OPENED,
    SIZED,
    Form,
    Values,
    unexpected,
)
from ema_ckpt.formats.pickle.cursors import Cursors
from ema_ckpt.formats.pickle.machine import Machine
from ema_ckpt.formats.pickle.memo import UNBUILT, LeftOut, Several

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ema_ckpt.core.catalog import Ints
    from ema_ckpt.formats.pickle.memo import Memo

    Numbers = NDArray[np.int64]
    Identifiers = NDArray[np.int32]
    Flags = NDArray[np.bool_]

_FIRST_WINDOW, _LARGEST_WINDOW = 64 << 10, 4 << 20  # bytes in which rows are looked for at a time
_MAX_KEY = 1 << 62
_MAX_NUMBER = 1 << 31  # in the memo
_CHUNK_COUNT = 8  # memoized objects of a chunk
_ITEM_COUNT = 7  # of an index and a place; one more for a name or file in full
_NAME, _OFFSET, _FILE = 2, 4, 7  # of them, those that others may refer to


class TextIds:
    """Numbers for names: each of them is kept once."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._ids: dict[str, int] = {}

    def id_of(self, text: str) -> int:
        """Return the number of a name."""
        found = self._ids.setdefault(text, len(self.values))
        if found == len(self.values):
            self.values.append(text)
        return found

    def find(self, text: str) -> int:
        """Return the number of a name, or -1 if there is none."""
        return self._ids.get(text, -1)


class TupleIds:
    """Numbers for tuples of integers: each of them is kept once."""

    def __init__(self) -> None:
        self.values: list[Ints] = []
        self._ids: dict[Ints, int] = {}
        self._collisions = Collisions()

    def id_of(self, numbers: Ints) -> int:
        """Return the number of a tuple."""
        found = self._ids.get(numbers)
        if found is None:
            self._collisions.check([numbers])
            found = self._ids[numbers] = len(self.values)
            self.values.append(numbers)
        return found

    def find(self, numbers: Ints) -> int | None:
        """Return the number of a tuple, or None if there is none."""
        return self._ids.get(numbers)

    def ids_of(self, rows: Numbers, counts: Numbers) -> Identifiers:
        """Return the numbers of tuples: of each row its first so many integers."""
        ids = np.zeros(len(rows), np.int32)
        for count in np.unique(counts):
            places = np.flatnonzero(counts == count)
            part = rows[places, :count]
            if not len(part):
                continue
            _, firsts, inverse = np.unique(_keys(part), return_index=True, return_inverse=True)
            known = [self.id_of(tuple(numbers)) for numbers in part[firsts].tolist()]
            ids[places] = np.array(known, np.int32)[inverse.reshape(-1)]
        return ids


def _keys(rows: Numbers) -> NDArray[np.generic]:
    """Return one value for each row, equal for equal rows."""
    limits = [int(limit) + 1 for limit in rows.max(axis=0)]
    total = 1
    for limit in limits:
        total *= limit
    if total < _MAX_KEY:
        keys = np.zeros(len(rows), np.int64)
        for column, limit in zip(rows.T, limits, strict=True):
            keys = keys * limit + column
        return keys
    return (
        np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    )


class Batch:
    """Rows of one form that begin in a window of the pickle, and which of them follow another.

    Attributes:
        stop: end of the window, in bytes.
        memo: number of memoized objects before each row, and after the last.
    """

    def __init__(self, starts: Numbers, cursors: Cursors, counts: Numbers, stop: int) -> None:
        self.stop = stop
        self.memo = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._starts: list[int] = starts.tolist()
        self.ends: list[int] = cursors.positions.tolist()
        is_last = np.ones(len(starts), np.bool_)
        is_last[:-1] = ~cursors.good[1:] | (cursors.positions[:-1] != starts[1:])
        self._good: list[bool] = cursors.good.tolist()
        self._lasts: list[int] = np.flatnonzero(is_last).tolist()

    def run(self, position: int) -> tuple[int, int]:
        """Return the rows, first and end, that follow each other from `position`; or none."""
        first = bisect_left(self._starts, position)
        if first == len(self._starts) or self._starts[first] != position or not self._good[first]:
            return 0, 0
        return first, self._lasts[bisect_left(self._lasts, first)] + 1

    def close(self) -> None:
        """Release what only `run` needs."""
        for numbers in (self._starts, self.ends, self._good, self._lasts):
            numbers.clear()


class ChunkBatch(Batch):
    """Chunks: numbers of their offsets' and of their sizes' tuples."""

    def __init__(self, form: Form, window: tuple[int, int], reader: ColumnReader) -> None:
        ref, key, size, key2, size2 = form
        opened = ref + OPENED + key + size
        starts = _find(reader.data, opened, window)
        cursors = Cursors(reader.data, starts + len(opened))
        offsets, dims = cursors.read_tuple()
        cursors.skip_literal(SIZED + key2 + size2)
        sizes, size_dims = cursors.read_tuple()
        cursors.skip_literal(SIZED + BUILT)
        super().__init__(starts, cursors, np.full(len(starts), _CHUNK_COUNT), window[1])
        self.offset_ids = reader.tuples.ids_of(offsets, dims)
        self.size_ids = reader.tuples.ids_of(sizes, size_dims)


class ItemBatch(Batch):
    """Indices and places.

    Attributes:
        names, files: numbers in the memo; or below zero, of one in full, -1 less its number.
        offset_ids: numbers of the chunks' offsets. starts, nbytes: of the places.
    """

    def __init__(self, form: Form, window: tuple[int, int], reader: ColumnReader) -> None:
        index_ref, key, key2, key3, size, place_ref, key4, key5, key6 = form
        opened = index_ref + OPENED + key
        starts = _find(reader.data, opened, window)
        cursors = Cursors(reader.data, starts + len(opened))
        names = cursors.read_text()
        cursors.skip_literal(key2)
        cursors.skip_count()
        cursors.skip_literal(key3 + size)
        offsets, dims = cursors.read_tuple()
        cursors.skip_literal(SIZED + BUILT + place_ref + OPENED + key4)
        files = cursors.read_text()
        cursors.skip_literal(key5)
        self.starts = cursors.read_integer()
        cursors.skip_literal(key6)
        self.nbytes = cursors.read_integer()
        cursors.skip_literal(BUILT)
        self.names = reader.number_texts(names, cursors.good)
        self.files = reader.number_texts(files, cursors.good)
        counts = _ITEM_COUNT + (self.names < 0).astype(np.int64) + (self.files < 0)
        super().__init__(starts, cursors, counts, window[1])
        self.offset_ids = reader.tuples.ids_of(offsets, dims)


def _find(data: bytes, opened: bytes, window: tuple[int, int]) -> Numbers:
    """Return where in a window instances begin that are opened so."""
    first, stop = window
    found = re.compile(re.escape(opened)).finditer(data, first, stop + len(opened) - 1)
    return np.fromiter((match.start() for match in found), np.int64)


class ChunkRows(Several):
    """Chunks that follow each other, in the place of so many in a list."""

    __slots__ = ("batch", "first", "stop")
    __hash__: ClassVar[None]  # type: ignore[assignment]

    def __init__(self, batch: ChunkBatch, first: int, stop: int) -> None:
        self.batch, self.first, self.stop = batch, first, stop

    def __eq__(self, other: object) -> bool:
        return self is other

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def offset_ids(self) -> Identifiers:
        """Numbers of the tuples of the offsets."""
        return self.batch.offset_ids[self.first : self.stop]

    @property
    def size_ids(self) -> Identifiers:
        """Numbers of the tuples of the sizes."""
        return self.batch.size_ids[self.first : self.stop]


class ItemRows(Several):
    """Items that follow each other, in the place of so many keys and values in a dict.

    Attributes:
        memo_count: memoized objects before the first of them.
    """

    __slots__ = ("batch", "first", "memo_count", "stop")

    def __init__(self, batch: ItemBatch, first: int, stop: int, memo_count: int) -> None:
        self.batch, self.first, self.stop, self.memo_count = batch, first, stop, memo_count

    def __len__(self) -> int:
        return self.stop - self.first


class _LeftOutChunks(LeftOut):
    """Memoized objects of chunks, of which those may be needed that are their offsets and sizes."""

    __slots__ = ("_rows", "_tuples")

    def __init__(self, rows: ChunkRows, tuples: TupleIds) -> None:
        self._rows, self._tuples = rows, tuples

    def get(self, number: int) -> object:
        row, kind = divmod(number, _CHUNK_COUNT)
        if row >= len(self._rows):
            return UNBUILT
        if kind == 4:
            return self._tuples.values[self._rows.offset_ids[row]]
        return self._tuples.values[self._rows.size_ids[row]] if kind == 7 else UNBUILT


class _LeftOutItems(LeftOut):
    """Memoized objects of items: their names, offsets and files."""

    __slots__ = ("_columns", "_rows")

    def __init__(self, rows: ItemRows, columns: ColumnReader) -> None:
        self._rows, self._columns = rows, columns

    def get(self, number: int) -> object:
        rows, batch = self._rows, self._rows.batch
        number += int(batch.memo[rows.first])
        row = int(np.searchsorted(batch.memo, number, side="right")) - 1
        if row >= rows.stop:
            return UNBUILT
        kind, name, file = number - int(batch.memo[row]), int(batch.names[row]), batch.files[row]
        texts, has_name = self._columns.texts.values, name < 0
        if kind == _NAME and has_name:
            return texts[-1 - name]
        if kind == _FILE + has_name and file < 0:
            return texts[-1 - file]
        if kind != _OFFSET + has_name:
            return UNBUILT
        return self._columns.tuples.values[batch.offset_ids[row]]


class ColumnReader:
    """Reads rows of one pickle.

    Attributes:
        data: the pickle. texts: names and files in rows of it. tuples: offsets and sizes.
    """

    def __init__(self, data: bytes, values: Values) -> None:
        self.data = data
        self.texts = TextIds()
        self.tuples = TupleIds()
        self._values = values
        self._memo: Memo | None = None
        self._window = _FIRST_WINDOW
        self._chunks: dict[Form, ChunkBatch] = {}
        self._items: dict[Form, ItemBatch] = {}

    def read_chunks(self, form: Form, machine: Machine) -> None:
        """Read chunks that differ from an earlier one in numbers alone."""
        batch = self._chunks.get(form)
        if batch is None or machine.pos >= batch.stop:
            window = self._next_window(machine, batch)
            batch = self._chunks[form] = ChunkBatch(form, window, self)
        first, stop = batch.run(machine.pos)
        if first < stop and not _takes_one(machine):
            rows = ChunkRows(batch, first, stop)
            machine.stack.append(rows)
            machine.memo.leave_out(_LeftOutChunks(rows, self.tuples), _CHUNK_COUNT * len(rows))
            machine.pos = batch.ends[stop - 1]

    def read_items(self, form: Form, machine: Machine) -> None:
        """Read indices and places that differ from earlier ones in names and numbers alone."""
        batch = self._items.get(form)
        if batch is None or machine.pos >= batch.stop:
            window = self._next_window(machine, batch)
            batch = self._items[form] = ItemBatch(form, window, self)
        first, stop = batch.run(machine.pos)
        if first < stop and not _takes_one(machine):
            self._memo = machine.memo
            rows = ItemRows(batch, first, stop, machine.memo.count)
            machine.stack += (rows, rows)
            count = int(batch.memo[stop] - batch.memo[first])
            machine.memo.leave_out(_LeftOutItems(rows, self), count)
            machine.pos = batch.ends[stop - 1]

    def close(self) -> None:
        """Release the pickle and what was read of it, but for `texts` and `tuples`."""
        self.data, self._memo = b"", None
        self._chunks.clear()
        self._items.clear()

    def number_texts(self, texts: tuple[Numbers, Numbers, Numbers], good: Flags) -> Identifiers:
        """Number the texts that rows have in full.

        Args:
            texts: numbers in the memo, or -1; where texts begin, and their bytes.
            good: rows that are as expected; this is no longer so of numbers that no memo has.

        Returns:
            The numbers in the memo, or -1 less that of the text.
        """
        numbers, starts, nbytes = texts
        good &= numbers < _MAX_NUMBER
        rows = np.flatnonzero(good & (numbers < 0))
        if len(rows):
            spans = zip(starts[rows].tolist(), (starts + nbytes)[rows].tolist(), strict=True)
            data, text, id_of = self.data, self._values.text, self.texts.id_of
            numbers[rows] = [-1 - id_of(text(data[start:end])) for start, end in spans]
        return numbers.astype(np.int32)

    def ids_of_texts(self, numbers: Identifiers) -> Identifiers:
        """Return the numbers of the texts of rows. Raises SourceError if one is no text."""
        different, inverse = np.unique(numbers, return_inverse=True)
        ids = [-1 - n if n < 0 else self._id_of_memoized(n) for n in different.tolist()]
        return np.array(ids, np.int32)[inverse.reshape(-1)]

    def _id_of_memoized(self, number: int) -> int:
        value = self._memo.get(number) if self._memo is not None else None
        if not isinstance(value, str):
            raise unexpected()
        return self.texts.id_of(value)

    def _next_window(self, machine: Machine, before: Batch | None) -> tuple[int, int]:
        """Choose where to look: the further, the more the last look was worth."""
        if before is not None:
            before.close()
            self._window = min(2 * self._window, _LARGEST_WINDOW)
        return machine.pos, min(machine.pos + self._window, len(machine.data))


def _takes_one(machine: Machine) -> bool:
    """Whether no mark was set: then one object alone goes into the list or dict."""
    return isinstance(machine.stack[-1], (list, dict))
