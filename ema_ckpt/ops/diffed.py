"""What `diff` returns."""

from __future__ import annotations

from dataclasses import dataclass

from ema_ckpt.core.catalog import Diagnostic


@dataclass(frozen=True, slots=True)
class ShapeEntry:
    """Shape and torch's name of the dtype of one side of a pair."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A name on both sides whose shapes differ."""

    name: str
    a: ShapeEntry
    b: ShapeEntry


@dataclass(frozen=True, slots=True)
class DiffTensor:
    """How a pair of tensors differs, d = a − b: ‖d‖/‖b‖, the largest and the mean |d|, the cosine,
    counts.

    Numbers that are undefined are NaN (in JSON null). Complex elements are pairs of numbers;
    `changed` and `numel` count elements, `nan` and `inf` numbers.
    """

    name: str
    numel: int
    rel_l2: float
    max_abs: float
    mean_abs: float
    cosine: float
    changed: int
    nan_a: int
    nan_b: int
    inf_a: int
    inf_b: int


@dataclass(frozen=True, slots=True)
class DiffSummary:
    """The same over all pairs together."""

    rel_l2: float
    max_abs: float
    cosine: float
    changed: int


@dataclass(frozen=True, slots=True)
class DiffResult:
    """What `diff` found. `compared` and `identical` count pairs; names are those inside the
    trees.
    """

    a: str
    b: str
    tree_a: str
    tree_b: str
    compared: int
    identical: int
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]
    tensors: tuple[DiffTensor, ...]
    summary: DiffSummary
    findings: tuple[Diagnostic, ...]

    @property
    def differs(self) -> bool:
        """Whether anything changed, mismatched, or is on one side only."""
        return bool(self.summary.changed or self.mismatched or self.only_in_a or self.only_in_b)
