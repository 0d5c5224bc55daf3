"""A small run to save and restore: model, optimizer, average."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ema_ckpt import restore, save
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.schedules import Warmup


class Net(nn.Module):
    def __init__(self, seed: int = 0, wide: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter = nn.Linear(3, wide)
        self.norm = nn.BatchNorm1d(wide)
        self.leave = nn.Linear(wide, 2, bias=False)
        self.empty = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(self.enter(x)))


class Run:
    def __init__(self, seed: int = 0, wide: int = 5, **options: Any) -> None:
        self.model = Net(seed, wide)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.ema = ShardedEMA(self.model, **{"decay": Warmup(0.9), **options})
        self.ema.attach(self.optimizer)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            self.model(x).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def bits(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            f"model.{k}": v.clone() for k, v in self.model.state_dict().items()
        }
        found |= {f"ema.{k}": v.clone() for k, v in self.ema.state_dict()["weights"].items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{k}": v.clone() for k, v in state.items()}
        found["groups"] = json.dumps(self.optimizer.state_dict()["param_groups"])
        found["counter"] = (self.ema.num_updates, self.ema.current_decay, self.ema.samples_seen)
        return found

    def save(self, path: Path, **options: Any) -> Path:
        found = save(path, model=self.model, ema=self.ema, optimizer=self.optimizer, **options)
        assert isinstance(found, Path)
        return found

    def restore(self, path: Path, **options: Any) -> Any:
        return restore(
            path, **{"model": self.model, "ema": self.ema, "optimizer": self.optimizer, **options}
        )


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert (
            torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name]
        ), name


def refused(other: Run, path: Path, kind: type[EmaCkptError], **options: Any) -> EmaCkptError:
    """The error of a restore that must leave every bit as it was."""
    before = other.bits()
    with pytest.raises(kind) as caught:
        other.restore(path, **options)
    same(other.bits(), before)
    return caught.value


def stepped(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=1e-3)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer
