"""How two blocks of numbers differ: norms, inner product, extremes and counts, block by block.

Everything is computed in float64, integers exactly. For large tensors of float32, bfloat16 and
float16 there is a fast way: products are summed in float32 over runs of 256 elements and those sums
in float64, which is within 1e-7 of the exact result and takes a third of the time; blocks that
leave its range are done again exactly.

An element that is NaN on both sides, or the same infinity, is equal and counts for nothing else. A
value that is not finite on one side alone leaves norms and extremes undefined (NaN).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ema_ckpt.core.dtypes import DType
from ema_ckpt.runtime.page_buffer import buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

FAST_NUMEL = 1 << 20
"""Elements of a tensor from which on the fast way is taken."""

_SINGLE = ("float32", "bfloat16", "float16")
# elements in one pass: float64 scratch of three times this stays in the second-level cache
_PART = 32768
_RUN = 256
_ROW = 8192  # BLAS uses one thread for vectors up to 10 000
_LOPSIDED = 1e-6  # a·b comes from the three norms, which needs them to be of one order
_TINY = 1e-28  # a mean square below this has lost bits in float32
_PAIRS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True, slots=True)
class PairStats:
    """What was found in a part of a pair of tensors, a and b; d = a − b.

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
        """‖a − b‖ / ‖b‖: 0 where both are equal, undefined where b alone is zero or float64 holds
        no square of d.
        """
        if not self.dd:
            return math.nan if self.unequal else 0.0
        return math.sqrt(self.dd / self.bb) if self.bb else math.nan

    @property
    def cosine(self) -> float:
        """a·b / (‖a‖‖b‖): 1 where both are zero or equal, undefined where one alone is zero."""
        if not self.unequal:
            return 1.0
        norms = math.sqrt(self.aa) * math.sqrt(self.bb)
        cosine = self.ab / norms if norms else math.nan
        return cosine if math.isnan(cosine) else max(-1.0, min(1.0, cosine))

    @staticmethod
    def total(parts: Sequence[PairStats]) -> PairStats:
        """The sums of all parts; rounded once, so that their order does not matter."""
        if len(parts) <= 1:
            return parts[0] if parts else PairStats()
        largest = [p.largest for p in parts]
        return PairStats(
            aa=_fsum([p.aa for p in parts]),
            bb=_fsum([p.bb for p in parts]),
            ab=_fsum([p.ab for p in parts]),
            dd=_fsum([p.dd for p in parts]),
            absolute=_fsum([p.absolute for p in parts]),
            largest=math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0),
            changed=sum(p.changed for p in parts),
            unequal=sum(p.unequal for p in parts),
            nan_a=sum(p.nan_a for p in parts),
            nan_b=sum(p.nan_b for p in parts),
            inf_a=sum(p.inf_a for p in parts),
            inf_b=sum(p.inf_b for p in parts),
            same_bits=all(p.same_bits for p in parts),
        )


