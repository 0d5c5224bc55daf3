"""Post-hoc EMA: combine snapshots of power-function averages into an average of another length.

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
"""Relative standard deviation of the flat profile, γ = 0: the widest there is."""
_NARROWEST = 1e-6  # γ is about its inverse


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile: its end `time`, in updates or samples, and its relative standard deviation.

    Raises:
        UsageError: `usage` if there is no such profile.
    """

    time: float
    sigma_rel: float

    def __post_init__(self) -> None:
        if not _NARROWEST <= self.sigma_rel <= WIDEST:
            limits = f"{_NARROWEST:g} to {WIDEST:.4f}"
            message = f"a relative width is a number from {limits}, not {self.sigma_rel}"
            raise UsageError("usage", message)
        if not (self.time > 0 and math.isfinite(self.time)):
            message = f"a snapshot is taken after one step or more, not at {self.time}"
            raise UsageError("usage", message)

    @property
    def exponent(self) -> float:
        """γ."""
        return exponent_of(self.sigma_rel)


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
    """Weight of each snapshot in the combination nearest to `target` in L2 (algorithm 3).

    The normal equations A x = b hold the inner products of the profiles; x is scaled to the sum of
    one.

    Raises:
        UsageError: `usage` if two snapshots are of one time and profile.
    """
    import numpy as np

    numbers: dict[Profile, int] = {}
    for number, profile in enumerate(snapshots, 1):
        twin = numbers.setdefault(profile, number)
        if twin != number:
            same = f"step {profile.time:g}, width {profile.sigma_rel}"
            message = f"snapshots {twin} and {number} are both of {same}; give each once"
            raise UsageError("usage", message)
    matrix = np.array([[inner_product(a, b) for b in snapshots] for a in snapshots], np.float64)
    right = np.array([inner_product(a, target) for a in snapshots], np.float64)
    try:
        weights = np.linalg.solve(matrix, right)
    except np.linalg.LinAlgError:
        message = "the snapshots are too much alike to be combined; leave some out"
        raise UsageError("usage", message) from None
    return [float(weight) for weight in weights / weights.sum()]


def mismatch(snapshots: Sequence[Profile], weights: Sequence[float], target: Profile) -> float:
    """Relative L2 distance of the combined profile from the target: ‖Σ x_i p_i − p‖ / ‖p‖."""
    weighted = list(zip(weights, snapshots, strict=True))
    own = inner_product(target, target)
    cross = math.fsum([x * inner_product(p, target) for x, p in weighted])
    square = math.fsum([x * y * inner_product(p, q) for x, p in weighted for y, q in weighted])
    return math.sqrt(max(square - 2 * cross + own, 0.0) / own)
