"""CRC-32 of joined strings, against zlib; both the fast library's and the package's own arithmetic."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from ema_ckpt.core import crc


@given(st.binary(max_size=300), st.binary(max_size=5000))
def test_combine_is_the_crc_of_the_whole(first: bytes, second: bytes) -> None:
    joined = crc.combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)


@given(st.binary(max_size=300), st.binary(max_size=5000))
def test_own_arithmetic_equals_the_librarys(first: bytes, second: bytes) -> None:
    own = crc._multiply(crc._shift(len(second)), zlib.crc32(first)) ^ zlib.crc32(second)
    assert own == zlib.crc32(first + second)


def test_long_second_part() -> None:
    nbytes = 5 * 2**30 + 13
    once = crc._shift(nbytes)
    assert once == crc._multiply(crc._shift(nbytes - 7), crc._shift(7))
    assert crc.combine(1, 2, nbytes) == crc._multiply(once, 1) ^ 2


@given(st.binary(max_size=2000))
def test_crc32_equals_zlib(data: bytes) -> None:
    assert crc.crc32(data) == zlib.crc32(data)
    assert crc.crc32(data[5:], crc.crc32(data[:5])) == zlib.crc32(data)
