"""`ema_ckpt.open`: tensors of any checkpoint in this process, without a process group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.display import displayed, masked
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.nearest_names import nearest
from ema_ckpt.core.text import counted, shown
from ema_ckpt.core.torch_import import import_torch
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.ops.results.inspect import TreeEntry
from ema_ckpt.reading.box_reader import BoxReader, locate
from ema_ckpt.reading.checksum_verifier import ChecksumVerifier
from ema_ckpt.reading.quantized.exact_parts import exact_parts
from ema_ckpt.reading.unchanged import FileStates
from ema_ckpt.state_dicts.hidden_averages import find_hidden
from ema_ckpt.state_dicts.selection import cast_target
from ema_ckpt.state_dicts.ties import with_all_names
from ema_ckpt.state_dicts.tree import (
    Tree,
    default_tree,
    find_tree,
    find_trees,
    list_trees,
    live_of,
)
from ema_ckpt.storage.files import local_path

if TYPE_CHECKING:
    import os

    import torch

_BLOCK_NBYTES = 4 << 20
_SHOWN_TREES = 5


# A block in which some files of the checkpoint are read: those that were opened, or an error.
_Guard = Callable[[Iterable[str]], AbstractContextManager[None]]


class _Objects(Mapping[str, object]):
    """The objects of a checkpoint by full stored name; each value is read when it is asked for.

    A value of a class that is unknown here is an `Opaque` placeholder; no code of it runs.

    Raises:
        UnsafeError: `unsafe-pickle` from a look-up, if unpickling the value would call anything.
    """

    def __init__(self, catalog: Catalog, same: _Guard) -> None:
        self._catalog = catalog
        self._same = same
        self._items = {item.name: item for item in catalog.objects}

    def __getitem__(self, name: str) -> object:
        item = self._items.get(name)
        if item is None:
            near = shown(nearest(name, self._items)[:3])
            raise KeyError(f"no object {name!r}; names there are like {near}")
        with self._same([item.file]):
            return self._catalog.reader.load(item)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items  # without reading it


class Checkpoint:
    """Checkpoint opened for reading: whole tensors on the CPU, checked against stored checksums."""

    def __init__(self, catalog: Catalog, trees: Sequence[Tree]) -> None:
        self._catalog = catalog
        self._trees = trees
        self._same = _guard(catalog)
        self._by_name = {tensor.name: tensor for tensor in catalog.tensors}

    @property
    def path(self) -> str:
        """Directory or file of the checkpoint, with the credentials of a URL: it can be opened."""
        return self._catalog.resolved

    @property
    def trees(self) -> Mapping[str, TreeEntry]:
        """Role and totals of each tree, by its name."""
        return MappingProxyType({tree.name: TreeEntry.of(tree) for tree in self._trees})

    @property
    def objects(self) -> Mapping[str, object]:
        """Every value that is no tensor, by full stored name; read when asked for, running no code.

        Raises:
            UnsafeError: `unsafe-pickle` from a look-up, if unpickling it would call anything.
        """
        return _Objects(self._catalog, self._same)

    def keys(self, tree: str | None = None) -> list[str]:
        """Full stored names, of one tree or of all, in order. Raises UsageError `unknown-tree`."""
        if tree is None:
            return list(self._by_name)
        names: list[str] = []
        for one in find_trees(self._trees, tree, self.path):
            names += [tensor.name for tensor in one.tensors]
        return names

    def __repr__(self) -> str:
        trees = [f"{name!r} ({tree.role})" for name, tree in self.trees.items()]
        more = f" and {len(trees) - _SHOWN_TREES} more" if len(trees) > _SHOWN_TREES else ""
        names = ", ".join(trees[:_SHOWN_TREES]) + more
        count = counted(len(self), "tensor")
        return f"<Checkpoint {masked(self.path)!r}: {self._catalog.format}, {count}, trees {names}>"

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of that full stored name, with its global shape and stored dtype.

        Raises:
            KeyError: if there is none.
            SourceError: `hole overlap checksum truncated-file source-changed …`.
            UsageError: `missing-extra` without torch.
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
        """The weights of one tree, by default the only EMA or only live tree, by name inside it.

        Tied weights are one tensor under several names. `dtype`, one of torch's or `keep fp32 bf16
        fp16`, casts floating-point tensors, except those of 8 bits and parts of quantised weights
        (scales, zero points), which are logged to `ema_ckpt`, level warning.

        Raises:
            UsageError: `unknown-tree`, `ambiguous-tree`; `usage` for another dtype; `missing-extra`
                without torch.
            SourceError: as for a single tensor.
        """
        if tree is None:
            call = f"ema_ckpt.open({self.path!r}).state_dict"
            picked = default_tree(self._trees, call, self.path, warnings=self._catalog.warnings)
        else:
            picked = find_tree(self._trees, tree, self.path)
        cast_dtype = _cast_dtype(dtype)
        exact = frozenset[str]() if cast_dtype is None else exact_parts(self._catalog)
        shared: dict[object, torch.Tensor] = {}
        state_dict, spared = {}, []
        whole = with_all_names(self._catalog, picked, live_of(self._trees, picked))
        for name, tensor in whole.weights.items():
            key = (tensor.storage or id(tensor), tensor.shape, tensor.dtype.name)
            if key not in shared:
                shared[key] = self._read(tensor)
                is_cast = tensor.dtype.is_castable and cast_dtype not in (None, shared[key].dtype)
                if is_cast and tensor.name in exact:
                    spared.append(name)
                elif is_cast:
                    shared[key] = shared[key].to(cast_dtype)
            state_dict[name] = shared[key]
        _log_spared(spared)
        return state_dict

    def _read(self, tensor: Tensor) -> torch.Tensor:
        import_torch("reading a tensor")
        import torch

        prove(tensor)
        dtype: torch.dtype = getattr(torch, tensor.dtype.name)
        if not tensor.numel:
            return torch.empty(tensor.shape, dtype=dtype)
        data = bytearray(tensor.nbytes)
        with self._same(chunk.file for chunk in tensor.chunks):
            verifier = ChecksumVerifier(self._catalog.source, enabled=True)
            BoxReader(_BLOCK_NBYTES, verifier).read(locate(self._catalog, tensor), memoryview(data))
            verifier.finish()
        return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)

    def close(self) -> None:
        """Close its files; tensors that were read stay."""
        self._catalog.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _guard(catalog: Catalog) -> _Guard:
    """Compare local files with what they were when they were opened.

    What is behind a URL is compared with each answer instead.
    """
    if local_path(catalog.source.root) is None:
        return lambda _: nullcontext()
    states = FileStates.opened(catalog)
    states.refuse_changes()  # since the metadata was read
    return partial(states.same, catalog.source)


def _log_spared(names: Sequence[str]) -> None:
    """Log which parts of quantised weights are not cast."""
    if names:
        message = f"dtype does not cast parts of quantised weights: {shown(names)}"
        logging.getLogger("ema_ckpt").warning(displayed(message))


def _cast_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype to cast floating-point tensors to; None to keep theirs."""
    if dtype is None:
        return None
    import_torch("casting a tensor")
    import torch

    if isinstance(dtype, str):
        target = cast_target(dtype)
        return None if target is None else getattr(torch, target.name)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
        return dtype
    message = f"dtype {dtype!r}: expected a floating-point type of 16 bits or more"
    raise UsageError("usage", message)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of any readable format.

    Checkpoints beside it that are not opened, and averages that are no tree, as they lie below
    `callbacks` or other bookkeeping, are logged to `ema_ckpt`, level warning.

    Raises:
        EmaCkptError: `not-found not-a-checkpoint unreadable unsafe-pickle …`.
    """
    catalog = open_catalog(path)
    trees = list_trees(catalog)
    for warning in (*catalog.warnings, *find_hidden(trees)):
        if warning.code == "left-out":
            logging.getLogger("ema_ckpt").warning(displayed(warning.message))
    return Checkpoint(catalog, trees)
