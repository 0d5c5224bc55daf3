"""The live weights of a model as a tree that is saved from and restored into without a
collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ema_ckpt.ema.checkpoint.local_shards_tensor import as_global_tensor
from ema_ckpt.ema.model.scan import canonical_modules, scan_model
from ema_ckpt.ema.model.shards import Shard, TrackedShard

_EXTRA = "_extra_state"


def live_tree(model: nn.Module) -> dict[str, Any]:
    """Parameters, persistent buffers and extra state by canonical name, in the order of
    `model.state_dict()`.

    Tensors have their global shape and share the live memory; a tied one appears under each of its
    names.
    """
    tensors: dict[int, torch.Tensor] = {}
    tree = live_shards(model)
    for value in tree.values():
        if isinstance(value, Shard) and id(value) not in tensors:
            tensors[id(value)] = published(value)
    return {name: tensors.get(id(value), value) for name, value in tree.items()}


def live_shards(model: nn.Module) -> dict[str, Any]:
    """As `live_tree`, with shards in place of tensors."""
    found = scan_model(model)
    entries: dict[str, tuple[int, Any]] = {}  # kind, value
    for kind, group in enumerate((found.parameters, found.buffers)):
        for held in group:
            if held.persistent:
                entries.update(dict.fromkeys(held.shard.names, (kind, held.shard)))
    entries.update({name: (2, value) for name, value in extra_state(model).items()})
    places: dict[str, int] = {}
    for place, (prefix, _) in enumerate(canonical_modules(model)):
        places.setdefault(prefix, place)
    order = sorted(
        entries, key=lambda name: (places.get(_prefix(name), len(places)), entries[name][0])
    )
    return {name: entries[name][1] for name in order}


def published(shard: Shard) -> torch.Tensor:
    """A live shard as a tensor of global shape."""
    layout = (
        None if shard.mesh is None or shard.placements is None else (shard.mesh, shard.placements)
    )
    return as_global_tensor(shard.boxes, shard.shape, shard.local, layout)


def buffer_names(model: nn.Module) -> frozenset[str]:
    """Names of the persistent buffers: each rank has its own, and they may differ."""
    return frozenset(name for held in _buffers(model) for name in held.shard.names)


def tensor_names(model: nn.Module) -> frozenset[str]:
    """All names of parameters and persistent buffers."""
    found = scan_model(model)
    held = [h for h in (*found.parameters, *found.buffers) if h.persistent]
    return frozenset(name for h in held for name in h.shard.names)


def extra_state(model: nn.Module) -> dict[str, Any]:
    """What modules return from `get_extra_state`, by name."""
    return {name: module.get_extra_state() for name, module in _with_extra_state(model)}


def set_extra_state(model: nn.Module, values: dict[str, Any]) -> None:
    """Hand restored extra state to the modules it belongs to."""
    for name, module in _with_extra_state(model):
        if name in values:
            module.set_extra_state(values[name])


def _buffers(model: nn.Module) -> list[TrackedShard]:
    return [held for held in scan_model(model).buffers if held.persistent]


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in canonical_modules(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield prefix + _EXTRA, module


def _prefix(name: str) -> str:
    head, dot, _ = name.rpartition(".")
    return head + dot
