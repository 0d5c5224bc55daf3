"""Weights of merged checkpoints against the papers' formulas, written out in exact or high-precision numbers."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import pytest

from ema_ckpt import EmaCkptError
from ema_ckpt.analysis.merge_weights import merge_weights

COUNTS = [1, 2, 3, 10, 97]


@pytest.mark.parametrize("count", COUNTS)
def test_a_decayed_run_of_unit_gradients_is_reproduced(count: int) -> None:
    """Theorem of WSM: the merge moves from the oldest by each later step times the decay's share at that step."""
    mpmath.mp.dps = 40
    decays = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + mpmath.cos(mpmath.pi * x)) / 2,
        "minus-sqrt": lambda x: 1 - mpmath.sqrt(x),
    }
    for scheme, share in decays.items():
        weights = merge_weights(scheme, count)
        assert sum(weights) == pytest.approx(1, abs=1e-12)
        for step in range(1, count):
            later = sum(weights[step:])  # what a gradient step before checkpoint `step` counts for
            assert later == pytest.approx(float(share(mpmath.mpf(step) / count)), abs=1e-12)


@pytest.mark.parametrize("count", COUNTS)
def test_an_exponential_average_is_its_recursion(count: int) -> None:
    decay = Fraction(9, 10)
    values = [Fraction(i * i + 1) for i in range(count)]
    average = values[0]
    for value in values[1:]:
        average = decay * average + (1 - decay) * value
    found = sum(w * float(v) for w, v in zip(merge_weights("ema:0.9", count), values, strict=True))
    assert found == pytest.approx(float(average), rel=1e-12)


def test_uniform_is_the_mean() -> None:
    assert merge_weights("uniform", 4) == [0.25] * 4


@pytest.mark.parametrize(
    "scheme", ["", "cubic", "ema", "ema:", "ema:1", "ema:-0.1", "ema:nan", "ema:x", "linear:2"]
)
def test_no_scheme(scheme: str) -> None:
    with pytest.raises(EmaCkptError, match="--scheme") as caught:
        merge_weights(scheme, 3)
    assert caught.value.code == "usage"
