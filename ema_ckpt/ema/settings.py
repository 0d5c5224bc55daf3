"""The arguments of a manager, checked once, and its counter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias

import torch

from ema_ckpt.core.errors import StateError, UsageError
from ema_ckpt.ema.schedules import Constant, HalfLife, Schedule, Window, require

Source: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor | None]

_USUAL_CALLS, _USUAL_BATCH = 100_000, 1024
_MAX_COUNT = 1 << 62  # of a saved counter, so that an int64 has room for the calls to come
_MAX_PENDING = 1 << 20  # calls since a saved average last moved, if `every` is not more
_CHOICES: dict[str, tuple[object, ...]] = {
    "buffers": ("copy", "average", "skip"),
    "nonfinite": ("ignore", "skip", "raise"),
    "rounding": ("nearest", "stochastic"),
    "offload": (False, True, "sync"),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "compensate": (False, True),
    "shard_replicas": (None, False, True),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of the constructor.

    Raises:
        UsageError: one of them is not among its values, or two do not go together.
    """

    schedule: Schedule
    every: int = 1
    dtype: torch.dtype = torch.float32
    compensate: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    offload: bool | Literal["sync"] = False
    shard_replicas: bool | None = None
    buffers: Literal["copy", "average", "skip"] = "copy"
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    source: Source | None = None
    nonfinite: Literal["ignore", "skip", "raise"] = "ignore"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            # By identity, since 0 == False; equal strings need not be identical.
            is_choice = (
                value in choices if isinstance(value, str) else id(value) in map(id, choices)
            )
            names = ", ".join(map(repr, choices))
            require(is_choice, f"{name} is one of {names}; found {value!r}")
        is_count = isinstance(self.every, int) and not isinstance(self.every, bool)
        require(
            is_count and self.every >= 1,
            f"every is a number of calls, 1 or more; found {self.every!r}",
        )
        require(isinstance(self.seed, int), f"seed is a whole number; found {self.seed!r}")
        is_source = self.source is None or callable(self.source)
        require(is_source, f"source is a function of name and parameter; found {self.source!r}")
        require(
            not self.compensate or self.dtype is torch.float32,
            f"compensate=True carries a residual beside float32 averages, not {self.dtype}",
        )
        require(
            self.rounding == "nearest" or self.dtype is torch.bfloat16,
            f"rounding='stochastic' is for dtype=torch.bfloat16, not {self.dtype}",
        )

    def warn_of_lost_updates(self) -> None:
        """Warn if a step towards weights that are a tenth away rounds to nothing in `dtype`.

        A step is `weight` times that distance, and half the spacing of numbers is `eps / 2` of
        their size.
        """
        weight = _settled_weight(self.schedule)
        keeps_small_steps = self.rounding == "stochastic" or self.compensate
        if keeps_small_steps or weight >= 5 * torch.finfo(self.dtype).eps:
            return
        if isinstance(self.schedule, Constant) and not weight:
            return  # an average that is to stand still
        wider = {torch.float64: "a decay further from 1", torch.float32: "compensate=True"}
        remedy = wider.get(self.dtype, "dtype=torch.float32")
        warnings.warn(
            f"a {str(self.dtype).removeprefix('torch.')} average cannot follow {self.schedule}:"
            f" updates round to nothing; use {remedy}",
            stacklevel=4,
        )


def _settled_weight(schedule: Schedule) -> float:
    """Return the 1 − β that a schedule settles at, or comes to in a run of usual length."""
    if isinstance(schedule, Constant):
        return 1 - schedule.decay
    if isinstance(schedule, HalfLife):
        return 1 - schedule.beta(1, _USUAL_BATCH, _USUAL_BATCH)
    if isinstance(schedule, Window):
        return 1 / schedule.n
    return 1 - schedule.beta(_USUAL_CALLS, _USUAL_BATCH, _USUAL_CALLS * _USUAL_BATCH)


