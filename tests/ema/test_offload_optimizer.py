"""Optimizer state in host memory: the bits of the plain optimizer, its hooks and schedulers, and what is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ema_ckpt import EmaCkptError, ShardedEMA, offload_optimizer

SHAPES = [(3,), (), (70, 50), (400, 300), (5,), (0, 4), (129, 257), (20_000,)]


@pytest.fixture
def device() -> str:
    return "cpu"


class Bag(nn.Module):
    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(shape).to(device, dtype) for shape in SHAPES])


def give_gradients(model: nn.Module, step: int, missing: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    for index, param in enumerate(model.parameters()):
        grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        param.grad = None if index in missing else grad


def assert_same(
    a: nn.Module, x: torch.optim.Optimizer, b: nn.Module, y: torch.optim.Optimizer
) -> None:
    mine, plain = x.state_dict(), y.state_dict()
    for left, right in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(left, right)
    assert mine["state"].keys() == plain["state"].keys()
    for index, state in plain["state"].items():
        assert mine["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(mine["state"][index][name].cpu(), value.cpu()), (index, name)


OPTIONS: list[dict[str, Any]] = [
    {"lr": 1e-2},
    {"lr": 1e-2, "foreach": True, "weight_decay": 0.1},
    {"lr": 1e-2, "foreach": False, "maximize": True},
    {"lr": 1e-2, "fused": True, "betas": (0.8, 0.95)},
]


@pytest.mark.thorough
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("begun", [False, True])
def test_bits_of_the_plain_optimizer(
    device: str, options: dict[str, Any], kind: type[torch.optim.Optimizer], begun: bool
) -> None:
    mine, plain = Bag(device), Bag(device)
    x, y = kind(mine.parameters(), **options), kind(plain.parameters(), **options)
    for step in range(6):
        if step == (2 if begun else 0):
            handle = offload_optimizer(x, slot_bytes=1 << 16)  # so small that tensors are cut
        for model, optimizer in ((mine, x), (plain, y)):
            give_gradients(model, step, missing=(1, 3) if step < 3 else ())
            optimizer.step()
    assert_same(mine, x, plain, y)
    assert all(state["exp_avg"].device.type == "cpu" for state in x.state.values())
    handle.detach()
    assert type(x) is kind
    assert all(state["exp_avg"].device.type == device for state in x.state.values())
    for model, optimizer in ((mine, x), (plain, y)):
        give_gradients(model, 9)
        optimizer.step()
    assert_same(mine, x, plain, y)


@pytest.mark.thorough
def test_two_groups_a_scheduler_and_an_average(device: str) -> None:
    def made() -> tuple[Bag, torch.optim.Optimizer]:
        model = Bag(device)
        params = list(model.parameters())
        return model, torch.optim.AdamW(
            [{"params": params[:4], "lr": 0.1}, {"params": params[4:], "foreach": True}]
        )

    (mine, x), (plain, y) = made(), made()
    early = torch.optim.lr_scheduler.StepLR(x, 2)
    schedulers = [early, torch.optim.lr_scheduler.StepLR(y, 2)]
    offload_optimizer(x)
    averages = [ShardedEMA(mine, 0.9), ShardedEMA(plain, 0.9)]
    averages[0].attach(x)
    averages[1].attach(y)
    calls: list[int] = []
    x.register_step_pre_hook(lambda *_: calls.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        late = (
            torch.optim.lr_scheduler.ExponentialLR(x, 0.9),
            torch.optim.lr_scheduler.ExponentialLR(y, 0.9),
        )
        for step in range(4):
            for model, optimizer in ((mine, x), (plain, y)):
                give_gradients(model, step)
                optimizer.step()
            for scheduler in (*schedulers, *late):
                scheduler.step()
    assert len(calls) == 4
    assert averages[0].num_updates == averages[1].num_updates == 4
    assert_same(mine, x, plain, y)
    for name, value in averages[1].state_dict()["weights"].items():
        assert torch.equal(averages[0].state_dict()["weights"][name], value)


@pytest.mark.thorough
@pytest.mark.parametrize("scheduled", ["before", "during", "after"])
@pytest.mark.parametrize("detached_at", [0, 1])
def test_no_scheduler_warns_whenever_it_came(scheduled: str, detached_at: int, device: str) -> None:
    model = Bag(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedulers = []

    def made(when: str) -> None:
        if when == scheduled:
            schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made("before")
        handle = offload_optimizer(optimizer)
        made("during")
        for step in range(3):
            if step == detached_at:
                handle.detach()
                made("after")
            give_gradients(model, step)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** schedulers[0].last_epoch
    assert ("step" in vars(optimizer)) and not hasattr(type(optimizer).step, "_wrapped_by_lr_sched")
    offload_optimizer(optimizer).detach()


def test_a_step_before_the_schedulers_first_is_seen_across_detach(device: str) -> None:
    model = Bag(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    handle = offload_optimizer(optimizer)
    give_gradients(model, 0)
    optimizer.step()
    handle.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    late = torch.optim.lr_scheduler.StepLR(fresh, 1)
    offload_optimizer(fresh).detach()
    with pytest.warns(
        UserWarning, match=r"lr_scheduler.step\(\)` before"
    ):  # where there is reason to
        late.step()


def test_an_optimizer_that_no_scheduler_knows_is_what_it_was() -> None:
    optimizer = torch.optim.AdamW(Bag("cpu").parameters())
    before = dict(vars(optimizer))
    offload_optimizer(optimizer).detach()
    assert vars(optimizer).keys() == before.keys()


def test_a_state_dict_goes_both_ways(device: str) -> None:
    mine, plain, third = Bag(device), Bag(device), Bag(device)
    x, y, z = (torch.optim.Adam(model.parameters(), lr=0.1) for model in (mine, plain, third))
    offload_optimizer(x, slot_bytes=1 << 16)
    for step in range(3):
        for model, optimizer in ((mine, x), (plain, y)):
            give_gradients(model, step)
            optimizer.step()
    saved = copy.deepcopy(x.state_dict())
    third.load_state_dict(mine.state_dict())
    z.load_state_dict(copy.deepcopy(saved))
    x.load_state_dict(saved)
    assert all(state["exp_avg"].device.type == "cpu" for state in x.state.values())
    for model, optimizer in ((mine, x), (plain, y), (third, z)):
        give_gradients(model, 7)
        optimizer.step()
    assert_same(mine, x, plain, y)
    assert_same(third, z, plain, y)


class WithMasters(torch.optim.AdamW):
    """Keeps float32 master weights of bfloat16 parameters, as trainers write it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["master"] = param.detach().float().clone()
                    state["exp_avg"] = torch.zeros_like(state["master"])
                    state["count"] = torch.zeros(())
                state["count"] += 1
                state["exp_avg"].lerp_(param.grad.float(), 0.1)
                state["master"].add_(state["exp_avg"], alpha=-group["lr"] / float(state["count"]))
                param.copy_(state["master"])


