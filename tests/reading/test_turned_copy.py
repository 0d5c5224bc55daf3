"""Copies between orders of axes: each equals numpy's own assignment, whatever the order, sizes and element type."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ema_ckpt.reading.turned_copy import TurnedCopy

SHAPES = [
    (), (7,), (0, 3), (1, 5000), (5000, 1), (700, 300), (300, 1100), (449, 513), (2, 3), (3, 40, 900), (600, 2, 500),
    (40, 3, 3, 64), (1, 1000, 1, 200), (5, 900, 70),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_order_of_axes(shape: tuple[int, ...]) -> None:
    rng, copies = random.Random(str(shape)), TurnedCopy()
    for dtype in ("u1", "<u2", "<u4", "<u8", "<c16"):
        order = list(range(len(shape)))
        rng.shuffle(order)
        stored = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
        for axes in (order, order[::-1]):
            values = stored.transpose(axes)
            around = np.zeros((2, *values.shape, 3), dtype)  # a target with gaps
            for target in (np.zeros(values.shape, dtype), around[1, ..., 1]):
                copies.copy(target, values)
                assert np.array_equal(target, values)
        assert not around[0].any()


def test_rows_with_gaps_and_repeated_elements() -> None:
    copies = TurnedCopy()
    wide = np.arange(900 * 700, dtype="<u4").reshape(900, 700)
    values = wide[:, 11:500].T
    target = np.zeros(values.shape, "<u4")
    copies.copy(target, values)
    assert np.array_equal(target, values)
    same = np.broadcast_to(wide[:1, :], (900, 700)).T
    target = np.zeros(same.shape, "<u4")
    copies.copy(target, same)
    assert np.array_equal(target, same)
