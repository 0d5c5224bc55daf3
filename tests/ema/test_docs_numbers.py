"""The table of errors in docs/explanation/ema.md is what `tests/bench/ema_numerics.py` measures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench.ema_numerics import DECAYS, FORMS, PATHS, measure

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "ema.md"
ROW = re.compile(r"^\| (float32|float32, compensated|float16|bfloat16) \| (.+) \|$", re.MULTILINE)
ROWS = [(form, [tuple(map(float, re.findall(r"[\d.e+-]+", cell))) for cell in cells.split(" | ")])
        for form, cells in ROW.findall(PAGE.read_text(encoding="utf-8"))]  # fmt: skip


def test_the_page_has_every_row() -> None:
    assert [form for form, _ in ROWS] == list(FORMS) * len(PATHS)


@pytest.mark.thorough
@pytest.mark.parametrize("index", range(len(PATHS)), ids=[path.__name__ for path in PATHS])
@pytest.mark.parametrize("form", list(FORMS))
def test_the_table_of_errors(index: int, form: str) -> None:
    row = ROWS[index * len(FORMS) + list(FORMS).index(form)][1]
    for decay, (error, lost) in zip(DECAYS[::2], row[::2], strict=True):
        measured = measure(PATHS[index], decay, *FORMS[form])
        assert measured[0] == pytest.approx(error, rel=0.2)
        assert 100 * measured[1] == pytest.approx(lost, abs=2)
