"""Text on a terminal: no control characters or lone surrogates out of a checkpoint, no styles with
`NO_COLOR`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

_UNLIMITED_COLUMNS = 100_000


def terminal(*, stderr: bool = False) -> Console:
    """What to draw on. `NO_COLOR` switches bold and dim off as well; a pipe or file gets names
    uncut.
    """
    from rich.console import Console

    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    width = None if (sys.stderr if stderr else sys.stdout).isatty() else _UNLIMITED_COLUMNS
    return Console(
        stderr=stderr, soft_wrap=True, highlight=False, color_system=colours, width=width
    )


def clean(text: str) -> str:
    """`text` with everything that is not printable written as an escape."""
    safe = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in safe
    )
