"""Words that messages share."""

from __future__ import annotations

import pytest

from ema_ckpt.core.text import counted


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
