"""Names in a column: elided in the middle, so that no two of them look alike; words wrapped."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

_LEAST_WIDTH = 12
_TAIL_SHARES = (0.7, 0.5, 0.3, 0.85, 0.15)


def elide(names: Sequence[str], width: int) -> list[str]:
    """Shorten names to `width` characters; different names stay different, else none is cut.

    The end of a name says most, so it gets most of the room, if that tells all names apart.
    """
    room = max(width, _LEAST_WIDTH) - 1
    different = len(set(names))
    for share in _TAIL_SHARES:
        tail = int(room * share)
        cut = []
        for name in names:
            if len(name) > room + 1:
                name = f"{name[: room - tail]}…{name[len(name) - tail :]}"  # noqa: PLW2901
            cut.append(name)
        if len(set(cut)) == different:
            return cut
    return list(names)


def wrap(text: str, width: int, indent: str = "    ") -> str:
    """Break lines between words; further lines are indented."""
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
