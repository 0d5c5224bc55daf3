"""The manager beside wrappers that come late, are guarded by rank, or divide it over replicas."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ema_ckpt.core.errors import CollectiveError, StateError, UsageError
from ema_ckpt.ema.checkpoint import replicas as replicas_module
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.master_weights import master_weights
from tests.distributed.launcher import run
from tests.distributed.layouts import (
    Block,
    Model,
    Tied,
    batch,
    flat,
    fsdp2,
    in_bfloat16,
    make_model,
)
from tests.distributed.test_update_layouts import train_step, whole_average, whole_live


def shake(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad and p.numel()], lr=0.05
    )
    train_step(model, optimizer, 0)


def close_to_whole(
    ema: ShardedEMA, model: nn.Module, start: dict[str, torch.Tensor], decay: float
) -> None:
    live, average = whole_live(model), whole_average(ema)
    names = {shadow.shard.fqn for shadow in ema._averages.shadows}
    assert names
    for name in names:
        assert torch.equal(average[name], start[name].lerp(live[name], 1 - decay)), name


# A wrapper that comes after the manager


def late_fully_shard(mesh: tuple[int, ...]) -> None:
    model = make_model()
    ema = ShardedEMA(model, 0.9, compensate=False)
    start, whole_bytes = whole_average(ema), ema.nbytes
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
    for block in model.blocks:
        fully_shard(block, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)
    shake(model)
    ema.update()
    close_to_whole(ema, model, start, 0.9)
    assert ema.nbytes < 0.6 * whole_bytes
    with ema.swap(), torch.no_grad():
        model(batch(0))


def late_ddp() -> None:
    model = make_model()
    ema = ShardedEMA(model, 0.9)
    start, whole_bytes = whole_average(ema), ema.nbytes
    wrapped = DistributedDataParallel(model)
    shake(wrapped)
    ema.update()
    close_to_whole(ema, wrapped, start, 0.9)
    assert ema.nbytes == whole_bytes
    ema.rebind(
        wrapped
    )  # equal cuts stay as they are: only a new manager is divided over the replicas
    assert ema.nbytes == whole_bytes
    start = whole_average(ema)
    shake(wrapped)
    ema.update()
    close_to_whole(ema, wrapped, start, 0.9)


def late_fsdp1(original: bool, inner: bool) -> None:
    model = make_model(kind=Model)
    for parameter in model.parameters():
        parameter.requires_grad_(original or True)
    ema = ShardedEMA(model, 0.9)
    start = whole_average(ema)
    wrapped = FullyShardedDataParallel(
        model, use_orig_params=original, device_id=torch.device("cpu"),
        auto_wrap_policy=torch.distributed.fsdp.wrap.ModuleWrapPolicy({Block}) if inner else None,
    )  # fmt: skip
    for call in (ema.update, ema.state_dict):
        with pytest.raises(StateError, match=r"ema\.rebind\(wrapped\)"):
            call()
    assert ema.num_updates == 0
    ema.rebind(wrapped)
    shake(wrapped)
    ema.update()
    close_to_whole(ema, wrapped, start, 0.9)


def late_wrappers() -> None:
    late_fully_shard((2,))
    late_ddp()
    for original in (True, False):
        for inner in (True, False):
            late_fsdp1(original, inner)


def test_wrappers_that_come_after_the_manager() -> None:
    run(2, late_wrappers, timeout=90)


def test_an_hsdp_wrapper_that_comes_after_the_manager() -> None:
    run(4, late_fully_shard, (2, 2), timeout=60)


# Evaluation that goes wrong


def interrupted_forward(wrap: Callable[[], nn.Module]) -> None:
    """An exception inside a forward inside the block: the next forward uses the live weights."""
    model = wrap()
    ema = ShardedEMA(model, 0.9)
    for _ in range(2):
        shake(model)
        ema.update()
    with torch.no_grad():
        before = model(batch(1))
    last = [module for module in model.modules() if isinstance(module, Block)][-1]

    def fails(*_: object) -> None:
        raise ValueError("evaluation failed")

    for grad in (False, True):
        hook = last.register_forward_hook(fails)
        with (
            pytest.raises(ValueError, match="evaluation failed"),
            ema.swap(),
            torch.set_grad_enabled(grad),
        ):
            model(batch(1))
        hook.remove()
        with torch.no_grad():
            assert torch.equal(model(batch(1)), before)
    shake(model)
    ema.update()


def gathered_ahead() -> None:
    """Parameters gathered before the block and not used yet are gathered anew inside it."""
    model = fsdp2()
    ema = ShardedEMA(model, 0.9)
    shake(model)
    ema.update()
    with torch.no_grad():
        before = model(batch(1))
        with ema.swap():
            inside = model(batch(1))
        model.unshard(async_op=True)
        with ema.swap():
            assert torch.equal(model(batch(1)), inside)
            model.unshard(async_op=True)
        assert torch.equal(model(batch(1)), before)


def evaluation_goes_wrong() -> None:
    for wrap in (
        fsdp2,
        partial(fsdp2, reshard=False),
        flat(strategy=ShardingStrategy.SHARD_GRAD_OP, original=True),
        flat(strategy=ShardingStrategy.FULL_SHARD, original=False),
    ):
        interrupted_forward(wrap)
    gathered_ahead()


def test_evaluation_that_goes_wrong() -> None:
    run(2, evaluation_goes_wrong, timeout=60)


# Replicas


def same_bits_split_or_not() -> list[list[int]]:
    measured = []
    for wrap in (
        lambda: DistributedDataParallel(make_model()),
        flat(strategy=ShardingStrategy.NO_SHARD, original=True),
        flat(strategy=ShardingStrategy.NO_SHARD, original=False),
    ):
        model = wrap()
        split, whole = ShardedEMA(model, 0.9), ShardedEMA(model, 0.9, shard_replicas=False)
        for _ in range(2):
            shake(model)
            split.update(), whole.update()
        divided, kept = whole_average(split), whole_average(whole)
        assert all(torch.equal(divided[name], kept[name]) for name in kept)
        for ema in (split, whole):
            with ema.swap():
                shown = whole_live(model)
            assert all(
                torch.equal(shown[shadow.shard.fqn], kept[shadow.shard.fqn])
                for shadow in ema._averages.shadows
            )
        measured.append([split.nbytes, whole.nbytes])
    return measured


def test_splitting_over_replicas_changes_no_bit() -> None:
    everyone = run(2, same_bits_split_or_not, timeout=60)
    for sizes in zip(*everyone, strict=True):
        assert sum(split for split, _ in sizes) == sizes[0][1] == sizes[1][1]


def never_split() -> None:
    model = make_model()
    model.enter.bias.requires_grad_(True)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["enter.bias"])
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.register_buffer("mean", torch.zeros(6))
    ema = ShardedEMA(
        DistributedDataParallel(model, find_unused_parameters=True), 0.5, buffers="average"
    )
    whole = {shadow.shard.fqn for shadow in ema._averages.shadows if not shadow.is_split}
    assert whole == {"enter.bias", "scale", "mean"}


def without_copies() -> None:
    """After copying back all ranks are alike, and a call by rank 0 alone is an error and no deadlock."""
    model = DistributedDataParallel(make_model())
    ema = ShardedEMA(model, 0.9)
    shake(model)
    ema.update()
    started = time.monotonic()
    if dist.get_rank() == 0:
        for call in (
            lambda: ema.copy_to(model, timeout=2),
            lambda: ema.swap(timeout=2).__enter__(),
        ):
            with pytest.raises(CollectiveError, match=r"rank 1 did not call it within 2 s"):
                call()
        assert time.monotonic() - started < 20
    dist.barrier()  # the group is still usable
    live = [p.detach().clone() for p in model.parameters()]
    try:
        with ema.swap():
            if dist.get_rank() == 1:
                raise ValueError("evaluation failed on one rank")
    except ValueError:
        pass
    dist.barrier()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), live, strict=True))
    ema.copy_to(model)
    average = whole_average(ema)
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, average[name])
    plain = make_model()
    ema.copy_to(plain)
    assert torch.equal(plain.enter.weight, average["enter.weight"])


def strided_targets() -> None:
    """What replicas divide arrives whole in targets of any memory layout, whatever the size of the messages."""
    model = DistributedDataParallel(make_model())
    ema = ShardedEMA(model, 0.9)
    shake(model)
    ema.update()
    average = whole_average(ema)
    for message in (replicas_module._MESSAGE_NBYTES, 64):
        replicas_module._MESSAGE_NBYTES, usual = message, replicas_module._MESSAGE_NBYTES
        strided = make_model()
        for parameter in strided.parameters():
            wide = torch.full((*(2 * size for size in parameter.shape),), 7.0)
            cut = wide[tuple(slice(None, None, 2) for _ in parameter.shape)]
            parameter.data = (
                cut.t().contiguous().t() if parameter.dim() > 1 and parameter.shape[0] % 2 else cut
            )
        assert not any(
            p.is_contiguous() for p in strided.parameters() if p.numel() > 1 and 1 not in p.shape
        )
        ema.copy_to(strided)
        replicas_module._MESSAGE_NBYTES = usual
        for name, parameter in strided.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(parameter, average[name]), name


def untied_targets() -> None:
    """What replicas divide reaches each tensor that has one of a tied one's names."""
    model = DistributedDataParallel(make_model(kind=Tied))
    ema = ShardedEMA(model, 0.9)
    shake(model)
    ema.update()
    untied = make_model(kind=Tied)
    untied.back.weight = nn.Parameter(torch.zeros_like(untied.embed.weight, dtype=torch.float64))
    ema.copy_to(untied)
    average = whole_average(ema)["embed.weight"]
    assert torch.equal(untied.embed.weight, average)
    assert torch.equal(untied.back.weight, average.double())


