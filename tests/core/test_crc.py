"""CRC-32 of joined strings, against zlib."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from ema_ckpt.core.crc import combine_crcs, crc32


@given(st.binary(max_size=300), st.binary(max_size=5000))
def test_combine_is_the_crc_of_the_whole(first: bytes, second: bytes) -> None:
    joined = combine_crcs(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)


def test_a_second_part_longer_than_four_gigabytes() -> None:
    """It does not matter where the second part is cut."""
    nbytes, end = 5 * 2**30 + 13, b"the end"
    whole = combine_crcs(2, zlib.crc32(end), len(end))
    at_once = combine_crcs(1, whole, nbytes)
    assert at_once == combine_crcs(combine_crcs(1, 2, nbytes - len(end)), zlib.crc32(end), len(end))


@given(st.binary(max_size=2000))
def test_crc32_equals_zlib(data: bytes) -> None:
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data[5:], crc32(data[:5])) == zlib.crc32(data)
