"""How stored bytes become numbers: float32 tables of the values that each byte holds.

Codes are names of element types (`float8_e4m3fn`, `int8`), `float4_e2m1fn_x2` (two a byte, the low
half first), or `packed_int4` and the like: integers of 1, 2, 4 or 8 bits, the lowest bits first,
stored with half their range added, as compressed-tensors packs them into words.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ema_ckpt.core.dtypes import DTYPES_BY_NAME
from ema_ckpt.reading.decode import as_stored, table, to_float32

if TYPE_CHECKING:
    from ema_ckpt.reading.decode import Array

E8M0 = "float8_e8m0fnu"
_PACKED = "packed_int"
_PACKED_BITS = (1, 2, 4, 8)


def packed_integers(bits: int) -> str | None:
    """Name of the codes of integers of so many bits; None for those that straddle bytes."""
    return f"{_PACKED}{bits}" if bits in _PACKED_BITS else None


def values_per_byte(codes: str) -> int:
    """Number of values in one stored byte; only for codes of a byte or less."""
    if codes.startswith(_PACKED):
        return 8 // int(codes.removeprefix(_PACKED))
    return 2 if codes == "float4_e2m1fn_x2" else 1


def is_tabled(codes: str) -> bool:
    """Whether a table of the 256 bytes gives the values."""
    if codes.startswith(_PACKED):
        return True
    dtype = DTYPES_BY_NAME[codes]
    return dtype.itemsize == 1 and dtype.kind != "bool"


def decoded(raw: Array, codes: str) -> Array:
    """Values of stored bytes (uint8, the last axis contiguous) as float32, in a new array."""
    import numpy as np

    if not is_tabled(codes):
        dtype = DTYPES_BY_NAME[codes]
        stored = as_stored(raw.reshape(-1), dtype)
        out = np.empty(stored.size, np.float32)
        if dtype.name in ("bfloat16", "float16"):
            to_float32(stored, dtype.name, out)
        else:
            np.copyto(out, stored, casting="unsafe")
        return out.reshape(*raw.shape[:-1], -1)
    if codes == _E4M3 and raw.size >= _WORTH_PAIRS:
        return _widened_e4m3(raw)
    per_byte = values_per_byte(codes)
    if per_byte == 1 and raw.size % 2 == 0 and raw.size >= _WORTH_PAIRS:
        found = np.take(_pair_table(codes), raw.reshape(-1).view("<u2"))
    else:
        found = np.take(_byte_table(codes), raw.reshape(-1))
    values: Array = found.view(np.float32)
    return values.reshape(*raw.shape[:-1], raw.shape[-1] * per_byte)


_E4M3, _E4M3_NAN = "float8_e4m3fn", 0x7F
_WORTH_PAIRS = 1 << 16  # bytes for which a table of byte pairs, of half a megabyte, is worth it


def _widened_e4m3(raw: Array) -> Array:
    """Values of many `float8_e4m3fn`: the bits in the places of a float32, then the exponent.

    It takes half the time of a table. Subnormals come out right, as those of float32 are exact.
    """
    import numpy as np

    wide = raw.view(np.int8).astype(np.int32)
    np.left_shift(wide, 20, out=wide)
    np.bitwise_and(wide, np.array(0x87F00000, np.uint32).view(np.int32), out=wide)
    values: Array = wide.view(np.float32)
    np.multiply(values, np.float32(2.0**120), out=values)  # the biases are 7 and 127
    magnitude = np.bitwise_and(raw, 0x7F)
    if magnitude.max() == _E4M3_NAN:
        values[magnitude == _E4M3_NAN] = np.nan
    return values


@cache
def _byte_table(codes: str) -> Array:
    """The values of each byte, as one element."""
    import numpy as np

    if codes.startswith(_PACKED):
        bits = int(codes.removeprefix(_PACKED))
        shifts = np.arange(0, 8, bits)
        numbers = (np.arange(256)[:, None] >> shifts) & ((1 << bits) - 1)
        values = numbers - (1 << (bits - 1))
    elif codes in ("int8", "uint8"):
        values = np.arange(256).astype(np.uint8).view(codes)[:, None]
    else:
        values = table(codes).reshape(256, -1)
    single = np.ascontiguousarray(values, dtype=np.float32)
    return single.view(f"V{single.shape[1] * 4}").reshape(256)


@cache
def _pair_table(codes: str) -> Array:
    """The values of two bytes that follow one another, as one element."""
    import numpy as np

    single = _byte_table(codes).view(np.float32)
    low, high = np.arange(65536) & 255, np.arange(65536) >> 8
    return np.stack([single[low], single[high]], axis=1).view(np.complex64).reshape(-1)