def test_master_weights_are_moved_too(device: str) -> None:
    mine, plain = Bag(device, torch.bfloat16), Bag(device, torch.bfloat16)
    x, y = WithMasters(mine.parameters(), lr=0.1), WithMasters(plain.parameters(), lr=0.1)
    offload_optimizer(x, slot_bytes=1 << 16)
    for step in range(3):
        for model, optimizer in ((mine, x), (plain, y)):
            give_gradients(model, step)
            optimizer.step()
    assert_same(mine, x, plain, y)
    assert all(state["master"].device.type == "cpu" for state in x.state.values())


def test_what_is_refused() -> None:
    params = list(Bag("cpu").parameters())
    for options in ({"amsgrad": True}, {"differentiable": True}):
        (name,) = options
        with pytest.raises(EmaCkptError, match=f"{name}=True is not supported"):
            offload_optimizer(torch.optim.Adam(params, **options))
    with pytest.raises(EmaCkptError, match="SGD is neither"):
        offload_optimizer(torch.optim.SGD(params, lr=0.1))
    with pytest.raises(EmaCkptError, match="not contiguous"):
        offload_optimizer(torch.optim.Adam([torch.zeros(3, 4).t().requires_grad_()]))
    optimizer = torch.optim.Adam(params)
    offload_optimizer(optimizer)
    with pytest.raises(EmaCkptError, match="offloaded already"):
        offload_optimizer(optimizer)
    with pytest.raises(EmaCkptError, match="closure"):
        optimizer.step(lambda: 0.0)
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(EmaCkptError, match="capturable=True is not supported"):
        optimizer.step()


class Counting(torch.optim.AdamW):
    """Counts in plain numbers, and puts new tensors in the place of moments."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["exp_avg"] = state.get("exp_avg", torch.zeros_like(param)) * 0.5 + param.grad
                param.sub_(state["exp_avg"] / state["count"])


def test_state_that_a_derived_class_replaces_is_kept(device: str) -> None:
    mine, plain = Bag(device), Bag(device)
    x, y = Counting(mine.parameters()), Counting(plain.parameters())
    offload_optimizer(x, slot_bytes=1 << 16)
    for step in range(4):
        for model, optimizer in ((mine, x), (plain, y)):
            give_gradients(model, step)
            optimizer.step()
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
        assert x.state[a]["count"] == y.state[b]["count"] == 4
        x.state_dict()
        assert torch.equal(x.state[a]["exp_avg"], y.state[b]["exp_avg"].cpu())


class GroupCounting(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1


def test_a_derived_class_that_changes_its_groups_is_refused() -> None:
    model = Bag("cpu")
    optimizer = GroupCounting(model.parameters())
    offload_optimizer(optimizer)
    give_gradients(model, 0)
    with pytest.raises(EmaCkptError, match=r"GroupCounting.step\(\) changes 't'"):
        optimizer.step()


def test_an_offloaded_optimizer_is_neither_copied_nor_pickled() -> None:
    optimizer = torch.optim.AdamW(Bag("cpu").parameters())
    handle = offload_optimizer(optimizer)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(EmaCkptError, match="detach"):
            attempt(optimizer)
    handle.detach()
    copy.deepcopy(optimizer).step()


@pytest.mark.parametrize("slot_bytes", [None, "65536", 1e6, 1 << 15])
def test_slots_are_a_number_of_bytes(slot_bytes: Any) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(EmaCkptError, match="expected 65536 or more"):
        offload_optimizer(optimizer, slot_bytes)
