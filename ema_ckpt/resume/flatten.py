"""Flatten a training state into leaves: this rank's shards of tensors, and pickled objects.

Nesting is flattened as `torch.distributed.checkpoint` does it (`_traverse.py`, since torch 2.4), so
that plain `dcp.load` reads what is written and the metadata has the tree structure.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import NoneType
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import StateError, UsageError, about
from ema_ckpt.ema.checkpoint.agreement import checksum
from ema_ckpt.ema.checkpoint.listing import Path
from ema_ckpt.ema.checkpoint.local_shards_tensor import LocalShardsTensor, box_views, pieces_of
from ema_ckpt.ema.model.shards import Shard
from ema_ckpt.ema.model.tensor_kinds import refuse_unreadable
from ema_ckpt.formats.nesting import walk
from ema_ckpt.resume.checkpoint_reader import load_plain

_SMALL_NUMEL = 4096


@dataclass(frozen=True, slots=True, eq=False)
class LocalShards:
    """This rank's shards of one tensor: boxes in elements of the global shape, and their views."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[tuple[Box, torch.Tensor], ...]

    @classmethod
    def of(
        cls, boxes: Sequence[Box], shape: tuple[int, ...], local: torch.Tensor, *_: object
    ) -> LocalShards:
        """Cut `local` into views of the boxes; takes what `as_global_tensor` does."""
        if 0 in shape:
            # Kept on every rank, so that its shape survives whichever rank writes it.
            boxes, local = [whole(shape)], torch.empty(shape, dtype=local.dtype)
        views = [view.detach() for view in box_views(boxes, local)]
        return cls(shape, local.dtype, tuple(zip(boxes, views, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One entry of a flattened state under its dotted name and its path.

    `text_crc` is equal for objects that print alike: pickles of equal values may differ.
    """

    name: str
    path: Path
    value: LocalShards | bytes
    text_crc: int = 0

    def is_small(self) -> bool:
        """Whether it is an object, or as small as state of one value per layer is."""
        return isinstance(self.value, bytes) or prod(self.value.shape) <= _SMALL_NUMEL

    def is_whole(self) -> bool:
        """Whether this rank has all of it."""
        if isinstance(self.value, bytes):
            return True
        box = whole(self.value.shape)
        return all(part == box for part, _ in self.value.shards)

    def checksums(self) -> list[tuple[tuple[int, ...], int]]:
        """Return offsets and checksum of each shard of a tensor, or the object's `text_crc`."""
        if isinstance(self.value, bytes):
            return [((), self.text_crc)]
        return [(box.offsets, checksum(view)) for box, view in self.value.shards]


def refuse_unnamed(extra: object, call: str) -> None:
    """Refuse extra values without names."""
    if extra is not None and not isinstance(extra, Mapping):
        kind = type(extra).__name__
        raise UsageError("usage", f"{call}: extra is a dict of values by name; found {kind}")


def flatten(state: Mapping[str, Any]) -> list[Leaf]:
    """Flatten a nested state in order: objects are pickled now, tensors keep sharing their memory.

    Raises:
        UsageError: `name-collision` if two paths join to one dotted name; `unsupported` if an
            object is one that `restore` would not unpickle.
        StateError: `unsupported` if a tensor is one that `restore` could not bring back.
    """
    leaves: dict[str, Leaf] = {}
    for path, value in walk(state, _open_container):
        name = ".".join(map(str, path))
        if name in leaves:
            message = f"two entries of the state are called {name!r}; rename one of them"
            raise UsageError("name-collision", message)
        if isinstance(value, LocalShards | Shard | torch.Tensor):
            for tensor in _local_tensors(value):
                refuse_unreadable(name, tensor)
            try:
                leaves[name] = Leaf(name, path, local_shards(value))
            except StateError as error:
                raise about(error, tensor=name) from error
            continue
        if path[0] != "extra":  # the user's own values keep their types
            value = _plain(value)  # noqa: PLW2901
        text = repr(value) if path[0] == "extra" else ""
        crc = 0 if " at 0x" in text else crc32(text.encode())
        leaves[name] = Leaf(name, path, _pickled(name, value), crc)
    return list(leaves.values())


def _local_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in which this rank has its elements."""
    if isinstance(value, LocalShards):
        return [view for _, view in value.shards]
    if isinstance(value, Shard):
        return [value.local]
    if isinstance(value, LocalShardsTensor):
        return list(value.views)
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    return [getattr(value, "_local_tensor", value)]


def _pickled(name: str, value: Any) -> bytes:
    """Pickle an object, or refuse one that `restore` would not unpickle."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        message = f"{name!r} of type {type(value).__name__} cannot be pickled: {error}"
        raise UsageError("usage", message) from error
    data = stream.getvalue()
    try:
        if not _is_plain(value):
            load_plain(data)
    except Exception as error:
        raise UsageError(
            "unsupported",
            f"{name!r} of type {type(value).__name__} holds more than plain values, so that"
            " restore() would refuse it: pass its state_dict() or plain values, or list its classes"
            " in torch.serialization.add_safe_globals()",
        ) from error
    return data


def _is_plain(value: Any) -> bool:
    """Whether a value is sure to be unpickled, without trying it."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in (int, float, bool, str, bytes, NoneType)


def local_shards(tensor: torch.Tensor | Shard | LocalShards) -> LocalShards:
    """List this rank's shards of a tensor: a live shard, or one that is distributed or whole."""
    if isinstance(tensor, LocalShards):
        return tensor
    if isinstance(tensor, Shard):
        return LocalShards.of(tensor.boxes, tensor.shape, tensor.local)
    shape = tuple(tensor.shape)
    if 0 in shape:
        return LocalShards.of((), shape, torch.empty(0, dtype=tensor.dtype))
    if not hasattr(tensor, "local_shards"):
        shards = [(box, view.detach()) for box, view in pieces_of(tensor)]
        return LocalShards(shape, tensor.dtype, tuple(shards))
    shards = []
    for shard in tensor.local_shards():  # of a ShardedTensor, as in FSDP1's sharded state dicts
        if shard.tensor.numel():
            place = shard.metadata
            box = Box(tuple(place.shard_offsets), tuple(place.shard_sizes))
            shards.append((box, shard.tensor.detach()))
    return LocalShards(shape, tensor.dtype, tuple(shards))


def _plain(value: Any) -> Any:
    """Return a value with plain numbers in place of NumPy's scalars, also in tuples and lists."""
    if isinstance(value, numpy.number | numpy.bool_):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value) is dict:
        return {key: _plain(inner) for key, inner in value.items()}
    return value


def _open_container(path: Path, value: Any) -> Iterable[tuple[str | int, Any]] | None:
    if isinstance(value, Mapping) and not _is_leaf(path, value):
        return [(str(key), inner) for key, inner in value.items()]
    if isinstance(value, list) and _holds_tensor_or_dict(value):
        return enumerate(value)
    return None


def _is_leaf(path: Path, value: Mapping[Any, Any]) -> bool:
    """Whether a dict would not come back the same from flattened entries.

    torch turns keys into text and drops empty dicts; `MultiStepLR` keeps its milestones by number.
    """
    # Below `optimizer.state.<name>` and `optimizer.param_groups.0` values are the optimizer's own.
    depth = {"extra": 1, "optimizer": 3}.get(str(path[0]) if path else "", len(path))
    has_text_keys = bool(value) and all(isinstance(key, str) for key in value)
    is_own = len(path) <= depth and not is_extra_state(path)
    if is_own or has_text_keys:
        return False
    if _holds_shards(value, on_device=path[0] == "optimizer"):
        raise UsageError(
            "unsupported",
            f"{'.'.join(map(str, path))!r}: a dict with keys that are no text holds tensors that"
            " are sharded or on a device, and could not be put back under their keys; an optimizer"
            " belongs in save(optimizer=…)",
        )
    return True


def is_extra_state(path: Path) -> bool:
    """Whether a path leads into what a module's `get_extra_state` returned."""
    return any(str(part).endswith("_extra_state") for part in path)


def _holds_shards(value: Any, on_device: bool) -> bool:
    """Whether sharded tensors are in a value, or with `on_device` those outside host memory."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(_holds_shards(inner, on_device) for inner in value)
    if on_device and isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return True
    return isinstance(value, DTensor | LocalShardsTensor) or hasattr(value, "local_shards")


def _holds_tensor_or_dict(value: Any) -> bool:
    """Whether a list, at any depth of lists, holds a tensor or a dict."""
    if isinstance(value, list):
        return any(map(_holds_tensor_or_dict, value))
    return isinstance(value, Mapping | torch.Tensor)
