from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ema_ckpt.ema.manager import ShardedEMA


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1), nn.BatchNorm1d(1))


def _replace(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], object]:
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
    watch = ShardedEMA(model, buffers="average")._watch
    assert watch.unchanged()
    change(model)
    assert not watch.unchanged()


def test_new_values_are_no_exchange() -> None:
    model = _model()
    watch = ShardedEMA(model)._watch
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    model.load_state_dict(_model().state_dict())
    assert watch.unchanged()
