"""Casts between float64, float32, float16 and bfloat16 of raw little-endian bytes, in numpy and
ml_dtypes.

Results equal `torch.Tensor.to` on the CPU bit for bit: round to nearest, ties to even, and from
float64 to the two 16-bit types by way of float32, as torch does. NaN stays NaN; its bits are those
of torch's x86 kernels (of float64 → bfloat16, of those that handle 16 elements at a time; the rest
of a tensor gets another NaN there). Blocks of 256 KiB to 2 MiB keep all passes in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Buffer = memoryview | bytes | bytearray | Array

# Elements that one pass handles: 256 KiB of float32, with scratch and result well inside a core's
# L2 cache.
_PASS = 65536
# The largest float32 that rounds to a finite bfloat16 (bits 0x7F7F7FFF) or float16 (bits
# 0x477FEFFF).
_LARGEST = {"bfloat16": 3.3895312e38, "float16": 65519.996}


class Caster:
    """Casts blocks from one type to another, with buffers allocated once. Not for use by two
    threads at a time.

    Attributes:
        overflow: how many finite values became infinite so far.
    """

    def __init__(self, source: DType, target: DType) -> None:
        """Prepare for blocks of any length.

        Raises:
            UsageError: `usage` if one of the types is not castable.
        """
        for dtype in (source, target):
            if not dtype.is_castable:
                raise UsageError(
                    "usage", f"{dtype.name} is not a type that values are cast from or to"
                )
        self.source = source
        self.target = target
        self.overflow = 0
        self._needs_scratch = "float32" not in (source.name, target.name)
        self._out: Array | None = None
        self._wide: Array | None = None

    def cast(self, block: Buffer) -> memoryview:
        """Cast a block of whole elements, raw bytes of the source type.

        Returns raw bytes of the target type, valid until the next call.
        """
        import numpy as np

        raw = np.frombuffer(block, np.uint8)
        nbytes = raw.size // self.source.itemsize * self.target.itemsize
        if self._out is None or self._out.size < nbytes:
            self._out = np.empty(nbytes, np.uint8)
        self.cast_into(raw, self._out[:nbytes])
        return self._out.data[:nbytes]

    def cast_into(self, block: Buffer, out: Buffer) -> None:
        """Cast `block` into `out`, a writable buffer for as many elements of the target type."""
        import numpy as np

        values = np.frombuffer(block, self.source.numpy or "<u2")
        results = np.frombuffer(out, self.target.numpy or "<u2")
        # Without an intermediate type there is no scratch to keep small: fewer, longer passes.
        step = _PASS if self._needs_scratch else max(values.size, 1)
        if self._wide is None:
            self._wide = np.empty(_PASS if self._needs_scratch else 0, np.float32)
        with np.errstate(all="ignore"):
            for start in range(0, values.size, step):
                self._cast(values[start : start + step], results[start : start + step], self._wide)

    def _cast(self, values: Array, out: Array, wide: Array) -> None:
        """One pass, by way of float32, which holds every value of the 16-bit types."""
        source, target = self.source.name, self.target.name
        if source == target:
            out[:] = values
            return
        first = out if target == "float32" else wide[: values.size]
        single = _to_float32(values, source, first)
        if target == "bfloat16":
            clean = _round_to_bfloat16(single, out, 0x7FC0 if source == "float16" else 0xFFFF)
        elif target == "float16":
            clean = _round_to_float16(single, out)
        elif target == "float64":
            clean = True
            out[:] = single
        else:
            clean = source != "float64" or _all_finite(out)
        if not clean:
            self.overflow += _infinities(out, target) - _infinities(values, source)


def _to_float32(values: Array, source: str, out: Array) -> Array:
    """`values` as float32, in `out` unless they are."""
    import numpy as np

    if source == "float32":
        return values
    if source == "bfloat16":  # the upper half of a float32; numpy has no type for it
        bits = out.view(np.uint32)
        bits[:] = values
        np.left_shift(bits, 16, out=bits)
        return out
    np.copyto(out, values, casting="same_kind")
    if source == "float16" and not _all_finite(out):
        # numpy keeps signalling NaNs as they are; the hardware that torch uses makes them quiet.
        out.view(np.uint32)[np.isnan(out)] |= 0x400000
    return out


def _round_to_bfloat16(values: Array, out: Array, nan: int) -> bool:
    """Nearest, ties to even, by the kernel of ml_dtypes; NaN as torch has it.

    Returns whether it is certain that no result is infinite or NaN.
    """
    import ml_dtypes
    import numpy as np

    np.copyto(out.view(ml_dtypes.bfloat16), values, casting="unsafe")
    if _within(values, _LARGEST["bfloat16"]):
        return True
    out[np.isnan(values)] = nan
    return False


def _round_to_float16(values: Array, out: Array) -> bool:
    """numpy's own rounding, with NaN made quiet as the hardware does. Returns what
    `_round_to_bfloat16` does.
    """
    import numpy as np

    np.copyto(out, values, casting="same_kind")
    if _within(values, _LARGEST["float16"]):
        return True
    isnan = np.isnan(values)
    bits = values.view(np.uint32)[isnan]
    out.view(np.uint16)[isnan] = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
    return False


def _within(values: Array, limit: float) -> bool:
    return bool(values.max() <= limit and values.min() >= -limit)


def _all_finite(values: Array) -> bool:
    import numpy as np

    return bool(np.isfinite(values).all())


def _infinities(values: Array, dtype: str) -> int:
    import numpy as np

    found = (values & 0x7FFF) == 0x7F80 if dtype == "bfloat16" else np.isinf(values)
    return int(np.count_nonzero(found))


def cast_block(block: Buffer, source: DType, target: DType) -> tuple[memoryview, int]:
    """Cast one block of raw bytes; returns raw bytes of `target` and how many finite values became
    infinite.
    """
    caster = Caster(source, target)
    return caster.cast(block), caster.overflow


def import_all(casts: Iterable[tuple[DType, DType]]) -> None:
    """Import numpy and what these casts need, so that copies of this process share it."""
    import numpy as np  # noqa: F401

    for source, target in set(casts):
        if source != target:
            cast_block(bytes(source.itemsize), source, target)
