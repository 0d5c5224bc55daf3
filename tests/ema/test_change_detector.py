from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ema_ckpt import StateError
from ema_ckpt.ema.manager import ShardedEMA


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1), nn.BatchNorm1d(1))


def _replace(
    name: str, value: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[nn.Module], object]:
    def change(model: nn.Module) -> None:
        layer, _, key = name.rpartition(".")
        module = model.get_submodule(layer)
        setattr(module, key, nn.Parameter(value(getattr(module, key).detach())))

    return change


def _point_elsewhere(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.clone()


@pytest.mark.parametrize("change", [
    _replace("0.weight", torch.clone),
    _replace("0.weight", lambda t: t[:, :1].clone()),
    _replace("0.weight", lambda t: t[:0].clone()),
    _replace("1.bias", torch.clone),  # of one element, equal to the old one
    _replace("1.bias", lambda t: t.reshape(())),
    _point_elsewhere,
    lambda model: model.add_module("0", nn.Linear(3, 4)),
    lambda model: model._modules.pop("2"),
    lambda model: model[1]._parameters.pop("bias"),
    lambda model: model.double(),
])  # fmt: skip
def test_every_exchange_is_noticed(change: Callable[[nn.Module], object]) -> None:
    model = _model()
    watch = ShardedEMA(model, buffers="average")._change_detector
    assert watch.unchanged()
    change(model)
    assert not watch.unchanged()


def test_new_values_are_no_exchange() -> None:
    model = _model()
    watch = ShardedEMA(model)._change_detector
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    model.load_state_dict(_model().state_dict())
    assert watch.unchanged()


class _Alike(nn.Module):
    """A module that takes any other of its class for equal, and one that cannot be compared at all."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.w = fails, nn.Parameter(torch.zeros(3))

    def __eq__(self, other: object) -> bool:
        if self.fails:
            raise AttributeError("nope")
        return isinstance(other, _Alike)

    __hash__ = nn.Module.__hash__


@pytest.mark.parametrize("fails", [False, True])
def test_modules_are_not_asked_whether_they_are_equal(fails: bool) -> None:
    model = nn.Sequential(_Alike(fails))
    ema = ShardedEMA(model, decay=0.0)
    model[0] = _Alike(fails)
    nn.init.constant_(model[0].w, 7.0)
    ema.update()
    assert ema.full_state_dict()["0.w"].tolist() == [7.0] * 3


def test_another_shape_in_the_same_memory_raises_when_the_average_is_asked_for() -> None:
    model = nn.Linear(2, 4)
    ema = ShardedEMA(model, decay=0.5)
    model.weight.data = model.weight.data[:2]
    for ask in (ema.state_dict, ema.full_state_dict, ema.swap().__enter__):
        with pytest.raises(
            StateError, match=r"'weight' changed its shape from \(4, 2\) to \(2, 2\)"
        ):
            ask()


def test_other_strides_in_the_same_memory_are_followed_from_then_on() -> None:
    model = nn.Linear(2, 2, bias=False)
    ema = ShardedEMA(model, decay=0.0)
    model.weight.data = model.weight.data.t()
    ema.state_dict()
    ema.update()
    assert torch.equal(ema.full_state_dict()["weight"], model.weight)
