"""peft: a LoRA adapter by itself, and beside the weights it belongs to."""

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
from tests.integration.test_transformers import small
from tests.integration.training import keep, kept

pytestmark = pytest.mark.integration


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(small(), LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))


def saves(folder: Path, beside_the_base: bool) -> None:
    from peft import get_peft_model_state_dict

    warnings.simplefilter("ignore")
    if beside_the_base:
        small().save_pretrained(folder / "adapter")
        keep(small().state_dict(), folder / "base.pt")
    model = adapted()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "adapter")
    keep(get_peft_model_state_dict(model), folder / "whole.pt")


def loads(folder: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    warnings.simplefilter("ignore")
    model = PeftModel.from_pretrained(small(), folder / "one")
    keep(get_peft_model_state_dict(model), folder / "loaded.pt")


def test_adapter(tmp_path: Path) -> None:
    with Row("peft", "LoRA adapter, `save_pretrained`") as row:
        launcher.run(1, saves, tmp_path, False, timeout=120)
        adapter = kept(tmp_path / "whole.pt")
        made = Made(
            tmp_path / "adapter", {"": "live"}, {"": adapter}, verdict="unproven", beside=("adapter_config.json",)
        )  # fmt: skip
        goes_through_all_verbs(row, made, tmp_path)
        ema_ckpt.consolidate(made.path, tmp_path / "one", basename="adapter_model")
        shutil.copy(made.path / "adapter_config.json", tmp_path / "one")
        launcher.run(1, loads, tmp_path, timeout=120)
        assert_same_bits(kept(tmp_path / "loaded.pt"), adapter)
        row.shown("loaded back", "`PeftModel.from_pretrained`")


def test_adapter_beside_the_weights_is_said(tmp_path: Path) -> None:
    launcher.run(1, saves, tmp_path, True, timeout=120)
    base = kept(tmp_path / "base.pt")
    with Row("peft", "LoRA adapter beside the whole weights") as row:
        made = Made(
            tmp_path / "adapter", {"": "live"}, {"": base}, verdict="unproven", left_out=("adapter_model.safetensors",)
        )  # fmt: skip
        goes_through_all_verbs(row, made, tmp_path)
