"""The fast way to read `.metadata` gives what the interpreter gives, on whole files and damaged ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ema_ckpt import EmaCkptError
from ema_ckpt.formats.dcp.metadata import Metadata, parse

FIXTURES = Path(__file__).parents[3] / "fixtures"
METADATA = sorted(FIXTURES.glob("*/.metadata")) + sorted(FIXTURES.glob("*/*/.metadata"))
WHOLE = [(FIXTURES / "dcp" / name / ".metadata").read_bytes() for name in ("fsdp2-w4", "dtypes-w2")]


def outcome(data: bytes, *, fast: bool) -> Metadata | str:
    """What is read, or the code of the error."""
    try:
        return parse(data, "t", fast=fast)
    except EmaCkptError as error:
        return error.code


def check_same(data: bytes) -> None:
    fast, slow = outcome(data, fast=True), outcome(data, fast=False)
    assert fast == slow
    if isinstance(fast, Metadata) and isinstance(slow, Metadata):
        assert list(fast.entries) == list(slow.entries)


@pytest.mark.parametrize("path", METADATA, ids=lambda p: str(p.parent.relative_to(FIXTURES)))
def test_fixtures(path: Path) -> None:
    check_same(path.read_bytes())


@given(st.sampled_from(WHOLE), st.integers(0, 1 << 20), st.integers(1, 255))
def test_one_changed_byte(data: bytes, place: int, change: int) -> None:
    damaged = bytearray(data)
    damaged[place % len(data)] ^= change
    check_same(bytes(damaged))


@pytest.mark.parametrize("data", WHOLE)
@pytest.mark.parametrize("op", [b"\x85", b"\x86", b"\x87", b"t", b"("])
def test_a_tuple_of_another_length(data: bytes, op: bytes) -> None:
    """Every opcode that makes a tuple of numbers, exchanged for another that takes fewer or more."""
    places = [
        match.start(2) for match in re.finditer(rb"(K.)([\x85-\x87t])\x94\x85", data, re.DOTALL)
    ]
    assert len(places) > 20
    for place in places[::7]:
        check_same(data[:place] + op + data[place + 1 :])


def test_an_instance_that_is_built_twice() -> None:
    """Without its NEWOBJ, what follows is given to the instance before it."""
    data = WHOLE[0]
    opening = next(re.finditer(rb"ub(h.\)\x81)\x94}\x94\(h.h.K", data, re.DOTALL))
    check_same(data[: opening.start(1)] + data[opening.end(1) :])


@given(st.sampled_from(WHOLE), st.integers(0, 1 << 20), st.integers(0, 40), st.binary(max_size=8))
def test_a_replaced_run_of_bytes(data: bytes, place: int, length: int, new: bytes) -> None:
    place %= len(data)
    check_same(data[:place] + new + data[place + length :])
