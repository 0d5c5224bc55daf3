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


def test_what_nests_too_deeply_is_refused() -> None:
    value: object = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(TypeError, match="too deeply"):
        check_expanded_size(value)


def test_ordinary_sharing_is_written_out() -> None:
    assert sidecar.decode(sidecar.encode(_doubled(10, ["x"]))) == _doubled(10, ["x"])
