"""Restore `extra`: stateful objects in place, plain values through the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ema_ckpt.core.text import shown
from ema_ckpt.formats.nesting import nest
from ema_ckpt.resume.checkpoint_reader import Nested, nest_items
from ema_ckpt.resume.restore_phases import Findings, PartRestorer
from ema_ckpt.resume.rng import RngState


@dataclass(eq=False)
class ExtraRestorer(PartRestorer):
    """Restores the values under `extra`."""

    requested: Mapping[str, Any]
    stored: Nested = field(init=False)
    values: dict[str, Any] = field(default_factory=dict, init=False)
    former: dict[str, Any] = field(default_factory=dict, init=False)

    def compare(self) -> None:
        self.stored = nest_items("extra", self.reader.items_below("extra"))
        # Plain `dcp.save({"model": …, "step": n})` has no tree of that name.
        for name in self.requested.keys() - self.stored.keys():
            items = self.reader.items_at_top(name)
            self.stored.update(nest((item.path, item) for item in items))
            self.findings.trees += [name] * (name in self.reader.tree_names)
        missing = [f"extra.{name}" for name in self.requested if name not in self.stored]
        if missing and self.context.strict:
            message = f"it lacks {shown(missing)}; strict=False restores the rest"
            raise self.reader.refusal("incomplete", message)
        unexpected = [f"extra.{name}" for name in self.stored if name not in self.requested]
        trees = [*self.findings.trees, "extra"]
        self.findings = Findings(trees, missing=missing, unexpected=unexpected)

    def read(self) -> None:
        for name, current in self.requested.items():
            if name not in self.stored:
                continue
            stored = self.stored[name]
            if isinstance(current, RngState):
                unexpected, warnings = current.compare(name, stored)
                self.findings.unexpected += unexpected
                self.findings.warnings += warnings
            self.values[name] = self.reader.load(stored)
            self.findings.loaded.append(f"extra.{name}")

    def apply_user_state(self) -> None:
        for name, value in self.values.items():
            current = self.requested[name]
            if not hasattr(current, "load_state_dict"):
                self.findings.extra[name] = value
                continue
            former = current.state_dict() if hasattr(current, "state_dict") else {}
            self.former[name] = deepcopy(former)
            current.load_state_dict(_distribute_like(former, value))
            self.findings.extra[name] = current

    def rollback_user_state(self) -> list[tuple[str, Callable[[], object]]]:
        return [
            (f"extra.{name}", partial(self.requested[name].load_state_dict, value))
            for name, value in self.former.items()
            if value
        ]


def _distribute_like(former: Any, value: Any) -> Any:
    """Cut whole tensors into DTensors where an object has DTensors by the same names, locally."""
    if isinstance(value, dict) and isinstance(former, Mapping):
        return {key: _distribute_like(former.get(key), inner) for key, inner in value.items()}
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if isinstance(former, DTensor) and is_whole:
        local = value.to(former.device)
        return distribute_tensor(local, former.device_mesh, former.placements, src_data_rank=None)
    return value
