"""A run that is saved and restored again and again ends where the uninterrupted one does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import ema_ckpt
from ema_ckpt import ShardedEMA, restore, save
from tests.distributed.launcher import run


def _fsdp1(strategy: ShardingStrategy, model: nn.Module, *, use_orig_params: bool = True) -> nn.Module:
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model, sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=cpu, device_mesh=mesh
    )


def _fsdp2(model: nn.Module) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


LAYOUTS: dict[str, tuple[int, Any]] = {
    "FULL_SHARD": (3, partial(_fsdp1, ShardingStrategy.FULL_SHARD)),
    "SHARD_GRAD_OP": (2, partial(_fsdp1, ShardingStrategy.SHARD_GRAD_OP)),
    "HYBRID_SHARD": (4, partial(_fsdp1, ShardingStrategy.HYBRID_SHARD)),
    "flat": (3, partial(_fsdp1, ShardingStrategy.FULL_SHARD, use_orig_params=False)),
    "fully_shard": (3, _fsdp2),
}


def _runs(layout: str, optimizer: Any, parent: str) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, ShardedEMA]:
        torch.manual_seed(0)
        model = LAYOUTS[layout][1](nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 1)))
        return model, optimizer(model.parameters(), lr=0.01), ShardedEMA(model, 0.9)

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, ema: ShardedEMA, first: int) -> None:
        for step in range(first, first + 3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update()

    model, optim, ema = made()
    for number in range(3):
        trained(model, optim, ema, 3 * number)
    save(Path(parent, "straight"), model=model, optimizer=optim, ema=ema)
    for number in range(3):
        model, optim, ema = made()
        if number:
            restore(Path(parent, str(number - 1)), model=model, optimizer=optim, ema=ema)
        trained(model, optim, ema, 3 * number)
        save(Path(parent, str(number)), model=model, optimizer=optim, ema=ema, check_replicas=True)
    dist.barrier()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumed_twice_equals_one_that_was_not(layout: str, optimizer: Any, tmp_path: Path) -> None:
    run(LAYOUTS[layout][0], _runs, layout, optimizer, str(tmp_path))
    with ema_ckpt.open(tmp_path / "straight") as straight, ema_ckpt.open(tmp_path / "2") as resumed:
        names = straight.keys()
        assert resumed.keys() == names
        assert {int(resumed[name]) for name in names if name.endswith(".step")} == {9}
        assert [name for name in names if not torch.equal(straight[name], resumed[name])] == []
