"""lightning: averages attached to what its Trainer and Fabric prepare are counted, saved and resumed bit for bit."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ema_ckpt import ShardedEMA
from tests.distributed import launcher
from tests.integration.resumed import SAVED_AT, STEPS, Follower, run_and_resume
from tests.integration.test_lightning import module_of, trainer_of
from tests.integration.training import Net, as_launched, batch

pytestmark = pytest.mark.integration


def rows(first: int, repeats: int) -> Any:
    rank, world = as_launched()
    batches = [batch(step, rank, world) for step in range(first, STEPS) for _ in range(repeats)]
    return torch.utils.data.DataLoader(batches, batch_size=None)


def follows(follower: Follower, first: int, repeats: int = 1) -> Any:
    import lightning

    class Callback(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            follower.begin(module, trainer.optimizers)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
            follower.stepped(first + batches // repeats)

    return Callback()


def fits(folder: Path, kind: str, repeats: int) -> None:
    warnings.simplefilter("ignore")

    def train(follower: Follower, first: int) -> None:
        from lightning.pytorch.callbacks import WeightAveraging

        callbacks = [follows(follower, first, repeats)]
        if kind == "averaging":
            callbacks.append(WeightAveraging())
        trainer = trainer_of(
            "plain" if kind == "averaging" else kind, -1, as_launched()[1], tuple(callbacks)
        )
        trainer.fit_loop.max_epochs = 1
        trainer.accumulate_grad_batches = repeats
        trainer.fit(module_of(kind, seed=first), rows(first, repeats))

    run_and_resume(train, folder)


@pytest.mark.parametrize(
    ("kind", "ranks", "repeats"),
    [("plain", 1, 1), ("plain", 1, 2), ("averaging", 1, 1), ("parallel", 2, 1), ("fsdp", 2, 1)],
)
def test_trainer(kind: str, ranks: int, repeats: int, tmp_path: Path) -> None:
    launcher.run(ranks, fits, tmp_path, kind, repeats, timeout=180)


def fits_by_hand(folder: Path) -> None:
    """Manual optimization: two optimizers of two layers, as a GAN has them."""
    import lightning

    warnings.simplefilter("ignore")

    class Module(lightning.LightningModule):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.net, self.automatic_optimization = Net(seed), False

        def training_step(self, x: torch.Tensor, index: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.net(x).square().mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            halves = (self.net.enc, self.net.dec)
            return [torch.optim.AdamW(half.parameters(), lr=0.1) for half in halves]

    def train(follower: Follower, first: int) -> None:
        trainer = trainer_of("plain", -1, 1, (follows(follower, first),))
        trainer.fit_loop.max_epochs = 1
        trainer.fit(Module(first), rows(first, 1))

    run_and_resume(train, folder)


def test_manual_optimization(tmp_path: Path) -> None:
    launcher.run(1, fits_by_hand, tmp_path, timeout=180)


def fabric_trains(folder: Path, kind: str) -> None:
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy

    warnings.simplefilter("ignore")
    _, world = as_launched()

    def cut(module: Any, mesh: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        return fully_shard(module, mesh=mesh["data_parallel"])

    def train(follower: Follower, first: int) -> None:
        strategy: Any = "auto"
        if kind == "ddp":
            strategy = "ddp"
        elif kind == "fsdp2":
            strategy = ModelParallelStrategy(cut, data_parallel_size=world, tensor_parallel_size=1)
        os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # processes are there already
        fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy)
        fabric.launch()
        if kind == "fsdp2":
            model = fabric.setup(Net(first))
            optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
        else:
            net = Net(first)
            model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
        follower.begin(model, [optimizer])
        assert {shadow.shard.fqn for shadow in follower.ema._averages.shadows} == {
            name for name, _ in Net().named_parameters()
        }
        for number in range(first, STEPS):
            fabric.backward(model(batch(number, fabric.global_rank, world)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            follower.stepped(number + 1)

    run_and_resume(train, folder)


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 1), ("ddp", 2), ("fsdp2", 2)])
def test_fabric(kind: str, ranks: int, tmp_path: Path) -> None:
    launcher.run(ranks, fabric_trains, tmp_path, kind, timeout=180)


def test_an_optimizer_of_another_module_is_refused() -> None:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    net, other = Net(), Net()
    model, _ = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    _, foreign = fabric.setup(other, torch.optim.AdamW(other.parameters()))
    with pytest.raises(Exception, match="steps no parameter that is averaged"):
        ShardedEMA(model).attach(foreign)
    assert SAVED_AT < STEPS
