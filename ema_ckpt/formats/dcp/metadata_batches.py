"""Rows of tensors, chunks and items in a window of a `.metadata`, read as columns."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import numpy as np

from ema_ckpt.core.collisions import Collisions
from ema_ckpt.formats.dcp.metadata_values import BUILT, OPENED, REFERENCE, Form, Values
from ema_ckpt.formats.pickle.cursors import Cursors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ema_ckpt.core.catalog import Ints

    Numbers = NDArray[np.int64]
    Identifiers = NDArray[np.int32]
    Flags = NDArray[np.bool_]

_MAX_KEY = 1 << 62
_MAX_NUMBER = 1 << 31  # in the memo
INSTANCE_COUNT = 2  # memoized objects of an instance: itself and its dict
_MEMORY_FORMAT = 2  # its place among a tensor's properties, after the dtype
TENSOR_COUNT = 5  # of a tensor: itself, its dict, its properties, their state, its list
_PROPERTIES = b")\x81\x94("  # EMPTY_TUPLE NEWOBJ MEMOIZE MARK
_PROPERTIES_BUILT = b"t\x94b"  # TUPLE MEMOIZE BUILD
_LIST = b"]\x94"
_NEWOBJ = b"\x81"
_ONE_APPENDED, _ALL_APPENDED = b"aub", b"eub"


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


class _IdsOfRuns(dict[bytes, int]):
    """By the bytes of a text -1 less its number; a name recurs for each rank."""

    def __init__(self, texts: TextIds, values: Values) -> None:
        super().__init__()
        self._texts, self._values = texts, values

    def __missing__(self, run: bytes) -> int:
        number = self[run] = -1 - self._texts.id_of(self._values.text(run))
        return number


class Numbered:
    """Names and tuples of one pickle, by number.

    Attributes:
        data: the pickle. texts: names and files in rows of it. tuples: offsets and sizes.
    """

    def __init__(self, data: bytes, values: Values) -> None:
        self.data = data
        self.texts = TextIds()
        self.tuples = TupleIds()
        self._ids_of_runs = _IdsOfRuns(self.texts, values)

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
            data, id_of = self.data, self._ids_of_runs.__getitem__
            numbers[rows] = [id_of(data[start:end]) for start, end in spans]
        return numbers.astype(np.int32)


class Batch:
    """Rows of one form that begin in a window of the pickle, and which of them follow another.

    Attributes:
        stop: end of the window, in bytes. memo, memo_counts: number of memoized objects before each
            row, and after the last. ends: where each row ends.
    """

    def __init__(
        self,
        starts: Numbers,
        cursors: Cursors,
        counts: Numbers,
        stop: int,
        joined: Numbers | None = None,
    ) -> None:
        """Note rows from `starts` to the positions of `cursors`.

        Args:
            counts: memoized objects of each row.
            joined: where the row after each begins; by default where it ends.
        """
        self.stop = stop
        self.memo_counts = array("q", [0])
        self.memo_counts.frombytes(np.cumsum(counts).tobytes())
        self.memo = np.frombuffer(self.memo_counts, np.int64)
        joined = cursors.positions if joined is None else joined
        is_last = np.ones(len(starts), np.bool_)
        is_last[:-1] = ~cursors.good[1:] | (joined[:-1] != starts[1:])
        self._arrays = starts, cursors.positions, cursors.good, np.flatnonzero(is_last)
        self._starts: list[int] = starts.tolist()
        self.ends: list[int] = cursors.positions.tolist()
        self._good: list[bool] = cursors.good.tolist()
        self._lasts: list[int] = self._arrays[3].tolist()

    def run(self, position: int) -> tuple[int, int]:
        """Return the rows, first and end, that follow each other from `position`; or none."""
        first = bisect_left(self._starts, position)
        if first == len(self._starts) or self._starts[first] != position or not self._good[first]:
            return 0, 0
        return first, self._lasts[bisect_left(self._lasts, first)] + 1

    def runs(self, cursors: Cursors) -> tuple[Numbers, Numbers]:
        """Move positions over the rows that follow each other from there.

        Returns:
            The first rows, and the ends.
        """
        starts, ends, good, lasts = self._arrays
        if not len(starts):
            cursors.good &= False
            return cursors.positions * 0, cursors.positions * 0
        first = np.minimum(np.searchsorted(starts, cursors.positions), len(starts) - 1)
        cursors.good &= (starts[first] == cursors.positions) & good[first]
        last = lasts[np.searchsorted(lasts, first)]
        cursors.positions = ends[last]
        return first, last + 1

    def locate(self, number: int) -> tuple[int, int]:
        """Return the row of a memoized object, and how many of the row's come after it.

        Args:
            number: counted from the first of the batch.
        """
        row = bisect_right(self.memo_counts, number) - 1
        rest = self.memo_counts[row + 1] - 1 - number if row + 1 < len(self.memo_counts) else 0
        return row, rest

    def close(self) -> None:
        """Release what only `run` and `runs` need."""
        nothing = np.zeros(0, np.int64)
        self._arrays = nothing, nothing, nothing > 0, nothing
        self._starts, self.ends, self._good, self._lasts = [], [], [], []


class ChunkBatch(Batch):
    """Chunks: numbers of their offsets' and of their sizes' tuples."""

    def __init__(self, form: Form, window: tuple[int, int], numbered: Numbered) -> None:
        ref, key, size, key2, size2 = form
        opened = ref + OPENED + key + size
        starts = _find(numbered.data, opened, window)
        cursors = Cursors(numbered.data, starts + len(opened))
        offsets, dims = cursors.read_size()
        cursors.skip_literal(key2 + size2)
        sizes, size_dims = cursors.read_size()
        cursors.skip_literal(BUILT)
        counts = INSTANCE_COUNT + memoized_of_sizes(dims) + memoized_of_sizes(size_dims)
        super().__init__(starts, cursors, counts, window[1])
        self.offset_ids = numbered.tuples.ids_of(offsets, dims)
        self.size_ids = numbered.tuples.ids_of(sizes, size_dims)


class ItemBatch(Batch):
    """Indices and places.

    Attributes:
        names, files: numbers in the memo; or below zero, of one in full, -1 less its number.
        offset_ids: numbers of the chunks' offsets. starts, nbytes: of the places.
    """

    def __init__(self, form: Form, window: tuple[int, int], numbered: Numbered) -> None:
        index_ref, key, key2, key3, size, place_ref, key4, key5, key6 = form
        opened = index_ref + OPENED + key
        starts = _find(numbered.data, opened, window)
        cursors = Cursors(numbered.data, starts + len(opened))
        names = cursors.read_text()
        cursors.skip_literal(key2)
        cursors.skip_count()
        cursors.skip_literal(key3 + size)
        offsets, dims = cursors.read_size()
        cursors.skip_literal(BUILT + place_ref + OPENED + key4)
        files = cursors.read_text()
        cursors.skip_literal(key5)
        self.starts = cursors.read_integer()
        cursors.skip_literal(key6)
        self.nbytes = cursors.read_integer()
        cursors.skip_literal(BUILT)
        self.names = numbered.number_texts(names, cursors.good)
        self.files = numbered.number_texts(files, cursors.good)
        counts = 2 * INSTANCE_COUNT + memoized_of_sizes(dims) + (self.names < 0) + (self.files < 0)
        super().__init__(starts, cursors, counts, window[1])
        self.offset_ids = numbered.tuples.ids_of(offsets, dims)


class TensorBatch(Batch):
    """Tensors, each with its chunks.

    Attributes:
        names: of the tensor after each: below zero, -1 less the number of the text.
        dtypes: numbers in the memo. others: of further properties. formats: of those, the memory
            formats. size_ids: of the sizes.
        chunks: rows of all chunks; those of each tensor begin and end at `firsts` and `stops`.
    """

    def __init__(
        self, form: Form, window: tuple[int, int], chunks: ChunkBatch, numbered: Numbered
    ) -> None:
        ref, key, properties, fields, key2, size, key3 = form
        opened = ref + OPENED + key + properties + _PROPERTIES
        starts = _find(numbered.data, opened, window)
        cursors = Cursors(numbered.data, starts + len(opened))
        self.dtypes = cursors.read_reference()
        self.others: list[Numbers] = []
        self.formats: Numbers | None = None
        for place, kind in enumerate(fields):
            if kind == REFERENCE[0]:
                self.others.append(cursors.read_reference())
                if place == _MEMORY_FORMAT:
                    self.formats = self.others[-1]
            else:
                cursors.skip_boolean()
        cursors.skip_literal(_PROPERTIES_BUILT + key2 + size)
        sizes, dims = cursors.read_size()
        cursors.skip_literal(key3 + _LIST)
        is_marked = cursors.skip_mark()
        self.chunks = chunks
        self.firsts, self.stops = chunks.runs(cursors)
        cursors.good &= is_marked == (self.stops - self.firsts > 1)
        cursors.skip_either(is_marked, _ALL_APPENDED, _ONE_APPENDED)
        after = Cursors(numbered.data, cursors.positions)
        self.names = numbered.number_texts(after.read_text(), after.good)
        is_named = after.good & (self.names < 0)
        counts = TENSOR_COUNT + memoized_of_sizes(dims) + is_named
        counts += chunks.memo[self.stops] - chunks.memo[self.firsts]
        joined = np.where(is_named, after.positions, -1)
        super().__init__(starts, cursors, counts, window[1], joined)
        self.size_ids = numbered.tuples.ids_of(sizes, dims)
        self._is_named = is_named

    def is_named(self, row: int) -> bool:
        """Whether the name of the tensor after a row is counted among the row's objects."""
        return bool(self._is_named[row])


def memoized_of_sizes(dims: Numbers) -> Numbers:
    """Return the number of memoized objects of each `torch.Size`; the last of them is itself."""
    return np.where(dims == 0, 2, 3)


def _find(data: bytes, opened: bytes, window: tuple[int, int]) -> Numbers:
    """Return where in a window instances begin that are opened so."""
    first, stop = window
    skip = opened.index(_NEWOBJ)
    window_bytes = np.frombuffer(data, np.uint8)[first + skip : stop + skip]
    starts = np.flatnonzero(window_bytes == opened[skip]) + first
    cursors = Cursors(data, starts)
    cursors.skip_literal(opened)
    return starts[cursors.good]
