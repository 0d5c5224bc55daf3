"""Post-hoc EMA: which weights turn snapshots of power-function averages into an average of another
length.

After Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models" (EDM2,
arXiv:2312.02696), Appendix C; equation numbers are those of that paper. All arithmetic is in
float64.

The average with exponent γ at time t is ∫ p(τ) θ(τ) dτ over the profile p(τ) = (γ+1) τ^γ / t^(γ+1),
0 <= τ <= t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ema_ckpt.core.errors import UsageError

WIDEST = 12**-0.5
"""The relative standard deviation of the flat profile, γ = 0: the widest there is."""
_NARROWEST = 1e-6  # γ is about its inverse


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile: the time at which it ends, in updates or samples, and its relative standard
    deviation.

    Raises:
        UsageError: `usage` if there is no such profile.
    """

    time: float
    sigma_rel: float

    def __post_init__(self) -> None:
        if not _NARROWEST <= self.sigma_rel <= WIDEST:
            range_ = f"{_NARROWEST:g} to {WIDEST:.4f}"
            raise UsageError(
                "usage", f"a relative width is a number from {range_}, not {self.sigma_rel}"
            )
        if not (self.time > 0 and math.isfinite(self.time)):
            raise UsageError(
                "usage", f"a snapshot is taken after one step or more, not at {self.time}"
            )

    @property
    def exponent(self) -> float:
        """γ."""
        return exponent_of(self.sigma_rel)


def width_of(exponent: float) -> float:
    """Relative standard deviation of the profile τ^γ (equation 123): ((γ+1) / ((γ+2)² (γ+3)))^½."""
    return math.sqrt((exponent + 1) / ((exponent + 2) ** 2 * (exponent + 3)))


def exponent_of(sigma_rel: float) -> float:
    """γ of the profile with that relative standard deviation (equation 126).

    It is the greatest root of γ³ + 7γ² + (16 − σ^-2) γ + 12 − σ^-2, approached from above, where
    the cubic is convex and Newton's steps only go down.
    """
    inverse = sigma_rel**-2
    gamma = math.sqrt(inverse) + 1
    for _ in range(200):
        value = ((gamma + 7) * gamma + 16 - inverse) * gamma + 12 - inverse
        slope = (3 * gamma + 14) * gamma + 16 - inverse
        step = value / slope
        if step <= 0:
            break
        gamma -= step
    return max(gamma, 0.0)


def inner_product(a: Profile, b: Profile) -> float:
    """∫ p_a(τ) p_b(τ) dτ (equation 151)."""
    first, last = (a, b) if a.time <= b.time else (b, a)
    x, y = first.exponent, last.exponent
    ratio = math.pow(first.time / last.time, y)
    return (x + 1) * (y + 1) * ratio / ((x + y + 1) * last.time)


def solve(snapshots: Sequence[Profile], target: Profile) -> list[float]:
    """The weight of each snapshot in the combination nearest to `target` in L2 (algorithm 3).

    The normal equations A x = b hold the inner products of the profiles; x is scaled to the sum of
    one.

    Raises:
        UsageError: `usage` if two snapshots are of one time and profile.
    """
    import numpy as np

    _refuse_twins(snapshots)
    matrix = np.array([[inner_product(a, b) for b in snapshots] for a in snapshots], np.float64)
    right = np.array([inner_product(a, target) for a in snapshots], np.float64)
    try:
        found = np.linalg.solve(matrix, right)
    except np.linalg.LinAlgError:
        raise UsageError(
            "usage", "the snapshots are too much alike to be combined; leave some out"
        ) from None
    return [float(weight) for weight in found / found.sum()]


def _refuse_twins(snapshots: Sequence[Profile]) -> None:
    seen: dict[Profile, int] = {}
    for index, profile in enumerate(snapshots):
        other = seen.setdefault(profile, index)
        if other != index:
            what = f"snapshots {other + 1} and {index + 1} are both of step {profile.time:g}, width {profile.sigma_rel}"
            raise UsageError("usage", f"{what}; give each once")


def mismatch(snapshots: Sequence[Profile], weights: Sequence[float], target: Profile) -> float:
    """Relative L2 distance between the combined profile and the one wanted: ‖Σ x_i p_i − p‖ /
    ‖p‖.
    """
    own = inner_product(target, target)
    cross = math.fsum(x * inner_product(p, target) for x, p in zip(weights, snapshots, strict=True))
    pairs = [
        (x * y, p, q)
        for x, p in zip(weights, snapshots, strict=True)
        for y, q in zip(weights, snapshots, strict=True)
    ]
    square = math.fsum(w * inner_product(p, q) for w, p, q in pairs)
    return math.sqrt(max(square - 2 * cross + own, 0.0) / own)
