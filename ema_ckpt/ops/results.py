"""What the verbs return: frozen, and equal to the JSON that the command line prints when made a dict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass

from ema_ckpt.catalog import Warn

__all__ = [
    "ChunkEntry",
    "DiffSummary",
    "DiffTensor",
    "Diffed",
    "FileEntry",
    "Inspected",
    "Mismatch",
    "ObjectEntry",
    "Problem",
    "ShapeEntry",
    "Skipped",
    "TensorEntry",
    "TreeEntry",
    "Verified",
    "Written",
    "as_json",
]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file that was written, relative to the target, and its bytes."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was left out, the file it is in, and why."""

    name: str
    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class Written:
    """What a writing verb did, or with `dry_run` would do. `nbytes` is payload, `seconds` wall time."""

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
    warnings: tuple[Warn, ...] = ()
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A tree: its role and totals, and the number of its tensors of each dtype."""

    name: str
    role: str
    tensors: int
    numel: int
    nbytes: int
    dtypes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """A stored piece: box in elements, and the file that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: full stored name, name inside its tree, global shape, torch's name of the dtype, chunks."""

    name: str
    fqn: str
    tree: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    chunks: tuple[ChunkEntry, ...]


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """A stored value that is no tensor, and the file that holds it."""

    name: str
    file: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """What `inspect` found in a checkpoint."""

    path: str
    resolved: str
    format: str
    world_size: int | None
    nbytes: int
    trees: tuple[TreeEntry, ...]
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    ema: Mapping[str, Mapping[str, object]]
    warnings: tuple[Warn, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a checkpoint: a stable code, the tensor and file concerned (or None), and what it is."""

    code: str
    tensor: str | None
    file: str | None
    message: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What `verify` found.

    Attributes:
        status: `sound`, `unproven` (nothing wrong, but some payload carries no checksum) or `damaged`.
        checked_bytes, unchecked_bytes: payload compared with a checksum, and payload that carries none.
    """

    status: str
    checked_bytes: int
    unchecked_bytes: int
    problems: tuple[Problem, ...]
    warnings: tuple[Warn, ...]


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
    """How a pair of tensors differs, d = a − b: ‖d‖/‖b‖, the largest and the mean |d|, the cosine, counts.

    Numbers that are undefined are NaN (in JSON null). Complex elements are pairs of numbers; `changed` counts
    numbers, `numel` elements.
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
class Diffed:
    """What `diff` found. `compared` and `identical` count pairs; names are those inside the trees."""

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
    findings: tuple[Warn, ...]

    @property
    def differs(self) -> bool:
        """Whether anything changed, mismatched, or is on one side only."""
        return bool(self.summary.changed or self.mismatched or self.only_in_a or self.only_in_b)


def as_json(value: object) -> object:
    """A result as plain dicts, lists and scalars; NaN and infinities become None."""
    if isinstance(value, ChunkEntry):  # by far the most frequent
        return {"offsets": value.offsets, "sizes": value.sizes, "file": value.file}
    if is_dataclass(value):
        return {f.name: as_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
