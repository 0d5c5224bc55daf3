"""Optimizers that hold others: state is that of the ones inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ema_ckpt
from ema_ckpt import restore, save
from ema_ckpt.core.errors import UsageError
from tests.resume.training import Net

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def halves(model: nn.Module) -> list[list[nn.Parameter]]:
    parameters = list(model.parameters())
    return [parameters[::2], parameters[1::2]]


class Container(torch.optim.Optimizer):
    """As torchtitan 0.3's `OptimizersContainer` is: a list, and the base class' groups without options."""

    def __init__(self, model: nn.Module, hold: Any = list) -> None:
        inner = [torch.optim.AdamW(part, lr=0.01 * (i + 1)) for i, part in enumerate(halves(model))]
        self.optimizers = hold(inner)
        super().__init__([p for part in halves(model) for p in part], {})

    def each(self) -> list[torch.optim.Optimizer]:
        held: Any = self.optimizers
        held = list(held.values() if isinstance(held, dict) else held)
        return [one for part in held for one in (part if isinstance(part, list) else [part])]

    def step(self, closure: Any = None) -> None:
        for optimizer in self.each():
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(i): one.state_dict() for i, one in enumerate(self.each())}


class Composite(torch.optim.SGD):
    """Steps some parameters itself and leaves the others to an optimizer inside, as Muon does."""

    def __init__(self, model: nn.Module) -> None:
        mine, others = halves(model)
        super().__init__(mine, lr=0.1, momentum=0.9)
        self.auxiliary = torch.optim.AdamW(others, lr=0.01)

    def step(self, closure: Any = None) -> Any:
        self.auxiliary.step()
        return super().step(closure)


class Forwarder:
    """No optimizer by class."""

    __slots__ = ("inner",)

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


MAKERS = {
    "list": Container,
    "tuple": lambda model: Container(model, tuple),
    "dict": lambda model: Container(model, lambda inner: dict(zip("ab", inner, strict=True))),
    "nested": lambda model: Container(model, lambda inner: [inner[:1], inner[1:]]),
    "composite": Composite,
    "forwarder": lambda model: Forwarder(torch.optim.AdamW(model.parameters())),
    "of forwarders": lambda model: Container(model, lambda inner: list(map(Forwarder, inner))),
}  # fmt: skip


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for step in range(steps):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_inside_is_saved_and_restored(tmp_path: Path, kind: str) -> None:
    model, other = Net(), Net(seed=5)
    optimizer, fresh = MAKERS[kind](model), MAKERS[kind](other)
    train(model, optimizer)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)
    names = [t.name for t in ema_ckpt.inspect(path).tensors if t.tree == "optimizer"]
    moments = [name for name in names if name.endswith(("exp_avg", "momentum_buffer"))]
    assert len(moments) == 5
    report = restore(path, model=other, optimizer=fresh)
    assert report.trees["optimizer"] == "restored"
    assert not report.missing
    train(model, optimizer)
    train(other, fresh)
    live = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in live)


def test_a_list_of_optimizers_is_as_their_container(tmp_path: Path) -> None:
    model = Net()
    container = Container(model)
    train(model, container)
    path = save(tmp_path / "c", model=model, optimizer=container)
    other = Net(seed=1)
    inner = Container(other).each()
    restore(path, model=other, optimizer=inner)
    restore(path, model=other, optimizer={"one": inner[0], "two": inner[1]})
    for one, its in zip(container.each(), inner, strict=True):
        assert str(one.state_dict()) == str(its.state_dict())


def test_state_in_a_place_that_is_not_found_is_refused(tmp_path: Path) -> None:
    model = Net()
    container = Container(model)
    optimizers = container.each()
    container.optimizers = None
    container.each = lambda: optimizers  # type: ignore[method-assign]
    train(model, container)

    class Hidden(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"moments": {"0": torch.ones(2)}}

    for odd in (container, Hidden(model.parameters(), 0.1)):
        with pytest.raises(UsageError, match="give the ones inside") as caught:
            save(tmp_path / "c", model=model, optimizer=odd)
        assert caught.value.code == "unsupported"
    assert not list(tmp_path.iterdir())
    save(tmp_path / "c", model=model, optimizer=torch.optim.SGD(model.parameters()))


def test_two_states_of_one_parameter_are_refused(tmp_path: Path) -> None:
    """SAM keeps old values of its own beside the moments of the optimizer inside."""
    model = Net()
    sharp = Container(model)
    train(model, sharp)
    for parameter in model.parameters():
        sharp.state[parameter]["old_p"] = parameter.detach().clone()
    with pytest.raises(UsageError, match="two optimizers keep state of"):
        save(tmp_path / "c", model=model, optimizer=sharp)


@pytest.mark.parametrize("odd", [3, "adam", nn.Linear(1, 1), [torch.ones(1)]])
def test_no_optimizer_is_one_clear_error(tmp_path: Path, odd: Any) -> None:
    with pytest.raises(UsageError, match=r"found (int|str|Linear|Tensor)"):
        save(tmp_path / "c", model=Net(), optimizer=odd)
