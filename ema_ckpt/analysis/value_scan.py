"""Count values that no weights should have: NaN, infinities, absurd magnitudes, zeros alone.

IEEE types are judged by their bits as unsigned integers with the sign cleared, whose order is that
of the magnitudes: one pass in cache finds the largest, and only a block with NaN or Inf is looked
at again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ema_ckpt.core.dtypes import DType
from ema_ckpt.reading.decode import decode, table

ABSURD = 1e30
"""Magnitudes from here on are no weights: sums of their squares leave the range of float32."""

# For each IEEE type: unsigned integer of its size, mask of the magnitude, bits of infinity.
_IEEE = {
    "float64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "float32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "bfloat16": ("<u2", 0x7FFF, 0x7F80),
    "float16": ("<u2", 0x7FFF, 0x7C00),
}


@dataclass(slots=True)
class ValueCounts:
    """Counts of one tensor or a part of it; `largest` is the largest finite magnitude."""

    nan: int = 0
    inf: int = 0
    largest: float = 0.0

    def add(self, other: ValueCounts) -> None:
        """Add the counts of another part."""
        self.nan += other.nan
        self.inf += other.inf
        self.largest = max(self.largest, other.largest)


def has_values(dtype: DType) -> bool:
    """Whether elements of the type can be NaN, infinite or absurd."""
    return dtype.kind in ("float", "low", "complex")


class Scanner:
    """Scans blocks of one element type, for one worker."""

    def __init__(self, dtype: DType) -> None:
        import numpy as np

        self._dtype = dtype.part
        self._ieee = _IEEE.get(self._dtype.name)
        self._scratch = np.empty(0, self._ieee[0] if self._ieee else np.uint8)

    def scan(self, block: memoryview) -> ValueCounts:
        """Count in raw little-endian bytes of whole elements."""
        import numpy as np

        if self._ieee is None:  # a small float: count its codes, then look each one up once
            counts = np.bincount(np.frombuffer(block, np.uint8), minlength=256)
            values = table(self._dtype.name).reshape(-1)
            counts = np.repeat(counts, values.size // 256)
            present = values[np.isfinite(values) & (counts > 0)]
            return ValueCounts(
                nan=int(counts[np.isnan(values)].sum()),
                inf=int(counts[np.isinf(values)].sum()),
                largest=float(np.abs(present).max(initial=0)),
            )
        unsigned, mask, infinity = self._ieee
        bits = np.frombuffer(block, unsigned)
        if self._scratch.size < bits.size:
            self._scratch = np.empty(bits.size, unsigned)
        magnitudes = np.bitwise_and(bits, mask, out=self._scratch[: bits.size])
        largest = magnitudes.max(initial=0)
        if largest < infinity:
            return ValueCounts(largest=self._value(largest))
        finite = magnitudes[magnitudes < infinity]
        return ValueCounts(
            nan=int((magnitudes > infinity).sum()),
            inf=int((magnitudes == infinity).sum()),
            largest=self._value(finite.max(initial=0)),
        )

    def _value(self, bits: Any) -> float:
        return float(decode(bits.tobytes(), self._dtype, "f8")[0])
