"""Restore optimizers: state and options by parameter name, without a dummy step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from math import prod
from typing import Any

import torch
from torch import optim
from torch.distributed.fsdp import FlatParameter
from torch.optim import Adafactor, Optimizer

from ema_ckpt.core.box import whole
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.names import EMA, LIVE, MOMENTS, OPTIMIZER
from ema_ckpt.core.text import counted, shown
from ema_ckpt.ema.model.shards import Shard
from ema_ckpt.ema.optimizer_offload.optimizer import handle_of
from ema_ckpt.resume import optimizer_state
from ema_ckpt.resume.checkpoint_reader import torch_dtype
from ema_ckpt.resume.optimizer_state import StagedState, optimizer_tree, stepped_groups
from ema_ckpt.resume.restore_phases import PartRestorer
from ema_ckpt.resume.stored_optimizer import LiveGroup, StoredOptimizer, name_state
from ema_ckpt.state_dicts.ema_config import read_ema_config

State = dict[str, dict[str, Any]]  # per fqn and state name
# Options of any kind of optimizer: its parameters, and what schedulers add.
_COMMON = frozenset(
    "params param_names initial_lr max_lr min_lr base_momentum max_momentum swa_lr".split()
)
_FILES_BESIDE = ("optimizer.pt", "optimizer.bin")  # of transformers' `Trainer` and accelerate
_FACTORED = frozenset({"exp_avg_sq_row", "exp_avg_sq_col"})  # of another shape than the parameter
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


def _is_like(live: Any, saved: Any) -> bool:
    """Whether a saved option is a number, or so many numbers, as the live one is."""
    if isinstance(live, tuple | list):
        return isinstance(saved, tuple | list) and len(saved) == len(live) and _is_number(saved)
    if isinstance(saved, torch.Tensor):
        return saved.numel() == 1
    return _is_number(saved) and not isinstance(saved, tuple | list)


def _is_count(step: Any) -> bool:
    """Whether a step count is one number that is not negative."""
    if not isinstance(step, StagedState) or prod(step.shape) != 1:
        return False
    is_real = step.dtype.is_floating_point or step.dtype in (torch.int32, torch.int64)
    return is_real and all(bool(part >= 0) for part in step.values.values())


def _is_moment(value: Any, shape: tuple[int, ...]) -> bool:
    if not isinstance(value, StagedState) or value.shape != shape:
        return False
    return value.dtype.is_floating_point or value.dtype.is_complex


def _keeps_moments(optimizer: Optimizer) -> bool:
    """Whether a step of one of torch's optimizers leaves state."""
    if isinstance(optimizer, optim.SGD):
        return any(group["momentum"] for group in optimizer.param_groups)
    return isinstance(optimizer, tuple(_MOMENTS))


