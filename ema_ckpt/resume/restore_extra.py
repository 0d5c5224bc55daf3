"""Restoring whatever else was saved: plain values come back in the report, stateful objects take
theirs in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.core.errors import SourceError, shown
from ema_ckpt.resume.restore_model import Restorer
from ema_ckpt.resume.rng import RngState
from ema_ckpt.resume.sources import Checkpoint, loaded, nested


class ExtraRestorer(Restorer):
    """The values under `extra`."""

    def __init__(self, checkpoint: Checkpoint, extra: Mapping[str, Any], *, strict: bool) -> None:
        super().__init__(["extra"])
        self._checkpoint, self._wanted = checkpoint, extra
        items: list[Tensor | Object] = [*checkpoint.catalog.tensors, *checkpoint.catalog.objects]
        self._stored = nested(
            [
                (item.path[1:], item)
                for item in items
                if item.path[0] == "extra" and len(item.path) > 1
            ]
        )
        empty = [name for name in extra if name not in self._stored]
        if empty and strict:
            raise SourceError(
                "incomplete",
                f"{checkpoint.where}: nothing was restored: it lacks {shown([f'extra.{name}' for name in empty])}; "
                "strict=False restores the rest",
            )
        self.missing += [f"extra.{name}" for name in empty]
        self.unexpected += [f"extra.{name}" for name in self._stored if name not in extra]
        self._values: dict[str, Any] = {}
        self._former: dict[str, Any] = {}

    def read(self) -> None:
        """Read the values that were asked for."""
        for name, value in self._wanted.items():
            if name not in self._stored:
                continue
            stored = self._stored[name]
            if isinstance(value, RngState):
                dropped = value.dropped(stored)
                self.unexpected += [f"extra.{name}.{key}" for key in dropped]
                self.warnings += value.warnings(name, stored)
            self._values[name] = loaded(self._checkpoint.source, stored)
            self.loaded.append(f"extra.{name}")

    def hand_over(self) -> None:
        """Hand values to stateful objects, the rest to the report."""
        for name, value in self._values.items():
            wanted = self._wanted[name]
            if hasattr(wanted, "load_state_dict"):
                former = wanted.state_dict() if hasattr(wanted, "state_dict") else {}
                self._former[name] = deepcopy(former)
                wanted.load_state_dict(_cut_like(former, value))
                self.extra[name] = wanted
            else:
                self.extra[name] = value

    def take_back(self) -> None:
        """Give the objects the state that they had."""
        for name, value in self._former.items():
            if value:
                self._wanted[name].load_state_dict(value)


def _cut_like(former: Any, value: Any) -> Any:
    """Whole tensors as DTensors where the object has DTensors under the same names; no
    communication.
    """
    if isinstance(value, dict) and isinstance(former, Mapping):
        return {key: _cut_like(former.get(key), inner) for key, inner in value.items()}
    if (
        isinstance(former, DTensor)
        and isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
    ):
        local = value.to(former.device)
        return distribute_tensor(local, former.device_mesh, former.placements, src_data_rank=None)
    return value
