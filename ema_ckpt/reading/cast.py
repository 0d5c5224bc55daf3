"""Cast between float64, float32, float16 and bfloat16, as raw little-endian bytes.

Results equal `torch.Tensor.to` on the CPU bit for bit: round to nearest, ties to even, and from
float64 to the two 16-bit types by way of float32, as torch does. NaN stays NaN; its bits are those
of torch's x86 kernels (from float64 to bfloat16, of those that handle 16 elements at a time; the
rest of a tensor gets another NaN there). Blocks of 256 KiB to 2 MiB keep all passes in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import UsageError
from ema_ckpt.reading.decode import as_stored, to_float32

if TYPE_CHECKING:
    from ema_ckpt.reading.decode import Array, Buffer

# Elements of one pass: 256 KiB of float32, so that scratch and result stay in a core's L2 cache.
_PASS = 65536
# The largest float32 that rounds to a finite bfloat16 (0x7F7F7FFF) or float16 (0x477FEFFF).
_LARGEST = {"bfloat16": 3.3895312e38, "float16": 65519.996}


class Caster:
    """Cast blocks from one type to another, with buffers allocated once. For one thread.

    Attributes:
        overflow: number of finite values that became infinite so far.
    """

    def __init__(self, source: DType, target: DType) -> None:
        """Prepare for blocks of any length.

        Raises:
            UsageError: `usage` if one of the types is not castable.
        """
        for dtype in (source, target):
            if not dtype.is_castable:
                message = f"{dtype.name} is not a type that values are cast from or to"
                raise UsageError("usage", message)
        self.source = source
        self.target = target
        self.overflow = 0
        self._needs_scratch = "float32" not in (source.name, target.name)
        self._out: Array | None = None
        self._scratch: Array | None = None

    def cast(self, block: Buffer) -> memoryview:
        """Cast whole elements; the result is valid until the next call."""
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

        values, results = as_stored(block, self.source), as_stored(out, self.target)
        # Without an intermediate type there is no scratch to keep small: one long pass.
        step = _PASS if self._needs_scratch else max(values.size, 1)
        if self._scratch is None:
            self._scratch = np.empty(_PASS if self._needs_scratch else 0, np.float32)
        with np.errstate(all="ignore"):
            for start in range(0, values.size, step):
                self._cast(values[start : start + step], results[start : start + step])

    def _cast(self, values: Array, out: Array) -> None:
        """Run one pass, by way of float32, which holds every value of the 16-bit types."""
        import numpy as np

        source, target = self.source.name, self.target.name
        if source == target or self._scratch is None:
            out[:] = values
            return
        single = to_float32(
            values, source, out if target == "float32" else self._scratch[: values.size]
        )
        if source == "float16" and not _is_finite(single):
            # numpy keeps signalling NaNs; the hardware that torch uses makes them quiet.
            single.view(np.uint32)[np.isnan(single)] |= 0x400000
        if target == "bfloat16":
            is_finite = _round_to_bfloat16(single, out, 0x7FC0 if source == "float16" else 0xFFFF)
        elif target == "float16":
            is_finite = _round_to_float16(single, out)
        elif target == "float64":
            out[:] = single
            is_finite = True
        else:
            is_finite = source != "float64" or _is_finite(out)
        if not is_finite:
            self.overflow += _count_infinities(out, target) - _count_infinities(values, source)


def _round_to_bfloat16(values: Array, out: Array, nan: int) -> bool:
    """Round by ml_dtypes, write `nan` for NaN; return whether all results are surely finite."""
    import ml_dtypes
    import numpy as np

    np.copyto(out.view(ml_dtypes.bfloat16), values, casting="unsafe")
    if _is_within(values, _LARGEST["bfloat16"]):
        return True
    out[np.isnan(values)] = nan
    return False


def _round_to_float16(values: Array, out: Array) -> bool:
    """Round with numpy, make NaN quiet; return whether all results are surely finite."""
    import numpy as np

    np.copyto(out, values, casting="same_kind")
    if _is_within(values, _LARGEST["float16"]):
        return True
    isnan = np.isnan(values)
    bits = values.view(np.uint32)[isnan]
    out.view(np.uint16)[isnan] = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
    return False


def _is_within(values: Array, limit: float) -> bool:
    return bool(values.max() <= limit and values.min() >= -limit)


def _is_finite(values: Array) -> bool:
    import numpy as np

    return bool(np.isfinite(values).all())


def _count_infinities(values: Array, dtype: str) -> int:
    import numpy as np

    is_infinite = (values & 0x7FFF) == 0x7F80 if dtype == "bfloat16" else np.isinf(values)
    return int(np.count_nonzero(is_infinite))


def import_all(casts: Iterable[tuple[DType, DType]]) -> None:
    """Import numpy and whatever these casts need, so that child processes share the modules.

    Pairs of types that are not cast need nothing.
    """
    import numpy as np  # noqa: F401

    for source, target in set(casts):
        if source != target and source.is_castable and target.is_castable:
            Caster(source, target).cast(bytes(source.itemsize))
