"""The state of optimizers as a tree in torch's nested form, saved from and restored into without a
collective.

The form is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`:
`{"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, …], option: value}]}`. State that
has a parameter's shape is sharded as the parameter is. Nothing here steps an optimizer: torch's own
functions run a dummy step with learning rate 0 to make the state of a fresh one, and that step
fires hooks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ema_ckpt.core.errors import UsageError, shown
from ema_ckpt.ema.checkpoint.local_shards_tensor import as_global_tensor
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.ema.model.shards import Shard, TrackedShard
from ema_ckpt.ema.offload.optimizer import handle_of
from ema_ckpt.ema.offload.state_slabs import local_of

Optimizers = Optimizer | Iterable[Optimizer]


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor of optimizer state to be made: its global shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class _Stepped:
    """A tensor that an optimizer steps, and the parameters in it: several in a flat parameter of
    FSDP1.
    """

    optimizer: Optimizer
    tensor: torch.Tensor
    parts: tuple[TrackedShard, ...]

    def is_idle(self) -> bool:
        """Whether this rank has nothing of a parameter that others step: under FSDP1 it gets no
        gradient here.

        State of it would stay at the step at which it was made, and a save might take that for
        everybody's.
        """
        is_empty = not self.tensor.numel() and not isinstance(self.tensor, DTensor)
        return is_empty and any(prod(held.shard.shape) for held in self.parts)


def listed(optimizers: Optimizers) -> list[Optimizer]:
    """The optimizers as a list."""
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def optimizer_tree(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """State and options of `optimizers` under the model's canonical names; tensors share the
    optimizers' memory.

    Raises:
        UsageError: an optimizer steps a tensor that is no parameter of `model`, or keeps state that
            is not one entry for each of its parameters.
    """
    known = _by_owner(model)
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    saved = listed(optimizers)
    for optimizer in saved:
        offloaded = handle_of(optimizer)
        if offloaded is not None:
            offloaded.wait()
        _refuse_hidden(optimizer, saved)
        for group in optimizer.param_groups:
            stepped = [
                _Stepped(optimizer, tensor, _parts(known, tensor)) for tensor in group["params"]
            ]
            fqns = [held.shard.fqn for one in stepped for held in one.parts]
            groups.append(
                {name: value for name, value in group.items() if name != "params"}
                | {"params": fqns}
            )
            for one in stepped:
                for fqn, values in _state_of(one):
                    if fqn in state:
                        message = (
                            f"two optimizers keep state of {fqn!r}: save one of them under extra"
                        )
                        raise UsageError("unsupported", message, tensor=fqn)
                    state[fqn] = values
    return {"state": state, "param_groups": groups}


def make_state(
    model: nn.Module, optimizers: Optimizers, wanted: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give every parameter the state entries it lacks and `wanted` has, so that `optimizer_tree`
    shows them all.

    Args:
        wanted: per fqn and state name, a `Blank` to allocate, or any other value to set as it is.
    """
    known = _by_owner(model)
    for optimizer in listed(optimizers):
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                one = _Stepped(optimizer, tensor, _parts(known, tensor))
                _make(one, wanted)


def fill(optimizers: Optimizers, groups: list[dict[str, Any]]) -> None:
    """Set the options of all parameter groups, in order; tensors are filled in place."""
    live = [group for optimizer in listed(optimizers) for group in optimizer.param_groups]
    held = Counter(
        id(value) for group in live for value in group.values() if isinstance(value, torch.Tensor)
    )
    for group, saved in zip(live, groups, strict=True):
        for name, value in saved.items():
            if name in ("params", "param_names"):
                continue
            there = group.get(name)
            if isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor):
                if held[id(there)] > 1:  # one default learning rate for all groups
                    group[name] = there = there.clone()
                there.copy_(value)
            else:
                group[name] = value


