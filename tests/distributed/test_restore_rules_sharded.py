"""`restore(rules=…)` with an optimizer: from the shards of two ranks into other layouts on three."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ema_ckpt import restore, save
from tests.distributed.launcher import run
from tests.resume.test_restore_rules import (
    RULES,
    Named,
    New,
    Old,
    assert_equal,
    expected,
    gradients,
    steps,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def first_model() -> Old:
    torch.manual_seed(3)
    return Old()


def sharded_steps(model: nn.Module, optimizer: torch.optim.Optimizer, grads: list[Named]) -> None:
    """Step with these gradients, each cut as its parameter is."""
    parameters = dict(model.named_parameters())
    for named in grads:
        for name, grad in named.items():
            parameter = parameters[name]
            assert isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
        optimizer.step()


def save_old(folder: str) -> None:
    model = first_model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sharded_steps(model, optimizer, gradients(1))
    save(f"{folder}/run", model=model, optimizer=optimizer)


def restore_new(folder: str) -> Named:
    model = New()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    restore(f"{folder}/run", model=model, optimizer=optimizer, rules=f"{folder}/rules.toml")
    sharded_steps(model, optimizer, [expected(named) for named in gradients(2)])
    return {name: value.full_tensor().detach() for name, value in model.named_parameters()}


def test_shards_take_another_layout_on_other_ranks(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    run(2, save_old, str(tmp_path))
    whole = first_model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    steps(whole, optimizer, [*gradients(1), *gradients(2)])
    for found in run(3, restore_new, str(tmp_path)):
        assert_equal(found, expected(whole.state_dict()))
