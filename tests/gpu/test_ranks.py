"""As many ranks as there are cards, at most two, over NCCL: FSDP2, FSDP1 and DDP with averages here and on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ema_ckpt import restore, save
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.shadows import live_part
from tests.distributed import test_offload_optimizer as offloaded_optimizer
from tests.distributed.launcher import run

DECAY = 0.9
WIDTH = 1024


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4))
    )


def _wrapped(kind: str) -> nn.Module:
    model = _network().cuda()
    if kind == "ddp":
        return DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            model, device_id=torch.cuda.current_device(), use_orig_params=True
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _live(ema: ShardedEMA) -> list[torch.Tensor]:
    return [
        live_part(shadow, shadow.shard.local).detach().cpu() for shadow in ema._averages.shadows
    ]


def _shadows(ema: ShardedEMA) -> list[torch.Tensor]:
    ema.wait(host=True)
    return [shadow.average.detach().cpu().clone() for shadow in ema._averages.shadows]


def _train(
    model: nn.Module, emas: list[ShardedEMA], optimizer: torch.optim.Optimizer
) -> list[torch.Tensor]:
    """Six steps with all managers updated; the average by the first, in float64."""
    from torch.distributed.tensor.debug import CommDebugMode

    exact = [tensor.double() for tensor in _live(emas[0])]
    for step in range(6):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(64, WIDTH, device="cuda")).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with CommDebugMode() as spoken:
            for ema in emas:
                ema.update()
        assert spoken.get_total_counts() == 0
        for average, live in zip(exact, _live(emas[0]), strict=True):
            average.lerp_(live.double(), 1 - DECAY)
    return exact


def _gathered(ema: ShardedEMA) -> dict[str, torch.Tensor]:
    """`full_state_dict`, and that it held no more on the device than one tensor."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    whole = ema.full_state_dict()
    assert torch.cuda.max_memory_allocated() - held <= 4 * WIDTH * WIDTH
    return whole


def _check(kind: str, folder: str) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    model = _wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    here, away = ShardedEMA(model, DECAY), ShardedEMA(model, DECAY, offload=True)
    exact = _train(model, [here, away], optimizer)
    assert all(torch.equal(a, b) for a, b in zip(_shadows(away), _shadows(here), strict=True))
    for average, want in zip(_shadows(here), exact, strict=True):
        assert (average.double() - want).norm() <= 1e-6 * want.norm()
    x = torch.randn(4, WIDTH, device="cuda")
    with torch.no_grad():
        before = model(x)
        outputs = []
        for ema in (here, away):
            with ema.swap():
                outputs.append(model(x))
            assert torch.equal(model(x), before)
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], before)
    whole = _gathered(away)
    save(f"{folder}/saved", model=model, ema=away, optimizer=optimizer)
    save(f"{folder}/later", model=model, ema=away, optimizer=optimizer, async_save=True).result()
    again = _wrapped(kind)
    averaged = ShardedEMA(again, DECAY, offload=True)
    fresh = torch.optim.AdamW(again.parameters(), lr=1e-3, fused=True)
    restore(f"{folder}/later", model=again, ema=averaged, optimizer=fresh)
    assert averaged.num_updates == 6
    assert all(torch.equal(a, b) for a, b in zip(_shadows(averaged), _shadows(here), strict=True))
    return whole


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "ddp"])
def test_training_over_nccl(kind: str, tmp_path: Path) -> None:
    world = min(2, torch.cuda.device_count())
    whole = run(world, _check, kind, str(tmp_path), timeout=240)[0]
    for device in ("cuda", "cpu"):
        model = _network().to(device)
        for options in ({}, {"offload": True}):
            ema = ShardedEMA(model, DECAY, **options)  # type: ignore[arg-type]
            restore(tmp_path / "saved", model=model, ema=ema)
            state = ema.state_dict()["weights"]
            assert all(torch.equal(state[name].cpu(), whole[name]) for name in state)


def _check_optimizer(kind: str, folder: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    offloaded_optimizer.check(kind, "cuda", folder)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp1-flat", "fsdp2"])
def test_optimizer_state_in_host_memory(kind: str, tmp_path: Path) -> None:
    run(min(2, torch.cuda.device_count()), _check_optimizer, kind, str(tmp_path), timeout=240)
