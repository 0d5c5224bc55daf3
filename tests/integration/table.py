"""The table of packages and verbs in the documentation: a row holds what a test has shown, and nothing else.

`EMA_CKPT_RECORD=1 python -m pytest -m integration` writes the rows of the tests that pass anew.
"""

from __future__ import annotations

import fcntl
import os
import re
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "packages.md"
COLUMNS = ("inspect", "consolidate", "reshard", "convert", "diff", "verify", "loaded back")
NOTHING = "–"
_BEGIN, _END = "<!-- rows -->\n", "<!-- end of rows -->"


class Row:
    """One row, as a context manager: at its end the page must say exactly what was shown inside."""

    def __init__(self, package: str, checkpoint: str) -> None:
        self.package = package
        self.checkpoint = checkpoint
        self.cells = dict.fromkeys(COLUMNS, NOTHING)

    def shown(self, column: str, text: str = "yes") -> None:
        """Note that the test has just shown `column`."""
        assert column in self.cells
        self.cells[column] = text

    def __enter__(self) -> Row:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            return
        if os.environ.get("EMA_CKPT_RECORD"):
            record(self)
        assert str(self) in PAGE.read_text(encoding="utf-8"), f"the page must have the row\n{self}"

    def __str__(self) -> str:
        cells = (self.package, version(self.package), self.checkpoint, *self.cells.values())
        return f"| {' | '.join(cells)} |"


def rows_of_page() -> list[list[str]]:
    """The cells of each row of the page."""
    _, rows, _ = re.split(f"{_BEGIN}|{_END}", PAGE.read_text(encoding="utf-8"))
    body = rows.splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body if row]


def record(row: Row) -> None:
    """Put `row` into the page, in the place of the one of the same package and checkpoint."""
    with PAGE.open("r+", encoding="utf-8") as page:
        fcntl.flock(page, fcntl.LOCK_EX)
        before, rows, after = re.split(f"{_BEGIN}|{_END}", page.read())
        head, rule, *body = rows.splitlines()
        key = f"| {row.package} | "
        kept = [
            line
            for line in body
            if not (line.startswith(key) and f" | {row.checkpoint} | " in line)
        ]
        ordered = sorted([*kept, str(row)], key=str.lower)
        page.seek(0)
        page.truncate()
        page.write(before + _BEGIN + "\n".join([head, rule, *ordered]) + "\n" + _END + after)
