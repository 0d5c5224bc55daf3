"""Optimizer state as a tree in torch's nested form, saved and restored without a collective.

The form is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`:
`{"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, …], option: value}]}`. State of a
parameter's shape is sharded as the parameter is. Nothing here steps an optimizer: torch's own
functions run a dummy step with learning rate 0 to create the state, and that step fires hooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.optim import Adagrad, Optimizer

from ema_ckpt.comm.channel import Channel
from ema_ckpt.core.box import Box
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.text import shown
from ema_ckpt.ema.model.shards import ModelShards, Shard, TrackedShard
from ema_ckpt.ema.model.tensor_kinds import refuse_unreadable
from ema_ckpt.ema.optimizer_offload.optimizer import handle_of
from ema_ckpt.ema.optimizer_offload.state_slabs import local_of
from ema_ckpt.ema.optimizers import tensors_in
from ema_ckpt.resume.flatten import LocalShards, local_shards


@dataclass(frozen=True, slots=True, eq=False)
class StagedState:
    """A state tensor to restore: global shape, dtype, and host values by box."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Mapping[Box, torch.Tensor]

    def copy_to(self, live: Any) -> None:
        """Copy the values into this rank's shards of a live tensor."""
        for box, view in local_shards(live).shards:
            if box.numel:
                view.copy_(self.values[box])


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

    def part_of(self, name: str, value: Any, shard: Shard) -> Any:
        """Cut a state value for one parameter: sharded as it is if it has its shape, else as is."""
        if not isinstance(value, torch.Tensor):
            is_flat = isinstance(self.tensor, FlatParameter)
            if is_flat and next(tensors_in(value), None) is not None:
                raise UsageError(
                    "unsupported",
                    f"{type(self.optimizer).__name__} keeps tensors in a {type(value).__name__},"
                    f" {name!r} of {shard.fqn!r}: FSDP1 does not tell which part of the flat"
                    " parameter they belong to; use fully_shard",
                    tensor=shard.fqn,
                )
            return value
        if isinstance(value, DTensor) and value.placements != getattr(
            self.tensor, "placements", None
        ):
            return value  # cut in its own way
        local, numel = local_of(value), shard.local.numel()
        refuse_unreadable(f"optimizer.state.{shard.fqn}.{name}", local)
        if isinstance(self.tensor, FlatParameter) and local.dim() == 1:
            starts = [
                t.shard.local.storage_offset() for t in self.parameters if t.shard.local.numel()
            ]
            start = shard.local.storage_offset() - min(starts, default=0) if numel else 0
            local = local[start : start + numel]
        elif local.shape != shard.local.shape:
            return value
        return LocalShards.of(shard.boxes, shard.shape, local)

    def zeros(self, value: StagedState, shard: Shard) -> torch.Tensor:
        """Allocate a state tensor where the optimizer keeps its state."""
        if value.shape != shard.shape or not value.shape:
            return torch.zeros(value.shape, dtype=value.dtype, device=self.tensor.device)
        offloaded = handle_of(self.optimizer)
        zeros_like = torch.zeros_like if offloaded is None else offloaded._zeros
        return zeros_like(self.tensor, dtype=value.dtype).requires_grad_(False)

    def allocate(self, state: Mapping[str, Mapping[str, Any]], *, step_on_device: bool) -> None:
        """Give the optimizer the entries of `state`, per fqn and state name; tensors are zeros."""
        entries = self.optimizer.state[self.tensor]
        for tracked in self.parameters:
            for name, value in state.get(tracked.shard.fqn, {}).items():
                if name in entries:  # of another parameter in the same flat one
                    continue
                if not isinstance(value, StagedState):
                    entries[name] = value
                    continue
                zeros = self.zeros(value, tracked.shard)
                on_host = name == "step" and not step_on_device
                entries[name] = zeros.cpu() if on_host else zeros
        if not entries:
            del self.optimizer.state[self.tensor]


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


