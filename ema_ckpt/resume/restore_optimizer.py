"""Restore optimizers: state and options by parameter name, without a dummy step."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import optim
from torch.distributed.fsdp import FlatParameter
from torch.optim import Adafactor, Optimizer

from ema_ckpt.core.box import whole
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.names import LIVE
from ema_ckpt.core.text import shown
from ema_ckpt.ema.model.shards import Shard
from ema_ckpt.ema.optimizer_offload.optimizer import handle_of
from ema_ckpt.resume import optimizer_state
from ema_ckpt.resume.checkpoint_reader import torch_dtype
from ema_ckpt.resume.optimizer_state import StagedState, optimizer_tree
from ema_ckpt.resume.restore_phases import PartRestorer

State = dict[str, dict[str, Any]]  # per fqn and state name
# Options of any kind of optimizer: its parameters, and what schedulers add.
_COMMON = {"params", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
# State that a step of these kinds always leaves: the next one fails without it.
_MOMENTS: dict[type, tuple[str, ...]] = {
    optim.Adam: ("step", "exp_avg", "exp_avg_sq"),
    optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    optim.NAdam: ("step", "exp_avg", "exp_avg_sq"),
    optim.RAdam: ("step", "exp_avg", "exp_avg_sq"),
    optim.Adamax: ("step", "exp_avg", "exp_inf"),
    optim.RMSprop: ("step", "square_avg"),
    optim.Adadelta: ("step", "square_avg", "acc_delta"),
    optim.Adagrad: ("step", "sum"),
}


def _is_number(value: Any) -> bool:
    """Whether an option is a number or several, and no switch that a release of torch may add."""
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)


@dataclass(eq=False)
class OptimizerRestorer(PartRestorer):
    """Restores state and options of optimizers."""

    optimizers: list[Optimizer]
    shards: dict[str, Shard] = field(default_factory=dict, init=False)  # by names of parameters
    fqns: dict[str, str] = field(default_factory=dict, init=False)  # by names of parameters
    stored: State = field(default_factory=dict, init=False)
    stored_groups: list[Any] = field(init=False)
    live_groups: list[dict[str, Any]] = field(init=False)
    staged: State = field(default_factory=dict, init=False)
    options: list[dict[str, Any]] = field(default_factory=list, init=False)

    def compare(self) -> None:
        context, findings = self.context, self.findings
        for tracked in context.shards.parameters:
            self.shards.update(dict.fromkeys(tracked.shard.names, tracked.shard))
            self.fqns.update(dict.fromkeys(tracked.shard.names, tracked.shard.fqn))
        tree, entries = self.reader.optimizer_entries()
        findings.trees.append(tree)
        names: dict[str, list[str]] = {}
        for name, values in entries.get("state", {}).items():
            if name in self.shards:
                names.setdefault(self.fqns[name], []).append(name)
            elif name not in context.remote_names:
                findings.unexpected += [f"optimizer.state.{name}.{key}" for key in values]
        if findings.unexpected and context.strict:
            message = f"it has {shown(findings.unexpected)}, whose parameters this model lacks"
            raise self.reader.refusal("incomplete", message)
        for fqn, tied in names.items():
            # Of names that are tied here the first one's state counts, as its weight does.
            first, *others = sorted(tied, key=self.shards[fqn].names.index)
            self.stored[fqn] = entries["state"][first]
            findings.loaded += [f"optimizer.state.{fqn}.{key}" for key in self.stored[fqn]]
            if others:
                tie = f"{shown(others)} are tied to {first!r} here"
                findings.warnings.append(f"{tie}: the optimizer's state is that of it")
        self.stored_groups = list(dict(sorted(entries.get("param_groups", {}).items())).values())
        self.live_groups = optimizer_tree(context.shards, self.optimizers)["param_groups"]
        there, here = len(self.stored_groups), len(self.live_groups)
        if there != here:
            message = f"{there} parameter groups there, {here} here"
            raise self.reader.refusal("index-mismatch", message)

    def read(self) -> None:
        weights = self.reader.live_weights() if self.reader.by_role[LIVE] else {}
        cast: dict[str, None] = {}
        for fqn, entries in self.stored.items():
            shard = self.shards[fqn]
            weight = next((weights[name] for name in shard.names if name in weights), None)
            values = self.staged[fqn] = {}
            for name, entry in entries.items():
                if not isinstance(entry, Tensor):
                    values[name] = self.reader.load(entry)
                    continue
                dtype, boxes = torch_dtype(entry), [whole(entry.shape)]
                if entry.shape == shard.shape != ():
                    boxes = list(shard.boxes)
                    # State in the dtype of its stored weight follows the live weight's.
                    if weight is not None and torch_dtype(weight) is dtype is not shard.dtype:
                        dtype, cast[fqn] = shard.dtype, None
                parts = dict(zip(boxes, self.reader.read(entry, boxes), strict=True))
                values[name] = StagedState(entry.shape, dtype, parts)
        self.warn_of_mixed_steps()
        if cast:
            names = shown(list(cast))
            warning = f"the optimizer's state of {names} is cast as their weights are"
            self.findings.warnings.append(warning)
        self.pair_groups([self.reader.load(group) for group in self.stored_groups])

    def warn_of_mixed_steps(self) -> None:
        """Warn where parameters of one flat parameter differ: FSDP1 has one step count for all."""

        def step_state(fqn: str) -> dict[str, Any]:
            """State that parameters stepped together have alike: names, and scalars."""
            common: dict[str, Any] = {}
            for name, value in self.staged.get(fqn, {}).items():
                if not isinstance(value, StagedState):
                    common[name] = repr(value)
                elif value.shape:
                    common[name] = None
                else:
                    common[name] = [part.item() for part in value.values.values()]
            return common

        flat: dict[int, list[str]] = {}
        for tracked in self.context.shards.parameters:
            if isinstance(tracked.owner, FlatParameter) and 0 not in tracked.shard.shape:
                flat.setdefault(id(tracked.owner), []).append(tracked.shard.fqn)
        for names in flat.values():
            first = step_state(names[0])
            odd = [fqn for fqn in names if step_state(fqn) != first]
            if odd:
                self.findings.warnings.append(
                    f"the optimizer's state of {shown(odd)} is not at the step of that of"
                    f" {names[0]!r}, and one flat parameter holds them: the run does not go on as"
                    " it was; wrap with use_orig_params=True"
                )

    def pair_groups(self, saved: list[dict[str, Any]]) -> None:
        """Bring the saved groups into the order of the live ones with the same parameters."""
        parameters = [
            self._fqns(group.get("params", [])) - self.context.remote_names for group in saved
        ]
        owners = [optimizer for optimizer in self.optimizers for _ in optimizer.param_groups]
        for number, (group, optimizer) in enumerate(zip(self.live_groups, owners, strict=True)):
            names = self._fqns(group["params"])
            if names not in parameters:
                message = f"no saved parameter group has the parameters of group {number} here"
                message = f"{message}, {shown(sorted(names))}"
                raise self.reader.refusal("index-mismatch", message)
            index = parameters.index(names)
            del parameters[index]
            self.options.append(saved.pop(index))
            there, here = set(self.options[-1]) - _COMMON, set(group) - _COMMON
            # Releases of torch add options or drop them; another kind of optimizer does both.
            if there - here and here - there:
                raise self.reader.refusal(
                    "index-mismatch",
                    f"parameter group {number} was saved with the options"
                    f" {shown(sorted(there - here))} and has {shown(sorted(here - there))} here:"
                    " another kind of optimizer",
                )
            absent = [name for name in sorted(here - there) if _is_number(group[name])]
            self.findings.missing += [f"optimizer.param_groups.{number}.{name}" for name in absent]
            self.refuse_gaps(type(optimizer), names)
            self.note_lost_moments(optimizer, names)
        if self.findings.missing and self.context.strict:
            message = f"it lacks {shown(self.findings.missing)}; strict=False restores the rest"
            raise self.reader.refusal("incomplete", message)

    def note_lost_moments(self, optimizer: Optimizer, names: frozenset[str]) -> None:
        """Note moments that no stepped parameter has; the state of those is begun anew."""
        wanted = next((_MOMENTS[kind] for kind in type(optimizer).__mro__ if kind in _MOMENTS), ())
        for fqn in sorted(names & self.staged.keys()):
            lost = [key for key in wanted if key not in self.staged[fqn]]
            if lost and self.staged[fqn]:
                self.findings.missing += [f"optimizer.state.{fqn}.{key}" for key in lost]
                del self.staged[fqn]

    def _fqns(self, names: list[str]) -> frozenset[str]:
        return frozenset(self.fqns.get(name, name) for name in names)

    def refuse_gaps(self, optimizer: type[Optimizer], names: frozenset[str]) -> None:
        """Refuse state that a stepped parameter lacks and others of its group have."""
        # Those of torch keep the same entries for every parameter that they have stepped.
        if not optimizer.__module__.startswith("torch.optim.") or optimizer is Adafactor:
            return
        states = {fqn: self.stored[fqn] for fqn in sorted(names & self.stored.keys())}
        keys = dict.fromkeys(chain.from_iterable(states.values()))
        lost = []
        for fqn, state in states.items():
            lost += [f"optimizer.state.{fqn}.{key}" for key in keys if key not in state]
        if lost:
            message = f"it lacks {shown(lost)}, which others have"
            raise self.reader.refusal("incomplete", message)

    def write(self) -> None:
        offloaded = [handle for handle in map(handle_of, self.optimizers) if handle is not None]
        for handle in offloaded:
            handle.wait()
        for optimizer in self.optimizers:
            optimizer.state.clear()  # what the checkpoint lacks is dropped
        with torch.no_grad():
            optimizer_state.set_state(self.context.shards, self.optimizers, self.staged)
        optimizer_state.set_options(self.optimizers, self.options)
        for handle in offloaded:
            handle.settle()
