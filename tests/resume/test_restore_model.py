"""Live weights and extra state of modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ema_ckpt import restore, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_tied_model_saved_with_a_wrapper_prefix(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    torch.save(
        {"model": {f"module.{name}": value for name, value in model.state_dict().items()}},
        tmp_path / "c.pt",
    )
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    other[1].weight = other[0].weight
    assert not restore(tmp_path / "c.pt", model=other).unexpected
    assert torch.equal(other[1].weight, model[0].weight)


def test_extra_state_of_modules(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    model = nn.Sequential(Counting(2, 2), nn.Linear(2, 1))
    model[0].count = 7
    path = save(tmp_path / "c", model=model)
    other = nn.Sequential(Counting(2, 2), nn.Linear(2, 1))
    restore(path, model=other)
    assert other[0].count == 7
    names = [
        name
        for name in dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        if name.startswith("model.")
    ]
    assert names == [
        f"model.{name}".replace("_extra_state", "_extra_state.count") for name in model.state_dict()
    ]
