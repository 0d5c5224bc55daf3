"""Values that are small in memory and without end on paper."""

from __future__ import annotations

import time

import pytest

from ema_ckpt.formats import sidecar
from ema_ckpt.formats.pickle import writer as picklewriter
from ema_ckpt.formats.pickle.limits import check_expanded_size


def _doubled(levels: int, leaf: object) -> object:
    value = leaf
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize("write", [check_expanded_size, picklewriter.dumps, sidecar.encode])
@pytest.mark.parametrize("leaf", [["ha"], ("ha",), {"ha": 1}, {"ha"}])
def test_what_is_shared_without_end_is_refused_at_once(write, leaf: object) -> None:
    begin = time.monotonic()
    with pytest.raises(TypeError, match="over and over"):
        write(_doubled(60, leaf))
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("write", [check_expanded_size, picklewriter.dumps, sidecar.encode])
def test_what_contains_itself_is_refused(write) -> None:
    value: list[object] = [1]
    value.append({"again": value})
    with pytest.raises(TypeError, match="contains itself"):
        write(value)


@pytest.mark.parametrize("write", [check_expanded_size, picklewriter.dumps, sidecar.encode])
@pytest.mark.parametrize("text", ["a" * 10**6, "\u00e4" * 10**6, b"a" * 10**6, bytearray(10**6)])
def test_one_text_that_is_referred_to_over_and_over_is_refused_at_once(write, text: object) -> None:
    begin = time.monotonic()
    with pytest.raises(TypeError, match="texts over and over"):
        write({"names": [[text] * 10] * 100})
    assert time.monotonic() - begin < 1


def test_a_huge_number_that_is_referred_to_over_and_over_is_refused() -> None:
    with pytest.raises(TypeError, match="texts over and over"):
        check_expanded_size([1 << 8 * 10**6] * 1000)


def test_long_texts_are_written_once_each_whatever_their_length() -> None:
    check_expanded_size(["a" * 10**8, "b" * 10**8, b"c" * 10**8])
    check_expanded_size([f"{number}" * 1000 for number in range(50_000)])


def test_what_nests_too_deeply_is_refused() -> None:
    value: object = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(TypeError, match="too deeply"):
        check_expanded_size(value)


def test_ordinary_sharing_is_written_out() -> None:
    assert sidecar.decode(sidecar.encode(_doubled(10, ["x"]))) == _doubled(10, ["x"])
