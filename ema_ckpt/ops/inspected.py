"""What `inspect` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ema_ckpt.core.catalog import Diagnostic


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
    """A tensor: full stored name, name inside its tree, global shape, torch's name of the dtype,
    chunks.
    """

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
class InspectResult:
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
    warnings: tuple[Diagnostic, ...]
