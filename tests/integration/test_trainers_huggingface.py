"""transformers' Trainer and accelerate: averages attached to what they prepare are counted and resumed bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import launcher
from tests.integration.resumed import STEPS, Follower, run_and_resume
from tests.integration.test_accelerate import prepared, step
from tests.integration.test_transformers import small
from tests.integration.training import as_launched

pytestmark = pytest.mark.integration


def trainer_trains(folder: Path, launched: bool, accumulated: int) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    warnings.simplefilter("ignore")
    world = as_launched()[1] if launched else 1
    per_step = 2 * accumulated * world

    def train(follower: Follower, first: int) -> None:
        class Callback(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                follower.begin(given["model"], [given["optimizer"]])

            def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                follower.stepped(first + state.global_step)

        class InOrder(Trainer):
            def _get_train_sampler(self, *_: Any) -> Any:
                return torch.utils.data.SequentialSampler(self.train_dataset)

        arguments = TrainingArguments(
            output_dir=str(folder / "run"), max_steps=STEPS - first, save_strategy="no", use_cpu=True, report_to=[],
            per_device_train_batch_size=2, gradient_accumulation_steps=accumulated, disable_tqdm=True,
            learning_rate=0.01, lr_scheduler_type="constant", logging_steps=1000,
        )  # fmt: skip
        model = small()
        if first:  # another start
            torch.manual_seed(first)
            model.apply(model._init_weights)
        data = [{"input_ids": row, "labels": row} for row in tokens(per_step)][first * per_step :]
        InOrder(model=model, args=arguments, train_dataset=data, callbacks=[Callback()]).train()

    run_and_resume(train, folder)


def tokens(per_step: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    found: list[list[int]] = torch.randint(19, (STEPS * per_step, 6), generator=generator).tolist()
    return found


@pytest.mark.parametrize(("ranks", "accumulated"), [(1, 1), (1, 2), (2, 1)])
def test_trainer(ranks: int, accumulated: int, tmp_path: Path) -> None:
    launcher.run(ranks, trainer_trains, tmp_path, ranks > 1, accumulated, timeout=180)


def accelerate_trains(folder: Path, version: int) -> None:
    warnings.simplefilter("ignore")

    def train(follower: Follower, first: int) -> None:
        accelerator, model, optimizer = prepared(version, "SHARDED_STATE_DICT")
        if first:
            step(accelerator, model, optimizer, 77)  # another start
            optimizer.optimizer.state.clear()
        follower.begin(model, [optimizer])
        for number in range(first, STEPS):
            step(accelerator, model, optimizer, number)
            follower.stepped(number + 1)

    run_and_resume(train, folder)


@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_fsdp(version: int, tmp_path: Path) -> None:
    launcher.run(2, accelerate_trains, tmp_path, version, timeout=180)
