"""Decay schedules: β of each call, in float64, as pure functions of the call's number.

The average moves by e ← β·e + (1 − β)·p. Calls are numbered i = 1, 2, …
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, TypeAlias

from ema_ckpt.core.errors import UsageError

NEVER_MOVES = "decay=1.0: the average never moves"
Unit = Literal["updates", "samples"]

_NO_SAMPLES = "this decay schedule counts samples: pass their number, as in ema.update(samples=512)"


@dataclass(frozen=True, slots=True)
class Constant:
    """The same β for every call."""

    decay: float
    kind: ClassVar[str] = "constant"
    unit: ClassVar[Unit] = "updates"

    def __post_init__(self) -> None:
        _take_numbers(self, "decay")
        require(0.0 <= self.decay <= 1.0, f"decay is between 0 and 1, not {self.decay}")

    def beta(self, call: int, samples: int | None = None, seen: int | None = None) -> float:  # noqa: ARG002
        """Return the constant."""
        return self.decay


@dataclass(frozen=True, slots=True)
class Warmup:
    """β_i = min(decay, max(min_decay, 1 − (1 + max(0, i − 1 − start) / inv_gamma)^−power)).

    `start` and `inv_gamma` are in calls. The first call gets β = `min_decay`: with the defaults the
    average begins at the parameters it first sees. `power=2/3` reaches 0.999 after about 31 600
    calls, `power=1` after 1 000. `inv_gamma=9, power=1` is the ramp (1 + n) / (10 + n) with n = i −
    2 from the second call on.

    Source: Crowson's k-diffusion `EMAWarmup` and timm's `ModelEmaV3`, which use the same curve.
    """

    decay: float
    inv_gamma: float = 1.0
    power: float = 2 / 3
    min_decay: float = 0.0
    start: int = 0
    kind: ClassVar[str] = "warmup"
    unit: ClassVar[Unit] = "updates"

    def __post_init__(self) -> None:
        _take_numbers(self, "decay", "inv_gamma", "power", "min_decay", "start")
        require(0.0 <= self.decay <= 1.0, f"decay is between 0 and 1, not {self.decay}")
        require(0.0 <= self.min_decay <= 1.0, f"min_decay is between 0 and 1, not {self.min_decay}")
        require(0 < self.inv_gamma < inf, f"inv_gamma is positive, not {self.inv_gamma}")
        require(0 < self.power < inf, f"power is positive, not {self.power}")
        is_count = 0 <= self.start < inf and self.start == int(self.start)
        require(is_count, f"start is a whole number of calls, not {self.start}")

    def beta(self, call: int, samples: int | None = None, seen: int | None = None) -> float:  # noqa: ARG002
        """Return β of call number `call`."""
        step = max(0, call - 1 - self.start)
        value = 1 - float((1 + step / self.inv_gamma) ** -self.power)
        return min(self.decay, max(self.min_decay, value))


@dataclass(frozen=True, slots=True)
class PowerFunction:
    """β_i = (1 − 1/i)^(γ+1): the average whose profile over training time is t^γ.

    `sigma_rel` is the profile's width as a share of the time trained; γ solves
    sigma_rel² = (γ + 1) / ((γ + 2)² (γ + 3)). In samples β = (1 − samples/seen)^(γ+1), where `seen`
    includes the call's own samples. β of the first call is 0.

    Source: Karras et al. 2024 (EDM2, arXiv:2312.02696), equations 123 and 127.
    """

    sigma_rel: float = 0.10
    unit: Unit = "updates"
    kind: ClassVar[str] = "power-function"

    def __post_init__(self) -> None:
        _take_numbers(self, "sigma_rel")
        # At γ = 0 the profile is flat and the width is 12^-1/2; wider ones are not averages of t^γ
        # with γ >= 0.
        is_width = 0 < self.sigma_rel <= 12**-0.5
        require(is_width, f"sigma_rel is between 0 and 0.2886, not {self.sigma_rel}")
        _require_unit(self.unit)

    @property
    def gamma(self) -> float:
        """γ of the profile t^γ."""
        return gamma_of(self.sigma_rel)

    def beta(self, call: int, samples: int | None = None, seen: int | None = None) -> float:
        """Return β of call number `call`, or of the one with `samples` of the `seen` samples."""
        if self.unit == "updates":
            return float((1 - 1 / call) ** (self.gamma + 1))
        if samples is None or seen is None:
            raise UsageError("usage", _NO_SAMPLES)
        return float((1 - samples / seen) ** (self.gamma + 1)) if samples else 1.0


@dataclass(frozen=True, slots=True)
class HalfLife:
    """β = 0.5^(1/n): the contribution of n updates ago counts half.

    In samples β = 0.5^(samples/n) for a call with `samples` of them, whatever the batch size is.
    """

    n: float
    unit: Unit = "updates"
    kind: ClassVar[str] = "half-life"

    def __post_init__(self) -> None:
        _take_numbers(self, "n")
        is_length = 0 < self.n < inf
        require(is_length, f"a half-life is a positive number of {self.unit}, not {self.n}")
        _require_unit(self.unit)

    def beta(self, call: int, samples: int | None = None, seen: int | None = None) -> float:  # noqa: ARG002
        """Return β of a call, with `samples` of them if the unit is samples."""
        spent = 1 if self.unit == "updates" else samples
        if spent is None:
            raise UsageError("usage", _NO_SAMPLES)
        return float(0.5 ** (spent / self.n))


@dataclass(frozen=True, slots=True)
class HalfLifeFraction:
    """β_i = 2^(−1 / (fraction · i)): a half-life that is a fixed share of the updates so far.

    Source: torchtitan's `half_life_fraction`.
    """

    fraction: float
    kind: ClassVar[str] = "half-life-fraction"
    unit: ClassVar[Unit] = "updates"

    def __post_init__(self) -> None:
        _take_numbers(self, "fraction")
        require(0 < self.fraction < inf, f"fraction is positive, not {self.fraction}")

    def beta(self, call: int, samples: int | None = None, seen: int | None = None) -> float:  # noqa: ARG002
        """Return β of call number `call`."""
        return float(0.5 ** (1 / (self.fraction * call)))


@dataclass(frozen=True, slots=True)
class Window:
    """The mean of the last n updates: β_i = 1 − 1/k, where i is the k-th call of its window.

    Windows of n calls follow each other. At the end of one the average is the mean of its n
    updates; before that it is the mean of those that the window has so far, and the first copies
    the weights. So no other copies of the weights are kept.

    Source: latest-weight averaging (Kaddour 2022, arXiv:2209.14981), with windows that do not
    overlap.
    """

    n: int
    kind: ClassVar[str] = "window"
    unit: ClassVar[Unit] = "updates"

    def __post_init__(self) -> None:
        _take_numbers(self, "n")
        is_count = 1 <= self.n < inf and self.n == int(self.n)
        require(is_count, f"a window is a whole number of updates, not {self.n}")

    def beta(self, call: int, samples: int | None = None, seen: int | None = None) -> float:  # noqa: ARG002
        """Return β of call number `call`."""
        return 1 - 1 / ((call - 1) % self.n + 1)


Schedule: TypeAlias = Constant | Warmup | PowerFunction | HalfLife | HalfLifeFraction | Window


def gamma_of(sigma_rel: float) -> float:
    """Return the γ >= 0 with sigma_rel² = (γ + 1) / ((γ + 2)² (γ + 3)).

    With t = sigma_rel^-2 and x = γ + 2 this is the cubic x³ + x² − t·x + t = 0, whose greatest root
    is wanted; Newton's method from above it converges monotonically.

    Source: Karras et al. 2024 (EDM2), equation 126.
    """
    t = sigma_rel**-2
    x = float(t**0.5) + 1.0
    for _ in range(100):
        step = (x**3 + x**2 - t * x + t) / (3 * x**2 + 2 * x - t)
        x -= step
        if abs(step) <= 1e-15 * x:
            break
    return x - 2


def as_schedule(decay: float | Schedule) -> Schedule:
    """Return a schedule as it is, a number as the constant β.

    Raises:
        UsageError: it is neither, or the number is not between 0 and 1.
    """
    if isinstance(decay, Schedule):
        return decay
    if isinstance(decay, (int, float)) and not isinstance(decay, bool):
        return Constant(float(decay))
    kind = type(decay).__name__
    raise UsageError(
        "usage",
        "decay is a number or one of Warmup, PowerFunction, HalfLife, HalfLifeFraction, Window; "
        f"found {kind}",
    )


def to_json(schedule: Schedule) -> dict[str, Any]:
    """Return the schedule as plain JSON values; `kind` names it."""
    return {"kind": schedule.kind, **asdict(schedule)}


def require(fact: bool, message: str) -> None:
    """Raise UsageError with `message` unless `fact`."""
    if not fact:
        raise UsageError("usage", message)


def _require_unit(unit: str) -> None:
    require(unit in ("updates", "samples"), f"unit is 'updates' or 'samples', not {unit!r}")


def _take_numbers(schedule: Schedule, *names: str) -> None:
    """Make numbers of other packages Python's: β is computed in float64, and saved as JSON."""
    for name in names:
        value = getattr(schedule, name)
        require(isinstance(value, Real), f"{name} is a number; found {type(value).__name__}")
        try:
            number = float(value)
        except OverflowError:
            raise UsageError("usage", f"{name} is beyond the numbers of a float64") from None
        object.__setattr__(schedule, name, int(value) if isinstance(value, Integral) else number)
