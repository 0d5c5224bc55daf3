"""NeMo Automodel: what a recipe's `save_checkpoint` leaves, with the package's averages and with a `ShardedEMA`.

It pins another transformers than the other packages here, so it has an environment of its own:
`pip install -c constraints.txt -c tests/integration/constraints_automodel.txt -e '.[automodel]'`. The recipes that
train ask for CUDA when they set up; `BaseRecipe`, which saves and loads for all of them, and `Checkpointer` do not.
"""

from __future__ import annotations

import os
import shutil
import signal
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
from tests.integration.training import as_launched, keep, kept

pytestmark = pytest.mark.integration

STEPS, DECAY = 5, 0.75
STEP = "epoch_0_step_3"
KINDS = {
    "shards-1": ("EMAManager", "safetensors", False, 1),
    "shards-2": ("EMAManager", "safetensors", False, 2),
    "consolidated-2": ("ShardedModelEMAManager", "safetensors", True, 2),
    "dcp-2": ("EMAManager", "torch_save", False, 2),
    "ours-2": ("ShardedEMA", "safetensors", False, 2),
}
WORDS = {
    "shards-1": "safetensors of 1 rank, `EMAManager`",
    "shards-2": "safetensors of 2 ranks, `EMAManager`",
    "consolidated-2": "safetensors of 2 ranks and a consolidated copy, `ShardedModelEMAManager`",
    "dcp-2": "DCP of 2 ranks, `EMAManager`",
    "ours-2": "safetensors of 2 ranks, `ShardedEMA` as the recipe's",
}


def language_model(seed: int, *, sharded: bool = True) -> Any:
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=37, hidden_size=12, intermediate_size=22, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for layer in (*model.model.layers, model) if sharded else ():
        fully_shard(layer)
    return model


class Steps:
    """Where the run is, as a recipe's step scheduler tells it."""

    step, is_last_step = 0, False

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "epoch": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def recipe_of(folder: Path, kind: str, seed: int = 0) -> Any:
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.components.training.ema import EMAManager, ShardedModelEMAManager
    from nemo_automodel.components.training.rng import StatefulRNG
    from nemo_automodel.recipes.base_recipe import BaseRecipe

    average, form, consolidated, _ = KINDS[kind]
    recipe = BaseRecipe()
    recipe.peft_config = None
    recipe.model = language_model(seed)
    recipe.optimizer = [torch.optim.AdamW(recipe.model.parameters(), lr=0.1)]
    if average == "EMAManager":
        recipe.ema = EMAManager(recipe.model, DECAY)
    elif average == "ShardedModelEMAManager":
        recipe.ema = ShardedModelEMAManager(language_model(seed), recipe.model, DECAY)
    else:
        recipe.ema = ShardedEMA(recipe.model, DECAY)
    if average != "ShardedEMA":
        recipe.rng = StatefulRNG(1, ranked=True)  # which it cannot load on more ranks
    recipe.step_scheduler = Steps()
    recipe.cfg = ConfigNode({"ema": {"decay": DECAY}})
    recipe.checkpointer = CheckpointingConfig(
        checkpoint_dir=str(folder / "run"), model_save_format=form, save_consolidated=consolidated,
        model_cache_dir=str(folder / "none"), model_repo_id="none/none",
    ).build(dist.get_rank(), 0, 0)  # fmt: skip
    return recipe


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 37, (4, 6), generator=torch.Generator().manual_seed(step))


