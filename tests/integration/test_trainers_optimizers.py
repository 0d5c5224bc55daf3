"""Optimizers of timm, torchao and torchtitan: one update a step; what is saved is resumed bit for bit, the rest refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ema_ckpt import ShardedEMA, restore, save
from ema_ckpt.core.errors import EmaCkptError
from tests.distributed import launcher
from tests.integration.resumed import STEPS, Follower, run_and_resume
from tests.integration.training import Net, as_launched, batch

pytestmark = pytest.mark.integration

Make = Callable[[nn.Module], Any]


def trains(folder: Path, net: Callable[[int], nn.Module], make: Make) -> None:
    warnings.simplefilter("ignore")
    rank, world = as_launched() if torch.distributed.is_initialized() else (0, 1)

    def train(follower: Follower, first: int) -> None:
        model = net(first)
        optimizer = make(model)
        follower.begin(model, [optimizer])
        for number in range(first, STEPS):
            optimizer.zero_grad()
            model(batch(number, rank, world)).square().mean().backward()
            optimizer.step()
            follower.stepped(number + 1)

    run_and_resume(train, folder)


TIMM = (
    "adabelief adafactor adafactorbv adamp adamw adan adopt lamb laprop larc lion lookahead_adamw lookahead_lion"
    " madgrad mars muon nadamw novograd rmsproptf sgdp"
).split()


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str, tmp_path: Path) -> None:
    optim = pytest.importorskip("timm.optim")
    trains(tmp_path, Net, lambda model: optim.create_optimizer_v2(model, opt=name, lr=1e-2))


def test_state_of_timm_beside_that_of_the_parameters_goes_into_extra(tmp_path: Path) -> None:
    optim = pytest.importorskip("timm.optim")
    warnings.simplefilter("ignore")  # kron recommends opt_einsum
    model, other = Net(), Net(1)
    optimizer, another = (
        optim.create_optimizer_v2(one, opt="kron", lr=1e-2) for one in (model, other)
    )
    model(batch(0)).square().mean().backward()
    optimizer.step()
    with pytest.raises(EmaCkptError, match=r"Kron keeps 'rng_state' in its state_dict\(\) beside"):
        save(tmp_path / "c", model=model, optimizer=optimizer)
    save(tmp_path / "c", model=model, extra={"optimizer": optimizer})
    restore(tmp_path / "c", model=other, extra={"optimizer": another})
    want, found = optimizer.state_dict(), another.state_dict()
    assert found["rng_state"] == want["rng_state"]
    assert torch.equal(found["state"][0]["momentum_buffer"], want["state"][0]["momentum_buffer"])


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantised_moments_of_torchao_are_refused(name: str, tmp_path: Path) -> None:
    optim = pytest.importorskip("torchao.optim")
    model = nn.Linear(256, 64)
    optimizer = getattr(optim, name)(model.parameters())
    ema = ShardedEMA(model)
    ema.attach(optimizer)
    try:
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
    except RuntimeError as error:
        pytest.skip(f"torchao: {error}")
    assert ema.num_updates == 1
    with pytest.raises(EmaCkptError, match=r"'optimizer\.state\.weight\.exp_avg' is of .*OptimSt"):
        save(tmp_path / "c", model=model, ema=ema, optimizer=optimizer)
    assert not list(tmp_path.iterdir())
    save(tmp_path / "c", model=model, ema=ema)


def test_int8_weights_of_torchao_are_refused(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 8))
    quantization.quantize_(model[0], quantization.Int8WeightOnlyConfig())
    with pytest.raises(EmaCkptError, match=r"'model\.0\.weight' is of the class torchao\."):
        save(tmp_path / "c", model=model)
    with pytest.raises(EmaCkptError, match=r"'0\.weight' is of the class torchao\."):
        ShardedEMA(model, include="*")
    assert len(ShardedEMA(model)._averages.shadows) == 3
    assert not list(tmp_path.iterdir())


def float8(seed: int, gathers: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 16), nn.Linear(16, 16))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=True)
    convert_to_float8_training(model[1:], config=config)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def float8_trains(folder: Path, gathers: bool) -> None:
    trains(
        folder,
        lambda seed: float8(seed, gathers),
        lambda model: torch.optim.AdamW(model.parameters(), 1e-2),
    )


@pytest.mark.parametrize("gathers", [False, True])
def test_float8_training_of_torchao(gathers: bool, tmp_path: Path) -> None:
    pytest.importorskip("torchao.float8")
    launcher.run(2, float8_trains, tmp_path, gathers, timeout=180)


def container(model: nn.Module) -> Any:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    groups = [
        ParamGroupConfig(pattern=r"enc\..*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3}),
    ]
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    return OptimizersContainer(config, model_parts=[model])


def test_the_container_of_torchtitan(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.components.optimizer")
    trains(tmp_path, Net, container)
