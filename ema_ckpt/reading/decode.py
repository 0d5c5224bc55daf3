"""The values of 8-bit floating-point codes (and of two 4-bit ones in a byte), as tables in float64.

Bit layouts: OCP 8-bit Floating Point Specification 1.0 (e4m3fn, e5m2), OCP Microscaling Formats 1.0
(e8m0fnu, e2m1), and arXiv:2206.02915 for the `fnuz` forms, whose only special code is 0x80 = NaN.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Bits of the mantissa, bias of the exponent.
_SMALL_FLOATS = {
    "float8_e4m3fn": (3, 7),
    "float8_e5m2": (2, 15),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2fnuz": (2, 16),
}


@cache
def table(name: str) -> NDArray[Any]:
    """The value of every code of the type that torch calls `name`: float64 of shape (256,), or
    (256, 2) for pairs.
    """
    import numpy as np

    codes = np.arange(256, dtype=np.int64)
    if name == "float8_e8m0fnu":
        values = np.ldexp(1.0, codes - 127)
        values[255] = np.nan
        return values
    if name == "float4_e2m1fn_x2":
        small = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
        nibble = np.concatenate([small, -small])
        return np.stack([nibble[codes & 15], nibble[codes >> 4]], axis=1)
    mantissa_bits, bias = _SMALL_FLOATS[name]
    values = _decode(codes, mantissa_bits, bias)
    if name.endswith("fnuz"):
        values[0x80] = np.nan
    elif name == "float8_e4m3fn":
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[[0x7C, 0xFC]] = np.inf, -np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values


def _decode(codes: NDArray[Any], mantissa_bits: int, bias: int) -> NDArray[Any]:
    """Sign, exponent and mantissa as in IEEE 754, subnormals included and nothing special."""
    import numpy as np

    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes & 0x7F) >> mantissa_bits
    significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    magnitude = np.ldexp(
        significand.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits
    )
    signed: NDArray[Any] = np.where(codes & 0x80, -magnitude, magnitude)
    return signed
