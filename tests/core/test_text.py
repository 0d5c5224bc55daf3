"""Sizes, counts, names and ranks as people write and read them."""

from __future__ import annotations

import pytest

from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.text import counted, format_ranks, format_size, parse_size, shown


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("5GB", 5_000_000_000),
        ("5 gb", 5_000_000_000),
        ("1.5kB", 1500),
        ("16MiB", 16 * 1024**2),
        ("2GiB", 2 * 1024**3),
        ("3KiB", 3072),
        ("2TB", 2 * 10**12),
        ("7B", 7),
        (4096, 4096),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GB", "-5", "0", "0.1", "1..5MB", "5.", "5XB", "1e9", "0x10", "٣", "inf", "1,5MB", -1],
)
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(UsageError, match="is not a size") as caught:
        parse_size(text)
    assert caught.value.code == "usage"


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (0, 999, 1000, 999_600, 3_960_000_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1 MB",
        "3.96 GB",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 tensors"), (1, "1 tensor"), (2, "2 tensors"), (1200, "1,200 tensors")],
)
def test_one_is_no_plural(count: int, text: str) -> None:
    assert counted(count, "tensor") == text


def test_a_plural_of_its_own() -> None:
    assert [counted(n, "shape differs", "shapes differ") for n in (1, 2)] == [
        "1 shape differs",
        "2 shapes differ",
    ]


def test_ten_names_are_listed() -> None:
    assert shown(["a"]) == "'a'"
    assert shown(list("abcdefghij")).count("'") == 20
    assert shown(list("abcdefghijkl")).endswith("'j' and 2 more")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([1], "rank 1"), ([3, 1, 2], "ranks 1–3"), ([0, 2, 3, 5], "ranks 0, 2–3, 5")],
)
def test_ranks_in_a_row_are_a_span(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text
