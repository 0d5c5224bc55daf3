"""Result of `diff`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ema_ckpt.core.catalog import Diagnostic
from ema_ckpt.ops.results.places import hide_credentials
from ema_ckpt.ops.results.quantized import QuantizedEntry
from ema_ckpt.ops.results.short_repr import short_repr

if TYPE_CHECKING:
    from ema_ckpt.analysis.compare import PairStats


@dataclass(frozen=True, slots=True)
class ShapeEntry:
    """Shape and torch dtype name of one side of a pair."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Name on both sides whose shapes differ."""

    name: str
    a: ShapeEntry
    b: ShapeEntry


@dataclass(frozen=True, slots=True)
class DiffTensor:
    """Statistics of a pair of tensors, with d = a − b: `rel_l2` is ‖d‖/‖b‖, `max_abs` max |d|.

    Undefined numbers are NaN (null in JSON). A complex element is a pair of numbers; `changed` and
    `numel` count elements, `nan` and `inf` numbers.
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
    """Statistics over all pairs together."""

    rel_l2: float
    max_abs: float
    cosine: float
    changed: int


class _PairStatsSlot:
    """Statistics of each pair, for tables; no field, so neither in JSON nor in `asdict`."""

    __slots__ = ("pair_stats",)
    pair_stats: Mapping[str, PairStats]


@dataclass(frozen=True, slots=True)
class DiffResult(_PairStatsSlot):
    """Comparison of two trees; names are those inside the trees, counts are of pairs.

    Attributes:
        a, b: what was named. resolved_a, resolved_b: the checkpoints that they stood for.
        identical: pairs of equal values. same_bits: those of one dtype and the same bytes too;
            where that is all of them None, and no field.
        dequantized_a, dequantized_b: quantised weights that were compared as values; without any
            None, and no field.
    """

    a: str
    b: str
    resolved_a: str
    resolved_b: str
    warnings: tuple[Diagnostic, ...]
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
    same_bits: ClassVar[int | None] = None
    dequantized_a: ClassVar[tuple[QuantizedEntry, ...] | None] = None
    dequantized_b: ClassVar[tuple[QuantizedEntry, ...] | None] = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        hide_credentials(self, "a", "b", "resolved_a", "resolved_b")

    @property
    def differs(self) -> bool:
        """Whether anything changed, mismatched, or is on one side only."""
        return any((self.summary.changed, self.mismatched, self.only_in_a, self.only_in_b))