def as_patterns(option: str, globs: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Return one glob or several as a tuple.

    Raises:
        UsageError: it is none.
    """
    if globs is None:
        return None
    found: tuple[object, ...] = (globs,)
    if isinstance(globs, Iterable) and not isinstance(globs, str | bytes):
        found = tuple(globs)
    patterns = tuple(glob for glob in found if isinstance(glob, str))
    kinds = [type(glob).__name__ for glob in found if not isinstance(glob, str)]
    require(not kinds, f"{option} is a glob over names, or several; found {', '.join(kinds[:1])}")
    return patterns


@dataclass(slots=True)
class UpdateCounter:
    """Calls and samples so far, and the decay collected since the average last moved.

    It moves at every `every`-th call, by the product of β over the calls since it last moved.
    """

    schedule: Schedule
    every: int
    num_updates: int = 0
    samples_seen: int = 0
    moved_at: int = 0  # the call at which the average last moved
    pending: float = 1.0  # the product of β over the calls since
    applied: float = 1.0  # the product that it last moved by
    is_foreign: bool = False  # loaded from averages that recorded no updates

    @property
    def has_moved(self) -> bool:
        """Whether the average may differ from the weights it began with."""
        return self.moved_at > 0 or self.is_foreign

    def stalled(self) -> str:
        """Describe an average that has never moved."""
        if not self.num_updates:
            return "before the first update: the average is still the weights it began with"
        return (
            f"{self.num_updates} updates are counted and every={self.every}: the average has never"
            " moved and is still the weights it began with"
        )

    def count(self, samples: int | None) -> float | None:
        """Count one call and return the weight 1 - Πβ to move by, or None if it does not move.

        Raises UsageError, counting nothing, if `samples` is no whole number or needed and missing,
        or the schedule gives no decay.
        """
        samples = None if samples is None else _as_samples(samples)
        seen = self.samples_seen + (samples or 0)
        self.pending *= self._beta(self.num_updates + 1, samples, seen)
        self.num_updates, self.samples_seen = self.num_updates + 1, seen
        if self.num_updates % self.every:
            return None
        self.moved_at, self.applied, self.pending = self.num_updates, self.pending, 1.0
        return 1.0 - self.applied

    def is_due(self) -> bool:
        """Return whether the next call moves the average."""
        return (self.num_updates + 1) % self.every == 0

    def require_samples(self, samples: object) -> None:
        """Raise UsageError for no number, or for None where the schedule counts samples.

        A function that returns the number is asked later.
        """
        if samples is not None and not callable(samples):
            _as_samples(samples)
        require(
            samples is not None or self.schedule.unit == "updates",
            f"{self.schedule} counts samples: pass samples=, those of the global batch",
        )

    def reset(self) -> None:
        """Go back to before the first call."""
        self.num_updates = self.samples_seen = self.moved_at = 0
        self.pending = self.applied = 1.0
        self.is_foreign = False

    def resume(self, num_updates: int, samples_seen: int, saved: Any) -> None:
        """Continue from a saved counter.

        Raises:
            StateError: no run counts so; nothing was changed.
        """
        is_mapping = isinstance(saved, Mapping)
        counted = {
            "moved_at": None,
            "applied": 1.0,
            "pending": 1.0,
            **(saved if is_mapping else {}),
        }
        moved_at, applied, pending = (counted[key] for key in ("moved_at", "applied", "pending"))
        is_counted = _is_count(num_updates)
        if moved_at is None and is_counted:
            moved_at = num_updates - num_updates % self.every
        waiting = num_updates - moved_at if is_counted and _is_count(moved_at) else -1
        facts = {
            "num_updates": is_counted,
            "samples_seen": _is_count(samples_seen),
            "counter": is_mapping,
            "counter.moved_at": 0 <= waiting <= max(self.every, _MAX_PENDING),
            "counter.applied": _is_decay(applied),
            "counter.pending": _is_decay(pending),
        }
        odd = [name for name, fits in facts.items() if not fits]
        if odd:
            raise StateError("usage", f"the saved {odd[0]} is none that a run can have counted")
        # Decays that depend on the call's number alone are computed anew, with the present
        # settings; of those that depend on samples the saved products are the only trace.
        self.num_updates, self.samples_seen = num_updates, samples_seen
        self.is_foreign = not num_updates
        self.moved_at = moved_at
        if self.schedule.unit == "updates":
            first = max(1, self.moved_at - self.every + 1)
            self.applied = self._product(first, self.moved_at)
            self.pending = self._product(self.moved_at + 1, num_updates)
        else:
            self.applied, self.pending = float(applied), float(pending)

    def _product(self, first: int, last: int) -> float:
        return prod((self._beta(call) for call in range(first, last + 1)), start=1.0)

    def _beta(self, call: int, samples: int | None = None, seen: int | None = None) -> float:
        """Return β of a call, which a schedule derived from ours may get wrong."""
        beta = self.schedule.beta(call, samples, seen)
        if 0 <= beta <= 1:
            return beta
        fact = f"{self.schedule} gives the decay {beta} for call {call}"
        raise UsageError("usage", f"{fact}; a decay is between 0 and 1")


def _as_samples(value: Any) -> int:
    """Return a number of samples, which may be one of another package, as an int."""
    try:
        if 0 <= value < _MAX_COUNT and value == int(value):
            return int(value)
    except (TypeError, ValueError, RuntimeError):  # no number, several, or one on `meta`
        pass
    found = value if isinstance(value, int | float) else type(value).__name__
    message = f"samples is the number of samples of the global batch; found {found}"
    raise UsageError("usage", message)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _is_decay(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1
