"""The tests of optimizer state in host memory, with parameters on a CUDA device; and what it saves there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ema_ckpt import offload_optimizer
from tests.ema.test_offload_optimizer import (
    test_a_state_dict_goes_both_ways,
    test_bits_of_the_plain_optimizer,
    test_master_weights_are_moved_too,
    test_two_groups_a_scheduler_and_an_average,
)

__all__ = [
    "test_a_state_dict_goes_both_ways",
    "test_bits_of_the_plain_optimizer",
    "test_master_weights_are_moved_too",
    "test_two_groups_a_scheduler_and_an_average",
]


@pytest.fixture
def device() -> str:
    return "cuda"


def _large() -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList(
        [torch.randn(n, 1024, device="cuda") for n in (4096, 10, 20_000, 4096, 1)]
    )


def test_grad_scaler_and_a_step_with_infinite_gradients() -> None:
    results = []
    for offloaded in (False, True):
        params = _large()
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
        if offloaded:
            offload_optimizer(optimizer)
        scaler = torch.amp.GradScaler(init_scale=1024.0)
        for step in range(4):
            generator = torch.Generator(device="cuda").manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator, device="cuda")
            if step == 2:
                params[0].grad[0, 0] = torch.inf
            scaler.scale(torch.zeros((), device="cuda"))
            scaler.step(optimizer)
            scaler.update()
        state = optimizer.state_dict()["state"]
        results.append(
            [
                *params,
                *(state[i]["exp_avg_sq"].cpu() for i in state),
                *(state[i]["step"] for i in state),
            ]
        )
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.cpu(), b.cpu())


def test_memory_outside_a_step() -> None:
    held = []
    for offloaded in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        params = _large()
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        slot_bytes = 16 << 20
        handle = offload_optimizer(optimizer, slot_bytes) if offloaded else None
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        if handle is not None:
            handle.wait()
            saved = 8 * sum(param.numel() for param in params) - 2 * slot_bytes
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        del params, optimizer, handle, param
    assert held[0] - held[1] >= 0.98 * saved


def test_many_steps_without_a_pause_race_with_nothing() -> None:
    mine, plain = _large(), _large()
    x, y = (
        torch.optim.Adam(mine, lr=1e-3, foreach=True),
        torch.optim.Adam(plain, lr=1e-3, foreach=True),
    )
    offload_optimizer(x, slot_bytes=4 << 20)
    for step in range(100):
        generator = torch.Generator(device="cuda").manual_seed(step)
        for a, b in zip(mine, plain, strict=True):
            a.grad = torch.randn(a.shape, generator=generator, device="cuda")
            b.grad = a.grad.clone()
        x.step()
        y.step()
    state = x.state_dict()["state"]
    for index, (a, b) in enumerate(zip(mine, plain, strict=True)):
        assert torch.equal(a, b)
        assert torch.equal(state[index]["exp_avg"], y.state[b]["exp_avg"].cpu())
