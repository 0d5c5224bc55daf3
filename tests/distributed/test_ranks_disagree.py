"""Ranks that have updated differently, or hold different values under one name."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ema_ckpt
from ema_ckpt import save
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.ema.manager import ShardedEMA
from tests.distributed.launcher import run


def _torn(parent: str) -> list[str]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    messages = []
    for case in ("updates", "samples", "settings"):
        model = nn.Linear(2, 2)
        ema = ShardedEMA(model, 0.9 if case != "settings" or rank else 0.8)
        ema.update(samples=4 if case != "samples" or rank else 3)
        if case == "updates" and rank == 0:
            ema.update(samples=0)
        with pytest.raises(EmaCkptError) as caught:
            save(Path(parent, case), model=model, ema={"slow": ema} if case == "samples" else ema)
        messages.append(str(caught.value))
    return messages


def test_averages_that_ranks_updated_differently_are_refused(tmp_path: Path) -> None:
    updates, samples, settings = run(2, _torn, str(tmp_path))[1]
    assert "num_updates of ema: rank 0: 2; rank 1: 1" in updates
    assert "samples_seen of ema.slow: rank 0: 3; rank 1: 4" in samples
    assert "settings of ema: rank 0: " in settings
    assert not list(tmp_path.iterdir())


def _unwrapped(parent: str) -> list[str]:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank + 1))
    optimizer = torch.optim.AdamW(model.parameters())
    ema = ShardedEMA(model, 0.5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(rank + 1))
    optimizer.step()
    ema.update()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(Path(parent, "c"), model=model, ema=ema, optimizer=optimizer)
    return [str(warning.message) for warning in caught]


def test_all_of_one_name_comes_from_the_lowest_rank(tmp_path: Path) -> None:
    (said,), none = run(2, _unwrapped, str(tmp_path))
    assert not none
    assert "'model.0.bias'" in said
    assert "(ranks 0–1)" in said
    with ema_ckpt.open(tmp_path / "c") as stored:
        for name in ("0.weight", "1.bias"):
            assert stored[f"model.{name}"].mean() < 1
            assert stored[f"ema.weights.{name}"].mean() < 1
            moment = stored[f"optimizer.state.{name}.exp_avg"]
            assert torch.equal(moment, torch.full_like(moment, 0.1))


class Experts(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.values():
            x = layer(x)
        return x


def _experts(parent: str, kind: str) -> str:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Experts({"shared": nn.Linear(2, 2), "expert": nn.Linear(2, 2)})
    if kind == "stages":
        model[f"stage{rank}"] = nn.Linear(2, 2)
    with torch.no_grad():
        model["expert"].weight.add_(rank)
    if kind == "ignored":
        mesh = init_device_mesh("cpu", (2,))
        ignored = set(model["expert"].parameters())
        fully_shard(model["shared"], mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=ignored)
    with pytest.raises(EmaCkptError) as caught:
        save(Path(parent, kind), model=model)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["stages", "ignored"])
def test_different_values_on_ranks_that_are_no_replicas_are_refused(
    tmp_path: Path, kind: str
) -> None:
    for message in run(2, _experts, str(tmp_path), kind):
        assert "'model.expert.weight' (ranks 0–1)" in message
        assert "shared" not in message
    assert not list(tmp_path.iterdir())
