"""Compare blocks of numbers: norms, inner product, extremes and counts.

Everything is computed in float64, integers exactly. For large tensors of float32, bfloat16 and
float16 there is a fast way: products are summed in float32 over runs of 256 elements and those sums
in float64, which is within 1e-7 of the exact result and takes a third of the time; blocks that
leave its range are done again exactly.

An element that is NaN on both sides, or the same infinity, is equal and counts for nothing else. A
value that is not finite on one side alone leaves norms and extremes undefined (NaN).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ema_ckpt.core.dtypes import DType
from ema_ckpt.reading.decode import as_stored, decode, to_float32
from ema_ckpt.runtime.page_buffer import buffer

if TYPE_CHECKING:
    from ema_ckpt.reading.decode import Array

FAST_NUMEL = 1 << 20
"""Least number of elements of a tensor that is compared the fast way."""

_SINGLE = ("float32", "bfloat16", "float16")
# Elements of one exact pass: three times as much float64 stays in the second-level cache.
_PASS = 32768
_RUN = 256
_ROW = 8192  # BLAS uses one thread for vectors up to 10 000
_LOPSIDED = 1e-6  # a·b comes from the three norms, which needs them to be of one order
_TINY = 1e-28  # a mean square below this has lost bits in float32
_SUMMED = ("aa", "bb", "ab", "dd", "absolute")
_COUNTED = ("changed", "unequal", "nan_a", "nan_b", "inf_a", "inf_b")


@dataclass(frozen=True, slots=True)
class PairStats:
    """Statistics of a pair of tensors a and b, or of a part of them; d = a − b.

    Attributes:
        aa, bb, ab, dd: inner products. absolute: the sum of |d|. largest: the greatest |d|.
        changed: elements beyond the tolerance. unequal: elements of different value.
        nan_a, nan_b, inf_a, inf_b: counts of NaN and infinities.
        same_bits: whether the stored bytes are equal.
    """

    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0
    dd: float = 0.0
    absolute: float = 0.0
    largest: float = 0.0
    changed: int = 0
    unequal: int = 0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0
    same_bits: bool = True

    @property
    def rel_l2(self) -> float:
        """‖a − b‖ / ‖b‖: 0 if both are equal, undefined if b alone is zero or d² underflows."""
        if not self.dd:
            return math.nan if self.unequal else 0.0
        return math.sqrt(self.dd / self.bb) if self.bb else math.nan

    @property
    def cosine(self) -> float:
        """a·b / (‖a‖‖b‖): 1 if both are zero or equal, undefined if one alone is zero."""
        if not self.unequal:
            return 1.0
        norms = math.sqrt(self.aa) * math.sqrt(self.bb)
        cosine = self.ab / norms if norms else math.nan
        return cosine if math.isnan(cosine) else max(-1.0, min(1.0, cosine))

    @staticmethod
    def total(parts: Sequence[PairStats]) -> PairStats:
        """Add up all parts; sums are rounded once, so that their order does not matter."""
        if not parts:
            return PairStats()
        if len(parts) == 1:
            return parts[0]
        columns = {name: list(map(attrgetter(name), parts)) for name in PairStats.__slots__}
        total: dict[str, Any] = {}
        for name in _SUMMED:
            values = columns[name]
            total[name] = math.fsum(values) if all(map(math.isfinite, values)) else math.nan
        for name in _COUNTED:
            total[name] = sum(columns[name])
        largest = columns["largest"]
        total["largest"] = math.nan if any(map(math.isnan, largest)) else max(largest)
        return PairStats(**total, same_bits=all(columns["same_bits"]))


class Comparer:
    """Compares blocks of two element types, for one worker.

    Args:
        a, b: the element types of the two sides.
        rtol, atol: an element has changed if |a − b| > atol + rtol·|b|, or if that distance is
            infinite.
    """

    def __init__(self, a: DType, b: DType, rtol: float = 0.0, atol: float = 0.0) -> None:
        self._a = a
        self._b = b
        self._rtol = rtol
        self._atol = atol
        self._scratch: dict[str, Array] = {}
        self._is_real = a.is_castable and b.is_castable and not rtol and not atol
        self._is_single = a.name in _SINGLE and b.name in _SINGLE and self._is_real

    def compare(
        self, blocks: Iterable[tuple[memoryview, memoryview]], *, fast: bool
    ) -> list[PairStats]:
        """Compare pairs of blocks: raw little-endian bytes of as many whole elements of a and b."""
        import numpy as np

        fast = fast and self._is_single
        step_a, step_b = _PASS * self._a.itemsize, _PASS * self._b.itemsize
        results = []
        with np.errstate(all="ignore"):
            for a, b in blocks:
                stats = self._fast(a, b) if fast else None
                if stats is None:
                    parts = []
                    for index in range(-(-len(a) // step_a)):
                        x = a[index * step_a : (index + 1) * step_a]
                        y = b[index * step_b : (index + 1) * step_b]
                        finite = self._finite(x, y) if self._is_real else None
                        parts.append(finite or self._exact(x, y))
                    stats = PairStats.total(parts)
                results.append(stats)
        return results

    def _array(self, name: str, count: int, dtype: str) -> Array:
        """Scratch array `name`, of `count` elements."""
        import numpy as np

        array = self._scratch.get(name)
        if array is None or array.size < count:
            nbytes = max(count, _PASS) * np.dtype(dtype).itemsize
            array = self._scratch[name] = np.frombuffer(buffer(nbytes), dtype)
        return array[:count]

    def _same_bits(self, x: memoryview, y: memoryview, unequal: int) -> bool:
        return not unequal and self._a == self._b and bytes(x) == bytes(y)

    def _fast(self, x: memoryview, y: memoryview) -> PairStats | None:
        """Sum products in float32; None where that is not accurate."""
        import numpy as np

        a, b = self._as_single("a", x, self._a), self._as_single("b", y, self._b)
        count = a.size
        if count % _RUN:
            return None
        d = np.subtract(a, b, out=self._array("d", count, "f4"))
        sums = self._array("sums", 4 * (count // _RUN), "f4").reshape(4, -1)
        for values, out in zip((a, b, d), sums, strict=False):
            runs = values.reshape(-1, _RUN)
            _dots(runs, runs, out)
        np.abs(d, out=d)
        if "ones" not in self._scratch:
            self._scratch["ones"] = np.ones(_RUN, "f4")
        _dots(d.reshape(-1, _RUN), self._scratch["ones"], sums[3])
        aa, bb, dd, absolute = sums.sum(axis=1, dtype="f8").tolist()
        # The difference of two floats is zero only if they are equal, and |d| has no sign: its bits
        # tell.
        unequal = int(np.count_nonzero(d.view("i4")))
        if not _is_accurate(aa, bb, dd, count, unequal):
            return None
        ab, largest = (aa + bb - dd) / 2, float(d.max())
        same = self._same_bits(x, y, unequal)
        return PairStats(aa, bb, ab, dd, absolute, largest, unequal, unequal, same_bits=same)

    def _as_single(self, name: str, block: memoryview, dtype: DType) -> Array:
        values = as_stored(block, dtype)
        if dtype.name == "float32":
            return values
        return to_float32(values, dtype.name, self._array(name, values.size, "f4"))

    def _finite(self, x: memoryview, y: memoryview) -> PairStats | None:
        """Sum finite floating-point numbers in float64, all in scratch; None if some are not."""
        import numpy as np

        a, b = self._as_double("a", x, self._a), self._as_double("b", y, self._b)
        count = a.size
        aa, bb = _inner(a, a), _inner(b, b)
        if not math.isfinite(aa + bb):
            return None
        d = np.subtract(a, b, out=self._array("double d", count, "f8"))
        ab, dd = _inner(a, b), _inner(d, d)
        unequal = int(np.count_nonzero(np.not_equal(d, 0, out=self._array("ne", count, "?"))))
        np.abs(d, out=d)
        absolute, largest = float(d.sum()), float(d.max(initial=0.0))
        same = self._same_bits(x, y, unequal)
        return PairStats(aa, bb, ab, dd, absolute, largest, unequal, unequal, same_bits=same)

    def _as_double(self, name: str, block: memoryview, dtype: DType) -> Array:
        import numpy as np

        if dtype.name == "float64":
            return as_stored(block, dtype)
        single = self._as_single(name, block, dtype)
        out = self._array(f"double {name}", single.size, "f8")
        np.copyto(out, single)
        return out

    def _exact(self, x: memoryview, y: memoryview) -> PairStats:
        """Sum numbers of any kind: integers, codes, pairs, NaN and infinities; with tolerances."""
        import numpy as np

        a, b = self._widened(x, y)
        counts = {}
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            counts = _set_aside(a, b)
        d = np.subtract(a, b)
        unequal = changed = self._count(d != 0)  # NaN counts
        magnitude = np.abs(d)
        if self._rtol or self._atol:
            # An infinite distance is a change, even from infinity: its multiples are no tolerance.
            near = (magnitude <= self._atol + self._rtol * np.abs(b)) & np.isfinite(magnitude)
            changed = self._count(~near)
        a, b, d, magnitude = (np.asarray(v, np.float64) for v in (a, b, d, magnitude))
        return PairStats(
            aa=_inner(a, a),
            bb=_inner(b, b),
            ab=_inner(a, b),
            dd=_inner(d, d),
            absolute=_defined(float(magnitude.sum())),
            largest=_defined(float(magnitude.max(initial=0.0))),
            changed=changed,
            unequal=unequal,
            same_bits=self._same_bits(x, y, unequal),
            **counts,
        )

    def _count(self, mask: Array) -> int:
        """Count elements for which the mask is set; complex ones if it is for either part."""
        import numpy as np

        if "complex" in (self._a.kind, self._b.kind):
            return int(np.count_nonzero(mask.reshape(-1, 2).any(axis=1)))
        return int(np.count_nonzero(mask))

    def _widened(self, x: memoryview, y: memoryview) -> tuple[Array, Array]:
        """Decode both sides to a type that holds their values exactly."""
        import numpy as np

        # The significand of numpy's long double has 64 bits: enough for every integer.
        has_long = any(dtype.kind == "int" and dtype.itemsize == 8 for dtype in (self._a, self._b))
        wide = np.longdouble if has_long else np.float64
        a, b = decode(x, self._a, wide), decode(y, self._b, wide)
        if a.size < b.size:
            a = _with_zeros(a)
        elif b.size < a.size:
            b = _with_zeros(b)
        return a, b


def _set_aside(a: Array, b: Array) -> dict[str, int]:
    """Count NaN and infinities by field, and write zeros where both sides have the same one."""
    import numpy as np

    nan_a, nan_b, inf_a, inf_b = np.isnan(a), np.isnan(b), np.isinf(a), np.isinf(b)
    equal = (nan_a & nan_b) | (inf_a & (a == b))
    a[equal] = 0
    b[equal] = 0
    masks = {"nan_a": nan_a, "nan_b": nan_b, "inf_a": inf_a, "inf_b": inf_b}
    return {name: int(np.count_nonzero(mask)) for name, mask in masks.items()}


def _is_accurate(aa: float, bb: float, dd: float, count: int, unequal: int) -> bool:
    """Whether float32 sums are good: finite, no bits lost to small values, norms of one order."""
    if not math.isfinite(aa + bb + dd):
        return False
    least = count * _TINY
    if min(aa, bb) < least or (unequal and dd < least):
        return False
    return _LOPSIDED * max(aa, bb) < min(aa, bb)


def _with_zeros(real: Array) -> Array:
    """Turn real numbers into complex pairs."""
    import numpy as np

    return np.stack([real, np.zeros_like(real)], axis=1).reshape(-1)


def _inner(a: Array, b: Array) -> float:
    """Inner product in float64, in rows so short that BLAS starts no threads."""
    import numpy as np

    whole = a.size // _ROW * _ROW
    total = float(np.dot(a[whole:], b[whole:]))
    if whole:
        total += float(_dots(a[:whole].reshape(-1, _ROW), b[:whole].reshape(-1, _ROW)).sum())
    return _defined(total)


def _dots(a: Array, b: Array, out: Array | None = None) -> Array:
    """Inner product of each row."""
    import numpy as np

    if hasattr(np, "vecdot"):  # numpy 2
        dots: Array = np.vecdot(a, b, out=out)
        return dots
    sums: Array = np.einsum("ij,ij->i", a, np.broadcast_to(b, a.shape), out=out)
    return sums


def _defined(value: float) -> float:
    return value if math.isfinite(value) else math.nan
