"""`ema_ckpt.open`: tensors of any checkpoint in this process, without a process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.names import nearest
from ema_ckpt.core.text import shown
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.ops.results import TreeEntry
from ema_ckpt.reading.box_reader import BoxReader, locate
from ema_ckpt.reading.checksums import ChecksumVerifier
from ema_ckpt.state_dicts.ema_config import with_tied_names
from ema_ckpt.state_dicts.selection import cast_target
from ema_ckpt.state_dicts.tree import Tree, default_tree, find_tree, find_trees, list_trees

if TYPE_CHECKING:
    import os

    import torch

_BLOCK_NBYTES = 4 << 20


def tree_entry(tree: Tree) -> TreeEntry:
    """A tree's role and totals."""
    return TreeEntry(
        name=tree.name,
        role=tree.role,
        tensors=len(tree.tensors),
        numel=sum(tensor.numel for tensor in tree.tensors),
        nbytes=sum(tensor.nbytes for tensor in tree.tensors),
        dtypes=dict(Counter(tensor.dtype.name for tensor in tree.tensors)),
    )


def _float_kind(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """What `dtype` asks floating-point tensors to become; None to keep them as they are."""
    import torch

    if isinstance(dtype, str):
        target = cast_target(dtype)
        dtype = None if target is None else getattr(torch, target.name)
    if dtype is not None and not (
        isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    ):
        raise UsageError(
            "usage", f"dtype {dtype!r}: expected a floating-point type of 16 bits or more"
        )
    return dtype


class Checkpoint:
    """A checkpoint opened for reading. Tensors are whole, on the CPU, and checked against stored
    checksums.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known = list_trees(catalog)
        self._by_name = {tensor.name: tensor for tensor in catalog.tensors}

    @property
    def path(self) -> str:
        """The checkpoint that was found."""
        return self._catalog.resolved

    @property
    def trees(self) -> Mapping[str, TreeEntry]:
        """Role and totals of each tree, by its name."""
        return MappingProxyType({tree.name: tree_entry(tree) for tree in self._known})

    def keys(self, tree: str | None = None) -> list[str]:
        """Full stored names, of one tree or of all, in stored order. Raises UsageError
        `unknown-tree`.
        """
        if tree is None:
            return list(self._by_name)
        return [
            tensor.name
            for found in find_trees(self._known, tree, self.path)
            for tensor in found.tensors
        ]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of that full stored name, with its global shape and stored dtype.

        Raises:
            KeyError: if there is none.
            SourceError: `hole overlap checksum truncated-file …`.
        """
        tensor = self._by_name.get(name)
        if tensor is None:
            near = nearest(name, self._by_name)[:3]
            raise KeyError(f"no tensor {name!r}; names there are like {shown(near)}")
        return self._read(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def state_dict(
        self, tree: str | None = None, dtype: torch.dtype | str | None = None
    ) -> dict[str, torch.Tensor]:
        """The weights of one tree by their names inside it: by default of the only EMA, or only
        live tree.

        Tied weights are one tensor under several names. `dtype`, one of torch's or `keep fp32 bf16
        fp16`, casts floating-point tensors, those of 8 bits excepted.

        Raises:
            UsageError: `unknown-tree`, `ambiguous-tree`; `usage` for another dtype.
            SourceError: as for a single tensor.
        """
        if tree is None:
            picked = default_tree(
                self._known, f"ema_ckpt.open({self.path!r}).state_dict", self.path
            )
        else:
            picked = find_tree(self._known, tree, self.path)
        kind = _float_kind(dtype)
        weights = with_tied_names(self._catalog, picked).weights
        shared: dict[object, torch.Tensor] = {}
        found = {}
        for name, tensor in weights.items():
            key = (tensor.storage or id(tensor), tensor.shape, tensor.dtype.name)
            if key not in shared:
                shared[key] = self._read_as(tensor, kind)
            found[name] = shared[key]
        return found

    def _read_as(self, tensor: Tensor, kind: torch.dtype | None) -> torch.Tensor:
        value = self._read(tensor)
        return value if kind is None or not tensor.dtype.is_castable else value.to(kind)

    def _read(self, tensor: Tensor) -> torch.Tensor:
        import torch

        kind: torch.dtype = getattr(torch, tensor.dtype.name)
        if not tensor.numel:
            return torch.empty(tensor.shape, dtype=kind)
        data = bytearray(tensor.nbytes)
        verifier = ChecksumVerifier(self._catalog.source, enabled=True)
        BoxReader(_BLOCK_NBYTES, verifier).read(locate(self._catalog, tensor), memoryview(data))
        verifier.finish()
        return torch.frombuffer(data, dtype=kind).reshape(tensor.shape)

    def close(self) -> None:
        """Close its files; tensors that were read stay."""
        self._catalog.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of any readable format.

    Raises:
        EmaCkptError: `not-found not-a-checkpoint unreadable unsafe-pickle …`.
    """
    return Checkpoint(open_catalog(path))
