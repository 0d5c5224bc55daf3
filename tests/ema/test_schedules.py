from __future__ import annotations

import json
from fractions import Fraction
from math import nan, sqrt
from typing import Any

import numpy as np
import pytest
import torch

from ema_ckpt.core.errors import UsageError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.schedules import (
    Constant,
    HalfLife,
    HalfLifeFraction,
    PowerFunction,
    Warmup,
    Window,
    as_schedule,
    gamma_of,
    to_json,
)


def test_a_number_is_a_constant() -> None:
    assert as_schedule(0.9999) == Constant(0.9999)
    assert [as_schedule(0.5).beta(i) for i in (1, 2, 100_000)] == [0.5] * 3


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), "0.9", None, True])
def test_not_a_decay(bad: object) -> None:
    with pytest.raises(UsageError):
        as_schedule(bad)  # type: ignore[arg-type]


def test_warmup_rises_as_its_formula_says_up_to_an_untouched_base() -> None:
    schedule = Warmup(0.9999, inv_gamma=9, power=1)
    ramp = [float(Fraction(n, n + 9)) for n in range(5)]  # 0, 1/10, 2/11, 3/12, 4/13
    assert [schedule.beta(i) for i in range(1, 6)] == pytest.approx(ramp, abs=1e-15)
    betas = [schedule.beta(i) for i in range(1, 100_001)]
    assert betas == sorted(betas)
    assert betas[-1] == 0.9999 == schedule.decay
    assert schedule.beta(89_000) < 0.9999  # 1 - 9/(n+9) reaches 0.9999 at n = 89 991


def test_warmup_waits_for_start_and_keeps_its_floor() -> None:
    schedule = Warmup(0.99, start=10, min_decay=0.3)
    assert [schedule.beta(i) for i in range(1, 12)] == [0.3] * 11
    assert schedule.beta(12) == pytest.approx(1 - 2 ** (-2 / 3))


@pytest.mark.parametrize("gamma", [0.0, 1.0, 6.94, 16.97, 200.0])
def test_gamma_inverts_the_width(gamma: float) -> None:
    width = sqrt((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)))
    assert gamma_of(width) == pytest.approx(gamma, abs=1e-9, rel=1e-12)


def test_the_widths_of_the_paper() -> None:
    # EDM2 quotes gamma 16.97 and 6.94 for sigma_rel 0.05 and 0.10.
    assert gamma_of(0.05) == pytest.approx(16.97, abs=0.005)
    assert gamma_of(0.10) == pytest.approx(6.94, abs=0.005)


def test_power_function_averages_have_the_profile_t_to_the_gamma() -> None:
    schedule = PowerFunction(0.10)
    assert schedule.beta(1) == 0.0
    steps, profile = 2000, [0.0] * 2000
    for i in range(1, steps + 1):
        beta = schedule.beta(i)
        profile = [weight * beta for weight in profile[: i - 1]] + [1 - beta] + profile[i:]
    times = [(i + 0.5) / steps for i in range(steps)]
    mean = sum(w * t for w, t in zip(profile, times, strict=True))
    width = sqrt(sum(w * (t - mean) ** 2 for w, t in zip(profile, times, strict=True)))
    assert sum(profile) == pytest.approx(1)
    assert width == pytest.approx(0.10, rel=2e-3)


def test_samples_units_do_not_depend_on_the_batch() -> None:
    half = HalfLife(1000, unit="samples")
    assert (
        half.beta(1, samples=500) ** 2
        == pytest.approx(half.beta(1, samples=1000))
        == pytest.approx(0.5)
    )
    power = PowerFunction(unit="samples")
    assert power.beta(1, samples=32, seen=32) == 0.0
    both = power.beta(7, samples=32, seen=96 + 32) * power.beta(8, samples=64, seen=96 + 32 + 64)
    assert both == pytest.approx(power.beta(9, samples=96, seen=192))
    assert power.beta(1, samples=0, seen=0) == 1.0


@pytest.mark.parametrize("schedule", [HalfLife(10, unit="samples"), PowerFunction(unit="samples")])
def test_a_samples_schedule_wants_a_number(schedule: HalfLife | PowerFunction) -> None:
    with pytest.raises(UsageError, match=r"ema.update\(samples=512\)"):
        schedule.beta(1)


