"""comfy-kitchen: the layers that ComfyUI quantises, against the package's own values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ema_ckpt

pytestmark = pytest.mark.integration

UNDERSTOOD = [
    ("TensorCoreFP8Layout", {}, {"format": "float8_e4m3fn"}),
    ("TensorWiseINT8Layout", {}, {"format": "int8_tensorwise"}),
    ("TensorWiseINT8Layout", {"per_channel": True}, {"format": "int8_tensorwise"}),
]
REFUSED = [
    ("TensorCoreMXFP8Layout", {}, {"format": "mxfp8"}),
    ("TensorCoreNVFP4Layout", {}, {"format": "nvfp4"}),
    ("TensorCoreConvRotW4A4Layout", {}, {"format": "convrot_w4a4"}),
    (
        "TensorWiseINT8Layout",
        {"per_channel": True, "convrot": True},
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256},
    ),
]


def quantised(path: Path, layout: str, options: dict[str, Any], description: object) -> Any:
    """Write a layer as ComfyUI does; return the values of its weight."""
    tensor = pytest.importorskip("comfy_kitchen.tensor")
    kind = getattr(tensor, layout)
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(7)).bfloat16()
    codes, params = kind.quantize(weight, **options)
    parts = kind.state_dict_tensors(codes, params)
    tensors = {f"blocks.0.weight{end}": part.contiguous() for end, part in parts.items()}
    text = json.dumps(description).encode()
    tensors["blocks.0.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    save_file(tensors, path)
    return kind.dequantize(codes, params)


@pytest.mark.parametrize(("layout", "options", "description"), UNDERSTOOD)
def test_values_are_those_of_the_package(
    tmp_path: Path, layout: str, options: dict[str, Any], description: object
) -> None:
    values = quantised(tmp_path / "a.safetensors", layout, options, description)
    ema_ckpt.consolidate(
        tmp_path / "a.safetensors", tmp_path / "out.safetensors", dequantize="bf16"
    )
    written = load_file(tmp_path / "out.safetensors")
    assert list(written) == ["blocks.0.weight"]
    # The package multiplies in bfloat16; here it is float32, which is rounded once.
    torch.testing.assert_close(written["blocks.0.weight"], values.bfloat16(), rtol=2**-6, atol=0)


@pytest.mark.parametrize(("layout", "options", "description"), REFUSED)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, layout: str, options: dict[str, Any], description: object
) -> None:
    quantised(tmp_path / "a.safetensors", layout, options, description)
    with pytest.raises(ema_ckpt.EmaCkptError, match="which is not understood") as refused:
        ema_ckpt.consolidate(tmp_path / "a.safetensors", tmp_path / "out.pt", dequantize="bf16")
    assert refused.value.code == "unsupported"
