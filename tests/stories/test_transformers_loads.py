"""What is consolidated from the committed models loads into transformers, strictly and with the trained loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import ema_ckpt
from tests.stories import truth
from tests.stories.commands import FIXTURES

CONFIG = FIXTURES / "tiny-lm-config"


def _loaded(directory: Path, config: Path) -> torch.nn.Module:
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shutil.copyfile(config / "config.json", directory / "config.json")
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)


def _loss(model: torch.nn.Module) -> float:
    """Mean loss of a text that the model was not shown, one character a token."""
    alphabet = json.loads((CONFIG / "alphabet.json").read_text())
    text = "The function returns a list of all the names that are defined in "[:64]
    ids = torch.tensor([[alphabet.index(c) for c in text]])
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("max_shard_size", ["5GB", "100kB"])
def test_transformers_loads_the_average_of_the_trained_model(
    max_shard_size: str, tmp_path: Path
) -> None:
    written = ema_ckpt.consolidate(
        FIXTURES / "tiny-lm", tmp_path / "model", max_shard_size=max_shard_size
    )
    assert written.tree == "ema"
    shards = [file.path for file in written.files if file.path.endswith(".safetensors")]
    assert (len(shards) > 1) == (max_shard_size != "5GB")
    model = _loaded(tmp_path / "model", CONFIG)
    assert truth.facts_of(model.state_dict()) == truth.trees("tiny-lm")["ema"]
    assert _loss(model) < 2.2  # 4.6 is what an untrained one has: log(95)


@pytest.mark.parametrize("name", ["hf/one-file", "hf/sharded"])
def test_transformers_loads_its_own_checkpoint_written_anew(name: str, tmp_path: Path) -> None:
    ema_ckpt.consolidate(FIXTURES / name, tmp_path / "model")
    assert (
        truth.facts_of(_loaded(tmp_path / "model", FIXTURES / name).state_dict())
        == truth.trees(name)[""]
    )


def test_a_torch_file_loads_strictly_into_the_model(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    ema_ckpt.consolidate(FIXTURES / "tiny-lm", tmp_path / "ema.pt")
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(CONFIG))
    model.load_state_dict(truth.load(tmp_path / "ema.pt"), strict=True)
    assert _loss(model) < 2.2


def test_the_file_that_transformers_loads_is_read_though_an_old_index_is_there(
    tmp_path: Path,
) -> None:
    """It leaves the index of its shards when it writes one file in their place."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(CONFIG)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="100kB")
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    loaded = _loaded(tmp_path / "model", CONFIG).state_dict()
    found = ema_ckpt.verify(tmp_path / "model")
    assert (found.status, found.problems) == ("unproven", ())
    assert [w.code for w in found.warnings] == ["left-out", "unchecked"]
    assert "delete it if an earlier save left it" in found.warnings[0].message
    ema_ckpt.consolidate(tmp_path / "model", tmp_path / "out.safetensors", strict=True)
    assert truth.facts_of(truth.load(tmp_path / "out.safetensors")) == truth.facts_of(loaded)
