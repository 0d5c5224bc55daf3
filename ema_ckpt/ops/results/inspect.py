"""Result of `inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ema_ckpt.core.catalog import Diagnostic
from ema_ckpt.ops.results.places import hide_credentials
from ema_ckpt.ops.results.quantized import QuantizedEntry
from ema_ckpt.ops.results.short_repr import short_repr

if TYPE_CHECKING:
    from ema_ckpt.state_dicts.tree import Tree


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """Role and totals of a tree; `dtypes` counts its tensors by dtype."""

    name: str
    role: str
    tensors: int
    numel: int
    nbytes: int
    dtypes: Mapping[str, int]

    @classmethod
    def of(cls, tree: Tree) -> TreeEntry:
        """Count what is in a tree."""
        return cls(
            name=tree.name,
            role=tree.role,
            tensors=len(tree.tensors),
            numel=sum([tensor.numel for tensor in tree.tensors]),
            nbytes=sum([tensor.nbytes for tensor in tree.tensors]),
            dtypes=dict(Counter([tensor.dtype.name for tensor in tree.tensors])),
        )


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
    """Contents of a checkpoint.

    Attributes:
        quantized: weights that several of `tensors` hold together; without any None, and no
            field.
    """

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
    quantized: ClassVar[tuple[QuantizedEntry, ...] | None] = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        hide_credentials(self, "path", "resolved")
