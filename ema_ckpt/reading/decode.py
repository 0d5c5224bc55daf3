"""Decode raw little-endian bytes of any element type into numbers.

Bit layouts of small types: OCP 8-bit Floating Point Specification 1.0 (e4m3fn, e5m2), OCP
Microscaling Formats 1.0 (e8m0fnu, e2m1), and arXiv:2206.02915 for the `fnuz` forms, whose only
special code is 0x80 = NaN.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ema_ckpt.core.dtypes import DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Buffer = memoryview | bytes | bytearray | Array

# Bits of the mantissa, bias of the exponent.
_SMALL_FLOATS = {
    "float8_e4m3fn": (3, 7),
    "float8_e5m2": (2, 15),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2fnuz": (2, 16),
}


def as_stored(block: Buffer, dtype: DType) -> Array:
    """View raw bytes as numpy's type; bfloat16, for which numpy has none, as its bits in uint16."""
    import numpy as np

    return np.frombuffer(block, dtype.numpy or "<u2")


def to_float32(values: Array, dtype: str, out: Array) -> Array:
    """Convert `values`, viewed by `as_stored`, to float32: in `out`, unless they are float32."""
    import numpy as np

    if dtype == "float32":
        return values
    if dtype == "bfloat16":  # the upper half of a float32
        bits = out.view(np.uint32)
        np.copyto(bits, values)
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(out, values, casting="same_kind")
    return out


def decode(block: Buffer, dtype: DType, wide: Any) -> Array:
    """Decode a block into a new array of numpy type `wide`; complex numbers become pairs."""
    import numpy as np

    dtype = dtype.part
    if dtype.kind == "low":
        codes = np.frombuffer(block, np.uint8)
        return table(dtype.name)[codes].reshape(-1).astype(wide, copy=False)
    values = as_stored(block, dtype)
    if dtype.name == "bfloat16":
        values = to_float32(values, dtype.name, np.empty(values.size, np.float32))
    return values.astype(wide)


@cache
def table(name: str) -> Array:
    """Values of the 256 codes of a small float: float64 of shape (256,), or (256, 2) for pairs."""
    import numpy as np

    codes = np.arange(256, dtype=np.int64)
    if name == "float8_e8m0fnu":
        values: Array = np.ldexp(1.0, codes - 127)
        values[255] = np.nan
        return values
    if name == "float4_e2m1fn_x2":
        small = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
        nibble = np.concatenate([small, -small])
        return np.stack([nibble[codes & 15], nibble[codes >> 4]], axis=1)
    # Sign, exponent and mantissa as in IEEE 754, subnormals included.
    mantissa_bits, bias = _SMALL_FLOATS[name]
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes & 0x7F) >> mantissa_bits
    significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    magnitude = np.ldexp(
        significand.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits
    )
    values = np.where(codes & 0x80, -magnitude, magnitude)
    if name.endswith("fnuz"):
        values[0x80] = np.nan
    elif name == "float8_e4m3fn":
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[[0x7C, 0xFC]] = np.inf, -np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values