def _fsum(values: list[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


class Comparer:
    """Compares blocks of two element types; one worker's own.

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
        self._is_plain = a.is_castable and b.is_castable and not rtol and not atol
        self._single = a.name in _SINGLE and b.name in _SINGLE and self._is_plain

    def compare(
        self, blocks: Iterable[tuple[memoryview, memoryview]], *, fast: bool
    ) -> list[PairStats]:
        """Compare blocks, each the raw little-endian bytes of as many whole elements of a and of
        b.
        """
        import numpy as np

        fast = fast and self._single
        with np.errstate(all="ignore"):
            return [(self._fast(a, b) if fast else None) or self._surely(a, b) for a, b in blocks]

    def _surely(self, a: memoryview, b: memoryview) -> PairStats:
        return PairStats.total(
            [self._plain(x, y) or self._exact(x, y) for x, y in self._parts(a, b)]
        )

    def _parts(self, a: memoryview, b: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
        count, of_a, of_b = len(a) // self._a.itemsize, self._a.itemsize, self._b.itemsize
        for at in range(0, count, _PART):
            stop = min(at + _PART, count)
            yield a[at * of_a : stop * of_a], b[at * of_b : stop * of_b]

    def _take(self, name: str, count: int, dtype: str) -> Array:
        import numpy as np

        held = self._scratch.get(name)
        if held is None or held.size < count:
            held = self._scratch[name] = np.frombuffer(
                buffer(max(count, _PART) * np.dtype(dtype).itemsize), dtype
            )
        return held[:count]

    # The fast way.

    def _fast(self, x: memoryview, y: memoryview) -> PairStats | None:
        """The sums by way of float32, or None where these would not be accurate."""
        import numpy as np

        a, b = self._as_single("a", x, self._a.name), self._as_single("b", y, self._b.name)
        count = a.size
        if count % _RUN:
            return None
        d = np.subtract(a, b, out=self._take("d", count, "f4"))
        sums = self._take("sums", 4 * (count // _RUN), "f4").reshape(4, -1)
        for values, into in zip((a, b, d), sums, strict=False):
            runs = values.reshape(-1, _RUN)
            _dots(runs, runs, into)
        np.abs(d, out=d)
        _dots(d.reshape(-1, _RUN), self._ones(), sums[3])
        aa, bb, dd, absolute = sums.sum(axis=1, dtype="f8").tolist()
        # The difference of two floats is zero only where they are equal; what is left of a zero
        # here has no sign.
        unequal = int(np.count_nonzero(d.view("i4")))
        if not _is_accurate(aa, bb, dd, count, unequal):
            return None
        same = not unequal and self._a == self._b and bytes(x) == bytes(y)
        ab = (aa + bb - dd) / 2
        return PairStats(aa, bb, ab, dd, absolute, float(d.max()), unequal, unequal, same_bits=same)

    def _as_single(self, name: str, block: memoryview, dtype: str) -> Array:
        import numpy as np

        if dtype == "float32":
            return np.frombuffer(block, "<f4")
        raw = np.frombuffer(block, "<u2")
        out = self._take(name, raw.size, "f4")
        if dtype == "bfloat16":  # the upper half of a float32
            bits = out.view("u4")
            np.copyto(bits, raw)
            np.left_shift(bits, 16, out=bits)
        else:
            np.copyto(out, raw.view("<f2"))
        return out

    def _ones(self) -> Array:
        import numpy as np

        if "ones" not in self._scratch:
            self._scratch["ones"] = np.ones(_RUN, "f4")
        return self._scratch["ones"]

    # The exact way.

    def _plain(self, x: memoryview, y: memoryview) -> PairStats | None:
        """The sums of finite floating-point numbers, without a copy that scratch does not hold;
        None for others.
        """
        import numpy as np

        if not self._is_plain:
            return None
        a, b = self._as_double("a", x, self._a.name), self._as_double("b", y, self._b.name)
        count = a.size
        aa, bb = _inner(a, a), _inner(b, b)
        if not math.isfinite(aa + bb):
            return None
        d = np.subtract(a, b, out=self._take("double d", count, "f8"))
        ab, dd = _inner(a, b), _inner(d, d)
        unequal = int(np.count_nonzero(np.not_equal(d, 0, out=self._take("ne", count, "?"))))
        np.abs(d, out=d)
        same = not unequal and self._a == self._b and bytes(x) == bytes(y)
        top = float(d.max(initial=0.0))
        return PairStats(aa, bb, ab, dd, float(d.sum()), top, unequal, unequal, same_bits=same)

    def _as_double(self, name: str, block: memoryview, dtype: str) -> Array:
        import numpy as np

        if dtype == "float64":
            return np.frombuffer(block, "<f8")
        single = self._as_single(name, block, dtype)
        out = self._take(f"double {name}", single.size, "f8")
        np.copyto(out, single)
        return out

    def _exact(self, x: memoryview, y: memoryview) -> PairStats:
        """The sums of any numbers: exact integers, codes, pairs, what is not finite, tolerances."""
        import numpy as np

        a, b = self._widened(x, y)
        odd = _Odd() if np.isfinite(a).all() and np.isfinite(b).all() else _set_aside(a, b)
        d = np.subtract(a, b)
        unequal = self._count(d != 0)  # NaN counts
        magnitude = np.abs(d)
        changed = unequal
        if self._rtol or self._atol:
            # What is infinitely far away has changed, even from infinity, whose multiples are no
            # tolerance.
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
            nan_a=odd.nan_a,
            nan_b=odd.nan_b,
            inf_a=odd.inf_a,
            inf_b=odd.inf_b,
            same_bits=not unequal and self._a == self._b and bytes(x) == bytes(y),
        )

    def _count(self, mask: Array) -> int:
        """Elements for which the mask is set; of a complex one, for either of its numbers."""
        import numpy as np

        is_complex = self._a.name in _PAIRS or self._b.name in _PAIRS
        return int(np.count_nonzero(mask.reshape(-1, 2).any(axis=1) if is_complex else mask))

    def _widened(self, x: memoryview, y: memoryview) -> tuple[Array, Array]:
        """Both sides in a type that holds their values exactly."""
        import numpy as np

        # The significand of numpy's long double has 64 bits: enough for every integer, signed or
        # not.
        wide = np.longdouble if _has_long(self._a) or _has_long(self._b) else np.float64
        a, b = decode(x, self._a, wide), decode(y, self._b, wide)
        if a.size < b.size:
            a = _with_zeros(a)
        elif b.size < a.size:
            b = _with_zeros(b)
        return a, b


@dataclass(frozen=True, slots=True)
class _Odd:
    """Counts of what is not finite."""

    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0


def _set_aside(a: Array, b: Array) -> _Odd:
    """Count NaN and infinities, and write zeros where both sides have the same one."""
    import numpy as np

    nan_a, nan_b, inf_a, inf_b = np.isnan(a), np.isnan(b), np.isinf(a), np.isinf(b)
    equal = (nan_a & nan_b) | (inf_a & (a == b))
    a[equal] = 0
    b[equal] = 0
    return _Odd(*(int(np.count_nonzero(v)) for v in (nan_a, nan_b, inf_a, inf_b)))


def _is_accurate(aa: float, bb: float, dd: float, count: int, unequal: int) -> bool:
    """Whether sums by way of float32 are good: finite, not so small that bits were lost, norms not
    far apart.
    """
    least = count * _TINY
    if not math.isfinite(aa + bb + dd) or aa < least or bb < least or (unequal and dd < least):
        return False
    return _LOPSIDED * max(aa, bb) < min(aa, bb)


def _has_long(dtype: DType) -> bool:
    return dtype.kind == "int" and dtype.itemsize == 8


def decode(block: memoryview, dtype: DType, wide: Any) -> Array:
    """The values of a block as a new array of `wide`; complex numbers as pairs."""
    import numpy as np

    name = _PAIRS.get(dtype.name, dtype.name)
    if name == "bfloat16":
        bits = np.frombuffer(block, "<u2").astype("<u4") << 16
        return np.asarray(bits.view("<f4"), wide)
    if name == "bool":
        return np.asarray(np.frombuffer(block, "u1") != 0, wide)
    if dtype.kind == "low":
        from ema_ckpt.reading.decode import table

        return np.asarray(table(name)[np.frombuffer(block, "u1")].reshape(-1), wide)
    codes: dict[str, str] = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
    values: Array = np.frombuffer(block, codes.get(name, dtype.numpy)).astype(wide)
    return values


def _with_zeros(real: Array) -> Array:
    """Real numbers as complex pairs."""
    import numpy as np

    return np.stack([real, np.zeros_like(real)], axis=1).reshape(-1)


def _inner(a: Array, b: Array) -> float:
    """Inner product in float64, in pieces for which BLAS starts no threads."""
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