def optimizer_tree(model: ModelShards, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return state and options under the model's canonical names; tensors share their memory.

    Raises:
        UsageError: an optimizer steps a tensor that is no parameter of the model, or keeps state
            that is not one entry for each of its parameters.
    """
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        offloaded = handle_of(optimizer)
        if offloaded is not None:
            offloaded.wait()
        refuse_hidden_state(optimizer)
    for group, stepped in stepped_groups(model, optimizers):
        options = dict(group)
        del options["params"]
        parameters = chain.from_iterable(one.parameters for one in stepped)
        groups.append({**options, "params": [tracked.shard.fqn for tracked in parameters]})
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
                    name: one.part_of(name, value, tracked.shard) for name, value in values.items()
                }
    return {"state": state, "param_groups": groups}


def set_state(
    model: ModelShards, optimizers: Sequence[Optimizer], state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give every parameter the entries of `state`: tensors are allocated, then copied into.

    Args:
        state: per fqn and state name, a `StagedState`, or any other value to set as it is.
    """
    for group, stepped in stepped_groups(model, optimizers):
        # Step counts live on the host unless the kernel reads them on the device.
        step_on_device = any(map(group.get, ("capturable", "fused")))
        for one in stepped:
            if not one.is_idle():
                one.allocate(state, step_on_device=step_on_device)
    live = optimizer_tree(model, optimizers)["state"]
    for fqn, entries in state.items():
        for name, value in entries.items():
            if isinstance(value, StagedState) and name in live.get(fqn, {}):
                value.copy_to(live[fqn][name])


def begin_missing(optimizers: Iterable[Optimizer]) -> None:
    """Give parameters without state the one that their optimizer's constructor makes.

    Adagrad makes its state there up to torch 2.12, and cannot step a parameter that has none.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, Adagrad):
            continue
        for group in optimizer.param_groups:
            options = {name: group[name] for name in optimizer.defaults.keys() & group.keys()}
            for param in group["params"]:
                if param not in optimizer.state:
                    fresh = Adagrad([param], **options).state
                    optimizer.state.update(fresh)


def set_options(optimizers: Sequence[Optimizer], groups: list[dict[str, Any]]) -> None:
    """Set the options of all parameter groups, in order; tensors are filled in place."""
    live = list(chain.from_iterable(optimizer.param_groups for optimizer in optimizers))
    uses = Counter(map(id, chain.from_iterable(group.values() for group in live)))
    for group, saved in zip(live, groups, strict=True):
        options = {**saved}
        options.pop("params", None)
        options.pop("param_names", None)
        for name, value in options.items():
            current = group.get(name)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                if uses[id(current)] > 1:  # one default learning rate for all groups
                    group[name] = current = current.clone()
                current.copy_(value)
            else:
                group[name] = value


def refuse_hidden_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer with state outside the tensors it steps: it would be lost.

    Raises:
        UsageError: `unsupported`.
    """
    stepped = set(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    hidden = []
    keys: Iterable[object] = optimizer.state
    for key in keys:
        if not isinstance(key, torch.Tensor):
            hidden.append(str(key))
        elif key not in stepped:
            hidden.append(f"a tensor of shape {list(key.shape)}")
    if hidden:
        message = f"state under {shown(hidden)}, which is not in its parameter groups"
    elif getattr(optimizer, "param_groups_master", None):
        message = "master weights in param_groups_master"
    elif beside := _entries_beside_state(optimizer):
        message = f"{shown(beside)} in its state_dict() beside the state of its parameters"
    else:
        return
    kind = type(optimizer).__name__
    raise UsageError("unsupported", f"{kind} keeps {message}: save it under extra")


def _entries_beside_state(optimizer: Optimizer) -> list[str]:
    """Return what an optimizer's own `state_dict` has more than torch's."""
    method = getattr(type(optimizer), "state_dict", None)
    if method in (None, Optimizer.state_dict) or not isinstance(optimizer, Optimizer):
        return []
    keys = optimizer.state_dict().keys()
    # One without "state" there is a container, whose own state is looked at as such.
    return sorted(map(str, keys - {"state", "param_groups"})) if "state" in keys else []


def merge_group_parameters(groups: Sequence[dict[str, Any]], ranks: Channel) -> None:
    """List in each parameter group the parameters of all ranks: stages of a pipeline differ."""
    everyone = ranks.exchange_if_different([group["params"] for group in groups])
    if not everyone:
        return
    for index, group in enumerate(groups):
        names: dict[str, None] = {}
        for lists in everyone:
            if index < len(lists):
                names.update(dict.fromkeys(lists[index]))
        group["params"] = list(names)