@dataclass(eq=False)
class OptimizerRestorer(PartRestorer):
    """Restores state and options of optimizers."""

    optimizers: list[Optimizer]
    shards: dict[str, Shard] = field(default_factory=dict, init=False)  # by names of parameters
    fqns: dict[str, str] = field(default_factory=dict, init=False)  # by names of parameters
    source: StoredOptimizer = field(init=False)
    stored: State = field(default_factory=dict, init=False)
    live_groups: list[dict[str, Any]] = field(init=False)
    staged: State = field(default_factory=dict, init=False)
    options: list[dict[str, Any]] = field(default_factory=list, init=False)

    def compare(self) -> None:
        context, findings = self.context, self.findings
        for tracked in context.shards.parameters:
            self.shards.update(dict.fromkeys(tracked.shard.names, tracked.shard))
            self.fqns.update(dict.fromkeys(tracked.shard.names, tracked.shard.fqn))
        self.live_groups = optimizer_tree(context.shards, self.optimizers)["param_groups"]
        self.source = self.find_source()
        findings.missing += self.source.missing
        known = {*self.shards, *context.remote_names}
        findings.unexpected += self.source.unexpected
        for name, values in self.source.state.items():
            if name not in known:
                findings.unexpected += [f"optimizer.state.{name}.{key}" for key in values]
        if findings.unexpected and context.strict:
            message = f"it has {shown(findings.unexpected)}, whose parameters this model lacks"
            raise self.reader.refusal("incomplete", message)
        self.store_once()
        if self.stored and not self.source.groups:  # all options are missing, and not the state
            self.source.groups = [{"params": group["params"]} for group in self.live_groups]
        there, here = len(self.source.groups), len(self.live_groups)
        if there != here:
            message = f"{there} parameter groups there, {here} here"
            raise self.reader.refusal("index-mismatch", message)

    def find_source(self) -> StoredOptimizer:
        """Find the stored state, in a file beside the weights if the checkpoint has none."""
        reader, live = self.reader, self.list_live_groups()
        self.refuse_left_out()
        if not reader.by_role[OPTIMIZER]:
            beside = reader.beside(_FILES_BESIDE)
            if beside is not None and reader.has_rules:
                message = f"{beside.path} is not carried through rules; leave out `optimizer`"
                raise reader.refusal("unsupported", message)
            if beside is not None:
                reader.tree_names.append(beside.path)
                self.findings.trees.append(beside.path)
                reader = beside
        trees, documents = reader.optimizer_documents(len(live))
        self.findings.trees += trees if reader is self.reader else []
        names = {*self.shards, *self.context.remote_names}
        return name_state(reader, documents, live, names)

    def refuse_left_out(self) -> None:
        """Refuse state that rules do not carry, or note it if that is allowed."""
        left_out = self.reader.left_out
        if not left_out:
            return
        reason = next(iter(left_out.values()))
        message = f"rules leave out {shown(list(left_out))}: {reason}"
        if not self.reader.by_role[OPTIMIZER]:
            raise self.reader.refusal("unsupported", f"{message}; leave out `optimizer`")
        if self.context.strict:
            message += "; strict=False restores the rest, or leave out `optimizer`"
            raise self.reader.refusal("unsupported", message)
        self.findings.warnings.append(message)

    def list_live_groups(self) -> list[LiveGroup]:
        """List the parameters of each live group, by the tensors that are stepped."""
        groups = []
        for _, stepped in stepped_groups(self.context.shards, self.optimizers):
            names = [[tracked.shard.fqn for tracked in one.parameters] for one in stepped]
            groups.append(LiveGroup(names))
        return groups

    def store_once(self) -> None:
        """Take the state of each parameter; of names that are tied here, the first one's."""
        names: dict[str, list[str]] = {}
        for name in self.source.state:
            if name in self.shards:
                names.setdefault(self.fqns[name], []).append(name)
        for fqn, tied in names.items():
            # As its weight does.
            first, *others = sorted(tied, key=self.shards[fqn].names.index)
            self.stored[fqn] = self.source.state[first]
            self.findings.loaded += [f"optimizer.state.{fqn}.{key}" for key in self.stored[fqn]]
            if others:
                tie = f"{shown(others)} are tied to {first!r} here"
                self.findings.warnings.append(f"{tie}: the optimizer's state is that of it")

    def read(self) -> None:
        weights = self.reader.live_weights() if self.reader.by_role[LIVE] else {}
        cast: dict[str, None] = {}
        for fqn, entries in self.stored.items():
            shard = self.shards[fqn]
            weight = next((weights[name] for name in shard.names if name in weights), None)
            values = self.staged[fqn] = {}
            for name, entry in entries.items():
                if not isinstance(entry, Tensor):
                    values[name] = self.source.reader.load(entry)
                    continue
                self.check_shape(fqn, name, entry)
                dtype, boxes = torch_dtype(entry), [whole(entry.shape)]
                if entry.shape == shard.shape != ():
                    boxes = list(shard.boxes)
                    # State in the dtype of its stored weight follows the live weight's.
                    if weight is not None and torch_dtype(weight) is dtype is not shard.dtype:
                        dtype, cast[fqn] = shard.dtype, None
                parts = dict(zip(boxes, self.source.reader.read(entry, boxes), strict=True))
                values[name] = StagedState(entry.shape, dtype, parts)
        self.warn_of_mixed_steps()
        self.warn_of_no_state()
        if cast:
            names = shown(list(cast))
            warning = f"the optimizer's state of {names} is cast as their weights are"
            self.findings.warnings.append(warning)
        self.pair_groups(list(self.source.groups))

    def check_shape(self, fqn: str, name: str, entry: Tensor) -> None:
        """Refuse a moment that is that of another parameter, as by an odd order of positions."""
        if name not in MOMENTS or name in _FACTORED or not entry.shape:
            return  # with no shape it is one number in all, as NovoGrad's
        shape = self.shards[fqn].shape
        # One number an element, or one a row or a column.
        same_rank = len(entry.shape) == len(shape)
        if same_rank and all(n in (1, m) for n, m in zip(shape, entry.shape, strict=True)):
            return
        message = f"'optimizer.state.{fqn}.{name}' has shape {list(entry.shape)} there, and its"
        raise self.reader.refusal("index-mismatch", f"{message} parameter {list(shape)} here")

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

    def warn_of_no_state(self) -> None:
        """Warn where averages were updated, and no parameter has the state that a step leaves.

        Without averages a checkpoint cannot tell that from a save before the first step.
        """
        if self.source.state or not any(map(_keeps_moments, self.optimizers)):
            return
        trees = self.reader.by_role[EMA].values()
        updates = [read_ema_config(self.reader.catalog, tree).num_updates for tree in trees]
        count = max(filter(None, updates), default=0)
        if count > 0:
            self.findings.warnings.append(
                f"it holds no state of the optimizer after {counted(count, 'update')} of the"
                " averages: the optimizer's moments start anew"
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
            for name in sorted(here - there):
                if _is_number(group[name]):
                    self.findings.missing.append(f"optimizer.param_groups.{number}.{name}")
            self.refuse_odd_options(optimizer, group, number)
            self.set_step_tensors(optimizer, names)
            self.refuse_gaps(type(optimizer), names)
            self.note_lost_moments(optimizer, names)
        if self.findings.missing and self.context.strict:
            message = f"it lacks {shown(self.findings.missing)}; strict=False restores the rest"
            raise self.reader.refusal("incomplete", message)

    def refuse_odd_options(
        self, optimizer: Optimizer, group: Mapping[str, Any], number: int
    ) -> None:
        """Refuse options of torch's optimizers that are no numbers there, and are here."""
        if not type(optimizer).__module__.startswith("torch.optim."):
            return
        for name, value in self.options[-1].items():
            if _is_number(group.get(name)) and not _is_like(group[name], value):
                message = f"optimizer.param_groups.{number}.{name} is no such number there"
                raise self.reader.refusal("unsupported", message)

    def set_step_tensors(self, optimizer: Optimizer, names: frozenset[str]) -> None:
        """Make step counts tensors, as torch's optimizers need; before 1.12 they were numbers."""
        if not type(optimizer).__module__.startswith("torch.optim."):
            return
        for fqn in names & self.staged.keys():
            step = self.staged[fqn].get("step")
            if isinstance(step, int | float):
                value = torch.tensor(float(step))
                self.staged[fqn]["step"] = StagedState((), value.dtype, {whole(()): value})

    def note_lost_moments(self, optimizer: Optimizer, names: frozenset[str]) -> None:
        """Note moments that no stepped parameter has; the state of those is begun anew."""
        known = [kind for kind in type(optimizer).__mro__ if kind in _MOMENTS]
        if not known:
            return
        wanted = _MOMENTS[known[0]]
        for fqn in sorted(names & self.staged.keys()):
            state = self.staged[fqn]
            self.refuse_odd_moments(optimizer, fqn, wanted)
            lost = [f"optimizer.state.{fqn}.{key}" for key in wanted if key not in state]
            if state and lost:
                self.findings.missing += lost
                del self.staged[fqn]

    def refuse_odd_moments(self, optimizer: Optimizer, fqn: str, wanted: Sequence[str]) -> None:
        """Refuse what is no moment of a parameter or no step count, where torch's optimizers step.

        They fail, or go on wrongly, in the first step after.
        """
        if type(optimizer) not in _MOMENTS:
            return
        state, shape = self.staged[fqn], self.shards[fqn].shape
        for key in wanted:
            value = state.get(key)
            is_step = key == "step"
            fits = _is_count(value) if is_step else _is_moment(value, shape)
            if key in state and not fits:
                kind = "number of steps" if is_step else f"moment of shape {list(shape)}"
                message = f"optimizer.state.{fqn}.{key} is no {kind} there"
                raise self.reader.refusal("unsupported", message)

    def _fqns(self, names: list[str]) -> frozenset[str]:
        return frozenset(self.fqns.get(name, name) for name in names)

    def refuse_gaps(self, optimizer: type[Optimizer], names: frozenset[str]) -> None:
        """Refuse state that a stepped parameter lacks and others of its group have."""
        # Those of torch keep the same entries for every parameter that they have stepped.
        if not optimizer.__module__.startswith("torch.optim.") or optimizer is Adafactor:
            return
        fqns = sorted(names & self.stored.keys())
        keys = dict.fromkeys(chain.from_iterable(map(self.stored.__getitem__, fqns)))
        lost = []
        for fqn, key in product(fqns, keys):
            if key not in self.stored[fqn]:
                lost.append(f"optimizer.state.{fqn}.{key}")
        if lost:
            message = f"it lacks {shown(lost)}, which others have"
            raise self.reader.refusal("incomplete", message)

    def write(self) -> None:
        offloaded = list(filter(None, map(handle_of, self.optimizers)))
        for handle in offloaded:
            handle.wait()
        for optimizer in self.optimizers:
            optimizer.state.clear()  # what the checkpoint lacks is dropped
        with torch.no_grad():
            optimizer_state.set_state(self.context.shards, self.optimizers, self.staged)
            optimizer_state.begin_missing(self.optimizers)
        optimizer_state.set_options(self.optimizers, self.options)
        for handle in offloaded:
            handle._settle()
