"""Ranks that hold different layers, as the stages of a pipeline do: saved together, restored each its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ema_ckpt
from ema_ckpt import restore, save
from ema_ckpt.core.errors import SourceError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.model.live_tree import live_tree
from ema_ckpt.ema.model.scan import scan_model
from tests.distributed.launcher import run
from tests.distributed.test_save_failures import bits

LAYERS = ("0", "1", "2")


class Stage(nn.Module):
    """Some layers of one model under the names that they have in the whole."""

    def __init__(self, layers: tuple[str, ...], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in layers})
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x).relu() * self.scale
        return x


def made(layers: tuple[str, ...], seed: int) -> dict[str, Any]:
    model = Stage(layers, seed)
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    groups = [{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.01}]
    return {"model": model, "optimizer": torch.optim.AdamW(groups), "ema": ShardedEMA(model, 0.9)}


def train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        state["model"](torch.ones(3, 4)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["ema"].update()


def _resumed(root: str) -> list[Any]:
    layers = LAYERS[:2] if dist.get_rank() == 0 else LAYERS[2:]
    state = made(layers, 1)
    train(state, 2)
    save(Path(root) / "step_2", **state)
    before = bits(**state)
    train(state, 1)
    after = bits(**state)

    other = made(layers, 2)
    report = restore(root, **other)
    assert bits(**other) == before
    assert not report.missing
    assert not report.unexpected
    assert [group["lr"] for group in other["optimizer"].param_groups] == [0.1, 0.01]
    train(other, 1)
    assert bits(**other) == after

    # A name that no rank has is still refused, on all of them.
    if dist.get_rank():
        del state["model"].layers["2"]
        state["ema"] = None
    with pytest.raises(SourceError, match=r"layers\.2\.weight"):
        restore(root, model=state["model"])
    return [name for name in live_tree(scan_model(other["model"])) if name != "scale"]


def test_every_stage_resumes(tmp_path: Path) -> None:
    first, second = run(2, _resumed, str(tmp_path))
    whole = made(LAYERS, 3)
    report = restore(tmp_path, **whole)
    assert sorted(first + second) == sorted(
        name for name in live_tree(scan_model(whole["model"])) if name != "scale"
    )
    assert [len(group["params"]) for group in whole["optimizer"].param_groups] == [3, 3]
    assert not report.unexpected
    with warnings.catch_warnings(), ema_ckpt.open(tmp_path / "step_2") as stored:
        warnings.simplefilter("ignore")
        want = stored.state_dict("model")
    assert all(
        torch.equal(want[name], value) for name, value in whole["model"].state_dict().items()
    )
