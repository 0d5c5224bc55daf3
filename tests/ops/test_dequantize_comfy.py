"""Quantised layers that ComfyUI describes: in a tensor beside the weight, or in the header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ema_ckpt

FP8 = {"format": "float8_e4m3fn"}


def text_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def quantised(
    path: Path, description: object, *, in_header: bool = False, prefix: str = "", **more: Any
) -> torch.Tensor:
    """Write one quantised layer; return the values of its weight."""
    codes = torch.randn(8, 8).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.37)
    tensors = {f"{prefix}blocks.0.weight": codes, f"{prefix}blocks.0.weight_scale": scale}
    tensors |= {f"{prefix}blocks.0.{name}": tensor for name, tensor in more.items()}
    tensors["norm.weight"] = torch.ones(8)
    header = {"note": "kept"}
    text = description if isinstance(description, str) else json.dumps(description)
    if in_header:
        layers = {"blocks.0": description}
        header["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})
    else:
        tensors[f"{prefix}blocks.0.comfy_quant"] = text_tensor(text)
    save_file(tensors, path, metadata=header)
    return codes.float() * scale


@pytest.mark.parametrize("in_header", [False, True])
@pytest.mark.parametrize("description", [
    FP8,
    {**FP8, "full_precision_matrix_mult": True},
    {**FP8, "convrot": False, "convrot_groupsize": 256},
])  # fmt: skip
def test_plain_formats_are_computed_and_their_descriptions_left_out(
    tmp_path: Path, description: object, in_header: bool
) -> None:
    source, out = tmp_path / "a.safetensors", tmp_path / "out.safetensors"
    values = quantised(source, description, in_header=in_header, prefix="model.diffusion_model.")
    result = ema_ckpt.consolidate(source, out, dequantize="fp32")
    written = load_file(out)
    assert sorted(written) == ["model.diffusion_model.blocks.0.weight", "norm.weight"]
    assert torch.equal(written["model.diffusion_model.blocks.0.weight"], values)
    left_out = [] if in_header else ["model.diffusion_model.blocks.0.comfy_quant"]
    assert [item.name for item in result.skipped] == left_out
    with safe_open(out, "pt") as file:
        assert file.metadata()["note"] == "kept"
        assert "_quantization_metadata" not in file.metadata()


@pytest.mark.parametrize("in_header", [False, True])
@pytest.mark.parametrize(("description", "reason"), [
    ({"format": "mxfp8"}, "ComfyUI as 'mxfp8'"),
    ({**FP8, "convrot": True}, "as 'float8_e4m3fn' with 'convrot'"),
    ({}, "as None"),
    ([FP8], "no JSON object"),
])  # fmt: skip
def test_other_formats_are_refused_by_name(
    tmp_path: Path, description: object, reason: str, in_header: bool
) -> None:
    source, out = tmp_path / "a.safetensors", tmp_path / "out.safetensors"
    quantised(source, description, in_header=in_header, prefix="model.")
    with pytest.raises(ema_ckpt.EmaCkptError, match=reason) as refused:
        ema_ckpt.consolidate(source, out, dequantize="bf16")
    assert (refused.value.code, out.exists()) == ("unsupported", False)
    ema_ckpt.consolidate(source, out, dequantize="bf16", match=["norm.*"], strict=False)


@pytest.mark.parametrize("text", ["{", "[" * 5000, "\x00"])
def test_a_description_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    source = tmp_path / "a.safetensors"
    quantised(source, text)
    with pytest.raises(ema_ckpt.EmaCkptError, match="comfy_quant is no JSON object"):
        ema_ckpt.consolidate(source, tmp_path / "out.pt", dequantize="bf16")


@pytest.mark.parametrize("further", ["weight_scale_2", "pre_quant_scale"])
def test_further_scales_are_refused(tmp_path: Path, further: str) -> None:
    source = tmp_path / "a.safetensors"
    quantised(source, FP8, **{further: torch.ones(8)})
    with pytest.raises(ema_ckpt.EmaCkptError, match=further) as refused:
        ema_ckpt.consolidate(source, tmp_path / "out.pt", dequantize="bf16")
    assert refused.value.code == "unsupported"


def test_the_form_before_descriptions_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {
        "blocks.0.weight": torch.randn(8, 8).to(torch.float8_e4m3fn),
        "blocks.0.scale_weight": torch.tensor(0.37),
        "scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ema_ckpt.EmaCkptError, match="ComfyUI \\(scaled_fp8\\)") as refused:
        ema_ckpt.consolidate(tmp_path / "a.safetensors", tmp_path / "out.pt", dequantize="bf16")
    assert refused.value.code == "unsupported"


@pytest.mark.parametrize("name", [
    "W_q", "SCB", "absmax", "weight_scale", "weight_scale_2", "scale_weight", "qweight",
])  # fmt: skip
def test_plain_floats_of_such_names_are_no_codes(tmp_path: Path, name: str) -> None:
    tensors = {
        f"a.{name}": torch.randn(4),
        "a.weight": torch.randn(4, 4),
        "a.scale": torch.randn(4),
    }
    source, out = tmp_path / "a.safetensors", tmp_path / "out.safetensors"
    save_file(tensors, source)
    result = ema_ckpt.consolidate(source, out, dtype="bf16")
    assert {tensor.dtype for tensor in load_file(out).values()} == {torch.bfloat16}
    assert not [one.code for one in result.warnings if one.code != "unchecked"]
    ema_ckpt.synthesize([source, source], tmp_path / "sum.safetensors", weights=[0.5, 0.5])
    with pytest.raises(ema_ckpt.UsageError, match="no quantised weight"):
        ema_ckpt.consolidate(source, tmp_path / "no.pt", dequantize="bf16")


def test_a_cast_says_that_it_leaves_eight_bits_alone(tmp_path: Path) -> None:
    source = tmp_path / "a.safetensors"
    save_file(
        {"a.weight": torch.randn(4, 4).to(torch.float8_e4m3fn), "a.bias": torch.ones(4)}, source
    )
    result = ema_ckpt.consolidate(source, tmp_path / "out.safetensors", dtype="bf16")
    assert [one.code for one in result.warnings].count("low-kept") == 1
    kept = ema_ckpt.consolidate(source, tmp_path / "same.safetensors", dtype="bf16", keep_dtype=["*weight"])  # fmt: skip
    assert "low-kept" not in [one.code for one in kept.warnings]
