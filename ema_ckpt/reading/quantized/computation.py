"""The values of elements of a quantised weight: which rows and columns they are, and how they are
computed. For one thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from ema_ckpt.core.box import Box, flat_range_boxes
from ema_ckpt.core.dtypes import DType, by_name
from ema_ckpt.reading.cast import Caster
from ema_ckpt.reading.overlaps import UNITS
from ema_ckpt.reading.quantized.codes import Memory
from ema_ckpt.reading.quantized.scaled_bytes import GroupReader, ScaleTable, has_table
from ema_ckpt.reading.quantized.scaled_values import ReadBox, Span, compute_box
from ema_ckpt.reading.quantized.schemes import QuantizedTensor

if TYPE_CHECKING:
    from ema_ckpt.reading.decode import Array

# Values of one box. Only those of a weight that is exchanged, or has very long rows, are all in
# memory as float32.
_PASS_NUMEL = 1 << 20
_LONG_PASS_NUMEL = 256 << 10


class Computation:
    """Computes values with memory that is used again."""

    def __init__(self, read: ReadBox, dtype: DType, memory: Memory, kept_nbytes: int) -> None:
        self._read = read
        self._dtype = dtype
        self._memory = memory
        self._groups = GroupReader(read, kept_nbytes)
        self._table: tuple[object, ScaleTable] | None = None
        self._rounding: dict[str, _Rounding] = {}

    def values(self, weight: QuantizedTensor, first: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of elements [first, stop) piece by piece, each valid until the next."""
        layout = weight.layout
        table = self._table_of(weight) if has_table(weight) else None
        shape, limit = layout.logical_shape, _PASS_NUMEL
        if table is None and (layout.is_transposed or shape[-1:] > (_LONG_PASS_NUMEL // 4,)):
            limit = min(_LONG_PASS_NUMEL, max((stop - first) // 2, 1))
        # Rows of a transposed weight are columns of its groups: whole groups are taken at once.
        rows = layout.block[-1] if layout.is_transposed else 1
        for begin, end in _passes(shape, rows, limit, first, stop):
            for box in flat_range_boxes(shape, begin, end):
                stored = _exchanged(box) if layout.is_transposed else box
                if table is not None:
                    yield from self._looked_up(weight, table, stored)
                elif layout.is_transposed:
                    yield self._transposed(weight, stored)
                else:
                    yield from self._computed(weight, stored)

    def _rounding_of(self, weight: QuantizedTensor) -> _Rounding:
        scheme = weight.layout.rounded
        if scheme not in self._rounding:
            self._rounding[scheme] = _Rounding(by_name(scheme), self._dtype)
        return self._rounding[scheme]

    def _table_of(self, weight: QuantizedTensor) -> ScaleTable:
        key = ScaleTable.key(weight)
        if self._table is None or self._table[0] != key:
            rounded = self._rounding_of(weight).rounded
            self._table = key, ScaleTable(weight, self._read, rounded, self._dtype)
        return self._table[1]

    def _looked_up(
        self, weight: QuantizedTensor, table: ScaleTable, box: Box
    ) -> Iterator[memoryview]:
        """Yield values of a box of the stored shape, by the table."""
        import numpy as np

        *outer, rows, columns = [Span(*one) for one in zip(*box, strict=True)]
        group = weight.layout.block[-1]
        touched = columns.in_blocks(group)
        skipped = columns.first - touched.first * group
        near = slice(skipped, skipped + columns.length)
        for lead in product(*(range(span.first, span.stop) for span in outer)):
            if weight.layout.is_transposed:
                groups = self._groups.columns(weight, lead, rows, touched)
                yield _bytes(table.columns(groups, self._memory)[near])
                continue
            groups = self._groups.rows(weight, lead, rows, touched)
            for values in table.rows(groups, self._memory):
                yield _bytes(np.ascontiguousarray(values[:, near]))

    def _computed(self, weight: QuantizedTensor, box: Box) -> Iterator[memoryview]:
        """Yield values of a box."""
        rounding = self._rounding_of(weight)
        for values in compute_box(weight, box, self._read, self._memory):
            yield rounding.rounded(values)

    def _transposed(self, weight: QuantizedTensor, box: Box) -> memoryview:
        """Return values of a box of the stored shape with the last two dims exchanged."""
        import numpy as np

        data = bytearray()
        for part in self._computed(weight, box):
            data += part
        stored = np.frombuffer(data, UNITS[self._dtype.itemsize]).reshape(-1, *box.sizes[-2:])
        return _bytes(np.ascontiguousarray(np.swapaxes(stored, 1, 2)))


def _bytes(values: Array) -> memoryview:
    import numpy as np

    return values.reshape(-1).view(np.uint8).data


class _Rounding:
    """Rounds float32: to the type of a scheme where it has one, then to the type asked for."""

    def __init__(self, scheme: DType, target: DType) -> None:
        single = by_name("float32")
        self._casters = [Caster(single, target)]
        if scheme not in (single, target):
            self._casters = [Caster(single, scheme), Caster(scheme, single), *self._casters]

    def rounded(self, values: Array) -> memoryview:
        """Round values; the bytes are valid until the next call."""
        import numpy as np

        data = _bytes(np.ascontiguousarray(values))
        for caster in self._casters:
            data = caster.cast(data)
        return data


def _passes(
    shape: Sequence[int], rows: int, limit: int, first: int, stop: int
) -> Iterator[tuple[int, int]]:
    """Cut elements [first, stop) into passes of whole multiples of `rows`, if these are short."""
    numel = rows * shape[-1]
    step = max(limit // max(numel, 1), 1) * numel
    if numel > limit and rows == 1:
        step = limit
    while first < stop:
        end = min((first // step + 1) * step, stop)
        yield first, end
        first = end


def _exchanged(box: Box) -> Box:
    """Exchange the last two dims of a box."""
    offsets, sizes = box
    return Box((*offsets[:-2], offsets[-1], offsets[-2]), (*sizes[:-2], sizes[-1], sizes[-2]))