def step_of(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(input_ids=tokens(step), labels=tokens(step)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


def averages_of(recipe: Any) -> dict[str, torch.Tensor]:
    if isinstance(recipe.ema, ShardedEMA):
        return recipe.ema.full_state_dict()
    return whole(recipe.ema.state_dict())


def saves(folder: Path, kind: str) -> None:
    warnings.simplefilter("ignore")
    as_launched()
    recipe = recipe_of(folder, kind)
    for step in range(1, 4):
        step_of(recipe.model, recipe.optimizer[0], step)
        recipe.ema.update(*([] if isinstance(recipe.ema, ShardedEMA) else [recipe.model]))
        recipe.step_scheduler.step = step
        if step > 1:
            recipe.save_checkpoint(0, step, 0.5)
    keep(whole(recipe.model.state_dict()), folder / "live.pt")
    keep(averages_of(recipe), folder / "average.pt")
    moments = recipe.optimizer[0].state[recipe.model.lm_head.weight]["exp_avg"]
    keep({"exp_avg": moments.full_tensor()}, folder / "moment.pt")


def loads(folder: Path, kind: str) -> None:
    warnings.simplefilter("ignore")
    as_launched()
    recipe = recipe_of(folder, kind, seed=1)
    recipe.load_checkpoint(STEP)
    assert recipe.step_scheduler.step == 3
    keep(whole(recipe.model.state_dict()), folder / "loaded.pt")
    keep(averages_of(recipe), folder / "loaded-average.pt")
    moments = recipe.optimizer[0].state[recipe.model.lm_head.weight]["exp_avg"]
    keep({"exp_avg": moments.full_tensor()}, folder / "loaded-moment.pt")


@pytest.mark.parametrize("kind", KINDS)
def test_recipe(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("nemo_automodel")
    _, form, consolidated, world_size = KINDS[kind]
    with Row("nemo-automodel", f"a recipe's step, {WORDS[kind]}") as row:
        launcher.run(world_size, saves, tmp_path, kind, timeout=180)
        step = tmp_path / "run" / STEP
        assert ema_ckpt.latest(tmp_path / "run") == step
        live, average = kept(tmp_path / "live.pt"), kept(tmp_path / "average.pt")
        roles = {"model": "live", "optim": "optimizer", "ema": "ema"}
        said = ["step_scheduler.pt"]
        if form == "safetensors":
            said.append("missing last rows go unseen")
        if kind == "shards-1":
            said.append("rng_global_rank_0.pt")
            roles["rng"] = "other"
        if consolidated:
            said.append("model/consolidated")
        verdict = "unproven" if form == "safetensors" else "sound"
        made = Made(
            step, roles, {"model": live, "ema": average}, verdict=verdict, left_out=tuple(said)
        )
        goes_through_all_verbs(row, made, tmp_path)
        if consolidated:
            ema_ckpt.consolidate(step / "model" / "consolidated", tmp_path / "theirs.safetensors")
            ema_ckpt.consolidate(step, tmp_path / "ours.safetensors", tree="model")
            theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
            assert ema_ckpt.verify(theirs, against=ours).status == "sound"
        again = tmp_path / "again"
        shutil.copytree(step, again / "run" / STEP)
        for part in ("model", "optim", "ema"):
            shutil.rmtree(again / "run" / STEP / part)
            ema_ckpt.reshard(step / part, again / "run" / STEP / part, world_size=3)
        launcher.run(world_size, loads, again, kind, timeout=180)
        assert_same_bits(kept(again / "loaded.pt"), live)
        assert_same_bits(kept(again / "loaded-average.pt"), average)
        assert_same_bits(kept(again / "loaded-moment.pt"), kept(tmp_path / "moment.pt"))
        row.shown("loaded back", "`load_checkpoint`, all parts resharded")


def truth() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(live, average) after all steps: one process, plain torch."""
    model = language_model(0, sharded=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(1, STEPS + 1):
        step_of(model, optimizer, step)
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.detach(), 1 - DECAY)
    return dict(model.state_dict()), average


def follows(folder: Path, dies_at: int | None) -> None:
    """A loop with a `ShardedEMA` that the recipe saves and loads beside its own."""
    warnings.simplefilter("ignore")
    as_launched()
    recipe = recipe_of(folder, "ours-2", seed=0 if dies_at else 1)
    recipe.ema.attach(*recipe.optimizer)
    if not dies_at:
        recipe.load_checkpoint("LATEST")
        assert recipe.ema.num_updates == recipe.step_scheduler.step == 3
    for step in range(recipe.step_scheduler.step + 1, STEPS + 1):
        step_of(recipe.model, recipe.optimizer[0], step)
        recipe.step_scheduler.step = step
        if step == dies_at and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        recipe.save_checkpoint(0, step, 0.5)
    keep(whole(recipe.model.state_dict()), folder / "live.pt")
    keep(recipe.ema.full_state_dict(), folder / "average.pt")


@pytest.mark.parametrize("resumed_on", [1, 4])
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path, resumed_on: int) -> None:
    pytest.importorskip("nemo_automodel")
    with pytest.raises(launcher.WorkersFailed):
        launcher.run(2, follows, tmp_path, 4, timeout=180)
    assert ema_ckpt.latest(tmp_path / "run") == tmp_path / "run" / STEP
    launcher.run(resumed_on, follows, tmp_path, None, timeout=180)
    live, average = truth()
    assert_same_bits(kept(tmp_path / "live.pt"), live)
    assert_same_bits(kept(tmp_path / "average.pt"), average)


def restores(folder: Path) -> None:
    warnings.simplefilter("ignore")
    as_launched()
    model = language_model(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
    ema = ShardedEMA(model, DECAY)
    report = ema_ckpt.restore(folder / "run", model=model, optimizer=optimizer, ema=ema)
    assert set(report.trees.values()) <= {"restored", "ignored"}
    assert optimizer.param_groups[0]["lr"] == 0.1
    keep(ema.full_state_dict(), folder / "restored-average.pt")
    keep(whole(model.state_dict()), folder / "restored.pt")
    moments = optimizer.state[model.lm_head.weight]["exp_avg"]
    keep({"exp_avg": moments.full_tensor()}, folder / "restored-moment.pt")


@pytest.mark.parametrize("kind", ["shards-2", "ours-2"])
def test_restored_at_another_world_size(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("nemo_automodel")
    launcher.run(2, saves, tmp_path, kind, timeout=180)
    launcher.run(3, restores, tmp_path, timeout=180)
    assert_same_bits(kept(tmp_path / "restored.pt"), kept(tmp_path / "live.pt"))
    assert_same_bits(kept(tmp_path / "restored-average.pt"), kept(tmp_path / "average.pt"))
    assert_same_bits(kept(tmp_path / "restored-moment.pt"), kept(tmp_path / "moment.pt"))
