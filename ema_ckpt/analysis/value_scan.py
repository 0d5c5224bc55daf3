"""Values that no weights should have: NaN, infinities, nothing but zeros, absurd magnitudes.

IEEE types are judged by their bits as unsigned integers with the sign cleared, whose order is that
of the magnitudes: one pass in cache finds the largest, and only a block that holds NaN or Inf is
looked at again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ema_ckpt.core.dtypes import DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

ABSURD = 1e30
"""Magnitudes from here on are no weights: sums of their squares leave the range of float32."""

# Bits of the magnitude, of infinity, and the element's parts in a block, for each IEEE type.
_IEEE = {
    "float64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000, "<f8"),
    "float32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000, "<f4"),
    "bfloat16": ("<u2", 0x7FFF, 0x7F80, "bfloat16"),
    "float16": ("<u2", 0x7FFF, 0x7C00, "<f2"),
}
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@dataclass(slots=True)
class Seen:
    """What was seen of one tensor; `largest` is the largest finite magnitude."""

    nan: int = 0
    inf: int = 0
    largest: float = 0.0

    def add(self, other: Seen) -> None:
        """Take in what was seen of another part."""
        self.nan += other.nan
        self.inf += other.inf
        self.largest = max(self.largest, other.largest)


def has_values(dtype: DType) -> bool:
    """Whether elements of the type can be NaN, infinite or absurd."""
    return dtype.kind in ("float", "low", "complex")


class Scanner:
    """Looks at blocks of one type; one worker's own."""

    def __init__(self, dtype: DType) -> None:
        import numpy as np

        self._table = None
        name = _PARTS.get(dtype.name, dtype.name)
        if name in _IEEE:
            self._unsigned, self._mask, self._infinity, self._float = _IEEE[name]
            self._scratch = np.empty(0, self._unsigned)
        else:
            from ema_ckpt.reading.decode import table

            self._table = table(dtype.name)

    def scan(self, block: memoryview) -> Seen:
        """Look at the raw little-endian bytes of whole elements."""
        import numpy as np

        if self._table is not None:
            return _scan_table(np.frombuffer(block, np.uint8), self._table)
        bits = np.frombuffer(block, self._unsigned)
        if self._scratch.size < bits.size:
            self._scratch = np.empty(bits.size, self._unsigned)
        magnitudes = np.bitwise_and(bits, self._mask, out=self._scratch[: bits.size])
        largest = magnitudes.max(initial=0)
        if largest < self._infinity:
            return Seen(largest=self._value(largest))
        found = Seen(
            int((magnitudes > self._infinity).sum()), int((magnitudes == self._infinity).sum())
        )
        finite = magnitudes[magnitudes < self._infinity]
        found.largest = self._value(finite.max(initial=0))
        return found

    def _value(self, bits: Any) -> float:
        import numpy as np

        if self._float == "bfloat16":
            return float(np.array(int(bits) << 16, "<u4").view("<f4"))
        return float(np.array(bits, self._unsigned).view(self._float))


def _scan_table(codes: NDArray[Any], table: NDArray[Any]) -> Seen:
    import numpy as np

    present = np.bincount(codes, minlength=256)
    parts = table.reshape(256, -1)
    counts = np.repeat(present, parts.shape[1])
    values = parts.reshape(-1)
    finite = np.isfinite(values) & (counts > 0)
    return Seen(
        int(counts[np.isnan(values)].sum()),
        int(counts[np.isinf(values)].sum()),
        float(np.abs(values[finite]).max(initial=0)),
    )
