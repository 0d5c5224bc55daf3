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
    started = time.process_time()
    with pytest.raises(SourceError) as caught:
        Collisions().check(keys)
    assert caught.value.code == "unsupported"
    assert time.process_time() - started < 2


def test_keys_that_occur_pass() -> None:
    collisions = Collisions()
    collisions.check([-1, -2, *range(10_000), *range(2**61, 2**61 + 10_000)])
    collisions.check([(i, j) for i in range(200) for j in range(-100, 100)])
    collisions.check([float(2**i) for i in range(1000)])
    collisions.check(["a", None, True, (0, 0)] * 5000)  # the same keys of many dicts
