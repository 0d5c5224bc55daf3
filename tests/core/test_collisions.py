"""Keys that were chosen to collide are refused before a dict of them takes hours."""

from __future__ import annotations

import time

import pytest

from ema_ckpt.core.collisions import Collisions
from ema_ckpt.core.errors import SourceError

PRIME = 2**61 - 1


@pytest.mark.parametrize(
    "keys",
    [
        [PRIME * i + 5 for i in range(1, 50_000)],
        [(PRIME * i, 0) for i in range(1, 50_000)],
        [("w", (0, PRIME * i)) for i in range(1, 50_000)],
        [-PRIME * i for i in range(1, 50_000)],
    ],
    ids=["numbers", "tuples", "nested", "negative"],
)
def test_chosen_keys_are_refused_at_once(keys: list[object]) -> None:
    for batch in (0, 1000, len(keys)):
        started = time.process_time()
        with pytest.raises(SourceError) as caught:
            noted(Collisions(), keys, batch)
        assert caught.value.code == "unsupported"
        assert time.process_time() - started < 2


def noted(collisions: Collisions, keys: list[object], batch: int) -> None:
    """Note keys one by one, or in batches."""
    if not batch:
        collisions.check(keys)
    for start in range(0, len(keys) if batch else 0, batch or 1):
        collisions.check_all(keys[start : start + batch])


def test_chosen_keys_among_honest_ones_are_refused() -> None:
    """Chunks of a large checkpoint, and then keys of one hash among as many others."""
    collisions = Collisions()
    noted(collisions, [(f"w{i}", (j, 0)) for i in range(300) for j in range(1000)], 1000)
    chosen = [("w", (PRIME * i, 0)) for i in range(1, 1000)]
    with pytest.raises(SourceError):
        noted(collisions, [*chosen, *[(f"v{i}", (0,)) for i in range(1000)]], 500)


@pytest.mark.parametrize("batch", [1000, 10**6])
def test_honest_keys_pass_in_batches(batch: int) -> None:
    """Spread ones, and those whose hashes lie in rows: whole numbers and powers of two."""
    noted(Collisions(), [(f"w{i}", (j, 0)) for i in range(100) for j in range(1000)], batch)
    noted(Collisions(), [65521 * i for i in range(50_000)], batch)
    noted(Collisions(), [float(2**i) for i in range(1000)], batch)


def test_keys_that_occur_pass() -> None:
    collisions = Collisions()
    collisions.check([-1, -2, *range(10_000), *range(2**61, 2**61 + 10_000)])
    collisions.check([(i, j) for i in range(200) for j in range(-100, 100)])
    collisions.check([float(2**i) for i in range(1000)])
    collisions.check(["a", None, True, (0, 0)] * 5000)  # the same keys of many dicts
