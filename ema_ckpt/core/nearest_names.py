"""Names nearest to one that is not there, for "did you mean"."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Sort `names` by similarity to `name`, the most similar first; ties keep their order."""
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(b=name, autojunk=False)

    def distance(other: str) -> float:
        matcher.set_seq1(other)
        return -matcher.ratio()

    return sorted(names, key=distance)
