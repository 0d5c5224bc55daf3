"""Optimizer state in host memory under every wrapper: bits of the plain optimizer, saved and restored across layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ema_ckpt import offload_optimizer, restore, save
from tests.distributed.launcher import run


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 130), nn.LayerNorm(130), nn.Linear(130, 13), nn.Linear(13, 1))


def _wrapped(kind: str, device: str) -> nn.Module:
    model = _network().to(device)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind.startswith("fsdp1"):
        where = (
            torch.device(device, torch.cuda.current_device())
            if device == "cuda"
            else torch.device(device)
        )
        return FullyShardedDataParallel(model, device_id=where, use_orig_params=kind == "fsdp1")
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, steps: range) -> None:
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(5, 7).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that this rank has: parameters, then the state of each."""
    optimizer.state_dict()  # waits for copies
    params = [
        param for param in model.parameters() if _local(param).numel()
    ]  # FSDP1 leaves others without gradient
    values = [
        *params,
        *(value for param in params for value in optimizer.state.get(param, {}).values()),
    ]
    return [_local(value).cpu().clone() for value in values]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def check(kind: str, device: str, folder: str) -> None:
    plain, mine = _wrapped(kind, device), _wrapped(kind, device)
    y = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    x = torch.optim.AdamW(mine.parameters(), lr=1e-2)
    offload_optimizer(x, slot_bytes=1 << 16)
    for model, optimizer in ((plain, y), (mine, x)):
        _train(model, optimizer, device, range(3))
    for a, b in zip(_held(mine, x), _held(plain, y), strict=True):
        assert torch.equal(a, b)
    save(f"{folder}/now", model=mine, optimizer=x)
    later = save(f"{folder}/later", model=mine, optimizer=x, async_save=True)
    for model, optimizer in ((plain, y), (mine, x)):
        _train(
            model, optimizer, device, range(3, 5)
        )  # the state moves on while it is being written
    later.result()
    want = _held(plain, y)
    for name in ("now", "later"):
        for offloaded in (False, True):
            again = _wrapped(kind, device)
            optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
            if offloaded:
                offload_optimizer(optimizer, slot_bytes=1 << 16)
                if name == "later":
                    _train(again, optimizer, device, range(2))  # there is state, and it is replaced
            restore(f"{folder}/{name}", model=again, optimizer=optimizer)
            if offloaded:
                moments = [
                    v for state in optimizer.state.values() for k, v in state.items() if k != "step"
                ]
                assert {_local(moment).device.type for moment in moments} == {"cpu"}
            _train(again, optimizer, device, range(3, 5))
            for a, b in zip(_held(again, optimizer), want, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp1-flat", "fsdp2"])
def test_bits_saves_and_restores(kind: str, tmp_path: Any) -> None:
    run(2, check, kind, "cpu", str(tmp_path), timeout=120)
