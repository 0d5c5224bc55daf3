"""A small model, data that depend on the step alone, and what a launcher tells its processes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.local_ports import free_port

GLOBAL_BATCH = 12


class Net(nn.Module):
    """Two layers and a norm, rows that no number of ranks divides, a buffer that counts forwards."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enc = nn.Linear(6, 13)
        self.norm = nn.LayerNorm(13)
        self.dec = nn.Linear(13, 5, bias=False)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.dec(self.norm(self.enc(x)).relu())


def batch(step: int, rank: int = 0, world: int = 1) -> torch.Tensor:
    """This rank's rows of a step's batch."""
    rows = torch.randn(GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(step))
    return rows.chunk(world)[rank]


def as_launched(port: int = 0) -> tuple[int, int]:
    """Set the variables of a launcher from the process group that is up; rank and world size."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    return rank, world


def keep(state: dict[str, torch.Tensor], file: Path) -> None:
    """On rank 0 save a whole state as it is now."""
    if dist.get_rank() == 0:
        torch.save({name: t.detach().cpu().clone() for name, t in state.items()}, file)


def kept(file: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return found
