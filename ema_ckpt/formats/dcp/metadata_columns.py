"""Read rows of tensors, chunks and items, of which a large `.metadata` is made, as columns.

A checkpoint of 2 900 tensors on 1 000 ranks has six million instances in these rows. They are
found by the bytes that begin each, read side by side by `Cursors`, and taken run by run as the
interpreter comes to them; it reads what is different, as where a frame of the pickle begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from ema_ckpt.formats.dcp.metadata_batches import (
    INSTANCE_COUNT,
    TENSOR_COUNT,
    Batch,
    ChunkBatch,
    ItemBatch,
    Numbered,
    TensorBatch,
)
from ema_ckpt.formats.dcp.metadata_values import Form, Values, is_memory_format, unexpected
from ema_ckpt.formats.pickle.machine import Machine
from ema_ckpt.formats.pickle.memo import UNBUILT, LeftOut
from ema_ckpt.formats.pickle.several import Several

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ema_ckpt.formats.dcp.metadata_batches import TupleIds
    from ema_ckpt.formats.pickle.memo import Memo

    Identifiers = NDArray[np.int32]

_FIRST_WINDOW, _LARGEST_WINDOW = 64 << 10, 4 << 20  # bytes in which rows are looked for at a time


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
    def memo_count(self) -> int:
        """Number of memoized objects."""
        return self.batch.memo_counts[self.stop] - self.batch.memo_counts[self.first]

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


class TensorRow(NamedTuple):
    """A tensor: what its dtype refers to, the number of its size, its chunks."""

    dtype: object
    size_id: int
    chunks: ChunkRows


class _LeftOutChunks(LeftOut):
    """Memoized objects of chunks, of which those may be needed that are their offsets and sizes."""

    __slots__ = ("_rows", "_tuples")

    def __init__(self, rows: ChunkRows, tuples: TupleIds) -> None:
        self._rows, self._tuples = rows, tuples

    def get(self, number: int) -> object:
        rows, tuples = self._rows, self._tuples.values
        row, last = rows.batch.locate(number + rows.batch.memo_counts[rows.first])
        if row >= rows.stop:
            return UNBUILT
        sizes = tuples[rows.batch.size_ids[row]]
        if last == 0:
            return sizes
        return tuples[rows.batch.offset_ids[row]] if last == (3 if sizes else 2) else UNBUILT


class _LeftOutItems(LeftOut):
    """Memoized objects of items: their names, offsets and files."""

    __slots__ = ("_numbered", "_rows")

    def __init__(self, rows: ItemRows, numbered: Numbered) -> None:
        self._rows, self._numbered = rows, numbered

    def get(self, number: int) -> object:
        rows, batch = self._rows, self._rows.batch
        row, last = batch.locate(number + batch.memo_counts[rows.first])
        if row >= rows.stop:
            return UNBUILT
        name, file, texts = (
            int(batch.names[row]),
            int(batch.files[row]),
            self._numbered.texts.values,
        )
        if file < 0:
            if last == 0:
                return texts[-1 - file]
            last -= 1
        offsets = self._numbered.tuples.values[batch.offset_ids[row]]
        if last == INSTANCE_COUNT:
            return offsets
        if name < 0 and last == INSTANCE_COUNT + (3 if offsets else 2):
            return texts[-1 - name]
        return UNBUILT


class _LeftOutTensors(LeftOut):
    """Memoized objects of tensors: their sizes, those of their chunks, and names."""

    __slots__ = ("_batch", "_first", "_numbered", "_stop")

    def __init__(self, batch: TensorBatch, first: int, stop: int, numbered: Numbered) -> None:
        self._batch, self._first, self._stop, self._numbered = batch, first, stop, numbered

    def get(self, number: int) -> object:
        batch, numbered = self._batch, self._numbered
        number += batch.memo_counts[self._first]
        row, last = batch.locate(number)
        if row >= self._stop:
            return UNBUILT
        if last == 0 and row + 1 < self._stop:
            return numbered.texts.values[-1 - int(batch.names[row])]
        size = numbered.tuples.values[batch.size_ids[row]]
        size_count = 3 if size else 2
        inner = number - batch.memo_counts[row] - TENSOR_COUNT - size_count
        if inner == -2:  # before the list
            return size
        if inner < 0:
            return UNBUILT
        rows = ChunkRows(batch.chunks, int(batch.firsts[row]), int(batch.stops[row]))
        return _LeftOutChunks(rows, numbered.tuples).get(inner)


class ColumnReader:
    """Reads rows of one pickle; `numbered` are the names and tuples in them."""

    def __init__(self, data: bytes, values: Values) -> None:
        self.numbered = Numbered(data, values)
        self._memo: Memo | None = None
        self._ids: dict[int, int] = {}  # of texts, by their numbers in the memo
        self._chunk_form: Form = ()
        self._tensors: dict[Form, TensorBatch] = {}
        self._window = _FIRST_WINDOW
        self._chunks: dict[Form, ChunkBatch] = {}
        self._items: dict[Form, ItemBatch] = {}

    def read_tensors(self, form: Form, machine: Machine) -> None:
        """Read tensors that differ from an earlier one in names, dtypes and numbers alone."""
        batch = self._tensors.get(form)
        if batch is None or machine.pos >= batch.stop:
            if not self._chunk_form:
                return
            if batch is not None:
                batch.close()
            chunks = self._chunks_at(machine, self._chunk_form)
            window = machine.pos, chunks.stop
            batch = self._tensors[form] = TensorBatch(form, window, chunks, self.numbered)
        first, stop = batch.run(machine.pos)
        if first < stop:
            self._push(batch, first, stop, machine)
            count = batch.memo_counts[stop] - batch.memo_counts[first] - batch.is_named(stop - 1)
            left_out = _LeftOutTensors(batch, first, stop, self.numbered)
            machine.memo.leave_out(left_out, count)
            machine.pos = batch.ends[stop - 1]

    def _push(self, batch: TensorBatch, first: int, stop: int, machine: Machine) -> None:
        """Push tensors; each but the first after its name, which is on the stack."""
        span, memo, texts = slice(first, stop), machine.memo, self.numbered.texts.values
        known: dict[int, object] = {}
        for numbers in (batch.dtypes, *batch.others):
            for number in np.unique(numbers[span]).tolist():
                known[number] = memo.get(number) if number < memo.count else UNBUILT
        if UNBUILT in known.values():
            raise unexpected()
        formats = () if batch.formats is None else np.unique(batch.formats[span]).tolist()
        if not all(is_memory_format(known[number]) for number in formats):
            raise unexpected()
        rows = zip(
            batch.dtypes[span].tolist(),
            batch.size_ids[span].tolist(),
            batch.firsts[span].tolist(),
            batch.stops[span].tolist(),
            batch.names[span].tolist(),
            strict=True,
        )
        push = machine.stack.append
        for dtype, size_id, start, end, name in rows:
            push(TensorRow(known[dtype], size_id, ChunkRows(batch.chunks, start, end)))
            push(texts[-1 - name] if name < 0 else None)
        machine.stack.pop()  # the name of the tensor after them

    def read_chunks(self, form: Form, machine: Machine) -> None:
        """Read chunks that differ from an earlier one in numbers alone."""
        self._chunk_form = form
        batch = self._chunks_at(machine, form)
        first, stop = batch.run(machine.pos)
        if first < stop and not _takes_one(machine):
            rows = ChunkRows(batch, first, stop)
            machine.push_several(rows)
            machine.memo.leave_out(_LeftOutChunks(rows, self.numbered.tuples), rows.memo_count)
            machine.pos = batch.ends[stop - 1]

    def read_items(self, form: Form, machine: Machine) -> None:
        """Read indices and places that differ from earlier ones in names and numbers alone."""
        batch = self._items.get(form)
        if batch is None or machine.pos >= batch.stop:
            window = self._next_window(machine, batch)
            batch = self._items[form] = ItemBatch(form, window, self.numbered)
        first, stop = batch.run(machine.pos)
        if first < stop and not _takes_one(machine):
            self._memo = machine.memo
            rows = ItemRows(batch, first, stop, machine.memo.count)
            machine.push_several(rows, rows)
            count = batch.memo_counts[stop] - batch.memo_counts[first]
            machine.memo.leave_out(_LeftOutItems(rows, self.numbered), count)
            machine.pos = batch.ends[stop - 1]

    def close(self) -> None:
        """Release the pickle and what was read of it, but for its names and tuples."""
        self.numbered.data, self._memo = b"", None
        self._tensors.clear()
        self._chunks.clear()
        self._items.clear()

    def ids_of_texts(self, numbers: Identifiers) -> Identifiers:
        """Return the numbers of the texts of rows. Raises SourceError if one is no text."""
        different, inverse = np.unique(numbers, return_inverse=True)
        ids = [-1 - n if n < 0 else self._id_of_memoized(n) for n in different.tolist()]
        return np.array(ids, np.int32)[inverse.reshape(-1)]

    def _id_of_memoized(self, number: int) -> int:
        found = self._ids.get(number)
        if found is None:
            value = self._memo.get(number) if self._memo is not None else None
            if not isinstance(value, str):
                raise unexpected()
            found = self._ids[number] = self.numbered.texts.id_of(value)
        return found

    def _chunks_at(self, machine: Machine, form: Form) -> ChunkBatch:
        """Return the chunks of the window that is come to, those of tensors and others alike."""
        batch = self._chunks.get(form)
        if batch is None or machine.pos >= batch.stop:
            window = self._next_window(machine, batch)
            batch = self._chunks[form] = ChunkBatch(form, window, self.numbered)
        return batch

    def _next_window(self, machine: Machine, before: Batch | None) -> tuple[int, int]:
        """Choose where to look: the further, the more the last look was worth."""
        if before is not None:
            before.close()
            self._window = min(2 * self._window, _LARGEST_WINDOW)
        return machine.pos, min(machine.pos + self._window, len(machine.data))


def _takes_one(machine: Machine) -> bool:
    """Whether no mark was set: then one object alone goes into the list or dict."""
    return isinstance(machine.stack[-1], (list, dict))
