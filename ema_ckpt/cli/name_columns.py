"""Names in a column: elided in the middle, so that no two of them look alike; words wrapped."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

_LEAST_WIDTH = 12
_TAIL_SHARES = (0.7, 0.5, 0.3, 0.85, 0.15)


def elide(names: Sequence[str], width: int) -> list[str]:
    """Shorten names to `width` characters; different names stay different, else none is cut.

    They are cut between components where that tells all apart, else inside them. The end of a name
    says most, so it gets most of the room.
    """
    room = max(width, _LEAST_WIDTH) - 1
    different = len(set(names))
    cut = [_cut_at_dots(name, room) for name in names]
    if len(set(cut)) == different:
        return cut
    for share in _TAIL_SHARES:
        cut = [_cut(name, room, int(room * share)) for name in names]
        if len(set(cut)) == different:
            return cut
    return list(names)


def _cut_at_dots(name: str, room: int) -> str:
    """Keep the last components that fit, then the first; cut inside one that is too long alone."""
    parts = name.split(".")
    if len(name) <= room + 1:
        return name
    if len(parts[-1]) > room:
        return _cut(name, room, int(room * _TAIL_SHARES[0]))
    tail = parts.pop()
    while len(parts[-1]) + 1 + len(tail) <= room:
        tail = f"{parts.pop()}.{tail}"
    head = ""
    while len(head) + len(parts[0]) + 1 + len(tail) <= room:
        head += f"{parts.pop(0)}."
    return f"{head}…{tail}"


def _cut(name: str, room: int, tail: int) -> str:
    return name if len(name) <= room + 1 else f"{name[: room - tail]}…{name[len(name) - tail :]}"


def wrap(text: str, width: int, indent: str = "    ") -> str:
    """Break lines between words; further lines are indented."""
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
