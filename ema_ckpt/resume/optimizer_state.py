"""Optimizer state as a tree in torch's nested form, saved and restored without a collective.

The form is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`:
`{"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, …], option: value}]}`. State of a
parameter's shape is sharded as the parameter is. Nothing here steps an optimizer: torch's own
functions run a dummy step with learning rate 0 to create the state, and that step fires hooks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.text import shown
from ema_ckpt.ema.checkpoint.local_shards_tensor import box_views
from ema_ckpt.ema.model.shards import ModelShards, Shard, TrackedShard
from ema_ckpt.ema.offload.optimizer import handle_of
from ema_ckpt.ema.offload.state_slabs import local_of
from ema_ckpt.resume.flatten import LocalShards

Optimizers = Optimizer | Iterable[Optimizer]


@dataclass(frozen=True, slots=True)
class EmptyState:
    """A tensor of optimizer state to allocate: its global shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class SteppedTensor:
    """A tensor that an optimizer steps, and its parameters: FSDP1's flat parameter has several."""

    optimizer: Optimizer
    tensor: torch.Tensor
    parameters: Sequence[TrackedShard]

    def is_idle(self) -> bool:
        """Whether this rank holds nothing of a parameter, so that FSDP1 gives no gradient here.

        Its state would keep the step count it was created with, and a save might take that.
        """
        if self.tensor.numel() or isinstance(self.tensor, DTensor):
            return False
        return any(prod(tracked.shard.shape) for tracked in self.parameters)

    def part_of(self, value: Any, shard: Shard) -> Any:
        """Cut a state value for one parameter: sharded as it is if it has its shape, else as is."""
        if not isinstance(value, torch.Tensor):
            return value
        local = local_of(value)
        if isinstance(self.tensor, FlatParameter) and local.dim() == 1:
            local = self._slice(local, shard)
        elif local.shape != shard.local.shape:
            return value
        views = box_views(shard.boxes, local)
        return LocalShards(shard.shape, local.dtype, tuple(zip(shard.boxes, views, strict=True)))

    def _slice(self, local: torch.Tensor, shard: Shard) -> torch.Tensor:
        """Elements of a flat parameter's state that belong to one of its parameters."""
        numel = shard.local.numel()
        if not numel:
            return local[:0]
        locals_ = [tracked.shard.local for tracked in self.parameters]
        first = min(other.storage_offset() for other in locals_ if other.numel())
        start = shard.local.storage_offset() - first
        return local[start : start + numel]


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    """Return one optimizer or several as a list."""
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def stepped_groups(
    model: ModelShards, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[dict[str, Any], list[SteppedTensor]]]:
    """Yield each parameter group with its tensors, in order.

    Raises:
        UsageError: an optimizer steps a tensor that is no parameter of the model.
    """
    by_owner: dict[int, list[TrackedShard]] = {}
    for tracked in model.parameters:
        by_owner.setdefault(id(tracked.owner), []).append(tracked)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            stepped = []
            for tensor in group["params"]:
                if id(tensor) not in by_owner:
                    raise UsageError(
                        "usage",
                        f"the optimizer steps a tensor of shape {list(tensor.shape)} that is no"
                        " parameter of the model; make the optimizer after the last wrapper"
                        " (fully_shard, FSDP, .to())",
                    )
                stepped.append(SteppedTensor(optimizer, tensor, by_owner[id(tensor)]))
            yield group, stepped


def optimizer_tree(model: ModelShards, optimizers: Optimizers) -> dict[str, Any]:
    """Return state and options under the model's canonical names; tensors share their memory.

    Raises:
        UsageError: an optimizer steps a tensor that is no parameter of the model, or keeps state
            that is not one entry for each of its parameters.
    """
    saved = as_list(optimizers)
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in saved:
        offloaded = handle_of(optimizer)
        if offloaded is not None:
            offloaded.wait()
        _refuse_hidden_state(optimizer, saved)
    for group, stepped in stepped_groups(model, saved):
        options = {name: value for name, value in group.items() if name != "params"}
        names = [tracked.shard.fqn for one in stepped for tracked in one.parameters]
        groups.append({**options, "params": names})
        for one in stepped:
            values = one.optimizer.state.get(one.tensor, {})
            if not values or one.is_idle():
                continue
            for tracked in one.parameters:
                fqn = tracked.shard.fqn
                if fqn in state:
                    message = f"two optimizers keep state of {fqn!r}: save one of them under extra"
                    raise UsageError("unsupported", message, tensor=fqn)
                state[fqn] = {
                    name: one.part_of(value, tracked.shard) for name, value in values.items()
                }
    return {"state": state, "param_groups": groups}


