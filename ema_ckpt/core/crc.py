"""CRC-32 of byte strings, and of joined ones from the CRC-32s of their parts.

zlib-ng computes it an order of magnitude faster than the zlib of most systems, by carry-less multiplication;
it is a dependency of this package, and where it cannot be built the standard library's takes its place.

A CRC is a polynomial over GF(2) modulo P; appending n bytes multiplies it by x^(8n). Multiplication and the
table of x^(2^k) follow zlib's `crc32_combine` (https://github.com/madler/zlib, crc32.c), in reflected bit order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zlib import crc32

    def combine(first: int, second: int, second_nbytes: int) -> int:
        """CRC-32 of A + B, from the CRC-32 of A, that of B and the length of B in bytes."""
        ...
else:
    try:
        from zlib_ng.zlib_ng import crc32
        from zlib_ng.zlib_ng import crc32_combine as combine
    except ImportError:
        from zlib import crc32

        def combine(first: int, second: int, second_nbytes: int) -> int:
            """CRC-32 of A + B, from the CRC-32 of A, that of B and the length of B in bytes."""
            return _multiply(_shift(second_nbytes), first) ^ second


__all__ = ["combine", "crc32"]

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def _multiply(a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    product = 0
    bit = _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=64)
def _squared(power: int) -> int:
    """x to the 2**power."""
    return 1 << 30 if power == 0 else _multiply(_squared(power - 1), _squared(power - 1))


@lru_cache(maxsize=1024)
def _shift(nbytes: int) -> int:
    """x to the 8 * nbytes: what appending that many zero bytes multiplies by."""
    result, power = _ONE, 3
    while nbytes:
        if nbytes & 1:
            result = _multiply(result, _squared(power))
        nbytes >>= 1
        power += 1
    return result
