"""Limit how large a value becomes once shared parts are written out wherever they are referred to.

A pickle of a few hundred bytes can refer to the same list twice, 64 levels deep: 2^64 places for a
writer that follows each reference. Counting them with a memo takes one visit a container.
"""

from __future__ import annotations

_MAX_PLACES = 10_000_000


def check_expanded_size(value: object) -> None:
    """Pass if writing `value` out in full takes at most ten million places.

    Raises:
        TypeError: it takes more, contains itself, or nests too deeply to be followed.
    """
    try:
        places = _count_places(value, {})
    except RecursionError:
        raise TypeError("a value that nests too deeply cannot be written") from None
    if places > _MAX_PLACES:
        raise TypeError(
            "a value that contains itself, or the same containers over and over, cannot be written"
        )


def _count_places(value: object, counts: dict[int, int]) -> int:
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return 1
    if id(value) not in counts:
        counts[id(value)] = _MAX_PLACES + 1  # met again before it has been counted: in itself
        places = 1 + sum(_count_places(item, counts) for item in value)
        if isinstance(value, dict):
            places += sum(_count_places(item, counts) for item in value.values())
        counts[id(value)] = places
    return counts[id(value)]
