"""Block sizes: from shapes where only one size can be meant, else from what is configured."""

from __future__ import annotations

import pytest

from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.quantized.block_sizes import aligned, block_sizes

Ints = tuple[int, ...]


@pytest.mark.parametrize(
    ("scale", "shape", "expected"),
    [
        ((), (4, 6), (1, 1)),
        ((1,), (4, 6), (1, 1)),
        ((4,), (4, 6), (4, 1)),
        ((2, 4), (2, 4, 6), (2, 4, 1)),
        ((4, 3), (4, 6), (4, 3)),
        ((4,), (4,), (4,)),
    ],
)
def test_scales_are_aligned(scale: Ints, shape: Ints, expected: Ints) -> None:
    assert aligned(scale, shape) == expected


@pytest.mark.parametrize(("scale", "shape"), [((3,), (4, 6)), ((2, 2, 2), (4, 6)), ((6,), (4, 6))])
def test_scales_that_do_not_fit(scale: Ints, shape: Ints) -> None:
    with pytest.raises(SourceError, match="do not fit"):
        aligned(scale, shape)


@pytest.mark.parametrize(
    ("scale", "shape", "configured", "may_be_cut", "expected"),
    [
        ((1, 1), (40, 96), None, True, (40, 96)),
        ((40, 1), (40, 96), None, False, (1, 96)),
        ((40, 3), (40, 96), None, False, (1, 32)),
        ((2, 3), (256, 384), None, True, (128, 128)),
        ((2, 3), (255, 383), None, True, (128, 128)),
        ((3, 5), (40, 72), (16, 16), True, (16, 16)),
        ((2, 3), (200, 300), (100, 128), True, (100, 128)),
        ((2, 40, 3), (2, 40, 96), (32,), False, (1, 1, 32)),
        ((1, 2), (100, 256), (128, 128), True, (100, 128)),
    ],
)
def test_sizes(
    scale: Ints, shape: Ints, configured: Ints | None, may_be_cut: bool, expected: Ints
) -> None:
    assert block_sizes(scale, shape, configured, may_be_cut=may_be_cut) == expected


@pytest.mark.parametrize(
    ("scale", "shape", "configured", "may_be_cut", "message"),
    [
        ((2, 1), (200, 8), None, True, "blocks of 100 or 128"),
        ((40, 3), (40, 97), None, False, "do not fit"),
        ((40, 3), (40, 96), (48,), False, "do not fit"),
        ((2, 1), (200, 8), (64, 8), True, "do not fit"),
        ((50, 1), (40, 8), None, True, "do not fit"),
        ((7, 1), (9, 8), None, True, "do not fit"),
    ],
)
def test_sizes_that_follow_from_nothing(
    scale: Ints, shape: Ints, configured: Ints | None, may_be_cut: bool, message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        block_sizes(scale, shape, configured, may_be_cut=may_be_cut)
