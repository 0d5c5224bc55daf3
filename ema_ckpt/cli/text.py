"""Text on a terminal: no control characters or lone surrogates out of a checkpoint, no styles with `NO_COLOR`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["clean", "terminal"]


def terminal(*, stderr: bool = False) -> Console:
    """What to draw on. `NO_COLOR` switches bold and dim off as well."""
    from rich.console import Console

    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=stderr, soft_wrap=True, highlight=False, color_system=colours)


def clean(text: str) -> str:
    """`text` with everything that is not printable written as an escape."""
    safe = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in safe)
