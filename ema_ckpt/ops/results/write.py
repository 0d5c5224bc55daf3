"""Result of the writing verbs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ema_ckpt.core.catalog import Diagnostic, Tensor
from ema_ckpt.ops.results.places import hide_credentials
from ema_ckpt.ops.results.quantized import QuantizedEntry
from ema_ckpt.ops.results.short_repr import short_repr


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
class RuleChange:
    """Names that rules took together, and the names that became of them."""

    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AppliedRules:
    """What a file of rules did; `inverse` if it led back."""

    file: str
    inverse: bool
    changes: tuple[RuleChange, ...]


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """One term of a weighted sum.

    Attributes:
        path: the checkpoint that was read. tree: that of it which is summed.
        step: the number in its name, if that is a step's. weight: what it is multiplied by.
    """

    path: str
    tree: str
    step: int | None
    weight: float

    def __post_init__(self) -> None:
        hide_credentials(self, "path")


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a writing verb wrote, or with `dry_run` would write; `nbytes` is payload.

    Attributes:
        source: what was named. resolved: the checkpoint that it stood for; of `synthesize` one for
            each snapshot.
        rules: what rules did; without rules None, and no field.
        dequantized: quantised weights that are written as values; without any None, and no field.
        snapshots: what `synthesize` summed, in order; of other verbs None, and no field.
    """

    source: str
    resolved: str | tuple[str, ...]
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
    rules: ClassVar[AppliedRules | None] = None
    dequantized: ClassVar[tuple[QuantizedEntry, ...] | None] = None
    snapshots: ClassVar[tuple[SnapshotEntry, ...] | None] = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        hide_credentials(self, "source", "resolved", "target")
