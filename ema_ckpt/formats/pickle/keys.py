"""Refuse keys of pickled dicts and sets that take long to hash or to tell apart."""

from __future__ import annotations

from itertools import chain

from ema_ckpt.core.collisions import Collisions
from ema_ckpt.core.errors import SourceError

_MAX_INNER = 64  # items of a tuple in a key
_WITH_KNOWN_HASHES = (int, float, complex, tuple)
_MERSENNE = (1 << 61) - 1  # Python's hashes of numbers are remainders by this prime


def check_keys(collisions: Collisions, keys: list[object]) -> None:
    """Refuse keys of a dict, or items of a set, that take long to hash or to tell apart.

    `collisions` counts them over the whole pickle. Raises SourceError `unsupported`.
    """
    kinds = set(map(type, keys))
    if kinds <= {str}:
        return
    if any(issubclass(kind, tuple) for kind in kinds):
        _check_nesting([key for key in keys if isinstance(key, tuple)])
    if any(issubclass(kind, _WITH_KNOWN_HASHES) for kind in kinds):
        collisions.check_all([key for key in keys if _has_known_hash(key)])


def _check_nesting(keys: list[tuple[object, ...]]) -> None:
    # A tuple of tuples can be small here and take forever to hash: each level may repeat the
    # one below.
    inner = [part for part in chain.from_iterable(keys) if isinstance(part, tuple)]
    innermost = set(map(type, chain.from_iterable(inner)))
    too_deep = any(issubclass(kind, tuple) for kind in innermost)
    if too_deep or max(map(len, inner), default=0) > _MAX_INNER:
        message = "a pickled dict or set has a deeply nested tuple as its key"
        raise SourceError("unsupported", message)


def _has_known_hash(key: object) -> bool:
    """Whether many keys of one hash can be made of such keys: not of text, nor of small numbers."""
    if isinstance(key, int):
        return abs(key) >= _MERSENNE
    return isinstance(key, _WITH_KNOWN_HASHES)
