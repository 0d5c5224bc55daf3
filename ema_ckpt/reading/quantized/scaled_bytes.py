"""Codes and scales of one byte each: a table has the rounded value of every pair of them.

So values of MXFP4, MXFP8 and NVFP4 are looked up, and none is computed. The table is made by the
functions that compute values elsewhere: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ema_ckpt.core.box import whole
from ema_ckpt.core.dtypes import DType
from ema_ckpt.reading.overlaps import UNITS
from ema_ckpt.reading.quantized.codes import (
    Memory,
    decoded,
    is_tabled,
    look_up,
    values_per_byte,
)
from ema_ckpt.reading.quantized.scaled_values import Ints, ReadBox, Span, box_of
from ema_ckpt.reading.quantized.schemes import QuantizedTensor

if TYPE_CHECKING:
    from ema_ckpt.reading.decode import Array

Rounded = Callable[["Array"], memoryview]
"""Rounds float32 to the type that is written; the bytes are valid until the next call."""

# Bytes of codes looked up at once, so that positions and values stay in the cache; of a tile that
# is transposed, and rows of it.
_STRIP_NBYTES, _TILE_NBYTES, _TILE_ROWS = 32 << 10, 32, 1024
# A table of one weight alone takes as long as the values of so many codes.
_LEAST_NUMEL = 1 << 18


def has_table(weight: QuantizedTensor) -> bool:
    """Whether a weight has groups inside rows, a byte for each code and scale, and is large."""
    layout, parts = weight.layout, weight.parts
    codes, scale = parts["codes"], parts["scale"]
    if "zero_point" in parts or len(layout.shape) < 2 or scale.shape != layout.scale_shape:
        return False
    are_bytes = codes.dtype.itemsize == scale.dtype.itemsize == 1
    if not are_bytes or not is_tabled(layout.codes) or not is_tabled(layout.scale_codes):
        return False
    per_byte, (*outer, group) = values_per_byte(layout.codes), layout.block
    if set(outer) != {1} or group % per_byte or layout.shape[-1] % group:
        return False
    return "global_scale" not in parts or codes.numel >= _LEAST_NUMEL


class ScaleTable:
    """The value of every code with every scale, rounded; of one weight, or of all of its kind.

    Attributes:
        group_nbytes: bytes of codes that share a scale.
    """

    def __init__(
        self, weight: QuantizedTensor, read: ReadBox, rounded: Rounded, dtype: DType
    ) -> None:
        import numpy as np

        layout = weight.layout
        every = np.arange(256, dtype=np.uint8)
        codes, scales = decoded(every, layout.codes), decoded(every, layout.scale_codes)
        with np.errstate(all="ignore"):
            if "global_scale" in weight.parts:
                part = weight.parts["global_scale"]
                data = read(part, whole(part.shape), "read")
                scales = scales / decoded(data, part.dtype.name).reshape(1)
            values = np.multiply(codes, scales[:, None])
        self.group_nbytes = layout.block[-1] // values_per_byte(layout.codes)
        self._per_byte = values_per_byte(layout.codes)
        self._unit = np.dtype(UNITS[dtype.itemsize])
        self._table = np.frombuffer(bytes(rounded(values)), f"V{dtype.itemsize * self._per_byte}")

    @staticmethod
    def key(weight: QuantizedTensor) -> tuple[object, ...]:
        """Return what is equal for weights that have one table."""
        layout = weight.layout
        own = weight.name if "global_scale" in weight.parts else None
        return (layout.codes, layout.scale_codes, layout.rounded, layout.block[-1], own)

    def rows(self, groups: Groups, memory: Memory) -> Iterator[Array]:
        """Yield values of a few rows at a time, of shape (rows, columns), valid until the next."""
        count, nbytes = groups.codes.shape
        step = max(_STRIP_NBYTES // max(nbytes, 1), 1)
        for first in range(0, count, step):
            codes = groups.codes[first : first + step]
            scales = groups.scales[first : first + step]
            found = memory.array("found", codes.size, self._table.dtype)
            self._look_up(codes.reshape(*scales.shape, -1), scales[:, :, None], found, memory)
            yield found.view(self._unit).reshape(len(codes), -1)

    def columns(self, groups: Groups, memory: Memory) -> Array:
        """Return values with rows and columns exchanged, valid until the next call."""
        import numpy as np

        count, nbytes = groups.codes.shape
        values = memory.array("exchanged", nbytes * self._per_byte * count, self._unit)
        values = values.reshape(nbytes, self._per_byte, count)
        group = self.group_nbytes
        width = max(_TILE_NBYTES // group, 1) * group
        for first in range(0, nbytes, width):
            scales = groups.scales[:, first // group : -(-(first + width) // group)]
            for row in range(0, count, _TILE_ROWS):
                # Side by side first: rows at a power of two push each other out of the cache.
                near = slice(row, row + _TILE_ROWS)
                tile = np.ascontiguousarray(groups.codes[near, first : first + width]).T
                own = np.ascontiguousarray(scales[near].T)
                found = memory.array("found", tile.size, self._table.dtype)
                self._look_up(
                    tile.reshape(len(own), -1, tile.shape[1]), own[:, None, :], found, memory
                )
                apart = found.view(self._unit).reshape(*tile.shape, self._per_byte)
                for index in range(self._per_byte):
                    values[first : first + width, index, near] = apart[:, :, index]
        return values.reshape(-1, count)

    def _look_up(self, codes: Array, scales: Array, out: Array, memory: Memory) -> None:
        """Find the values of codes, each with the scale that is broadcast to it."""
        import numpy as np

        positions = memory.array("positions", codes.size, np.intp).reshape(codes.shape)
        np.copyto(positions, codes)
        np.add(positions, scales.astype(np.intp) << 8, out=positions)
        look_up(self._table, positions.reshape(-1), out, memory)


class Groups(NamedTuple):
    """Codes, of shape (rows, bytes), and scales, of shape (rows, groups), of one matrix."""

    codes: Array
    scales: Array


class GroupReader:
    """Reads groups of a weight; those of transposed ones in bands, kept for what is read next.

    A band has all rows of a matrix, and as many columns as `kept_nbytes` hold codes of: the more,
    the fewer bytes of a file are read several times. For one thread.
    """

    def __init__(self, read: ReadBox, kept_nbytes: int) -> None:
        self._read = read
        self._kept_nbytes = kept_nbytes
        self._band: tuple[object, Span, Groups] | None = None

    def rows(self, weight: QuantizedTensor, lead: Ints, rows: Span, groups: Span) -> Groups:
        """Read groups of rows of one matrix; valid until the next call."""
        return self._groups(weight, lead, rows, groups, "")

    def columns(self, weight: QuantizedTensor, lead: Ints, rows: Span, groups: Span) -> Groups:
        """Return groups of one matrix, out of a band that is kept for what follows them."""
        *_, height, count = weight.layout.scale_shape
        key, band = (weight.name, lead), self._band
        if band is None or band[0] != key or not _is_within(groups, band[1]):
            nbytes = weight.parts["codes"].numel // weight.parts["scale"].numel * height
            length = max(groups.length, min(self._kept_nbytes // nbytes, count - groups.first))
            span = Span(groups.first, length)
            self._band = None
            found = self._groups(weight, lead, Span(0, height), span, "band of ")
            band = self._band = (key, span, found)
        _, span, (codes, scales) = band
        size = codes.shape[1] // span.length
        first = groups.first - span.first
        near, last = slice(rows.first, rows.stop), first + groups.length
        return Groups(codes[near, first * size : last * size], scales[near, first:last])

    def _groups(
        self, weight: QuantizedTensor, lead: Ints, rows: Span, groups: Span, kind: str
    ) -> Groups:
        codes, scale = weight.parts["codes"], weight.parts["scale"]
        outer = [*(Span(index, 1) for index in lead), rows]
        scales = self._read(scale, box_of([*outer, groups]), f"{kind}scales")
        if weight.layout.is_grouped:
            inner = [groups, Span(0, codes.shape[-1])]
        else:
            size = codes.shape[-1] // weight.layout.scale_shape[-1]
            inner = [Span(groups.first * size, groups.length * size)]
        data = self._read(codes, box_of([*outer, *inner]), f"{kind}codes")
        return Groups(data.reshape(rows.length, -1), scales.reshape(rows.length, -1))


def _is_within(inner: Span, outer: Span) -> bool:
    return outer.first <= inner.first and inner.stop <= outer.stop
