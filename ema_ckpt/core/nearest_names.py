"""Names nearest to one that is not there, for "did you mean"."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

# To compare two names letter by letter takes up to some milliseconds.
_MAX_COMPARED = 100
_MAX_LETTERS = 120


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Sort `names` by similarity to `name`, the most similar first; ties keep their order.

    Of many, those that share most components with `name` are sorted, and the others follow as they
    are: the time is linear in the number of names.
    """
    from difflib import SequenceMatcher

    listed = list(names)
    matcher = SequenceMatcher(b=name[:_MAX_LETTERS], autojunk=False)
    parts = set(name.split("."))

    def difference(place: int) -> tuple[int, int]:
        other = listed[place]
        return -len(parts.intersection(other.split("."))), abs(len(other) - len(name))

    def distance(place: int) -> float:
        matcher.set_seq1(listed[place][:_MAX_LETTERS])
        return -matcher.ratio()

    places = range(len(listed))
    compared = (
        places if len(listed) <= _MAX_COMPARED else nsmallest(_MAX_COMPARED, places, difference)
    )
    first = sorted(sorted(compared), key=distance)
    rest = [listed[place] for place in sorted(set(places).difference(first))]
    return [listed[place] for place in first] + rest