def test_half_life_in_updates() -> None:
    product = 1.0
    for i in range(1, 51):
        product *= HalfLife(50).beta(i)
    assert product == pytest.approx(0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Warmup(0.9, power=0.0),
        lambda: Warmup(0.9, inv_gamma=0.0),
        lambda: Warmup(0.9, start=-1),
        lambda: PowerFunction(0.3),
        lambda: PowerFunction(0.0),
        lambda: PowerFunction(unit="steps"),  # type: ignore[arg-type]
        lambda: HalfLife(0),
        lambda: HalfLife(10, unit="epochs"),  # type: ignore[arg-type]
    ],
)
def test_impossible_settings(make: object) -> None:
    with pytest.raises(UsageError):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    "schedule",
    [
        Constant(0.1),
        Warmup(0.9999, 3.0, 0.7, 0.1, 5),
        PowerFunction(0.05, "samples"),
        HalfLife(12.5),
    ],
)
def test_json_round_trip(schedule: Constant | Warmup | PowerFunction | HalfLife) -> None:
    fields = json.loads(json.dumps(to_json(schedule)))
    assert fields.pop("kind") == schedule.kind
    assert type(schedule)(**fields) == schedule


@pytest.mark.parametrize("n", [1, 3, 7])
def test_a_window_is_the_mean_of_its_updates(n: int) -> None:
    """Any prefix: the mean of the updates since the last multiple of n, in exact fractions."""
    average = Fraction(10**6)  # what it began with does not count
    for call in range(1, 4 * n + 2):
        beta = Window(n).beta(call)
        k = (call - 1) % n + 1
        assert beta == pytest.approx(1 - 1 / k, abs=1e-16)
        value = Fraction(call * call)
        average += (value - average) * Fraction(1, k)
        window = range(call - k + 1, call + 1)
        assert average == Fraction(sum(i * i for i in window), k)


@pytest.mark.parametrize("bad", [0, -1, 2.5, float("inf"), float("nan")])
def test_no_window(bad: float) -> None:
    with pytest.raises(UsageError):
        Window(bad)  # type: ignore[arg-type]


def test_the_half_life_is_a_share_of_the_updates() -> None:
    schedule = HalfLifeFraction(0.1)
    assert schedule.beta(10) == 0.5  # a half-life of one update
    assert schedule.beta(1000) == HalfLife(100).beta(1000)
    with pytest.raises(UsageError):
        HalfLifeFraction(0.0)


@pytest.mark.parametrize("kind", [Warmup, PowerFunction, HalfLife, HalfLifeFraction, Window])
@pytest.mark.parametrize("value", [None, "5", [5]])
def test_what_is_no_number_is_refused(kind: Any, value: object) -> None:
    with pytest.raises(UsageError, match="is a number; found"):
        kind(value)


@pytest.mark.parametrize("number", [np.float32(0.1), np.float16(0.1), Fraction(1, 10), np.int64(3)])
def test_numbers_of_other_packages_are_pythons_and_can_be_saved(number: Any) -> None:
    schedule = HalfLife(number)
    plain = HalfLife(float(number))
    assert type(schedule.n) in (int, float)
    assert [schedule.beta(call) for call in range(1, 9)] == [plain.beta(c) for c in range(1, 9)]
    assert json.loads(json.dumps(to_json(schedule)))["n"] == float(number)


@pytest.mark.parametrize(
    "make", [lambda: HalfLife(10**400), lambda: Warmup(0.9, start=float("inf"))]
)
def test_numbers_that_no_float_holds_are_refused(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


@pytest.mark.parametrize("beta", [nan, 1.5, -0.1])
def test_a_decay_that_is_none_is_refused(beta: float) -> None:
    class Own(Warmup):
        def beta(self, call: int, samples: int | None = None, seen: int | None = None) -> float:
            return beta if call == 3 else super().beta(call, samples, seen)

    model = torch.nn.Linear(2, 2)
    ema = ShardedEMA(model, Own(0.9))
    for _ in range(2):
        ema.update()
    before = ema.state_dict()["weights"]["weight"].clone()
    with pytest.raises(UsageError, match=rf"Own\(.* gives the decay {beta} for call 3; a decay is"):
        ema.update()
    assert ema.num_updates == 2
    assert torch.equal(ema.state_dict()["weights"]["weight"], before)