def replicas() -> None:
    untied_targets()
    strided_targets()
    never_split()
    without_copies()


def test_replicas_meet_or_say_who_is_missing() -> None:
    run(2, replicas, timeout=60)


def replicas_of_one() -> None:
    """A script that divides averages over replicas runs on one process too, and there divides nothing."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    for wrap in (
        lambda: DistributedDataParallel(make_model()),
        lambda: fully_shard(make_model(), mesh=mesh),
        flat(strategy=ShardingStrategy.NO_SHARD, original=True),
        flat(strategy=ShardingStrategy.NO_SHARD, original=False),
        flat(strategy=ShardingStrategy.HYBRID_SHARD, original=True, mesh=(1, 1)),
    ):
        model = wrap()
        ema = ShardedEMA(model, 0.9, shard_replicas=True)
        assert not any(shadow.is_split for shadow in ema._averages.shadows)
        start = whole_average(ema)
        shake(model)
        ema.update()
        close_to_whole(ema, model, start, 0.9)
        with ema.swap(), torch.no_grad():
            model(batch(0))
    for wrap in (make_model, fsdp2):
        with pytest.raises(UsageError, match="no wrapper of this model declares replicas"):
            ShardedEMA(wrap(), shard_replicas=True)


def replicas_of_one_over_shards() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = flat(strategy=ShardingStrategy.HYBRID_SHARD, original=True, mesh=(1, 2))
    for wrap in (lambda: fully_shard(make_model(), mesh=mesh), hybrid):
        model = wrap()
        ema, plain = ShardedEMA(model, 0.9, shard_replicas=True), ShardedEMA(model, 0.9)
        assert ema.nbytes == plain.nbytes
        start = whole_average(ema)
        shake(model)
        ema.update()
        close_to_whole(ema, model, start, 0.9)


def test_a_single_replica_is_declared_too() -> None:
    run(1, replicas_of_one, timeout=60)
    run(2, replicas_of_one_over_shards, timeout=60)


# Sources


class KeepsMasters(torch.optim.SGD):
    """Steps float32 copies of low-precision parameters, and keeps them in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    master = self.state[param].setdefault("master_param", param.float())
                    master.sub_(param.grad.float(), alpha=group["lr"])
                    param.copy_(master)


