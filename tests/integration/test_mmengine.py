"""mmengine: what `Runner` leaves with `EMAHook`, which stores the average under the live name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ema_ckpt
from tests.distributed import launcher
from tests.integration.proving import Made, assert_same_bits, goes_through_all_verbs
from tests.integration.table import Row
from tests.integration.training import Net, batch, keep, kept

pytestmark = pytest.mark.integration


def runner_of(folder: Path, iterations: int, seed: int = 0) -> Any:
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(seed)

        def forward(self, rows: torch.Tensor, mode: str = "tensor") -> Any:
            return {"loss": self.net(rows).square().mean()}

    rows = [(batch(step)[0],) for step in range(64)]
    return Runner(
        Model(), str(folder / "run"),
        train_dataloader={"dataset": rows, "batch_size": 4, "num_workers": 0, "collate_fn": {"type": "default_collate"},
                          "sampler": {"type": "DefaultSampler", "shuffle": False}},
        train_cfg={"by_epoch": False, "max_iters": iterations},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.1}},
        custom_hooks=[{"type": "EMAHook", "ema_type": "ExponentialMovingAverage", "momentum": 0.5}],
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 2, "by_epoch": False}},
        resume=iterations > 4,
    )  # fmt: skip


def trains(folder: Path) -> None:
    warnings.simplefilter("ignore")
    runner = runner_of(folder, 4)
    model = runner.train()
    hook = next(hook for hook in runner.hooks if type(hook).__name__ == "EMAHook")
    keep(dict(model.state_dict()), folder / "live.pt")
    keep(dict(hook.ema_model.module.state_dict()), folder / "average.pt")


def loads(folder: Path) -> None:
    from mmengine.runner import load_checkpoint

    warnings.simplefilter("ignore")
    model = runner_of(folder / "other", 4, seed=1).model
    load_checkpoint(model, str(folder / "back.pt"), map_location="cpu")
    keep(dict(model.state_dict()), folder / "loaded.pt")


def test_runner_with_ema_hook(tmp_path: Path) -> None:
    with Row("mmengine", "`Runner` with `EMAHook`") as row:
        launcher.run(1, trains, tmp_path, timeout=180)
        live, average = kept(tmp_path / "live.pt"), kept(tmp_path / "average.pt")
        assert ema_ckpt.inspect(tmp_path / "run").resolved.endswith("iter_4.pth")
        made = Made(
            tmp_path / "run" / "iter_4.pth",
            {"state_dict": "ema", "ema_state_dict": "live", "optimizer": "optimizer"},
            {"state_dict": average},
            left_out=("message_hub",),  # histories, of a class that no reader here makes
        )
        goes_through_all_verbs(row, made, tmp_path)
        assert ema_ckpt.diff(made.path).tree_a == "state_dict"
        launcher.run(1, loads, tmp_path, timeout=180)
        assert_same_bits(kept(tmp_path / "loaded.pt"), average)
        row.shown("loaded back", "`load_checkpoint`")
        assert set(live) == set(average)
