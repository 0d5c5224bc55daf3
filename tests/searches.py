"""How many examples a search by hypothesis takes."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """`count`, and in the loop while writing code the fifth of it that the profile `quick` takes elsewhere."""
    return count * settings.default.max_examples // 100
