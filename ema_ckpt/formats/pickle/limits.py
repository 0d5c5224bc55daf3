"""How large a value becomes once what it shares is written out in every place that refers to it.

A pickle of a few hundred bytes can refer to the same list twice, 64 levels deep: 2^64 places for a
writer that follows each reference. Counting them with a memo takes one visit a container.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_MAX_PLACES = 10_000_000


def check_expanded_size(value: object) -> None:
    """Pass if writing `value` out in full takes at most ten million places.

    Raises:
        TypeError: it takes more, contains itself, or nests too deeply to be followed.
    """
    try:
        places = _places(value, {})
    except RecursionError:
        raise TypeError("a value that nests too deeply cannot be written") from None
    if places > _MAX_PLACES:
        raise TypeError(
            "a value that contains itself, or the same containers over and over, cannot be written"
        )


def _places(value: object, known: dict[int, int]) -> int:
    inside = _inside(value)
    if inside is None:
        return 1
    found = known.get(id(value))
    if found is None:
        known[id(value)] = (
            _MAX_PLACES + 1
        )  # what is met again before it has been counted contains itself
        found = known[id(value)] = 1 + sum(_places(item, known) for item in inside)
    return found


def _inside(value: object) -> Iterable[object] | None:
    if isinstance(value, dict):
        return _pairs(value)
    return value if isinstance(value, list | tuple | set | frozenset) else None


def _pairs(value: dict[object, object]) -> Iterator[object]:
    for key, item in value.items():
        yield key
        yield item
