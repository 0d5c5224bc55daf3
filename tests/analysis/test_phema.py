"""Post-hoc EMA against numbers of the published solver, and against integrals and simulations of its own claims."""

from __future__ import annotations

import math

import pytest

from ema_ckpt import UsageError
from ema_ckpt.analysis.phema import (
    WIDEST,
    Profile,
    exponent_of,
    inner_product,
    mismatch,
    solve,
)

# What the solver published with EDM2 (github.com/NVlabs/edm2, training/phema.py) returns for these inputs.
EXPONENTS = {
    0.05: 16.972198602303447,
    0.07: 11.244939447857924,
    0.10: 6.937203937601809,
    0.20: 1.8262137798958404,
    0.28: 0.16934399376949866,
}
SNAPSHOTS = [Profile(4096 * i, width) for i in range(1, 9) for width in (0.05, 0.10)]
WEIGHTS = {
    0.07: [
        3.892319688417327e-12, -9.561291316207838e-11, 1.7380077549159738e-08, -1.1822569154039653e-07,
        2.2239824574642537e-06, -9.141160436822467e-06, 6.608857533668215e-05, -0.00021443138302308803,
        0.0008865974514001044, -0.002544484058667745, 0.007252178024206756, -0.01940544199435594,
        0.04239791331066466, -0.10864094698057342, 0.38708213040015615, 0.6931274147701697,
    ],
    0.15: [
        -2.3106212516331036e-05, 7.99239724427203e-05, -0.0005405309602212751, 0.001563065040830654,
        -0.003205000344061381, 0.008239137666580076, -0.01037294452347311, 0.02522871756519096,
        -0.02457425721327749, 0.0581988299118979, -0.04865177874856647, 0.11359105887650672,
        -0.08580813901246773, 0.1986636000652867, -0.173042792379138, 0.9406542162949862,
    ],
}  # fmt: skip


def width_of(exponent: float) -> float:
    """Relative standard deviation of the profile τ^γ (equation 123): ((γ+1) / ((γ+2)² (γ+3)))^½."""
    return math.sqrt((exponent + 1) / ((exponent + 2) ** 2 * (exponent + 3)))


@pytest.mark.parametrize("width", EXPONENTS)
def test_exponents_are_those_published(width: float) -> None:
    assert exponent_of(width) == pytest.approx(EXPONENTS[width], rel=1e-12)
    assert width_of(exponent_of(width)) == pytest.approx(width, rel=1e-14)


def test_the_widest_profile_is_flat() -> None:
    assert exponent_of(WIDEST) == pytest.approx(0, abs=1e-6)
    assert width_of(0) == pytest.approx(WIDEST)


@pytest.mark.parametrize("width", WEIGHTS)
def test_weights_are_those_published(width: float) -> None:
    found = solve(SNAPSHOTS, Profile(4096 * 8, width))
    assert found == pytest.approx(WEIGHTS[width], rel=1e-9, abs=1e-15)
    assert math.fsum(found) == pytest.approx(1, rel=1e-14)


def density(profile: Profile, at: float) -> float:
    gamma = profile.exponent
    return (gamma + 1) * at**gamma / profile.time ** (gamma + 1) if at <= profile.time else 0.0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "pair",
    [
        ((100, 0.05), (100, 0.10)),
        ((60, 0.10), (100, 0.05)),
        ((100, 0.05), (60, 0.10)),
        ((30, 0.2), (90, 0.25)),
    ],
)
def test_inner_products_are_the_integrals(
    pair: tuple[tuple[float, float], tuple[float, float]],
) -> None:
    """By Simpson's rule up to the earlier end, behind which one of the two is zero."""
    a, b = (Profile(*one) for one in pair)
    count, end = 20_000, min(a.time, b.time)
    values = [density(a, end * i / count) * density(b, end * i / count) for i in range(count + 1)]
    integral = (
        (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))
        * end
        / count
        / 3
    )
    assert inner_product(a, b) == pytest.approx(integral, rel=1e-9)


def test_a_snapshot_is_itself() -> None:
    found = solve(SNAPSHOTS, SNAPSHOTS[-1])
    assert found == pytest.approx([0] * 15 + [1], abs=1e-9)
    assert mismatch(SNAPSHOTS, found, SNAPSHOTS[-1]) == pytest.approx(0, abs=1e-7)


def test_no_other_combination_is_nearer() -> None:
    """Least squares, up to the scale that the sum of one asks for."""
    target = Profile(4096 * 8, 0.07)
    found = solve(SNAPSHOTS, target)
    best = mismatch(SNAPSHOTS, found, target)
    assert best < 0.02
    for index in range(0, 15, 2):
        for step in (-0.05, 0.05):
            moved = [w + step * (i == index) - step * (i == 15) for i, w in enumerate(found)]
            assert mismatch(SNAPSHOTS, moved, target) > best


def test_what_is_no_profile_is_refused() -> None:
    for bad in ((100, 0.0), (100, 0.3), (0, 0.1), (-5, 0.1), (math.inf, 0.1), (math.nan, 0.1)):
        with pytest.raises(UsageError):
            Profile(*bad)
    with pytest.raises(UsageError, match="snapshots 1 and 3 are both of step 8"):
        solve([Profile(8, 0.1), Profile(9, 0.1), Profile(8, 0.1)], Profile(9, 0.1))
