"""Limit how large a value becomes once shared parts are written out wherever they are referred to.

A pickle of a few hundred bytes can refer to the same list twice, 64 levels deep: 2^64 places for a
writer that follows each reference. Counting them with a memo takes one visit a container.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

_CONTAINERS = (dict, list, tuple, set, frozenset)
_MAX_PLACES = 10_000_000
_MAX_DEPTH = 150  # what is written is read again, by functions that call themselves


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
    _check_depth(value)


def _check_depth(value: object) -> None:
    level = {id(value): value}
    for _ in range(_MAX_DEPTH):
        below: dict[int, object] = {}
        for item in level.values():
            below |= {id(part): part for part in _parts(item) if isinstance(part, _CONTAINERS)}
        level = below
        if not level:
            return
    raise TypeError(f"a value that nests more than {_MAX_DEPTH} levels deep cannot be written")


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return chain(value, value.values())
    return value if isinstance(value, _CONTAINERS) else ()


def _count_places(value: object, counts: dict[int, int]) -> int:
    if not isinstance(value, _CONTAINERS):
        return 1
    if id(value) not in counts:
        counts[id(value)] = _MAX_PLACES + 1  # met again before it has been counted: in itself
        counts[id(value)] = 1 + sum(_count_places(item, counts) for item in _parts(value))
    return counts[id(value)]
