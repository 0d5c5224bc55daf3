"""`attach` to optimizers that forward to others, hold others, or are stepped by trainers."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ema_ckpt import save
from ema_ckpt.core.errors import UsageError
from ema_ckpt.ema.manager import ShardedEMA


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    model.zero_grad()
    (model(torch.ones(1, 3)).sum() * scale).backward()


class Forwarder:
    """Has nothing but the optimizer, which `__getattr__` finds."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Closed:
    """Hides the optimizer in a closure."""

    __slots__ = ("_find",)

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._find: Callable[[str], Any] = lambda name: getattr(inner, name)

    def __getattr__(self, name: str) -> Any:
        return self._find(name)


class Imitating:
    """As Lightning 2.6's and Fabric's: takes the class of the optimizer, and has its own `step`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self.__class__ = type(f"Fabric{kind.__name__}", (type(self), kind), {})

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Lookahead(torch.optim.Optimizer):
    """As timm 1.0's: no `__init__` of the base class, writes parameters after the inner step."""

    def __init__(self, base_optimizer: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._base_optimizer = base_optimizer
        self.param_groups = base_optimizer.param_groups
        self.defaults = base_optimizer.defaults
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self._base_optimizer.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)
        return loss

    def state_dict(self) -> Any:
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._base_optimizer.load_state_dict(state_dict)
        self.param_groups = self._base_optimizer.param_groups


class Sharing(Lookahead):
    """Has the hooks of the optimizer inside."""

    def __init__(self, base_optimizer: torch.optim.Optimizer) -> None:
        super().__init__(base_optimizer)
        self._optimizer_step_pre_hooks = base_optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = base_optimizer._optimizer_step_post_hooks


class Container(torch.optim.Optimizer):
    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__(
            [p for one in optimizers for g in one.param_groups for p in g["params"]], {}
        )

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, 0.1)


def accelerated(optimizer: torch.optim.Optimizer) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(optimizer)


KINDS: dict[str, Callable[[nn.Linear], Any]] = {
    "forwarder": lambda m: Forwarder(sgd(m.parameters())),
    "closed": lambda m: Closed(sgd(m.parameters())),
    "imitating": lambda m: Imitating(sgd(m.parameters())),
    "lookahead": lambda m: Lookahead(sgd(m.parameters())),
    "sharing": lambda m: Sharing(sgd(m.parameters())),
    "container": lambda m: Container(sgd([m.weight]), sgd([m.bias])),
    "two deep": lambda m: Imitating(Lookahead(sgd(m.parameters()))),  # type: ignore[arg-type]
    "accelerate": lambda m: accelerated(sgd(m.parameters())),
    "accelerated lookahead": lambda m: accelerated(Lookahead(sgd(m.parameters()))),
}


@pytest.mark.parametrize("scheduler", ["none", "before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_one_update_after_the_last_write(kind: str, scheduler: str) -> None:
    model, alike = network(), network()
    optimizer, other = KINDS[kind](model), KINDS[kind](alike)
    ema, by_hand = ShardedEMA(model, 0.5), ShardedEMA(alike, 0.5)

    def schedule() -> None:
        if isinstance(optimizer, torch.optim.Optimizer) and "lr" in optimizer.param_groups[0]:
            LambdaLR(optimizer, lambda _: 1.0)

    if scheduler == "before":
        schedule()
    ema.attach(optimizer)
    if scheduler == "after":
        schedule()
    for _ in range(3):
        backward(model), optimizer.step()
        backward(alike), other.step(), by_hand.update()
    assert ema.num_updates == 3
    mine, his = ema.full_state_dict(), by_hand.full_state_dict()
    assert all(torch.equal(value, his[name]) for name, value in mine.items())
    ema.detach()
    backward(model), optimizer.step()
    assert ema.num_updates == 3


def test_a_step_of_the_optimizer_inside_counts_too() -> None:
    """Lightning's automatic optimization steps another wrapper of the same optimizer."""
    model = network()
    inner = sgd(model.parameters())
    ema = ShardedEMA(model, 0.5)
    ema.attach(Imitating(inner))
    for step in (inner.step, Imitating(inner).step, Imitating(inner).step):
        backward(model), step()
    assert ema.num_updates == 3


def test_a_wrapper_that_only_accumulates_does_not_count() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    optimizer = sgd(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    ema = ShardedEMA(model, 0.5)
    ema.attach(optimizer)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 3)).sum())
            optimizer.step(), optimizer.zero_grad()
    assert ema.num_updates == 2


class Sealed:
    """Has a step of its own, and no place for another."""

    __slots__ = ("_inner", "param_groups")

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self.param_groups = inner.param_groups

    def step(self) -> None:
        self._inner.step()


