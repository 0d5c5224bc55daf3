from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ema_ckpt.core.errors import StateError, UsageError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.schedules import HalfLife


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (model(torch.ones(1, 3)).sum() * scale).backward()


def shadows(ema: ShardedEMA) -> list[torch.Tensor]:
    return [shadow.average.clone() for shadow in ema._averages.shadows]


def test_one_update_per_step_not_per_micro_batch() -> None:
    model, alike = network(), network()
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, alike))
    attached, by_hand = ShardedEMA(model, 0.9), ShardedEMA(alike, 0.9)
    attached.attach(optimizer)
    for _ in range(8):
        for _ in range(4):
            backward(model, 0.25)
        optimizer.step(), optimizer.zero_grad()
        backward(alike)
        other.step(), other.zero_grad()
        by_hand.update()
    assert attached.num_updates == 8
    assert all(map(torch.equal, shadows(attached), shadows(by_hand)))
    attached.detach()
    optimizer.step()
    assert attached.num_updates == 8
    attached.attach(optimizer)
    with pytest.raises(StateError, match="attached already"):
        attached.attach(optimizer)


def test_several_optimizers_make_one_update_once_each_has_stepped() -> None:
    model = network()
    first, second = torch.optim.SGD([model.weight], 0.1), torch.optim.SGD([model.bias], 0.1)
    ema = ShardedEMA(model)
    ema.attach(first, second)
    counts = []
    for optimizer in (first, second, second, second, first, first, second):
        backward(model)
        optimizer.step()
        counts.append(ema.num_updates)
    assert counts == [0, 1, 1, 1, 2, 2, 3]
    with pytest.raises(UsageError, match="at least one optimizer"):
        ShardedEMA(model).attach()


def test_samples_are_a_number_or_asked_for() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = {"size": 8}
    asked, fixed = (ShardedEMA(model, HalfLife(100, unit="samples")) for _ in range(2))
    asked.attach(optimizer, samples=lambda: batch["size"])
    fixed.attach(optimizer, samples=4)
    for size in (8, 16):
        batch["size"] = size
        backward(model)
        optimizer.step()
    assert (asked.samples_seen, fixed.samples_seen) == (24, 8)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_loss_scaler_skips_changes_nothing(fused: bool) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ema = ShardedEMA(model, 0.9)
    ema.attach(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        before = (shadows(ema), [p.detach().clone() for p in model.parameters()])
        if step == 2:
            model.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert ema.num_updates == 2
            assert all(map(torch.equal, shadows(ema), before[0]))
            assert all(map(torch.equal, model.parameters(), before[1]))
    assert ema.num_updates == 3


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_dummy_step_that_makes_an_optimizers_state_does_not_count(kind: Any) -> None:
    model = network()
    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    trained = kind(model.parameters(), lr=0.1, **options)
    backward(model)
    trained.step()
    saved = get_optimizer_state_dict(model, trained)
    trained.zero_grad()
    fresh = kind(model.parameters(), lr=0.1, **options)
    ema = ShardedEMA(model, 0.5)
    ema.attach(fresh)
    set_optimizer_state_dict(model, fresh, saved)
    assert fresh.state
    assert ema.num_updates == 0
    backward(model)
    fresh.step()
    assert ema.num_updates == 1


def test_a_real_first_step_with_learning_rate_0_counts() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ema = ShardedEMA(model, 0.5)
    ema.attach(optimizer)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert ema.num_updates == 1


def test_a_step_that_fails_is_no_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ema = ShardedEMA(model)
    ema.attach(optimizer)

    def closure() -> float:
        raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        optimizer.step(closure)
    assert ema.num_updates == 0


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_hooks_do_not_break_a_compiled_step() -> None:
    graphs: list[object] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled_steps(attach: bool) -> tuple[int, int]:
        torch._dynamo.reset()
        graphs.clear()
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        ema = ShardedEMA(model)
        if attach:
            ema.attach(optimizer)
        step = torch.compile(optimizer.step, backend=counting)
        for _ in range(3):
            backward(model)
            step()
        return len(graphs), ema.num_updates

    without, _ = compiled_steps(attach=False)
    with_hooks, updates = compiled_steps(attach=True)
    assert updates == 3
    assert with_hooks == without


class Derived(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def test_a_step_that_calls_its_base_class_counts_once() -> None:
    """torch hooks `step` of the derived class and of the base class: their hooks run twice in one step."""
    model = nn.Linear(2, 2)
    torch.optim.AdamW(model.parameters())  # the base class is hooked with its first instance
    optimizer = Derived(model.parameters())
    ema = ShardedEMA(model, 0.5)
    ema.attach(optimizer)
    live = []
    for _ in range(3):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        live.append(model.weight.detach().clone())
    assert ema.num_updates == 3
    want = live[0]
    model.weight.grad.fill_(torch.nan)
    optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        optimizer.step()
    assert ema.num_updates == 3
    assert not torch.equal(want, live[2])


def test_an_optimizer_given_twice_counts_once() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ema = ShardedEMA(model, 0.5)
    ema.attach(optimizer, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert ema.num_updates == 1


@pytest.mark.parametrize("saved", [
    5,
    [],
    {"optimizers": 2},
    {"optimizers": 2, "waiting": 5, "skipped": [], "steps": [1, 0], "last": None},
    {"optimizers": 2, "waiting": [7], "skipped": [], "steps": [1, 0], "last": None},
    {"optimizers": 2, "waiting": [-1], "skipped": [], "steps": [1, 0], "last": None},
    {"optimizers": 2, "waiting": ["0"], "skipped": [], "steps": [1, 0], "last": None},
    {"optimizers": 2, "waiting": [1], "skipped": [], "steps": [1], "last": None},
    {"optimizers": 2, "waiting": [1], "skipped": [], "steps": [1, 0], "last": 2},
])  # fmt: skip
def test_a_saved_round_of_an_odd_form_begins_anew(saved: Any) -> None:
    model = network()
    first, second = torch.optim.SGD([model.weight], 0.1), torch.optim.SGD([model.bias], 0.1)
    ema = ShardedEMA(model)
    ema.attach(first, second)
    state = ema.state_dict()
    state["config"] = {**json.loads(state["config"]), "attached": saved}
    ema.load_state_dict(state)
    backward(model)
    second.step()
    assert ema.num_updates == 0
    first.step()
    assert ema.num_updates == 1
