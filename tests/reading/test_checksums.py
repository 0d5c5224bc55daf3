"""CRC-32s of ranges, joined and compared with those of whole storages; zlib is the oracle."""

from __future__ import annotations

import json
import random
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ema_ckpt.core.catalog import Payload
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.checksum_verifier import ChecksumVerifier, Interval, join_crcs, range_crc
from ema_ckpt.storage.files import LocalFiles


def intervals_of(data: bytes, cuts: set[int]) -> list[Interval]:
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [(a, b - a, zlib.crc32(data[a:b])) for a, b in pairwise(marks)]


@given(st.binary(max_size=200), st.sets(st.integers(0, 200), max_size=6), st.randoms())
def test_intervals_that_tile_give_the_crc_of_all(
    data: bytes, cuts: set[int], shuffle: random.Random
) -> None:
    intervals = intervals_of(data, cuts)
    shuffle.shuffle(intervals)
    assert join_crcs(intervals * 2, len(data)) == zlib.crc32(data)
    if intervals:
        assert join_crcs(intervals[1:], len(data)) is None


def test_a_range_is_read_through_a_block(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(1000)
    (tmp_path / "f").write_bytes(data)
    for block_nbytes in (1, 7, 999, 4096):
        block = memoryview(bytearray(block_nbytes))
        crc = range_crc(LocalFiles(tmp_path), "f", 3, 900, block)
        assert crc == zlib.crc32(data[3:903])
    assert range_crc(LocalFiles(tmp_path), "f", 3, 0, memoryview(bytearray(1))) == 0


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("way", ["whole", "tiles", "part", "unordered", "other process"])
def test_a_storage_is_compared_however_it_is_read(tmp_path: Path, way: str, damaged: bool) -> None:
    data = random.Random(1).randbytes(500)
    (tmp_path / "f").write_bytes(b"xx" + data)
    payload = Payload("f", 2, 500, (7, 1), crc=zlib.crc32(data) ^ damaged)
    verifier = ChecksumVerifier(LocalFiles(tmp_path), enabled=True)
    tiles = intervals_of(data, {100, 250})

    def read() -> None:
        if way == "whole":
            verifier.record("t", payload, 0, 500, zlib.crc32(data))
        elif way == "unordered":
            verifier.require_full_read("t", payload)
        elif way == "other process":
            other = ChecksumVerifier(LocalFiles(tmp_path), enabled=True)
            other.record("t", payload, *tiles[0])
            verifier.merge(json.loads(json.dumps(other.dump())))
        else:
            for interval in tiles if way == "tiles" else tiles[1:]:
                verifier.record("t", payload, *interval)
        verifier.finish()

    if not damaged:
        read()
        return
    with pytest.raises(SourceError) as caught:
        read()
    assert (caught.value.code, caught.value.tensor, caught.value.file) == ("checksum", "t", "f")


def test_nothing_is_compared_without_a_checksum_or_when_disabled(tmp_path: Path) -> None:
    source = LocalFiles(tmp_path)  # where no file is: nothing may be read
    bare, wrong = Payload("f", 0, 10), Payload("f", 0, 10, crc=1)
    for verifier, payload in (
        (ChecksumVerifier(source, enabled=True), bare),
        (ChecksumVerifier(source, enabled=False), wrong),
    ):
        verifier.record("t", payload, 0, 10, 2)
        verifier.record("t", payload, 0, 5, 2)
        verifier.require_full_read("t", payload)
        verifier.finish()