def test_what_cannot_be_followed_is_refused() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    for odd, message in (
        (model, "wants optimizers; found Linear"),
        (model.parameters(), "wants optimizers; found generator"),
        (Sealed(optimizer), "step of Sealed cannot be noticed"),
        (sgd(network().parameters()), "SGD steps no parameter that is averaged here"),
    ):
        with pytest.raises(UsageError, match=message):
            ShardedEMA(model).attach(odd)
    ema = ShardedEMA(model)
    with pytest.warns(UserWarning, match="SGD steps no parameter that is averaged here and is"):
        ema.attach(optimizer, sgd(network().parameters()))
    backward(model), optimizer.step()
    assert ema.num_updates == 1


def test_what_is_said_once() -> None:
    model = network()
    ema = ShardedEMA(model)
    ema.attach(sgd(model.parameters()))
    with pytest.warns(UserWarning, match="by hand beside attach"):
        ema.update()
    ema.update()
    with pytest.warns(UserWarning, match=r"decay=1\.0: the average never moves"):
        ShardedEMA(model, 1.0).attach(sgd(model.parameters()))
    ema = ShardedEMA(model, 1.0)
    with pytest.warns(UserWarning, match=r"update\(\) with decay=1\.0: the average never moves"):
        ema.update()
    ema.update()
    with (
        pytest.warns(
            UserWarning, match=r"ema-stalled: swap\(\): decay=1\.0: the average never moves"
        ),
        ema.swap(),
    ):
        pass


def skipping(kind: str, model: nn.Linear) -> tuple[Callable[[int], None], ShardedEMA, list[int]]:
    """An iteration in which the first of two optimizers may be skipped, and the count after it."""
    first, second = (
        torch.optim.AdamW([p], 0.1, fused=kind == "fused") for p in (model.weight, model.bias)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=kind != "by hand")
    ema = ShardedEMA(model)
    ema.attach(first, second)
    between: list[int] = []

    def iterate(skipped: int) -> None:
        model.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        for number, (optimizer, parameter) in enumerate(
            zip((first, second), (model.weight, model.bias), strict=True)
        ):
            if number == skipped and kind == "by hand":
                continue
            if number == skipped:
                assert parameter.grad is not None
                parameter.grad.fill_(torch.inf)
            before = ema.num_updates
            scaler.step(optimizer)
            if not number:
                between.append(ema.num_updates - before)
        scaler.update()

    return iterate, ema, between


@pytest.mark.parametrize("kind", ["plain", "fused", "by hand"])
@pytest.mark.parametrize("skips", [(-1, 0, -1, -1), (-1, 1, -1, -1), (-1, -1, 0, 0, -1, -1)])
def test_after_a_skip_updates_fall_at_the_end_again(kind: str, skips: tuple[int, ...]) -> None:
    iterate, ema, between = skipping(kind, network())
    for skipped in skips:
        iterate(skipped)
    assert ema.num_updates == skips.count(-1)
    if kind != "by hand" or skips.count(0) < 2:
        assert not any(between)


def test_a_skip_in_the_first_iteration_by_the_scaler() -> None:
    for kind in ("plain", "fused"):
        iterate, ema, between = skipping(kind, network())
        for skipped in (0, 0, -1, -1, 0, -1):
            iterate(skipped)
        assert ema.num_updates == 3
        assert not any(between)


def test_steps_without_an_update_are_said(tmp_path: Any) -> None:
    model = network()
    attached, other = sgd([model.weight]), sgd(model.parameters())
    ema = ShardedEMA(model)
    ema.attach(attached)
    backward(model), other.step()
    with pytest.warns(UserWarning, match="ema-stalled.*another optimizer stepped averaged"):
        save(tmp_path / "c", model=model, ema=ema)
    attached.step()
    with warnings.catch_warnings(), ema.swap():
        warnings.simplefilter("error")
    idle = ShardedEMA(model)
    idle.attach(attached, sgd([model.bias]))
    attached.step(), attached.step()
    with (
        pytest.warns(UserWarning, match="ema-stalled.*stepped 2 times without an update"),
        idle.swap(),
    ):
        pass


def test_an_average_that_never_moved_is_said(tmp_path: Any) -> None:
    model, other = network(), network()
    ema = ShardedEMA(model, every=1000)
    for _ in range(100):
        ema.update()
    calls: list[Callable[[], Any]] = [
        lambda: ema.swap().__enter__(),
        lambda: ema.copy_to(other),
        ema.full_state_dict,
        lambda: save(tmp_path / "c", model=model, ema=ema),
    ]
    for call in calls[1:] + calls[:1]:
        with pytest.warns(UserWarning, match="ema-stalled.*100 updates are counted and every=1000"):
            call()
