"""Limit how large a value becomes once shared parts are written out wherever they are referred to.

A pickle of a few hundred bytes can refer to the same list twice, 64 levels deep: 2^64 places for a
writer that follows each reference. One long text it can refer to a thousand times. Counting with a
memo takes one visit a container.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

_CONTAINERS = (dict, list, tuple, set, frozenset)
_MAX_PLACES = 10_000_000
_BYTES_A_PLACE = 16  # of a text, of bytes or of an integer
MAX_REPEATED_BYTES = _MAX_PLACES * _BYTES_A_PLACE
_ENDLESS = 1 << 200
_MAX_DEPTH = 150  # what is written is read again, by functions that call themselves


def check_expanded_size(value: object) -> None:
    """Pass if writing `value` out in full takes at most ten million places.

    Texts, bytes and integers take one for each 16 bytes of theirs. What each of them takes once is
    allowed besides: only what is written more often than it was read makes a file grow.

    Raises:
        TypeError: it takes more, contains itself, or nests too deeply to be followed.
    """
    once: dict[int, int] = {}
    try:
        places = _count_places(value, {}, once)
    except RecursionError:
        raise TypeError("a value that nests too deeply cannot be written") from None
    if places > _MAX_PLACES + sum(once.values()):
        raise TypeError(
            "a value that contains itself, or the same containers or texts over and over, cannot be"
            f" written: at most {_MAX_PLACES} containers and values, 16 bytes of a text being one"
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


def bytes_of(value: object) -> int:
    """About how many bytes a text, bytes or an integer takes; 0 for anything else."""
    if isinstance(value, str):
        return len(value) if value.isascii() else 4 * len(value)
    if isinstance(value, bytes | bytearray):
        return len(value)
    return value.bit_length() // 8 if isinstance(value, int) else 0


def _count_places(value: object, counts: dict[int, int], once: dict[int, int]) -> int:
    """Count the places of a value, and note in `once` what is more than one place by itself."""
    if not isinstance(value, _CONTAINERS):
        more = bytes_of(value) // _BYTES_A_PLACE
        if more:
            once[id(value)] = more
        return 1 + more
    if id(value) not in counts:
        counts[id(value)] = _ENDLESS  # met again before it has been counted: in itself
        parts = (_count_places(item, counts, once) for item in _parts(value))
        counts[id(value)] = 1 + sum(parts)
    return counts[id(value)]
