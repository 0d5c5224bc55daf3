"""What each rank does in the tests that save to S3: train sharded, save, restore."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import ema_ckpt

STEP = {"step": 7, "note": "of the run"}
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Run:
    """A model that FSDP2 has sharded, with an average and an optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(7, 33), nn.SiLU(), nn.Linear(33, 5), nn.LayerNorm(5))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ema = ema_ckpt.ShardedEMA(self.model, decay=0.9)
        self.ema.attach(self.optimizer)

    def train(self) -> None:
        for step in range(3):
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "ema": self.ema, "optimizer": self.optimizer}

    def values(self) -> dict[str, torch.Tensor]:
        """Everything whole, by torch's own gathering; the average by ours. Collective."""
        found = {
            f"model.{k}": v for k, v in get_model_state_dict(self.model, options=_FULL).items()
        }
        for name, value in (self.ema.full_state_dict() or {}).items():
            found[f"ema.{name}"] = value.clone()
        state = get_optimizer_state_dict(self.model, self.optimizer, options=_FULL)
        for name, moments in state.get("state", {}).items():
            found |= {f"optimizer.{name}.{k}": v.clone() for k, v in moments.items()}
        found["num_updates"] = torch.tensor(self.ema.num_updates)
        return found


def train_and_save(
    environment: dict[str, str], url: str, seed: int, kill: str = ""
) -> dict[str, torch.Tensor]:
    """Train from `seed` and save; every rank dies when the file `kill` appears."""
    os.environ.update(environment)
    if kill:
        threading.Thread(target=_die_with, args=(Path(kill),), daemon=True).start()
    run = Run(seed)
    run.train()
    assert ema_ckpt.save(url, extra=STEP, **run.parts()) == url
    return run.values() if dist.get_rank() == 0 else run.values() and {}


def restore_whole(
    environment: dict[str, str], url: str
) -> tuple[str, object, dict[str, torch.Tensor]]:
    """Restore into a model of other values; return where from, the extra state and all values."""
    os.environ.update(environment)
    run = Run(seed=1000)
    report = ema_ckpt.restore(url, extra=dict.fromkeys(STEP), **run.parts())
    values = run.values()
    return str(report.path), report.extra, values if dist.get_rank() == 0 else {}


def _die_with(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
