"""Results of the verbs: frozen dataclasses, and their JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING

from ema_ckpt.core.catalog import Diagnostic, Problem, Tensor

if TYPE_CHECKING:
    from ema_ckpt.analysis.compare import PairStats

# Writing verbs.


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size of a written file; `path` is relative to the target."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Item that was left out, the file that holds it, and why."""

    name: str
    file: str
    reason: str

    @classmethod
    def tensor(cls, tensor: Tensor, name: str, reason: str) -> Skipped:
        """Describe a tensor; its file is that of its first chunk."""
        return cls(name, tensor.first_file or "", reason)


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a writing verb wrote, or with `dry_run` would write; `nbytes` is payload."""

    source: str
    target: str
    tree: str | None
    format: str
    files: tuple[FileEntry, ...]
    tensors: int
    nbytes: int
    seconds: float
    renamed: Mapping[str, str] = field(default_factory=dict)
    filled: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()
    dry_run: bool = False


# `inspect`.


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """Role and totals of a tree; `dtypes` counts its tensors by dtype."""

    name: str
    role: str
    tensors: int
    numel: int
    nbytes: int
    dtypes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """Box of a stored chunk, in elements, and its file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Tensor under its full stored `name`; `fqn` is its name inside the tree."""

    name: str
    fqn: str
    tree: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    chunks: tuple[ChunkEntry, ...]


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """Stored value that is no tensor, and its file."""

    name: str
    file: str


@dataclass(frozen=True, slots=True)
class InspectResult:
    """Contents of a checkpoint."""

    path: str
    resolved: str
    format: str
    world_size: int | None
    nbytes: int
    trees: tuple[TreeEntry, ...]
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    ema: Mapping[str, Mapping[str, object]]
    warnings: tuple[Diagnostic, ...]


# `verify`.


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Verdict on a checkpoint.

    Attributes:
        status: `sound`, `damaged`, or `unproven` if some payload has no checksum.
        checked_bytes, unchecked_bytes: payload with and without a checksum to compare.
    """

    status: str
    checked_bytes: int
    unchecked_bytes: int
    problems: tuple[Problem, ...]
    warnings: tuple[Diagnostic, ...]


# `diff`.


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
    """Comparison of two trees; names are those inside the trees, counts are of pairs."""

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


def as_json(value: object) -> object:
    """A result as plain dicts, lists and scalars; NaN and infinities become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: as_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
