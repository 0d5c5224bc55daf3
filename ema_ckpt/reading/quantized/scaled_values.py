"""Values of a box of a quantised weight, from the same box of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.reading.quantized.codes import Memory, decoded, values_per_byte
from ema_ckpt.reading.quantized.schemes import QuantizedTensor

if TYPE_CHECKING:
    from ema_ckpt.reading.decode import Array

Ints = tuple[int, ...]
ReadBox = Callable[[Tensor, Box, str], "Array"]
"""Reads the bytes of a box of a stored tensor, row-major: a flat array of uint8, valid until the
next call with the same name."""

# Values computed at once: as float32 and rounded they stay in the second-level cache.
_STRIP_NUMEL = 64 << 10


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


def compute_box(
    weight: QuantizedTensor, box: Box, read: ReadBox, memory: Memory
) -> Iterator[Array]:
    """Yield values of a box in row-major order, before any transposition and rounding.

    Each array is float32 of shape (rows, columns), of rows of one matrix, and valid until the next.
    """
    *outer, columns = [Span(*one) for one in zip(*box, strict=True)]
    # A tensor of one dim is a row of its own.
    rows = outer.pop() if outer else None
    leads = [range(span.first, span.stop) for span in outer]
    for lead in product(*leads):
        yield from _MatrixBox(weight, lead, rows, columns, read, memory).values()


class _MatrixBox:
    """Rows and columns of one matrix of a weight; `lead` is its index in the outer dims."""

    def __init__(
        self,
        weight: QuantizedTensor,
        lead: Ints,
        rows: Span | None,
        columns: Span,
        read: ReadBox,
        memory: Memory,
    ) -> None:
        self._layout = weight.layout
        self._parts = weight.parts
        self._lead = [Span(index, 1) for index in lead]
        self._rows = [] if rows is None else [rows]
        self._columns = columns
        self._read = read
        self._memory = memory

    def values(self) -> Iterator[Array]:
        """Yield (code − zero point) · scale, a few rows at a time."""
        import numpy as np

        layout = self._layout
        rows = self._rows[0] if self._rows else Span(0, 1)
        scales = self._numbers(self._parts["scale"], layout.scale_codes, "scales")
        zeros = None if "zero_point" not in self._parts else self._zero_points()
        if "global_scale" in self._parts:
            with np.errstate(all="ignore"):
                scales = scales / self._overall_scale()
        raw, skipped = self._codes(rows.length)
        shared = _Shared(layout.block, rows, self._columns, layout.scale_shape)
        step = max(_STRIP_NUMEL // max(self._columns.length, 1), 1)
        for start in range(0, rows.length, step):
            strip = Span(rows.first + start, min(step, rows.length - start))
            values = decoded(raw[start : start + strip.length], layout.codes, self._memory)
            values = values[:, skipped : skipped + self._columns.length]
            with np.errstate(all="ignore"):
                if zeros is not None:
                    shared.apply(np.subtract, values, zeros, strip)
                shared.apply(np.multiply, values, scales, strip)
            yield values

    def _codes(self, rows: int) -> tuple[Array, int]:
        """Read the bytes of each row; and how many values they begin before the box."""
        layout, codes = self._layout, self._parts["codes"]
        step = values_per_byte(layout.codes) * codes.dtype.itemsize
        inner: list[Span] = []
        if layout.is_grouped:
            step *= codes.shape[-1]
            inner = [Span(0, codes.shape[-1])]
        stored = self._columns.in_blocks(step)
        raw = self._read(codes, box_of([*self._lead, *self._rows, stored, *inner]), "read")
        return raw.reshape(rows, -1), self._columns.first - stored.first * step

    def _touched(self) -> list[Span]:
        """Blocks along each dim that the box touches; a dim with one scale has one block."""
        spans = [*self._lead, *self._rows, self._columns]
        touched = []
        for span, size, count in zip(
            spans, self._layout.block, self._layout.scale_shape, strict=True
        ):
            touched.append(Span(0, 1) if count == 1 else span.in_blocks(size))
        return touched

    def _numbers(self, part: Tensor, codes: str, name: str) -> Array:
        """One number for each block that the box touches, as float32, in the array `name`."""
        touched = self._touched()
        box = whole(part.shape)
        if part.numel > 1:  # dims of one block may be missing at the end
            box = box_of(touched[: len(part.shape)])
        values = decoded(self._read(part, box, "read"), codes, self._memory, name)
        return values.reshape(touched[-2].length if self._rows else 1, touched[-1].length)

    def _zero_points(self) -> Array:
        """Zero points of the blocks, which may be packed along the rows."""
        import numpy as np

        zero = self._parts["zero_point"]
        codes = self._layout.zero_codes or zero.dtype.name
        if zero.dtype.name == codes:
            return self._numbers(zero, codes, "zeros")
        *lead, rows, groups = self._touched()
        step = values_per_byte(codes) * zero.dtype.itemsize
        packed = rows.in_blocks(step)
        raw = self._read(zero, box_of([*lead, packed, groups]), "read")
        words = raw.view("<u4").reshape(packed.length, groups.length)
        data = np.ascontiguousarray(words.T).view(np.uint8)
        values = decoded(data, codes, self._memory, "zeros")
        skipped = rows.first - packed.first * step
        return values[:, skipped : skipped + rows.length].T

    def _overall_scale(self) -> Array:
        """The scale that all others are divided by, as an array of one number."""
        part = self._parts["global_scale"]
        data = self._read(part, whole(part.shape), "read")
        return decoded(data, part.dtype.name).reshape(1, 1)


class _Shared:
    """How numbers of blocks are applied to the values of a box: each to all that share it."""

    def __init__(self, block: Ints, rows: Span, columns: Span, scale_shape: Ints) -> None:
        self._rows = rows
        self._columns = columns
        self._row_block = block[-2] if len(block) > 1 else 1
        self._column_block = block[-1]
        self._is_one_row = len(block) < 2 or scale_shape[-2] == 1

    def apply(
        self, operation: Callable[..., Any], values: Array, numbers: Array, strip: Span
    ) -> None:
        """Do `operation(value, number)` in place, for the rows of a strip of the box."""
        for band, own in self._bands(values, numbers, strip):
            self._apply(operation, band, own)

    def _apply(self, operation: Callable[..., Any], band: Array, own: Array) -> None:
        size, columns = self._column_block, self._columns
        is_whole = columns.first % size == 0 and columns.length % size == 0
        if own.shape[1] == 1:
            operation(band, own, out=band)
        elif is_whole and own.shape[0] > 1 and band.flags.c_contiguous:
            blocks = band.reshape(*own.shape, size)
            operation(blocks, own[:, :, None], out=blocks)
        else:
            operation(band, self._for_each_column(own), out=band)

    def _bands(self, values: Array, numbers: Array, strip: Span) -> Iterator[tuple[Array, Array]]:
        """Yield rows that share their numbers, or all rows where each has its own."""
        if self._is_one_row:
            yield values, numbers
            return
        block = self._row_block
        before = self._rows.first // block  # numbers of the box begin here
        if block == 1:
            yield values, numbers[strip.first - before :][: strip.length]
            return
        touched = strip.in_blocks(block)
        for index in range(touched.first, touched.stop):
            start = index * block - strip.first
            own = numbers[index - before : index - before + 1]
            yield values[max(start, 0) : start + block], own

    def _for_each_column(self, numbers: Array) -> Array:
        import numpy as np

        skipped = self._columns.first % self._column_block
        wide = np.repeat(numbers, self._column_block, axis=1)
        return wide[:, skipped : skipped + self._columns.length]


def box_of(spans: Sequence[Span]) -> Box:
    """Return the box of indices along each dim."""
    return Box(tuple([span.first for span in spans]), tuple([span.length for span in spans]))
