"""Restore optimizers: state and options by parameter name, without a dummy step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FlatParameter
from torch.optim import Optimizer

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import LIVE
from ema_ckpt.core.text import shown
from ema_ckpt.ema.model.shards import Shard
from ema_ckpt.ema.offload.optimizer import handle_of
from ema_ckpt.resume.flatten import local_shards
from ema_ckpt.resume.optimizer_state import (
    EmptyState,
    Optimizers,
    allocate_state,
    as_list,
    optimizer_tree,
    set_options,
)
from ema_ckpt.resume.restorer import Findings, RestoreContext, Restorer
from ema_ckpt.resume.tensor_source import (
    CheckpointReader,
    live_weights,
    optimizer_entries,
    torch_dtype,
)

State = dict[str, dict[str, Any]]  # per fqn and state name
# Options of any kind of optimizer: its parameters, and what schedulers add.
_COMMON = {"params", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


@dataclass(frozen=True, slots=True, eq=False)
class _StagedState:
    """A state tensor that was read: global shape, dtype, and host values by box."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Mapping[Box, torch.Tensor]


@dataclass(slots=True, eq=False)
class OptimizerRestorer(Restorer):
    """State and options of optimizers."""

    reader: CheckpointReader
    context: RestoreContext
    optimizers: list[Optimizer]
    shards: Mapping[str, Shard]  # of the parameters, by each of their names
    weights: Mapping[str, Tensor]  # stored live weights
    stored: State
    stored_groups: list[Any]
    live_groups: list[dict[str, Any]]
    staged: State = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> None:
        cast: dict[str, None] = {}
        for fqn, entries in self.stored.items():
            shard = self.shards[fqn]
            values = self.staged[fqn] = {}
            for name, entry in entries.items():
                if not isinstance(entry, Tensor):
                    values[name] = self.reader.load(entry)
                    continue
                dtype = self._restored_dtype(shard, entry)
                if dtype is not torch_dtype(entry):
                    cast[fqn] = None
                is_sharded = entry.shape == shard.shape != ()
                boxes = list(shard.boxes) if is_sharded else [whole(entry.shape)]
                parts = dict(zip(boxes, self.reader.read(entry, boxes), strict=True))
                values[name] = _StagedState(entry.shape, dtype, parts)
        self._warn_of_mixed_steps()
        if cast:
            self.findings.warnings.append(
                f"the optimizer's state of {shown(list(cast))} is cast as their weights are"
            )
        self._pair_groups([self.reader.load(group) for group in self.stored_groups])

    def _restored_dtype(self, shard: Shard, stored: Tensor) -> torch.dtype:
        """Dtype as stored; state in the dtype of its stored weight follows the live weight's."""
        dtype = torch_dtype(stored)
        weights = [self.weights[name] for name in shard.names if name in self.weights]
        follows = weights and torch_dtype(weights[0]) is dtype
        return shard.dtype if follows and stored.shape == shard.shape != () else dtype

    def _warn_of_mixed_steps(self) -> None:
        """Warn where parameters of one flat parameter differ: FSDP1 has one step count for all."""
        flat: dict[int, list[str]] = {}
        for tracked in self.context.shards.parameters:
            if isinstance(tracked.owner, FlatParameter) and 0 not in tracked.shard.shape:
                flat.setdefault(id(tracked.owner), []).append(tracked.shard.fqn)
        for names in flat.values():
            common = [_common_state(self.staged.get(fqn, {})) for fqn in names]
            odd = [fqn for fqn, state in zip(names, common, strict=True) if state != common[0]]
            if odd:
                self.findings.warnings.append(
                    f"the optimizer's state of {shown(odd)} is not at the step of that of"
                    f" {names[0]!r}, and one flat parameter holds them: the run does not go on as"
                    " it was; wrap with use_orig_params=True"
                )

    def _pair_groups(self, saved: list[dict[str, Any]]) -> None:
        """Bring the saved groups into the order of the live ones with the same parameters."""
        remaining = [
            (self._fqns(group.get("params", [])) - self.context.remote_names, group)
            for group in saved
        ]
        owners = [optimizer for optimizer in self.optimizers for _ in optimizer.param_groups]
        for number, (group, optimizer) in enumerate(zip(self.live_groups, owners, strict=True)):
            names = self._fqns(group["params"])
            index = next((i for i, pair in enumerate(remaining) if pair[0] == names), None)
            if index is None:
                message = f"no saved parameter group has the parameters of group {number} here"
                raise self._mismatch(f"{message}, {shown(sorted(names))}")
            _, options = remaining.pop(index)
            there, here = set(options) - _COMMON, set(group) - _COMMON
            # Releases of torch add options or drop them; another kind of optimizer does both.
            if there - here and here - there:
                raise self._mismatch(
                    f"parameter group {number} was saved with the options"
                    f" {shown(sorted(there - here))} and has {shown(sorted(here - there))} here:"
                    " another kind of optimizer"
                )
            if _has_uniform_state(optimizer):
                self._refuse_gaps(names)
            self.options.append(options)

    def _mismatch(self, reason: str) -> SourceError:
        return SourceError("index-mismatch", f"{self.reader.path}: nothing was restored: {reason}")

    def _fqns(self, names: list[str]) -> frozenset[str]:
        return frozenset(self.shards[name].fqn if name in self.shards else name for name in names)

    def _refuse_gaps(self, names: frozenset[str]) -> None:
        """Refuse state that a stepped parameter lacks and others of its group have."""
        stepped = [fqn for fqn in sorted(names) if self.stored.get(fqn)]
        keys = dict.fromkeys(key for fqn in stepped for key in self.stored[fqn])
        lost = []
        for fqn in stepped:
            lost += [f"optimizer.state.{fqn}.{key}" for key in keys if key not in self.stored[fqn]]
        if lost:
            message = f"it lacks {shown(lost)}, which others have"
            raise SourceError("incomplete", f"{self.reader.path}: nothing was restored: {message}")

    def write(self) -> None:
        offloaded = [handle for handle in map(handle_of, self.optimizers) if handle is not None]
        for handle in offloaded:
            handle.wait()
        for optimizer in self.optimizers:
            optimizer.state.clear()  # what the checkpoint lacks is dropped
        blank: State = {}
        for fqn, values in self.staged.items():
            blank[fqn] = dict(values)
            for name, value in values.items():
                if isinstance(value, _StagedState):
                    blank[fqn][name] = EmptyState(value.shape, value.dtype)
        allocate_state(self.context.shards, self.optimizers, blank)
        live = optimizer_tree(self.context.shards, self.optimizers)["state"]
        for fqn, values in self.staged.items():
            for name, value in values.items():
                if isinstance(value, _StagedState) and name in live.get(fqn, {}):
                    _copy_state(live[fqn][name], value)
        set_options(self.optimizers, self.options)
        for handle in offloaded:
            handle.settle()


