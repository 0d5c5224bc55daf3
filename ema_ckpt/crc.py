"""CRC-32 of joined byte strings, from the CRC-32s of the parts.

A CRC is a polynomial over GF(2) modulo P; appending n bytes multiplies it by x^(8n). Multiplication and the
table of x^(2^k) follow zlib's `crc32_combine` (https://github.com/madler/zlib, crc32.c), in reflected bit order.
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["combine"]

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


def combine(first: int, second: int, second_nbytes: int) -> int:
    """CRC-32 of A + B, from the CRC-32 of A, that of B and the length of B in bytes."""
    return _multiply(_shift(second_nbytes), first) ^ second
