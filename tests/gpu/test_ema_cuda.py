"""The manager on a CUDA device: bits, host synchronisation, swap, FSDP2 over NCCL. Needs one card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from ema_ckpt.core.errors import StateError
from ema_ckpt.ema.checkpoint.agreement import checksum, sum_of_words
from ema_ckpt.ema.manager import ShardedEMA

WEIGHTS = [1e-4, 0.3, 0.5, 0.7, 1.0]


@pytest.fixture(scope="module")
def nccl() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 257), nn.LayerNorm(257), nn.Linear(257, 64), nn.Linear(64, 3000)
    )
    return model.to("cuda", dtype)


def shake(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_bits_are_those_of_torchs_foreach_lerp(dtype: torch.dtype, weight: float) -> None:
    model = network(dtype)
    ema = ShardedEMA(model, 1 - weight)
    expected = [p.detach().float().clone() for p in model.parameters()]
    for step in range(3):
        shake(model, step)
        ema.update()
        torch._foreach_lerp_(
            expected, [p.detach().float() for p in model.parameters()], 1.0 - (1 - weight)
        )
    for shadow, tensor in zip(ema._averages.shadows, expected, strict=True):
        assert torch.equal(shadow.average, tensor)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compensate": True},
        {"nonfinite": "skip"},
        {"dtype": torch.bfloat16, "decay": 0.9},
        {"nonfinite": "raise"},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_updates_do_not_wait_for_the_device(settings: dict[str, Any], dtype: torch.dtype) -> None:
    model = network(dtype)
    ema = ShardedEMA(model, **settings)
    ema.update()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            ema.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ema.num_updates == 4


def test_bad_values_are_counted_on_the_device() -> None:
    model = network()
    ema = ShardedEMA(model, 0.5, nonfinite="raise", compensate=True)
    with torch.no_grad():
        model[0].weight[3, 3] = torch.nan
    ema.update()
    assert ema.nonfinite_events == 1
    with pytest.raises(StateError, match="not finite in 1 updates"):
        ema.state_dict()
    assert all(torch.isfinite(shadow.average).all() for shadow in ema._averages.shadows)


def check_swap(model: nn.Module, ema: ShardedEMA) -> None:
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        before = model(x)
        with ema.swap():
            inside = model(x)
        assert torch.equal(model(x), before)
    assert not torch.equal(inside, before)


def test_swap() -> None:
    model = network()
    ema = ShardedEMA(model, 0.5)
    shake(model, 1)
    ema.update()
    check_swap(model, ema)
    ema.wait(host=True)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_fsdp2(reshard: bool, offload: bool) -> None:
    model = network()
    policy = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model:
        fully_shard(layer, reshard_after_forward=reshard, mp_policy=precision, **policy)
    fully_shard(model, reshard_after_forward=reshard, mp_policy=precision, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = ShardedEMA(model, 0.9)
    ema.attach(optimizer)
    expected = [p.to_local().detach().clone() for p in model.parameters()]
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(8, 64, device="cuda")).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        live = [held.shard.local for held in ema._averages.tracked]
        torch._foreach_lerp_(expected, live, 1 - 0.9)
        with torch.no_grad():
            model(torch.randn(8, 64, device="cuda"))
    for shadow, tensor in zip(ema._averages.shadows, expected, strict=True):
        assert shadow.average.device == shadow.shard.local.device
        assert torch.equal(shadow.average, tensor)
    check_swap(model, ema)


def test_a_model_that_moves_takes_its_average_along() -> None:
    model = network().cpu()
    ema = ShardedEMA(model, 0.5)
    model.cuda()
    shake(model, 0)
    ema.update()
    assert all(shadow.average.is_cuda for shadow in ema._averages.shadows)


def test_scratch_for_other_dtypes_is_bounded() -> None:
    model = nn.Linear(8192, 8192, bias=False, device="cuda", dtype=torch.bfloat16)
    ema = ShardedEMA(model)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    ema.update()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - held <= 64 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_checksums_are_taken_on_the_device(dtype: torch.dtype) -> None:
    values = torch.arange(9_000_001, device="cuda").remainder(2).to(dtype)
    with torch.cuda.device("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        first = checksum(values)
        assert torch.cuda.max_memory_allocated() - before < 200 << 20
    assert first == sum_of_words(values.cpu())
    values[8_000_000] = 1 - values[8_000_000].float()
    assert checksum(values) != first
