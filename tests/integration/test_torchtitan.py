"""torchtitan: its `CheckpointManager` (DCP) with its optimizer container, and a `ShardedEMA` among its states."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ema_ckpt
from ema_ckpt import ShardedEMA
from tests.distributed import launcher
from tests.integration.proving import Made, assert_same_bits, goes_through_all_verbs
from tests.integration.table import Row
from tests.integration.training import Net, as_launched, batch, keep, kept

pytestmark = pytest.mark.integration


class Counter:
    """As the trainer's own state: tensors under `train_state`."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Data(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{dist.get_rank()}": b"bytes that only its owner reads"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def parts(folder: Path, seed: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer.optimizer import default_adamw

    warnings.simplefilter("ignore")
    as_launched()
    model = Net(seed)
    for layer in (model.enc, model.norm, model):
        fully_shard(layer)
    config = default_adamw(lr=0.1)
    config.implementation = "foreach"
    optimizers = config.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=1).build(
        optimizers=optimizers, training_steps=10
    )
    ema = ShardedEMA(model, 0.5)
    ema.attach(optimizers)
    counter = Counter()
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True, folder="checkpoint", interval=2, last_save_model_only=False, keep_latest_k=0
        ),
        dataloader=Data(), model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": counter, "ema": ema}, sd_adapter=None, base_folder=str(folder),
    )  # fmt: skip
    return {"model": model, "optimizers": optimizers, "schedulers": schedulers, "ema": ema, "counter": counter, "manager": manager}  # fmt: skip


def whole(model: Any) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def saves(folder: Path) -> None:
    run = parts(folder, 0)
    for step in range(1, 5):
        rows = batch(step, dist.get_rank(), dist.get_world_size())
        run["model"](rows).square().mean().backward()
        run["optimizers"].step()
        run["optimizers"].zero_grad()
        run["schedulers"].step()
        run["counter"].step = step
        run["manager"].save(step)
    assert run["ema"].num_updates == 4
    keep(whole(run["model"]), folder / "live.pt")
    keep(run["ema"].full_state_dict(), folder / "average.pt")


def loads(folder: Path) -> None:
    run = parts(folder, 1)
    assert run["manager"].load()
    assert (run["counter"].step, run["ema"].num_updates) == (4, 4)
    for optimizer in run["optimizers"].optimizers:
        assert all(
            state["exp_avg"].full_tensor().abs().sum() > 0 for state in optimizer.state.values()
        )
    keep(whole(run["model"]), folder / "loaded.pt")
    keep(run["ema"].full_state_dict(), folder / "loaded-average.pt")


def test_checkpoint_manager(tmp_path: Path) -> None:
    with Row(
        "torchtitan", "`CheckpointManager`, FSDP2 on 2 ranks, `ShardedEMA` among its states"
    ) as row:
        launcher.run(2, saves, tmp_path, timeout=180)
        live, average = kept(tmp_path / "live.pt"), kept(tmp_path / "average.pt")
        assert ema_ckpt.inspect(tmp_path / "checkpoint").resolved.endswith("step-4")
        made = Made(
            tmp_path / "checkpoint" / "step-4",
            {"": "live", "ema": "ema", "optimizer": "optimizer", "train_state": "other"},
            {"": live, "ema": average},
        )
        goes_through_all_verbs(row, made, tmp_path)
        again = tmp_path / "again"
        ema_ckpt.reshard(made.path, again / "checkpoint" / "step-4", world_size=3)
        launcher.run(2, loads, again, timeout=180)  # its data are keyed by rank
        assert_same_bits(kept(again / "loaded.pt"), live)
        assert_same_bits(kept(again / "loaded-average.pt"), average)
        row.shown("loaded back", "`CheckpointManager.load`")
