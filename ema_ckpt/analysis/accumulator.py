"""Weighted values added up in float64, and rounded once at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ema_ckpt.core.dtypes import DType, by_name
from ema_ckpt.reading.cast import Caster
from ema_ckpt.reading.decode import as_stored, decode, to_float32
from ema_ckpt.runtime.page_buffer import buffer

if TYPE_CHECKING:
    from ema_ckpt.reading.decode import Array, Buffer

BLOCK_NUMEL = 96 << 10
"""Numbers to add up at once, so that all of them stay near a core; half of what is written at once
as float32, so that no short block is left over."""

_PASS_NUMEL = 32 << 10
_DOUBLE, _SINGLE = by_name("float64"), by_name("float32")


class Accumulator:
    """Adds up blocks of equally many numbers, in memory that is used again. For one thread."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")
        self._scaled = as_stored(buffer(_PASS_NUMEL * _DOUBLE.itemsize), _DOUBLE)
        self._single = as_stored(buffer(_PASS_NUMEL * _SINGLE.itemsize), _SINGLE)
        self._casters: dict[str, Caster] = {}

    def begin(self, count: int) -> Array:
        """Return memory for a sum of `count` numbers; those of complex types count twice."""
        nbytes = count * _DOUBLE.itemsize
        if len(self._memory) < nbytes:
            self._memory = buffer(nbytes)
        return as_stored(self._memory[:nbytes], _DOUBLE)

    def add(
        self, total: Array, block: Buffer, dtype: DType, weight: float, *, is_first: bool
    ) -> None:
        """Add the product of each number of a block and its weight; the first is put down."""
        import numpy as np

        part = dtype.part
        is_low = part.kind == "low"
        values = decode(block, part, np.float64) if is_low else as_stored(block, part)
        for start in range(0, values.size, _PASS_NUMEL):
            stop = min(start + _PASS_NUMEL, values.size)
            sums = total[start:stop]
            scaled = sums if is_first else self._scaled[: stop - start]
            found = values[start:stop]
            if part.name == "bfloat16":
                found = to_float32(found, part.name, self._single[: stop - start])
            np.copyto(scaled, found)
            np.multiply(scaled, weight, out=scaled)
            if not is_first:
                np.add(sums, scaled, out=sums)

    def round_into(self, total: Array, dtype: DType, out: Buffer) -> int:
        """Round a sum; return how many finite numbers became infinite."""
        caster = self._casters.get(dtype.part.name)
        if caster is None:
            caster = self._casters[dtype.part.name] = Caster(_DOUBLE, dtype.part)
        before = caster.overflow
        caster.cast_into(total.view("u1"), out)
        return caster.overflow - before
