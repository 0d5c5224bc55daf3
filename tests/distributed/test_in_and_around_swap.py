"""What a forward inside `swap()` gathers must not hide that the model holds averages; and other stores than TCP's."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ema_ckpt import restore, save
from ema_ckpt.core.errors import CollectiveError, StateError, UsageError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.model.live_tree import live_tree
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.resume.flatten import local_shards
from tests.distributed.launcher import run


def _held(model: nn.Module, ema: ShardedEMA) -> list[Any]:
    trees = [live_tree(scan_model(model)), ema.state_dict()["weights"]]
    return [
        view.tolist()
        for tree in trees
        for value in tree.values()
        for _, view in local_shards(value).shards
    ]


def _refused_after_a_forward() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    ema, other = ShardedEMA(model, 0.5), ShardedEMA(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema.attach(optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before = _held(model, ema)
    with ema.swap():
        with torch.no_grad():
            model(torch.ones(2, 4))
        calls = [
            optimizer.step,
            ema.update,
            other.update,
            ema.reset,
            ema.state_dict,
            ema.swap().__enter__,
        ]
        calls += [other.swap().__enter__, ema.full_state_dict, lambda: ema.copy_to(model)]
        for call in calls:
            with pytest.raises(StateError, match=r"inside (a )?swap\(\)"):
                call()
    assert ema.num_updates == 1
    assert _held(model, ema) == before


def test_calls_after_a_forward_inside_are_refused() -> None:
    run(2, _refused_after_a_forward)


def _sharded_inside(dtype: torch.dtype, wrapped: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)).to(dtype)
    ema = ShardedEMA(DistributedDataParallel(model) if wrapped else model, 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    ema.update()
    live = [parameter.detach().clone() for parameter in model.parameters()]
    if wrapped:  # an average that replicas divide is not cut again
        with (
            pytest.raises(StateError, match=r"the live weights are back in the model$"),
            ema.swap(),
        ):
            fully_shard(model)
    else:
        average = ema.full_state_dict(complete=False)
        with ema.swap():
            fully_shard(model)
        for name, value in ema.full_state_dict(complete=False).items():
            assert torch.equal(value, average[name])
    for parameter, value in zip(model.parameters(), live, strict=True):
        assert torch.equal(parameter.full_tensor(), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_that_is_sharded_inside_gets_its_live_weights_back(
    dtype: torch.dtype, wrapped: bool
) -> None:
    run(2, _sharded_inside, dtype, wrapped)


def _inside_summoned(use_orig_params: bool, parent: str) -> None:
    def wrapped() -> FullyShardedDataParallel:
        torch.manual_seed(0)
        return FullyShardedDataParallel(
            nn.Linear(5, 3), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )

    model, other = wrapped(), wrapped()
    ema = ShardedEMA(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    ema.update()
    live, path = _held(model, ema), Path(parent, "step")
    with FullyShardedDataParallel.summon_full_params(model):
        save(path, model=model, ema=ema)  # of the shards
        calls: list[Any] = [
            ema.swap().__enter__,
            lambda: ema.copy_to(model),
            lambda: restore(path, model=model, ema=ema),
        ]
        for call in calls:
            with pytest.raises(StateError, match=r"inside summon_full_params\(\)"):
                call()
    assert _held(model, ema) == live
    ema.copy_to(other)
    average = ema.full_state_dict()
    with ema.swap(), FullyShardedDataParallel.summon_full_params(model):
        for name, value in average.items():
            shown = model.module.get_parameter(name)
            assert torch.equal(shown, value)
    assert _held(model, ema) == live
    for options in ({}, {"rank0_only": True, "writeback": False}):
        block = ema.swap()
        block.__enter__()
        with (
            FullyShardedDataParallel.summon_full_params(model, **options),
            pytest.raises(StateError, match=r"the live weights are back in the model$"),
        ):
            block.__exit__(None, None, None)
        assert _held(model, ema) == live


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_what_is_summoned_and_written_back_is_left_alone(
    use_orig_params: bool, tmp_path: Path
) -> None:
    run(2, _inside_summoned, use_orig_params, str(tmp_path))


def _module_under_extra(parent: str) -> None:
    torch.manual_seed(dist.get_rank())
    model, first, second = (fully_shard(nn.Linear(5, 3)) for _ in range(3))
    path = save(Path(parent, "step"), model=model, extra={"critic": first})
    restore(path, model=model, extra={"critic": second})
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())


def test_a_sharded_module_under_extra_comes_back(tmp_path: Path) -> None:
    run(2, _module_under_extra, str(tmp_path))


def _divided_optimizer(parent: str) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(
        UsageError, match="ZeroRedundancyOptimizer keeps state in optimizers of its own"
    ):
        save(Path(parent, "step"), model=model, optimizer=optimizer)


def test_an_optimizer_whose_state_would_be_lost_is_refused(tmp_path: Path) -> None:
    run(2, _divided_optimizer, str(tmp_path))


def _meet_in_a_file(rank: int, path: str, results: Any) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    ema = ShardedEMA(DistributedDataParallel(nn.Linear(4, 4)), 0.5)
    ema.update()
    message = ""
    if rank == 0:
        try:
            with ema.swap(timeout=1):
                pass
        except CollectiveError as error:
            message = str(error)
    dist.barrier()
    with ema.swap(timeout=20):
        pass
    dist.barrier()
    results.put((rank, message))


def test_ranks_that_meet_in_a_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_meet_in_a_file, args=(r, str(tmp_path / "store"), results))
        for r in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        found = dict(results.get(timeout=60) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    assert found == {0: "swap() is collective: rank 1 did not call it within 1 s", 1: ""}
