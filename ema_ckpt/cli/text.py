"""Names from a checkpoint may hold lone surrogates and control characters: neither reaches a terminal."""

from __future__ import annotations

__all__ = ["clean"]


def clean(text: str) -> str:
    """`text` with everything that is not printable written as an escape."""
    safe = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in safe)