def _refuse_hidden(optimizer: Optimizer, saved: list[Optimizer]) -> None:
    """Refuse an optimizer whose state is not that of the tensors it steps: it would be lost.

    Raises:
        UsageError: `unsupported`.
    """
    stepped = {tensor for group in optimizer.param_groups for tensor in group["params"]}
    others = [
        key for key in optimizer.state if not isinstance(key, torch.Tensor) or key not in stepped
    ]
    if others:
        names = [
            f"a tensor of shape {list(k.shape)}" if isinstance(k, torch.Tensor) else str(k)
            for k in others
        ]
        message = f"state under {shown(names)}, which is not in its parameter groups"
    elif _keeps_state_elsewhere(optimizer, saved):
        message = "state in optimizers of its own"
    elif getattr(optimizer, "param_groups_master", None):
        message = "master weights in param_groups_master"
    else:
        return
    raise UsageError(
        "unsupported", f"{type(optimizer).__name__} keeps {message}: save it under extra"
    )


def _keeps_state_elsewhere(optimizer: Optimizer, saved: list[Optimizer]) -> bool:
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return True
    # A wrapper that shows the state of the one inside (accelerate's) is saved as that one.
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return any(
        one.state and one.state is not optimizer.state and all(one is not other for other in saved)
        for one in inner
    )


def _by_owner(model: nn.Module) -> dict[int, tuple[TrackedShard, ...]]:
    owners: dict[int, list[TrackedShard]] = {}
    for held in scan_model(model).parameters:
        owners.setdefault(id(held.owner), []).append(held)
    return {owner: tuple(parts) for owner, parts in owners.items()}


def _parts(
    known: Mapping[int, tuple[TrackedShard, ...]], tensor: torch.Tensor
) -> tuple[TrackedShard, ...]:
    parts = known.get(id(tensor))
    if parts is None:
        raise UsageError(
            "usage",
            f"the optimizer steps a tensor of shape {list(tensor.shape)} that is no parameter of the model; make the "
            "optimizer after the last wrapper (fully_shard, FSDP, .to())",
        )
    return parts


def _state_of(one: _Stepped) -> Iterator[tuple[str, dict[str, Any]]]:
    values = one.optimizer.state.get(one.tensor, {})
    if not values or one.is_idle():
        return
    for held in one.parts:
        yield (
            held.shard.fqn,
            {name: _part_of(value, one, held.shard) for name, value in values.items()},
        )


def _part_of(value: Any, one: _Stepped, shard: Shard) -> Any:
    """One state entry as it concerns one parameter: sharded like it if it has its shape, else as it
    is.
    """
    if not isinstance(value, torch.Tensor):
        return value
    local = local_of(value)
    if isinstance(one.tensor, FlatParameter) and local.dim() == 1:
        local = _slice(local, one, shard)
    elif local.shape != shard.local.shape:
        return value
    return as_global_tensor(shard.boxes, shard.shape, local)


def _slice(local: torch.Tensor, one: _Stepped, shard: Shard) -> torch.Tensor:
    """The elements of a flat parameter's state that belong to one of its parameters."""
    if not shard.local.numel():
        return local[:0]
    first = min(held.shard.local.storage_offset() for held in one.parts if held.shard.local.numel())
    start = shard.local.storage_offset() - first
    return local[start : start + shard.local.numel()]


def _make(one: _Stepped, wanted: Mapping[str, Mapping[str, Any]]) -> None:
    if one.is_idle():
        return
    state, offloaded = one.optimizer.state[one.tensor], handle_of(one.optimizer)
    make = torch.zeros_like if offloaded is None else offloaded.zeros
    for held in one.parts:
        for name, value in wanted.get(held.shard.fqn, {}).items():
            if name in state:
                continue
            if not isinstance(value, Blank):
                state[name] = value
            elif value.shape == held.shard.shape != ():
                state[name] = make(one.tensor, dtype=value.dtype).requires_grad_(False)
            else:
                state[name] = torch.zeros(
                    value.shape, dtype=value.dtype, device=_device_of(one, name)
                )
    if not state:
        del one.optimizer.state[one.tensor]


def _device_of(one: _Stepped, name: str) -> torch.device:
    """Where an optimizer keeps what has no parameter's shape: step counts on the host, unless told
    otherwise.
    """
    group = next(
        g for g in one.optimizer.param_groups if any(tensor is one.tensor for tensor in g["params"])
    )
    on_device = bool(group.get("capturable") or group.get("fused"))
    return one.tensor.device if on_device or name != "step" else torch.device("cpu")
