"""Values of a box of a quantised weight, from the same box of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.reading.quantized.codes import decoded, values_per_byte
from ema_ckpt.reading.quantized.schemes import QuantizedTensor

if TYPE_CHECKING:
    from ema_ckpt.reading.decode import Array

Ints = tuple[int, ...]
ReadBox = Callable[[Tensor, Box], "Array"]
"""Reads the bytes of a box of a stored tensor, row-major: a flat array of uint8, valid until the
next call."""


class Span(NamedTuple):
    """Indices along one dim."""

    first: int
    length: int

    @property
    def stop(self) -> int:
        """The index after the last."""
        return self.first + self.length

    def in_blocks(self, size: int) -> Span:
        """The blocks of `size` indices that these lie in."""
        first = self.first // size
        return Span(first, -(-self.stop // size) - first)


def compute_box(weight: QuantizedTensor, box: Box, read: ReadBox) -> Array:
    """Values of a box, before any transposition and rounding, in float32.

    The shape is (rows, columns); rows of all indices of the outer dims follow one another.
    """
    import numpy as np

    *outer, columns = [Span(*one) for one in zip(*box, strict=True)]
    # A tensor of one dim is a row of its own.
    rows = outer.pop() if outer else None
    leads = [range(span.first, span.stop) for span in outer]
    parts = [_MatrixBox(weight, lead, rows, columns, read).values() for lead in product(*leads)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class _MatrixBox:
    """Rows and columns of one matrix of a weight; `lead` is its index in the outer dims."""

    def __init__(
        self,
        weight: QuantizedTensor,
        lead: Ints,
        rows: Span | None,
        columns: Span,
        read: ReadBox,
    ) -> None:
        self._layout = weight.layout
        self._parts = weight.parts
        self._lead = [Span(index, 1) for index in lead]
        self._rows = [] if rows is None else [rows]
        self._columns = columns
        self._read = read

    def values(self) -> Array:
        """Compute (code − zero point) · scale."""
        import numpy as np

        layout = self._layout
        values = self._codes()
        scales = self._numbers(self._parts["scale"], layout.scale_codes)
        rows = self._rows[0] if self._rows else Span(0, 1)
        shared = _Shared(layout.block, rows, self._columns)
        with np.errstate(all="ignore"):
            if "zero_point" in self._parts:
                shared.apply(np.subtract, values, self._zero_points())
            if "global_scale" in self._parts:
                scales = scales / self._overall_scale()
            shared.apply(np.multiply, values, scales)
        return values

    def _codes(self) -> Array:
        """Codes as float32, before zero points and scales."""
        layout, codes = self._layout, self._parts["codes"]
        step = values_per_byte(layout.codes) * codes.dtype.itemsize
        inner: list[Span] = []
        if layout.is_grouped:
            step *= codes.shape[-1]
            inner = [Span(0, codes.shape[-1])]
        stored = self._columns.in_blocks(step)
        raw = self._read(codes, _box([*self._lead, *self._rows, stored, *inner]))
        rows = self._rows[0].length if self._rows else 1
        values = decoded(raw.reshape(rows, -1), layout.codes)
        skipped = self._columns.first - stored.first * step
        return values[:, skipped : skipped + self._columns.length]

    def _touched(self) -> list[Span]:
        """Blocks along each dim that the box touches; a dim with one scale has one block."""
        spans = [*self._lead, *self._rows, self._columns]
        touched = []
        for span, size, count in zip(
            spans, self._layout.block, self._layout.scale_shape, strict=True
        ):
            touched.append(Span(0, 1) if count == 1 else span.in_blocks(size))
        return touched

    def _numbers(self, part: Tensor, codes: str) -> Array:
        """One number for each block that the box touches, as float32."""
        touched = self._touched()
        box = whole(part.shape)
        if part.numel > 1:  # dims of one block may be missing at the end
            box = _box(touched[: len(part.shape)])
        values = decoded(self._read(part, box), codes)
        return values.reshape(touched[-2].length if self._rows else 1, touched[-1].length)

    def _zero_points(self) -> Array:
        """Zero points of the blocks, which may be packed along the rows."""
        import numpy as np

        zero = self._parts["zero_point"]
        codes = self._layout.zero_codes or zero.dtype.name
        if zero.dtype.name == codes:
            return self._numbers(zero, codes)
        *lead, rows, groups = self._touched()
        step = values_per_byte(codes) * zero.dtype.itemsize
        packed = rows.in_blocks(step)
        raw = self._read(zero, _box([*lead, packed, groups]))
        words = raw.view("<u4").reshape(packed.length, groups.length)
        values = decoded(np.ascontiguousarray(words.T).view(np.uint8), codes)
        skipped = rows.first - packed.first * step
        return values[:, skipped : skipped + rows.length].T

    def _overall_scale(self) -> Array:
        """The scale that all others are divided by, as an array of one number."""
        part = self._parts["global_scale"]
        return decoded(self._read(part, whole(part.shape)), part.dtype.name).reshape(1, 1)


class _Shared:
    """How numbers of blocks are applied to the values of a box: each to all that share it."""

    def __init__(self, block: Ints, rows: Span, columns: Span) -> None:
        self._rows = rows
        self._columns = columns
        self._row_block = block[-2] if len(block) > 1 else 1
        self._column_block = block[-1]

    def apply(self, operation: Callable[..., Any], values: Array, numbers: Array) -> None:
        """Do `operation(value, number)` in place."""
        size, columns = self._column_block, self._columns
        is_whole = columns.first % size == 0 and columns.length % size == 0
        for band, own in self._bands(values, numbers):
            if own.shape[1] == 1:
                operation(band, own, out=band)
            elif is_whole and own.shape[0] > 1 and band.flags.c_contiguous:
                blocks = band.reshape(*own.shape, size)
                operation(blocks, own[:, :, None], out=blocks)
            else:
                operation(band, self._for_each_column(own), out=band)

    def _bands(self, values: Array, numbers: Array) -> Iterator[tuple[Array, Array]]:
        """Yield rows that share their numbers, or all rows where each has its own."""
        if numbers.shape[0] == 1 or self._row_block == 1:
            yield values, numbers
            return
        block = self._row_block
        first = self._rows.first // block
        for index in range(numbers.shape[0]):
            start = (first + index) * block - self._rows.first
            yield values[max(start, 0) : start + block], numbers[index : index + 1]

    def _for_each_column(self, numbers: Array) -> Array:
        import numpy as np

        skipped = self._columns.first % self._column_block
        wide = np.repeat(numbers, self._column_block, axis=1)
        return wide[:, skipped : skipped + self._columns.length]


def _box(spans: Sequence[Span]) -> Box:
    return Box(tuple([span.first for span in spans]), tuple([span.length for span in spans]))
