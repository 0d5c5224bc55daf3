"""A run that is saved and restored again and again ends where the uninterrupted one does."""

from __future__ import annotations

import warnings
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


def _fsdp1(
    strategy: ShardingStrategy, model: nn.Module, *, use_orig_params: bool = True
) -> nn.Module:
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        device_id=cpu,
        device_mesh=mesh,
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

    def trained(
        model: nn.Module, optimizer: torch.optim.Optimizer, ema: ShardedEMA, first: int
    ) -> None:
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


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, pytest.param(torch.optim.Adagrad, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumed_twice_equals_one_that_was_not(
    layout: str, optimizer: Any, tmp_path: Path
) -> None:
    run(LAYOUTS[layout][0], _runs, layout, optimizer, str(tmp_path))
    with ema_ckpt.open(tmp_path / "straight") as straight, ema_ckpt.open(tmp_path / "2") as resumed:
        names = straight.keys()
        assert resumed.keys() == names
        assert {int(resumed[name]) for name in names if name.endswith(".step")} == {9}
        assert [name for name in names if not torch.equal(straight[name], resumed[name])] == []


class OwnScale(torch.optim.Optimizer):
    """Divides a gradient by a norm that each rank has of its own shard."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            value, grad = parameter.to_local(), parameter.grad.to_local()
            norm = self.state[parameter].setdefault("norm", torch.zeros(()))
            norm.add_(grad.square().sum())
            value.sub_(0.01 * grad / norm.sqrt())


def _own_state(parent: str) -> list[str]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4, bias=False))
    optimizer = OwnScale(model.parameters())
    model(torch.arange(4.0)[None]).square().sum().backward()
    optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(Path(parent, "c"), model=model, optimizer=optimizer)
    return [str(warning.message) for warning in caught]


def test_state_that_each_rank_has_of_its_own_is_told(tmp_path: Path) -> None:
    first, second = run(2, _own_state, str(tmp_path))
    assert ["'optimizer.state.weight.norm'" in message for message in first] == [True]
    assert second == []


def _late_layer(parent: str) -> tuple[str, ...]:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    model = _fsdp2(made())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        model(torch.ones(1, 2)).sum().backward()
        if step < 3:
            model[0].weight.grad = model[0].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    path = save(Path(parent, "c"), model=model, optimizer=optimizer)
    flat = _fsdp1(ShardingStrategy.FULL_SHARD, made(), use_orig_params=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return restore(path, model=flat, optimizer=torch.optim.AdamW(flat.parameters())).warnings


def test_steps_that_one_flat_parameter_cannot_keep_are_told(tmp_path: Path) -> None:
    for told in run(2, _late_layer, str(tmp_path)):
        assert ["not at the step of" in message for message in told] == [True]
