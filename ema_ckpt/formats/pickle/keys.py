"""Refuse keys of pickled dicts and sets that take long to hash or to tell apart."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from ema_ckpt.core.collisions import Collisions
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.pickle.safe_globals import Replacement
from ema_ckpt.formats.pickle.typed_values import TypedText

_MAX_INNER = 64  # items of a tuple in a key
_NESTING = (tuple, frozenset)
_PLAIN = (str, bytes, int, float, type(None))
_UNFORESEEN = (str, bytes, Replacement)  # nobody can choose their hashes
Nesting = tuple[object, ...] | frozenset[object]
_MERSENNE = (1 << 61) - 1  # Python's hashes of numbers are remainders by this prime


def check_keys(collisions: Collisions, keys: list[object]) -> None:
    """Refuse keys of a dict, or items of a set, that take long to hash or to tell apart.

    `collisions` counts them over the whole pickle. Raises SourceError `unsupported`, and
    `name-collision` for a device, a layout or a path that reads as another key.
    """
    kinds = set(map(type, keys))
    if kinds <= {str}:
        return
    _check_texts(keys)
    if any(issubclass(kind, _NESTING) for kind in kinds):
        _check_nesting([key for key in keys if isinstance(key, _NESTING)])
    if not all(issubclass(kind, _UNFORESEEN) for kind in kinds):
        collisions.check_all([key for key in keys if _has_known_hash(key)])


def repeated_key(keys: Iterable[object]) -> Exception:
    """Return the error of a dict that is given one of `keys` twice, which no dict is.

    A changed bit makes one name another. Tensors are keys by identity, which is not kept here.
    """
    if all(isinstance(key, _PLAIN) for key in keys):
        return ValueError("a dict is given one key twice")
    return SourceError("unsupported", "two keys of a dict, such as tensors, cannot be told apart")


def _check_texts(keys: list[object]) -> None:
    # A device is equal to its text here, which it is not in torch.
    typed = {key for key in keys if isinstance(key, TypedText)}
    texts = [key for key in keys if isinstance(key, str) and key in typed] if typed else []
    if len(texts) > len(typed):
        raise SourceError("name-collision", "a dict has two keys that read the same")


def _check_nesting(keys: list[Nesting]) -> None:
    # A tuple of tuples can be small here and take forever to hash, or to compare: each level may
    # repeat the one below.
    parts = chain.from_iterable(keys)
    inner: list[Nesting] = [part for part in parts if isinstance(part, _NESTING)]
    innermost = set(map(type, chain.from_iterable(inner)))
    too_deep = any(issubclass(kind, _NESTING) for kind in innermost)
    if too_deep or max(map(len, inner), default=0) > _MAX_INNER:
        message = "a pickled dict or set has a deeply nested tuple or set as its key"
        raise SourceError("unsupported", message)


def _has_known_hash(key: object) -> bool:
    """Whether many keys of one hash can be made of such keys: not of text, nor of small numbers."""
    if isinstance(key, int):
        return key.bit_length() >= _MERSENNE.bit_length()
    return not isinstance(key, _UNFORESEEN)
