"""transformers: what its `Trainer` leaves in a step, in one process and under DDP; peft's adapters."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ema_ckpt
from tests.distributed import launcher
from tests.integration.proving import Made, assert_same_bits, goes_through_all_verbs
from tests.integration.table import Row
from tests.integration.training import as_launched, keep, kept

pytestmark = pytest.mark.integration


def small() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=19, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16,
        )
    )  # fmt: skip


def rows() -> list[dict[str, list[int]]]:
    tokens = torch.randint(19, (32, 6), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]


def trains(folder: Path, launched: bool, steps: int, resume: str | None = None) -> None:
    from transformers import Trainer, TrainingArguments

    warnings.simplefilter("ignore")
    if launched:
        as_launched()
    arguments = TrainingArguments(
        output_dir=str(folder / "run"), max_steps=steps, save_steps=2, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], logging_steps=1000, disable_tqdm=True, learning_rate=0.1, seed=1,
    )  # fmt: skip
    trainer = Trainer(model=small(), args=arguments, train_dataset=rows())
    trainer.train(resume_from_checkpoint=resume)
    keep(trainer.model.state_dict(), folder / "live.pt")


def loads(folder: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "one")
    keep(model.state_dict(), folder / "loaded.pt")


@pytest.mark.parametrize("ranks", [1, 2])
def test_trainer(ranks: int, tmp_path: Path) -> None:
    with Row(
        "transformers", "a step of `Trainer`" + (", DDP on 2 ranks" if ranks > 1 else "")
    ) as row:
        launcher.run(ranks, trains, tmp_path, ranks > 1, 4, timeout=180)
        live = kept(tmp_path / "live.pt")
        step = tmp_path / "run" / "checkpoint-4"
        made = Made(
            step, {"": "live"}, {"": live}, verdict="unproven", left_out=("optimizer.pt",),
            beside=("config.json", "trainer_state.json"),
        )  # fmt: skip
        assert ema_ckpt.inspect(tmp_path / "run").resolved == str(step)
        goes_through_all_verbs(row, made, tmp_path)
        ema_ckpt.consolidate(step, tmp_path / "one")
        for name in ("config.json", "generation_config.json"):
            shutil.copy(step / name, tmp_path / "one")
        launcher.run(1, loads, tmp_path, "", timeout=120)
        assert_same_bits(kept(tmp_path / "loaded.pt"), live)
        row.shown("loaded back", "`from_pretrained`")
