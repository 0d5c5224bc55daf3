"""Every layout in real processes: average, swap and come back, bit for bit, against whole tensors gathered by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor.debug import CommDebugMode

from ema_ckpt.ema.checkpoint.local_shards_tensor import pieces_of
from ema_ckpt.ema.manager import ShardedEMA
from tests.distributed.launcher import run
from tests.distributed.layouts import LAYOUTS, OTHERS, batch, ddp_tp

DECAY = 0.9


def whole_live(model: nn.Module) -> dict[str, torch.Tensor]:
    """All live tensors in full, on every rank, as torch gathers them."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    box = [
        {name: tensor.clone() for name, tensor in full.items()} if dist.get_rank() == 0 else None
    ]
    dist.broadcast_object_list(box)
    return box[0]  # type: ignore[return-value]


def whole_average(ema: ShardedEMA) -> dict[str, torch.Tensor]:
    """All averages in full, put together from the boxes of all ranks; they must cover every element."""
    mine = {
        name: (tuple(tensor.shape), [(box, view.clone()) for box, view in pieces_of(tensor)])
        for name, tensor in ema.state_dict()["weights"].items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[str, torch.Tensor] = {}
    for name, (shape, pieces) in mine.items():
        dtype = next((v.dtype for rank in everyone for _, v in rank[name][1]), torch.float32)
        full = torch.zeros(shape, dtype=dtype)
        covered = torch.zeros(shape, dtype=torch.bool)
        for rank in everyone:
            for box, view in rank[name][1]:
                at = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                assert not covered[at].any() or torch.equal(full[at], view), (
                    f"{name}: replicas differ"
                )
                full[at], covered[at] = view, True
        assert covered.all(), f"{name}: {int((~covered).sum())} elements in no box"
        whole[name] = full
    return whole


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(batch(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def check_layout(wrap: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    model = wrap()
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    optimizer = torch.optim.SGD(trained, lr=0.05) if trained else None
    ema = ShardedEMA(model, DECAY)
    names = set(whole_average(ema)) - {n for n in whole_live(model) if n.endswith(".seen")}
    expected = {name: tensor.float() for name, tensor in whole_live(model).items() if name in names}
    _train(model, optimizer, ema, expected)
    average = whole_average(ema)
    for name in names:
        assert torch.equal(average[name], expected[name]), name
    _check_swap(model, ema, expected)
    _train(model, optimizer, ema, expected)
    average = whole_average(ema)
    for name in names:
        assert torch.equal(average[name], expected[name]), f"{name} after the swap"
    return average


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ema: ShardedEMA,
    expected: dict[str, torch.Tensor],
) -> None:
    for step in range(3):
        if optimizer is not None:
            train_step(model, optimizer, step)
        with torch.no_grad():
            model(batch(7))  # leaves FSDP modules unsharded
        with CommDebugMode() as comm:
            ema.update()
        assert comm.get_total_counts() == 0
        live = whole_live(model)
        for name, tensor in expected.items():
            tensor.lerp_(live[name].float(), 1 - DECAY)


def _check_swap(model: nn.Module, ema: ShardedEMA, expected: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        before, live = model(batch(9)), whole_live(model)
        model(batch(9))
        with ema.swap():
            inside, shown = model(batch(9)), whole_live(model)
            model(batch(9))
        after, again = model(batch(9)), whole_live(model)
        with torch.autocast("cpu", torch.bfloat16):
            low = model(batch(9))
            with ema.swap():
                low_inside = model(batch(9))
            assert torch.equal(model(batch(9)), low)
            assert not torch.equal(low, low_inside)
    for name, tensor in expected.items():
        assert torch.equal(shown[name], tensor.to(shown[name].dtype)), f"{name} inside"
    for name, tensor in live.items():
        assert torch.equal(tensor, again[name]), f"{name} came back changed"
    assert torch.equal(before, after)
    assert not torch.equal(before, inside)


def layouts_of(world_size: int) -> dict[str, Callable[[], nn.Module]]:
    return {**LAYOUTS[world_size], **OTHERS.get(world_size, {})}


def check_layouts(names: list[str]) -> None:
    for name in names:
        try:
            check_layout(layouts_of(dist.get_world_size())[name])
        except Exception as error:
            raise AssertionError(f"layout {name}: {type(error).__name__}: {error}") from error


# Each takes half a minute on two cores.
WORLD_SIZES = [pytest.param(n, marks=[pytest.mark.slow] * (n not in (1, 2, 4))) for n in LAYOUTS]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_update_and_swap_in_every_layout(world_size: int) -> None:
    run(world_size, check_layouts, list(layouts_of(world_size)), timeout=150)


def check_ddp_around_tensor_parallel() -> list[Any]:
    """torch loses the names of these parameters after the first forward, so whole tensors cannot come from there."""
    model = ddp_tp()
    ema = ShardedEMA(model, DECAY)
    trained = dict(model.module.named_parameters())
    optimizer = torch.optim.SGD(trained.values(), lr=0.05)
    expected = {name: parameter.detach().clone() for name, parameter in trained.items()}
    for step in range(3):
        train_step(model, optimizer, step)
        ema.update()
        for name, parameter in trained.items():
            expected[name].lerp_(parameter.detach(), 1 - DECAY)
    assert all(shadow.is_split for shadow in ema._averages.shadows)
    live = {name: parameter.detach().clone() for name, parameter in trained.items()}
    with ema.swap():
        for name, parameter in trained.items():
            assert torch.equal(parameter, expected[name]), name
    for name, parameter in trained.items():
        assert torch.equal(parameter, live[name]), name
    whole_average(ema)
    return [ema.nbytes, sum(tensor.nbytes for tensor in live.values())]


def test_ddp_around_tensor_parallel() -> None:
    measured = run(4, check_ddp_around_tensor_parallel, timeout=60)
    assert all(nbytes <= local / 2 * 1.3 for nbytes, local in measured)
