"""Keys that were chosen to collide: numbers and tuples have hashes that anybody can work out.

A dict of 60 000 such keys takes hours to build, and its file is small. Text and bytes have hashes
with a secret.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain, repeat
from operator import mod

from ema_ckpt.core.errors import SourceError

_MAX_KEYS = 100  # different ones of one hash; a few dozen numbers may have one by chance
_PRIME = 65521


class Collisions:
    """Counts different keys of equal hashes, before a dict or set is built of them."""

    def __init__(self) -> None:
        self._first: dict[int, object] = {}
        self._different: dict[int, set[object]] = {}
        # Keys of which only the remainders of the hashes were looked at, and how often each occurs:
        # a set of millions of hashes would take as much memory as the keys.
        self._noted: list[Sequence[Hashable]] = []
        self._count = 0
        self._remainders: Counter[int] = Counter()

    def check_all(self, keys: Sequence[Hashable]) -> None:
        """As `check`, for many at once: faster as long as their hashes are spread."""
        self._noted.append(keys)
        self._count += len(keys)
        remainders = list(map(mod, map(hash, keys), repeat(_PRIME)))
        self._remainders.update(remainders)
        most = max(map(self._remainders.__getitem__, remainders), default=0)
        if most > _MAX_KEYS + 2 * self._count // _PRIME:
            noted, self._noted = self._noted, []
            self.check(chain.from_iterable(noted))

    def check(self, keys: Iterable[Hashable]) -> None:
        """Note `keys`. Raises SourceError `unsupported` if a hundred have one hash."""
        first = self._first
        for key in keys:
            value = hash(key)
            if first.setdefault(value, key) != key:
                different = self._different.setdefault(value, set())
                different.add(key)
                if len(different) > _MAX_KEYS:
                    message = "its keys have equal hashes, as only keys made for that have"
                    raise SourceError("unsupported", message)
