"""One line for people about a choice that was made on their way: which step was opened, what was
recovered.

The library says it here; only a program that adds a listener shows it.
"""

from __future__ import annotations

from collections.abc import Callable

listeners: list[Callable[[str], None]] = []


def tell(text: str) -> None:
    """Pass a line to every listener."""
    for listener in listeners:
        listener(text)
