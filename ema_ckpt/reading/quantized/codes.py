"""How stored bytes become numbers: float32 tables of the values that each byte holds.

Codes are names of element types (`float8_e4m3fn`, `int8`), `float4_e2m1fn_x2` (two a byte, the low
half first), or `packed_int4` and the like: integers of 1, 2, 4 or 8 bits, the lowest bits first,
stored with half their range added, as compressed-tensors packs them into words.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ema_ckpt.core.dtypes import DTYPES_BY_NAME
from ema_ckpt.reading.decode import as_stored, table, to_float32
from ema_ckpt.runtime.page_buffer import buffer

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


class Memory:
    """Arrays that are used again, by name. For one thread."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def array(self, name: str, numel: int, dtype: Any) -> Array:
        """Return an array of a name, valid until the next of that name, with any content."""
        import numpy as np

        kind = np.dtype(dtype)
        found = self._arrays.get(name)
        if found is None or found.nbytes < numel * kind.itemsize:
            found = np.frombuffer(buffer(numel * kind.itemsize), np.uint8)
            self._arrays[name] = found
        return found[: numel * kind.itemsize].view(kind)


def decoded(raw: Array, codes: str, memory: Memory | None = None, name: str = "values") -> Array:
    """Values of stored bytes (uint8, the last axis contiguous) as float32.

    They are in the array `name` of `memory`, or a new one.
    """
    import numpy as np

    memory = memory or Memory()
    if not is_tabled(codes):
        dtype = DTYPES_BY_NAME[codes]
        stored = as_stored(raw.reshape(-1), dtype)
        out = memory.array(name, stored.size, np.float32)
        if dtype.name in ("bfloat16", "float16"):
            to_float32(stored, dtype.name, out)
        else:
            np.copyto(out, stored, casting="unsafe")
        return out.reshape(*raw.shape[:-1], -1)
    per_byte = values_per_byte(codes)
    out = memory.array(name, raw.size * per_byte, np.float32)
    flat = np.ascontiguousarray(raw).reshape(-1)
    if codes == _E4M3 and raw.size >= _WORTH_PAIRS:
        _widen_e4m3(flat, out, memory)
    elif codes == _INT4:
        _unpack_int4(flat, out, memory)
    elif per_byte == 1 and raw.size % 2 == 0 and raw.size >= _WORTH_PAIRS:
        look_up(_pair_table(codes), flat.view("<u2"), out.view(np.complex64), memory)
    else:
        bytewise = _byte_table(codes)
        look_up(bytewise, flat, out.view(bytewise.dtype), memory)
    return out.reshape(*raw.shape[:-1], raw.shape[-1] * per_byte)


def look_up(table: Array, positions: Array, out: Array, memory: Memory) -> None:
    """Fill `out` with the elements of a table at positions that are all inside it."""
    import numpy as np

    index = positions
    if positions.dtype != np.intp:
        index = memory.array("index", positions.size, np.intp)
        np.copyto(index, positions)
    # Otherwise numpy makes an array of its own, whose pages the kernel has to clear.
    np.take(table, index, out=out, mode="wrap")


_E4M3, _E4M3_NAN = "float8_e4m3fn", 0x7F
_INT4 = f"{_PACKED}4"
_WORTH_PAIRS = 1 << 16  # bytes for which a table of byte pairs, of half a megabyte, is worth it


def _widen_e4m3(raw: Array, out: Array, memory: Memory) -> None:
    """Values of many `float8_e4m3fn`: the bits in the places of a float32, then the exponent.

    It takes half the time of a table. Subnormals come out right, as those of float32 are exact.
    """
    import numpy as np

    wide = out.view(np.int32)
    np.copyto(wide, raw.view(np.int8))
    np.left_shift(wide, 20, out=wide)
    np.bitwise_and(wide, np.array(0x87F00000, np.uint32).view(np.int32), out=wide)
    np.multiply(out, np.float32(2.0**120), out=out)  # the biases are 7 and 127
    magnitude = memory.array("magnitude", raw.size, np.uint8)
    np.bitwise_and(raw, 0x7F, out=magnitude)
    if magnitude.max() == _E4M3_NAN:
        out[magnitude == _E4M3_NAN] = np.nan


def _unpack_int4(raw: Array, out: Array, memory: Memory) -> None:
    """Values of packed integers of four bits: the halves of each byte apart, then made floats.

    It takes half the time of a table.
    """
    import numpy as np

    wide = memory.array("wide", raw.size, np.uint32)
    high = memory.array("high", raw.size, np.uint32)
    np.copyto(wide, raw)
    np.left_shift(wide, 12, out=high)
    np.bitwise_or(wide, high, out=wide)
    np.bitwise_and(wide, 0x000F000F, out=wide)
    np.copyto(out, wide.view(np.uint16))
    np.subtract(out, np.float32(8), out=out)


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
