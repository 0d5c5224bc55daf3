"""Restoring optimizers: state and options by parameter name, without a dummy step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.errors import SourceError, shown
from ema_ckpt.core.names import LIVE
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.ema.model.shards import Shard
from ema_ckpt.ema.offload.optimizer import handle_of
from ema_ckpt.resume.flatten import pieces
from ema_ckpt.resume.optimizer_state import (
    Blank,
    Optimizers,
    fill,
    listed,
    make_state,
    optimizer_tree,
)
from ema_ckpt.resume.restore_model import Restorer
from ema_ckpt.resume.sources import Checkpoint, live_weights, loaded, optimizer_entries
from ema_ckpt.resume.tensor_source import dtype_of

# What a parameter group has of any kind of optimizer: its parameters, and what schedulers add.
_COMMON = {"params", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


class OptimizerRestorer(Restorer):
    """State and options of optimizers."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: nn.Module,
        optimizers: Optimizers,
        *,
        strict: bool,
        elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(["optimizer"])
        self._elsewhere = elsewhere
        self._checkpoint, self._model, self._optimizers = checkpoint, model, listed(optimizers)
        self._shards = {
            name: h.shard for h in scan_model(model).parameters for name in h.shard.names
        }
        entries = optimizer_entries(checkpoint)
        self._stored: dict[str, dict[str, Any]] = {}
        self._cast: list[str] = []
        self._weights = (
            live_weights(checkpoint) if any(tree.role == LIVE for tree in checkpoint.trees) else {}
        )
        self._take(entries.get("state", {}))
        self._groups = [
            entries["param_groups"][index] for index in sorted(entries.get("param_groups", {}))
        ]
        self._order: list[int] = []
        self._values: dict[str, dict[str, Any]] = {}
        self._options: list[dict[str, Any]] = []
        self._check(strict=strict)

    def _take(self, stored: Mapping[str, Mapping[str, Any]]) -> None:
        """Find the parameter of each entry. Of several that are one tensor here the first name's
        state is taken, as its weight is."""
        names: dict[str, list[str]] = {}
        for name, values in stored.items():
            shard = self._shards.get(name)
            if shard is not None:
                names.setdefault(shard.fqn, []).append(name)
            elif name not in self._elsewhere:
                self.unexpected += [f"optimizer.state.{name}.{key}" for key in values]
        for fqn, found in names.items():
            first, *others = sorted(found, key=self._shards[fqn].names.index)
            self._stored[fqn] = dict(stored[first])
            self.loaded += [f"optimizer.state.{fqn}.{key}" for key in stored[first]]
            if others:
                self.warnings.append(
                    f"{shown(others)} are tied to {first!r} here: the optimizer's state is that of it"
                )

    def _check(self, *, strict: bool) -> None:
        where = self._checkpoint.where
        if self.unexpected and strict:
            raise SourceError(
                "incomplete",
                f"{where}: nothing was restored: it has {shown(self.unexpected)}, whose parameters this model lacks",
            )
        live = optimizer_tree(self._model, self._optimizers)["param_groups"]
        if len(live) != len(self._groups):
            raise SourceError(
                "index-mismatch",
                f"{where}: nothing was restored: {len(self._groups)} parameter groups there, {len(live)} here",
            )

    def read(self) -> None:
        """Read state and options, and find the group that each saved one is here."""
        self._values = {
            fqn: {name: self._read(self._shards[fqn], value) for name, value in values.items()}
            for fqn, values in self._stored.items()
        }
        self._warn_of_uneven()
        if self._cast:
            names = shown(list(dict.fromkeys(self._cast)))
            self.warnings.append(f"the optimizer's state of {names} is cast as their weights are")
        self._options = self._arranged(
            [loaded(self._checkpoint.source, group) for group in self._groups]
        )

    def _warn_of_uneven(self) -> None:
        """Warn of parameters in one flat parameter whose state differs: FSDP1 then has one step
        count for all.
        """
        flat: dict[int, list[str]] = {}
        for held in scan_model(self._model).parameters:
            if isinstance(held.owner, FlatParameter) and 0 not in held.shard.shape:
                flat.setdefault(id(held.owner), []).append(held.shard.fqn)
        for names in flat.values():
            first = _common(self._values.get(names[0], {}))
            odd = [fqn for fqn in names if _common(self._values.get(fqn, {})) != first]
            if odd:
                self.warnings.append(
                    f"the optimizer's state of {shown(odd)} is not at the step of that of {names[0]!r}, and one flat"
                    " parameter holds them: the run does not go on as it was; wrap with use_orig_params=True"
                )

    def _read(self, shard: Shard, value: Any) -> Any:
        """A state entry: boxes with host values if it has the parameter's shape, else the whole
        value.
        """
        if isinstance(value, Tensor):
            boxes = _boxes(shard, value)
            values = self._checkpoint.source.read(value, boxes)
            dtype = self._dtype(shard, value)
            return _Staged(value.shape, dtype, dict(zip(boxes, values, strict=True)))
        return loaded(self._checkpoint.source, value)

    def _dtype(self, shard: Shard, value: Tensor) -> torch.dtype:
        """That of the state as it was saved; state in the dtype of its weight follows the weight's
        here.
        """
        dtype = dtype_of(value)
        weight = next((self._weights[name] for name in shard.names if name in self._weights), None)
        follows = (
            weight is not None and value.shape == shard.shape != () and dtype_of(weight) is dtype
        )
        if not follows or dtype is shard.dtype:
            return dtype
        self._cast.append(shard.fqn)
        return shard.dtype

    def _arranged(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The saved groups in the order of the live ones, paired by the parameters in them."""
        live = optimizer_tree(self._model, self._optimizers)["param_groups"]
        left = [(self._names(group.get("params", [])) - self._elsewhere, group) for group in saved]
        arranged: list[dict[str, Any]] = []
        owners = [optimizer for optimizer in self._optimizers for _ in optimizer.param_groups]
        for number, group in enumerate(live):
            names = self._names(group["params"])
            index = next((i for i, (there, _) in enumerate(left) if there == names), None)
            if index is None:
                raise SourceError(
                    "index-mismatch",
                    f"{self._checkpoint.where}: nothing was restored: no saved parameter group has the parameters of "
                    f"group {number} here, {shown(sorted(names))}",
                )
            arranged.append(left.pop(index)[1])
            self._refuse_other_kind(number, set(arranged[-1]) - _COMMON, set(group) - _COMMON)
            if _is_even(owners[number]):
                self._refuse_gaps(names)
        return arranged

    def _refuse_gaps(self, names: frozenset[str]) -> None:
        """Refuse state that one parameter lacks and others of its group have. None at all: it was
        never stepped.
        """
        held = {fqn: self._stored[fqn].keys() for fqn in sorted(names) if self._stored.get(fqn)}
        every = dict.fromkeys(key for keys in held.values() for key in keys)
        lost = [
            f"optimizer.state.{fqn}.{key}"
            for fqn, keys in held.items()
            for key in every
            if key not in keys
        ]
        if lost:
            raise SourceError(
                "incomplete",
                f"{self._checkpoint.where}: nothing was restored: it lacks {shown(lost)}, which others have",
            )

    def _refuse_other_kind(self, number: int, there: set[str], here: set[str]) -> None:
        """Releases of torch add options or drop them; another kind of optimizer does both."""
        if there - here and here - there:
            raise SourceError(
                "index-mismatch",
                f"{self._checkpoint.where}: nothing was restored: parameter group {number} was saved with the options "
                f"{shown(sorted(there - here))} and has {shown(sorted(here - there))} here: another kind of optimizer",
            )

    def _names(self, params: list[str]) -> frozenset[str]:
        return frozenset(
            self._shards[name].fqn if name in self._shards else name for name in params
        )

    def write(self) -> None:
        """Put state and options in place; state that the checkpoint lacks is dropped."""
        offloaded = [handle for handle in map(handle_of, self._optimizers) if handle is not None]
        for handle in offloaded:
            handle.wait()
        for optimizer in self._optimizers:
            optimizer.state.clear()
        wanted = {
            fqn: {
                name: Blank(v.shape, v.dtype) if isinstance(v, _Staged) else v
                for name, v in values.items()
            }
            for fqn, values in self._values.items()
        }
        make_state(self._model, self._optimizers, wanted)
        tree = optimizer_tree(self._model, self._optimizers)
        with torch.no_grad():
            for view, value in self._pairs(tree["state"]):
                view.copy_(value)
        fill(self._optimizers, self._options)
        for handle in offloaded:
            handle.settle()

    def _pairs(
        self, state: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for fqn, values in self._values.items():
            for name, value in values.items():
                if isinstance(value, _Staged) and name in state.get(fqn, {}):
                    yield from (
                        (view, value.parts[box])
                        for box, view in pieces(state[fqn][name]).held
                        if box.numel
                    )


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """A tensor of optimizer state that was read: global shape, dtype, and host values by box."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[Box, torch.Tensor]


def _is_even(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it keeps the same entries for every parameter that it has stepped, as far as is
    known.
    """
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.Adafactor


def _common(values: Mapping[str, Any]) -> dict[str, Any]:
    """What parameters that are stepped together have alike: names, and values of no dimension."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, _Staged):
            found[name] = [] if value.shape else [part.item() for part in value.parts.values()]
        else:
            found[name] = repr(value)
    return found


def _boxes(shard: Shard, stored: Tensor) -> list[Box]:
    return (
        list(shard.boxes) if stored.shape == shard.shape and stored.shape else [whole(stored.shape)]
    )
