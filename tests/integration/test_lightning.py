"""lightning: a plain `.ckpt`, `WeightAveraging`, `ModelParallelStrategy` (FSDP2) and `FSDPStrategy` (FSDP1)."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ema_ckpt
from tests.distributed import launcher
from tests.integration.proving import Made, assert_same_bits, goes_through_all_verbs
from tests.integration.table import Row
from tests.integration.training import Net, as_launched, batch, keep, kept

pytestmark = pytest.mark.integration


def module_of(kind: str, seed: int = 0) -> Any:
    import lightning
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    class Module(lightning.LightningModule):
        def configure_model(self) -> None:
            if hasattr(self, "net"):
                return
            self.net = Net(seed)
            if kind == "parallel":
                for layer in (self.net.enc, self.net.norm, self.net):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            if kind == "fsdp":
                self.net = FullyShardedDataParallel(
                    self.net, use_orig_params=True, device_id=torch.device("cpu")
                )

        def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(rows).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    return Module()


def trainer_of(kind: str, steps: int, world: int, callbacks: tuple[Any, ...] = ()) -> Any:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    class OnCPU(FSDPStrategy):
        """Lightning asks for a GPU if the strategy is exactly its own class."""

    strategies = {
        "plain": lambda: "auto",
        "parallel": lambda: ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
        "fsdp": lambda: OnCPU(state_dict_type="sharded"),
    }
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # processes are there already
    return lightning.Trainer(
        accelerator="cpu", devices=world, strategy=strategies[kind](), max_steps=steps, logger=False,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks), enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks), use_distributed_sampler=False,
    )  # fmt: skip


def data(rank: int, world: int) -> Any:
    rows = [batch(step, rank, world) for step in range(8)]
    return torch.utils.data.DataLoader(rows, batch_size=None)


def whole_of(kind: str, module: Any) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    if kind != "fsdp":
        return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    with FullyShardedDataParallel.summon_full_params(module.net, writeback=False):
        inner = module.net.module
        return {f"net.{name}": t.clone() for name, t in {**dict(inner.named_parameters()), **dict(inner.named_buffers())}.items()}  # fmt: skip


def saves(folder: Path, kind: str) -> None:
    warnings.simplefilter("ignore")
    rank, world = as_launched()
    module = module_of(kind)
    trainer = trainer_of(kind, 3, world)
    trainer.fit(module, data(rank, world))
    trainer.save_checkpoint(folder / "epoch=0-step=3.ckpt")
    keep(whole_of(kind, module), folder / "whole.pt")


def loads(folder: Path, kind: str, checkpoint: Path) -> None:
    """Training goes on from the checkpoint, and its number of steps is reached at once."""
    warnings.simplefilter("ignore")
    rank, world = as_launched()
    module = module_of(kind, seed=1)
    trainer = trainer_of(kind, 3, world)
    trainer.fit(module, data(rank, world), ckpt_path=str(checkpoint), weights_only=False)
    assert trainer.global_step == 3
    assert all(state["exp_avg"].abs().sum() > 0 for state in trainer.optimizers[0].state.values())
    keep(whole_of(kind, module), folder / "loaded.pt")


@pytest.mark.parametrize(
    ("kind", "live", "what"),
    [("parallel", "state_dict", "`ModelParallelStrategy`, 2 ranks"), ("fsdp", "model", "`FSDPStrategy`, 2 ranks")],
)  # fmt: skip
def test_sharded(kind: str, live: str, what: str, tmp_path: Path) -> None:
    with Row("lightning", what) as row:
        launcher.run(2, saves, tmp_path, kind, timeout=180)
        state = kept(tmp_path / "whole.pt")
        made = Made(
            tmp_path / "epoch=0-step=3.ckpt", {live: "live", "optimizer_0": "optimizer"}, {live: state},
            beside=("meta.pt",),
        )  # fmt: skip
        goes_through_all_verbs(row, made, tmp_path)
        launcher.run(2, loads, tmp_path, kind, tmp_path / "on-3", timeout=180)
        assert_same_bits(kept(tmp_path / "loaded.pt"), state)
        row.shown("loaded back", "`Trainer.fit(ckpt_path=…)`")


def test_plain(tmp_path: Path) -> None:
    with Row("lightning", "one process, `.ckpt`") as row:
        launcher.run(1, saves, tmp_path, "plain", timeout=180)
        state = kept(tmp_path / "whole.pt")
        made = Made(
            tmp_path / "epoch=0-step=3.ckpt", {"state_dict": "live", "optimizer_states": "optimizer"},
            {"state_dict": state},
        )  # fmt: skip
        goes_through_all_verbs(row, made, tmp_path)
        launcher.run(1, loads, tmp_path, "plain", tmp_path / "back.pt", timeout=180)
        assert_same_bits(kept(tmp_path / "loaded.pt"), state)
        row.shown("loaded back", "`Trainer.fit(ckpt_path=…)`")


def averages(folder: Path) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

    warnings.simplefilter("ignore")
    as_launched()
    module = module_of("plain")
    callbacks = (
        EMAWeightAveraging(decay=0.5, update_starting_at_step=0),
        ModelCheckpoint(folder / "run", every_n_train_steps=2, save_top_k=-1),
    )
    trainer = trainer_of("plain", 4, 1, callbacks)
    live: dict[str, torch.Tensor] = {}

    class Watch(type(callbacks[0]).__mro__[2]):  # a Callback: the weights before the last swap
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            live.update({name: t.detach().clone() for name, t in module.state_dict().items()})

    trainer.callbacks.insert(0, Watch())
    trainer.fit(module, data(0, 1))
    keep(live, folder / "live.pt")
    keep(dict(callbacks[0]._average_model.module.state_dict()), folder / "average.pt")


def test_weight_averaging(tmp_path: Path) -> None:
    with Row("lightning", "`EMAWeightAveraging`, `.ckpt`") as row:
        launcher.run(1, averages, tmp_path, timeout=180)
        live, average = kept(tmp_path / "live.pt"), kept(tmp_path / "average.pt")
        made = Made(
            tmp_path / "run",
            {
                "state_dict": "ema",
                "current_model_state": "live",
                "optimizer_states": "optimizer",
                "averaging_state": "other",
                "callbacks": "other",
            },
            {"state_dict": average, "current_model_state": live},
        )
        assert ema_ckpt.inspect(made.path).resolved.endswith("epoch=0-step=4.ckpt")
        goes_through_all_verbs(row, made, tmp_path)
