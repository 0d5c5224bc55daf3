"""Limit what a pickle makes of values that it refers to over and over.

A reference takes two bytes, and a list of a megabyte that is copied, hashed or looked through at
each of them takes forever, or more memory than any machine has. What a file holds in bytes of its
own may be looked at a few times; more is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from ema_ckpt.core.collisions import Collisions
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.pickle import keys as keys_of_dicts

_ARGS_DEPTH = 3  # pairs in a list that is an argument, and keys in these
_KEY_DEPTH = 1
_STATE_DEPTH = 1
_PER_BYTE = 2
_MORE = 1 << 16
_LONG = 256  # characters: shorter texts are shared everywhere, and cost little
_ENTRY = 4  # a copied dict or set takes as much memory as so long a list
_SEQUENCES = (tuple, list)
_HASHED = (dict, set, frozenset)
_TEXTS = (str, bytes, bytearray)
_COSTLY_KEYS = (tuple, frozenset, int)


class Effort:
    """What the rest of a pickle may cost, in items; eight characters of a text count as one."""

    def __init__(self, nbytes: int) -> None:
        self._spare = _PER_BYTE * nbytes + _MORE
        self._collisions = Collisions()

    def check_args(self, args: tuple[object, ...]) -> None:
        """Count the arguments of a call, which may copy them. Raises SourceError `unsupported`."""
        self._spend((args,), _ARGS_DEPTH, texts=True)

    def check_state(self, state: object) -> None:
        """Count the state of an instance. Raises SourceError `unsupported`."""
        self._spend((state,), _STATE_DEPTH, texts=True)

    def check_keys(self, keys: list[object]) -> None:
        """Count keys before they are hashed. Raises as `keys.check_keys`, and as `check_args`."""
        if any(issubclass(kind, _COSTLY_KEYS) for kind in set(map(type, keys))):
            self._spend(keys, _KEY_DEPTH, texts=False)
        keys_of_dicts.check_keys(self._collisions, keys)

    def _spend(self, values: Iterable[object], depth: int, *, texts: bool) -> None:
        for value in values:
            if isinstance(value, _SEQUENCES):
                inner: Iterable[object] = value
                self._take(len(value))
            elif isinstance(value, _HASHED):
                inner = chain(value, value.values()) if isinstance(value, dict) else value
                self._take(_ENTRY * len(value))
            else:
                self._spend_leaf(value, texts)
                continue
            if depth and set(map(type, value)) == {int} and not isinstance(value, dict):
                self._take(sum(map(int.bit_length, value)) // 64)
            elif depth:
                self._spend(inner, depth - 1, texts=texts)

    def _spend_leaf(self, value: object, texts: bool) -> None:
        if isinstance(value, int):
            self._take(value.bit_length() // 64)
        elif texts and isinstance(value, _TEXTS) and len(value) >= _LONG:
            self._take(len(value) // 8)

    def _take(self, cost: int) -> None:
        self._spare -= cost
        if self._spare < 0:
            raise SourceError("unsupported", "the same values are referred to over and over")