def compare_optimizers(
    reader: CheckpointReader, context: RestoreContext, optimizers: Optimizers
) -> OptimizerRestorer:
    """Compare the names of state and the number of groups with the checkpoint's.

    Raises:
        SourceError: `incomplete` under `strict`, or `index-mismatch`.
        UsageError: `unknown-tree`, or an optimizer that cannot be saved.
    """
    entries = optimizer_entries(reader)
    parameters = context.shards.parameters
    shards = {name: tracked.shard for tracked in parameters for name in tracked.shard.names}
    has_weights = any(tree.role == LIVE for tree in reader.trees)
    weights = live_weights(reader) if has_weights else {}
    findings = Findings(["optimizer"])
    stored = _state_by_parameter(entries.get("state", {}), shards, context, findings)
    if findings.unexpected and context.strict:
        names = shown(findings.unexpected)
        message = f"it has {names}, whose parameters this model lacks"
        raise SourceError("incomplete", f"{reader.path}: nothing was restored: {message}")
    numbered = entries.get("param_groups", {})
    groups = [numbered[index] for index in sorted(numbered)]
    listed = as_list(optimizers)
    live = optimizer_tree(context.shards, listed)["param_groups"]
    if len(live) != len(groups):
        message = f"{len(groups)} parameter groups there, {len(live)} here"
        raise SourceError("index-mismatch", f"{reader.path}: nothing was restored: {message}")
    return OptimizerRestorer(
        findings, reader, context, listed, shards, weights, stored, groups, live
    )


def _state_by_parameter(
    stored: Mapping[str, Mapping[str, Any]],
    shards: Mapping[str, Shard],
    context: RestoreContext,
    findings: Findings,
) -> State:
    """Stored state by fqn; of names tied here the first one's, as its weight is taken too."""
    names: dict[str, list[str]] = {}
    for name, values in stored.items():
        if name in shards:
            names.setdefault(shards[name].fqn, []).append(name)
        elif name not in context.remote_names:
            findings.unexpected += [f"optimizer.state.{name}.{key}" for key in values]
    state: State = {}
    for fqn, tied in names.items():
        first, *others = sorted(tied, key=shards[fqn].names.index)
        state[fqn] = dict(stored[first])
        findings.loaded += [f"optimizer.state.{fqn}.{key}" for key in stored[first]]
        if others:
            findings.warnings.append(
                f"{shown(others)} are tied to {first!r} here: the optimizer's state is that of it"
            )
    return state


@torch.no_grad()
def _copy_state(live: Any, staged: _StagedState) -> None:
    for box, view in local_shards(live).shards:
        if box.numel:
            view.copy_(staged.values[box])


def _has_uniform_state(optimizer: Optimizer) -> bool:
    """Whether every parameter it has stepped has the same entries, as far as is known."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.Adafactor


def _common_state(values: Mapping[str, Any]) -> dict[str, Any]:
    """State that parameters stepped together have alike: names, and values of no dimension."""
    common: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, _StagedState):
            common[name] = repr(value)
        else:
            common[name] = [] if value.shape else [part.item() for part in value.values.values()]
    return common
