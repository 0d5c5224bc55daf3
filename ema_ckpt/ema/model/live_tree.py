"""The live weights of a model as a tree, to save from and restore into without a collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ema_ckpt.ema.checkpoint.local_shards_tensor import as_global_tensor
from ema_ckpt.ema.model.shards import ModelShards, Shard, TrackedShard


def live_tree(model_shards: ModelShards) -> dict[str, Any]:
    """Return parameters, persistent buffers and extra state by name, in `model.state_dict()` order.

    Tensors have their global shape and share the live memory; a tied one appears under each of its
    names.
    """
    tree = live_shards(model_shards)
    tensors: dict[int, torch.Tensor] = {}
    for value in tree.values():
        if isinstance(value, Shard) and id(value) not in tensors:
            layout = value.layout
            tensors[id(value)] = as_global_tensor(value.boxes, value.shape, value.local, layout)
    return {name: tensors.get(id(value), value) for name, value in tree.items()}


def live_shards(model_shards: ModelShards) -> dict[str, Any]:
    """Return the tree of `live_tree` with shards in place of tensors."""
    values: dict[str, Any] = {}
    ranks: dict[str, int] = {}  # within a module: parameters, buffers, extra state
    for rank, tracked_shards in enumerate((model_shards.parameters, model_shards.buffers)):
        for tracked in tracked_shards:
            if tracked.persistent:
                values.update(dict.fromkeys(tracked.shard.names, tracked.shard))
                ranks.update(dict.fromkeys(tracked.shard.names, rank))
    extra = extra_state(model_shards)
    values.update(extra)
    ranks.update(dict.fromkeys(extra, 2))
    positions: dict[str, int] = {}
    for position, (prefix, _) in enumerate(model_shards.modules):
        positions.setdefault(prefix, position)

    def order(name: str) -> tuple[int, int]:
        parent, dot, _ = name.rpartition(".")
        return positions.get(parent + dot, len(model_shards.modules)), ranks[name]

    return {name: values[name] for name in sorted(values, key=order)}


def buffer_names(model_shards: ModelShards) -> frozenset[str]:
    """Return the names of persistent buffers: each rank has its own, and they may differ."""
    return _persistent_names(model_shards.buffers)


def tensor_names(model_shards: ModelShards) -> frozenset[str]:
    """Return all names of parameters and persistent buffers."""
    return _persistent_names(model_shards.tensors)


def _persistent_names(tensors: Iterable[TrackedShard]) -> frozenset[str]:
    names: set[str] = set()
    for tracked in tensors:
        if tracked.persistent:
            names.update(tracked.shard.names)
    return frozenset(names)


def extra_state(model_shards: ModelShards) -> dict[str, Any]:
    """Return the results of the modules' `get_extra_state`, by name."""
    return {name: module.get_extra_state() for name, module in _with_extra_state(model_shards)}


def set_extra_state(model_shards: ModelShards, values: dict[str, Any]) -> None:
    """Pass restored extra state to the modules it belongs to."""
    for name, module in _with_extra_state(model_shards):
        if name in values:
            module.set_extra_state(values[name])


def _with_extra_state(model_shards: ModelShards) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model_shards.modules:
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}_extra_state", module
