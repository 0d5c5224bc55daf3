"""Loops of trainers with a `ShardedEMA`: killed, gone on with another number of ranks, the bits of one that was not.

All ranks see the whole batch, so the mean of their gradients is exact on 1, 2 or 4 of them. The truth is one process
with plain torch: no trainer, no shards, no checkpoint.
"""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ema_ckpt import ShardedEMA, latest, restore, save
from tests.distributed import launcher
from tests.integration.proving import assert_same_bits
from tests.integration.test_accelerate import prepared
from tests.integration.test_lightning import module_of, trainer_of
from tests.integration.training import Net, as_launched, batch, keep, kept

pytestmark = pytest.mark.integration

STEPS, DECAY = 7, 0.75


def truth() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(live, average) after all steps."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.detach(), 1 - DECAY)
    return dict(model.state_dict()), {**average, "seen": model.seen}


def with_accelerate(folder: Path, dies_at: int | None) -> None:
    warnings.simplefilter("ignore")
    accelerator, model, optimizer = prepared(2, "SHARDED_STATE_DICT")
    ema = ShardedEMA(model, DECAY)
    ema.attach(optimizer)
    step, run = 0, folder / "run"
    if latest(run) is not None:
        report = restore(run, model=model, ema=ema, optimizer=optimizer, extra={"step": 0})
        step = report.extra["step"]
    while step < STEPS:
        accelerator.backward(model(batch(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == dies_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 0:
            save(
                run / f"step_{step}",
                model=model,
                ema=ema,
                optimizer=optimizer,
                extra={"step": step},
            )
    assert ema.num_updates == STEPS
    keep(accelerator.get_state_dict(model), folder / "live.pt")
    keep(ema.full_state_dict(), folder / "average.pt")


def callback(folder: Path, dies_at: int | None) -> Any:
    import lightning

    class Averaged(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.ema = ShardedEMA(module.net, DECAY)
            self.ema.attach(*trainer.optimizers)
            if latest(folder / "run") is not None:
                restore(folder / "run", **self.held(trainer, module))

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            step = trainer.global_step
            if step == dies_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % 2 == 0:
                save(folder / "run" / f"step_{step}", **self.held(trainer, module))

        def held(self, trainer: Any, module: Any) -> dict[str, Any]:
            return {
                "model": module.net, "ema": self.ema, "optimizer": trainer.optimizers,
                "extra": {"loops": trainer.fit_loop},
            }  # fmt: skip

    return Averaged()


def with_lightning(folder: Path, dies_at: int | None) -> None:
    warnings.simplefilter("ignore")
    _, world = as_launched()
    module = module_of("parallel")
    # The loop fetches ahead, and would show a batch of a step that it has not come to.
    module.training_step = lambda rows, batch_idx: (
        module.net(batch(module.trainer.global_step)).square().mean()
    )
    averaged = callback(folder, dies_at)
    trainer = trainer_of("parallel", STEPS, world, (averaged,))
    trainer.fit(module, torch.utils.data.DataLoader([0] * 2 * STEPS, batch_size=None))
    assert (averaged.ema.num_updates, trainer.global_step) == (STEPS, STEPS)
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole = get_model_state_dict(module.net, options=StateDictOptions(full_state_dict=True))
    keep(whole, folder / "live.pt")
    keep(averaged.ema.full_state_dict(), folder / "average.pt")


@pytest.mark.parametrize("loop", [with_accelerate, with_lightning], ids=["accelerate", "lightning"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_killed_and_resumed(loop: Any, ranks: int, tmp_path: Path) -> None:
    with pytest.raises(launcher.WorkersFailed):
        launcher.run(2, loop, tmp_path, 5, timeout=180)
    assert latest(tmp_path / "run") == tmp_path / "run" / "step_4"
    launcher.run(ranks, loop, tmp_path, None, timeout=180)
    live, average = launcher.run(1, truth)[0]  # one thread, as the loops have
    assert_same_bits(kept(tmp_path / "live.pt"), live)
    assert_same_bits(kept(tmp_path / "average.pt"), average)
