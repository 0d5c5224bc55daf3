"""The table of packages tells the pinned versions, and has no row that no test could have written."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.table import rows_of_page

HERE = Path(__file__).parent
PINNED = {
    package: version
    for file in ("constraints_automodel.txt", "constraints.txt")  # its own environment, and theirs
    for package, version in (line.split("==") for line in (HERE / file).read_text().split())
}


def test_versions_are_the_pinned_ones() -> None:
    assert {row[0]: row[1] for row in rows_of_page()}.items() <= PINNED.items()


def test_each_row_has_a_test_that_writes_it() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
    assert {row[0] for row in rows_of_page()} <= set(re.findall(r"\bRow\(\s*\"([\w-]+)\"", sources))
