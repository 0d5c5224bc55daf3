"""Restore `extra`: stateful objects in place, plain values through the report."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import shown
from ema_ckpt.resume.restorer import Findings, Restorer
from ema_ckpt.resume.rng import RngState
from ema_ckpt.resume.tensor_source import CheckpointReader, Nested, nested


@dataclass(slots=True, eq=False)
class ExtraRestorer(Restorer):
    """The values under `extra`."""

    reader: CheckpointReader
    requested: Mapping[str, Any]
    stored: Nested
    values: dict[str, Any] = field(default_factory=dict)
    former: dict[str, Any] = field(default_factory=dict)

    def read(self) -> None:
        for name, current in self.requested.items():
            if name not in self.stored:
                continue
            stored = self.stored[name]
            if isinstance(current, RngState):
                dropped = current.dropped(stored)
                self.findings.unexpected += [f"extra.{name}.{key}" for key in dropped]
                self.findings.warnings += current.warnings(name, stored)
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

    def rollback_user_state(self) -> None:
        for name, value in self.former.items():
            if value:
                self.requested[name].load_state_dict(value)


def compare_extra(
    reader: CheckpointReader, extra: Mapping[str, Any], *, strict: bool
) -> ExtraRestorer:
    """Compare the names under `extra` with the checkpoint's.

    Raises:
        SourceError: `incomplete` under `strict` if a name is missing.
    """
    items: list[Tensor | Object] = [*reader.catalog.tensors, *reader.catalog.objects]
    extra_items = [item for item in items if item.path[0] == "extra" and len(item.path) > 1]
    stored = nested((item.path[1:], item) for item in extra_items)
    missing = [f"extra.{name}" for name in extra if name not in stored]
    if missing and strict:
        message = f"{reader.path}: nothing was restored: it lacks {shown(missing)}"
        raise SourceError("incomplete", f"{message}; strict=False restores the rest")
    unexpected = [f"extra.{name}" for name in stored if name not in extra]
    findings = Findings(["extra"], missing=missing, unexpected=unexpected)
    return ExtraRestorer(findings, reader, extra, stored)


def _distribute_like(former: Any, value: Any) -> Any:
    """Cut whole tensors into DTensors where an object has DTensors by the same names, locally."""
    if isinstance(value, dict) and isinstance(former, Mapping):
        return {key: _distribute_like(former.get(key), inner) for key, inner in value.items()}
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if isinstance(former, DTensor) and is_whole:
        local = value.to(former.device)
        return distribute_tensor(local, former.device_mesh, former.placements, src_data_rank=None)
    return value
