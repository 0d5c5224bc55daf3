"""Canonical names under modules of trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ema_ckpt.ema.manager import ShardedEMA


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.enter(x))
        return out


class _FabricModule(nn.Module):
    """As lightning 2.6's: registers the module twice, and shows the state of the one inside."""

    def __init__(self, forward_module: nn.Module, original_module: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original_module

    def state_dict(self, **kwargs: Any) -> Any:
        return self._original_module.state_dict(**kwargs)


# torch.compile imports what torch itself has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [
    lambda net: _FabricModule(net, net),
    lambda net: _FabricModule(DataParallel(net), net),
    lambda net: DataParallel(_FabricModule(net, net)),
    lambda net: _FabricModule(torch.compile(net), net),
])  # fmt: skip
def test_names_are_those_of_the_module_inside(wrap: Any) -> None:
    net = Net()
    ema = ShardedEMA(wrap(net), 0.5)
    ema.update()
    assert list(ema.full_state_dict()) == list(net.state_dict())
    assert list(ema.state_dict()["weights"])[:2] == ["enter.weight", "enter.bias"]
    with ema.swap():
        pass