def masters_of_flat_parameters(wraps: list[Callable[[], nn.Module]]) -> None:
    """bfloat16 flat parameters whose optimizer keeps float32 ones, beside float32 flat parameters of these values."""
    for wrap in wraps:
        model, exact = in_bfloat16(wrap), wrap()
        optimizer = KeepsMasters(model.parameters(), lr=1e-3)
        ema = ShardedEMA(model, 0.9, source=master_weights(optimizer))
        with torch.no_grad():
            for flat_parameter, own in zip(exact.parameters(), model.parameters(), strict=True):
                flat_parameter.copy_(own)
        plain = ShardedEMA(exact, 0.9)
        for step in range(3):
            model(batch(step).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for flat_parameter, own in zip(exact.parameters(), model.parameters(), strict=True):
                    flat_parameter.copy_(optimizer.state[own]["master_param"])
                model(batch(7).bfloat16()), exact(batch(7))  # leaves some of them gathered
            ema.update(), plain.update()
        average, expected = whole_average(ema), whole_average(plain)
        assert all(torch.equal(average[name], expected[name]) for name in expected)
        assert any(
            not torch.equal(average[name], average[name].bfloat16().float()) for name in average
        )
        masters = [optimizer.state[own]["master_param"].clone() for own in model.parameters()]
        with ema.swap():
            shown = whole_live(model)
        assert all(
            torch.equal(shown[shadow.shard.fqn], expected[shadow.shard.fqn].bfloat16())
            for shadow in plain._averages.shadows
        )
        for own, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(optimizer.state[own]["master_param"], master)


def sources_of_flat_parameters() -> None:
    """What a source may give for a flat parameter: its shard, or this rank's piece of the name alone."""
    model = flat(strategy=ShardingStrategy.FULL_SHARD, original=False)()
    start = {name: tensor + 1 for name, tensor in whole_live(model).items()}
    whole = ShardedEMA(model, 0.9, source=lambda _, param: param.detach() + 1)
    pieces = {shadow.shard.fqn: shadow.shard.local + 1 for shadow in whole._averages.shadows}
    for ema in (whole, ShardedEMA(model, 0.9, source=lambda fqn, _: pieces[fqn])):
        average = whole_average(ema)
        assert all(
            torch.equal(average[shadow.shard.fqn], start[shadow.shard.fqn])
            for shadow in ema._averages.shadows
        )
    with pytest.raises(StateError, match=r"of the flat parameter's shard of \d+ elements"):
        ShardedEMA(model, source=lambda _, param: torch.zeros(param.numel() + 1))


def sources_over_two() -> None:
    full, none = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
    masters_of_flat_parameters(
        [
            flat(strategy=full, original=False),
            flat(strategy=full, original=False, kind=Tied),
            flat(strategy=none, original=False),
        ]
    )
    sources_of_flat_parameters()


def sources_over_four() -> None:
    grad_op, hybrid = ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD
    masters_of_flat_parameters(
        [flat(strategy=grad_op, original=False), flat(strategy=hybrid, original=False, mesh=(2, 2))]
    )


def test_the_masters_of_flat_parameters_are_averaged() -> None:
    run(2, sources_over_two, timeout=90)
    run(4, sources_over_four, timeout=90)


# Memory


def memory_beside(layout: str, rows: int) -> tuple[int, int, int]:
    """(EMA bytes here, growth of the resident set by making it, bytes of the whole model)."""
    model = nn.Sequential(*(nn.Linear(1024, rows, bias=False) for _ in range(4)))
    total = sum(p.nbytes for p in model.parameters())
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        sizes = (2, dist.get_world_size() // 2) if layout == "hsdp" else (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
        fully_shard(model, mesh=mesh)
    before = _resident()
    ema = ShardedEMA(model)
    ema.update()
    return ema.nbytes, _resident() - before, total


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def memory_of_layouts(rows: int) -> dict[str, Any]:
    return {layout: memory_beside(layout, rows) for layout in ("fsdp2", "hsdp", "ddp", "fsdp1")}


def test_each_rank_pays_for_its_share_alone() -> None:
    rows = 16_385  # 4 layers, 256 MiB
    for measured in run(4, memory_of_layouts, rows, timeout=120):
        for layout, (nbytes, grown, total) in measured.items():
            share = total / 4 * 1.01 + 4 * 1024 * 4  # and a row of each tensor
            assert nbytes <= share, layout
            assert grown <= share + (16 << 20), f"{layout}: {grown >> 20} MiB"


def _other_layout() -> str:
    model = nn.Linear(4, 4, bias=False)
    weights = torch.arange(16.0).view(4, 4)
    with torch.no_grad():
        model.weight.copy_(weights)
    fully_shard(model)
    columns = distribute_tensor(weights, model.weight.device_mesh, [Shard(1)])
    with pytest.raises(StateError, match="laid out as the parameter") as caught:
        ShardedEMA(model, source=lambda *_: columns)
    rows = distribute_tensor(weights + 1, model.weight.device_mesh, [Shard(0)])
    full = ShardedEMA(model, source=lambda *_: rows).full_state_dict()
    assert not full or torch.equal(full["weight"], weights + 1)
    return str(caught.value)


def test_a_source_in_another_layout_is_refused() -> None:
    assert all("'weight'" in message for message in run(2, _other_layout))
    assert all("'weight'" in message for message in run(4, _other_layout))