def allocate_state(
    model: ModelShards, optimizers: Optimizers, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give every parameter the entries of `state` that it lacks.

    Args:
        state: per fqn and state name, an `EmptyState` to allocate, or any other value to set.
    """
    for group, stepped in stepped_groups(model, as_list(optimizers)):
        for one in stepped:
            if not one.is_idle():
                _allocate_missing(one, group, state)


def _allocate_missing(
    one: SteppedTensor, group: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]
) -> None:
    entries, offloaded = one.optimizer.state[one.tensor], handle_of(one.optimizer)
    zeros_like = torch.zeros_like if offloaded is None else offloaded.zeros
    # Step counts live on the host unless the kernel reads them on the device.
    on_device = bool(group.get("capturable") or group.get("fused"))
    for tracked in one.parameters:
        for name, value in state.get(tracked.shard.fqn, {}).items():
            if name in entries:
                continue
            if not isinstance(value, EmptyState):
                entries[name] = value
            elif value.shape == tracked.shard.shape != ():
                zeros = zeros_like(one.tensor, dtype=value.dtype)
                entries[name] = zeros.requires_grad_(False)
            else:
                device = one.tensor.device if on_device or name != "step" else "cpu"
                entries[name] = torch.zeros(value.shape, dtype=value.dtype, device=device)
    if not entries:
        del one.optimizer.state[one.tensor]


def set_options(optimizers: Optimizers, groups: list[dict[str, Any]]) -> None:
    """Set the options of all parameter groups, in order; tensors are filled in place."""
    live = [group for optimizer in as_list(optimizers) for group in optimizer.param_groups]
    tensors = [id(v) for group in live for v in group.values() if isinstance(v, torch.Tensor)]
    uses = Counter(tensors)
    for group, saved in zip(live, groups, strict=True):
        for name, value in saved.items():
            if name in ("params", "param_names"):
                continue
            current = group.get(name)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                if uses[id(current)] > 1:  # one default learning rate for all groups
                    group[name] = current = current.clone()
                current.copy_(value)
            else:
                group[name] = value


def _refuse_hidden_state(optimizer: Optimizer, saved: list[Optimizer]) -> None:
    """Refuse an optimizer with state outside the tensors it steps: it would be lost.

    Raises:
        UsageError: `unsupported`.
    """
    stepped = {tensor for group in optimizer.param_groups for tensor in group["params"]}
    others = []
    keys: Iterable[object] = optimizer.state
    for key in keys:
        if not isinstance(key, torch.Tensor):
            others.append(str(key))
        elif key not in stepped:
            others.append(f"a tensor of shape {list(key.shape)}")
    if others:
        message = f"state under {shown(others)}, which is not in its parameter groups"
    elif _has_inner_optimizer(optimizer, saved):
        message = "state in optimizers of its own"
    elif getattr(optimizer, "param_groups_master", None):
        message = "master weights in param_groups_master"
    else:
        return
    kind = type(optimizer).__name__
    raise UsageError("unsupported", f"{kind} keeps {message}: save it under extra")


def _has_inner_optimizer(optimizer: Optimizer, saved: list[Optimizer]) -> bool:
    """Whether an optimizer inside this one keeps state that is saved nowhere else."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return True
    for inner in vars(optimizer).values():
        if not isinstance(inner, Optimizer) or any(inner is other for other in saved):
            continue
        # A wrapper that shows the state of the one inside (accelerate's) is saved as that one.
        if inner.state and inner.state is not optimizer.state:
            return True
    return False
