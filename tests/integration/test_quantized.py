"""Quantised weights as compressed-tensors, torchao and transformers write them: --dequantize gives the values that the
packages make of them, bit for bit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt

pytestmark = pytest.mark.integration

ROWS, COLUMNS = 37, 96
ODD = 65  # columns that fill no word and no block
ASKED = {"bf16": torch.bfloat16, "fp32": torch.float32}


def dequantized(path: Path, asked: str) -> dict[str, torch.Tensor]:
    out = path.parent / f"values-{asked}.pt"
    ema_ckpt.consolidate(path, out, dequantize=asked, overwrite=True)
    values = torch.load(out, weights_only=True)
    assert ema_ckpt.verify(out, against=path).status == "sound"
    assert ema_ckpt.diff(path, out).only_in_a == ()
    return values


def assert_values(path: Path, name: str, of: Callable[[torch.dtype], torch.Tensor]) -> None:
    for asked, dtype in ASKED.items():
        values, expected = dequantized(path, asked)[name], of(dtype)
        assert (values.dtype, values.shape) == (dtype, expected.shape)
        same = torch.equal(values, expected)
        assert same, f"{int((values != expected).sum())} of {values.numel()} differ"


class Kind(NamedTuple):
    """A form of compressed-tensors, settings of its weights, shapes, and the range of zero points."""

    form: str
    settings: dict[str, object]
    shape: tuple[int, int]
    scales: tuple[int, ...]
    zeros: tuple[int, int] | None = None


FLOAT8 = {"num_bits": 8, "type": "float"}
KINDS = {
    "fp8 channel": Kind("float-quantized", {**FLOAT8, "strategy": "channel"}, (ROWS, ODD), (ROWS, 1)),
    "fp8 tensor": Kind("float-quantized", {**FLOAT8, "strategy": "tensor"}, (ROWS, ODD), (1,)),
    "fp8 cut blocks": Kind(
        "float-quantized",
        {**FLOAT8, "strategy": "block", "block_structure": [16, 32]},
        (ROWS, ODD),
        (3, 3),
    ),
    "int8 channel": Kind(
        "int-quantized", {"num_bits": 8, "strategy": "channel"}, (ROWS, ODD), (ROWS, 1), (-99, 99)
    ),
    "int8 group": Kind(
        "int-quantized", {"num_bits": 8, "strategy": "group", "group_size": 16}, (ROWS, COLUMNS), (ROWS, 6)
    ),
    "mxfp8": Kind(
        "mxfp8-quantized", {**FLOAT8, "strategy": "group", "group_size": 32}, (ROWS, COLUMNS), (ROWS, 3)
    ),
    "mxfp4": Kind(
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        (ROWS, COLUMNS),
        (ROWS, 3),
    ),
    "nvfp4": Kind(
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        (ROWS, COLUMNS),
        (ROWS, 6),
    ),
    **{
        f"int{bits} {strategy} {'asymmetric' if zeros else 'symmetric'}": Kind(
            "pack-quantized",
            {"num_bits": bits, "strategy": strategy, **({"group_size": 32} if strategy == "group" else {})},
            (ROWS, COLUMNS if strategy == "group" else ODD),
            {"group": (ROWS, 3), "channel": (ROWS, 1), "tensor": (1,)}[strategy],
            zeros,
        )
        for bits in (2, 4, 8)
        for strategy in ("group", "channel", "tensor")
        for zeros in (None, (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
        if zeros is None or strategy != "tensor"
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_compressed_tensors(kind: Kind, dtype: torch.dtype, tmp_path: Path) -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    settings = {"type": "int", "symmetric": kind.zeros is None, **kind.settings}
    state = {"weight": torch.randn(kind.shape, dtype=dtype)}
    state["weight_scale"] = (torch.rand(kind.scales) * 0.02 + 0.001).to(dtype)
    if kind.form.startswith("mx"):
        state["weight_scale"] = 2.0 ** torch.randint(-6, 2, kind.scales).to(dtype)
    if kind.form.startswith("nv"):
        state["weight_global_scale"] = torch.tensor([37.3])
    if kind.zeros is not None:
        state["weight_zero_point"] = torch.randint(*kind.zeros, kind.scales, dtype=torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**settings))
    compressor = BaseCompressor.get_value_from_registry(kind.form)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {f"layer.{name}": tensor.contiguous() for name, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": settings}},
    }
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert_values(folder, "layer.weight", expected.to)


def quantised_layers() -> dict[str, torch.Tensor]:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    configurations = {
        "float8": Float8WeightOnlyConfig(),
        "int8": Int8WeightOnlyConfig(version=2),
        "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        "int2": IntxWeightOnlyConfig(weight_dtype=torch.int2, granularity=PerGroup(16)),
    }
    layers = {}
    for name, configuration in configurations.items():
        model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS, dtype=torch.bfloat16))
        quantize_(model, configuration)
        layers[f"{name}.weight"] = model.state_dict()["0.weight"]
    source = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
    layers["mxfp8.weight"] = MXTensor.to_mx(source, torch.float8_e4m3fn)
    layers["mxfp4.weight"] = MXTensor.to_mx(source, torch.float4_e2m1fn_x2)
    return layers


def of_torchao(layer: torch.Tensor) -> Callable[[torch.dtype], torch.Tensor]:
    if type(layer).__name__ == "IntxUnpackedToInt8Tensor":  # takes no type; computes in its own
        return lambda dtype: layer.dequantize().to(dtype)
    return layer.dequantize


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_torchao(form: str, tmp_path: Path) -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = quantised_layers()
        path = tmp_path / "model.pt"
        if form == "torch":
            torch.save(layers, path)
        else:
            path = tmp_path / "model.safetensors"
            tensors, text = flatten_tensor_state_dict(layers)
            save_file(tensors, path, metadata=text)
        for name, layer in layers.items():
            assert_values(path, name, of_torchao(layer))


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 24, 5, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 24, 5), dtype=torch.uint8)
    save_file(
        {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}, tmp_path / "m.safetensors"
    )
    assert_values(
        tmp_path / "m.safetensors",
        "e.down_proj",
        lambda dtype: convert_moe_packed_tensors(blocks, scales, dtype=dtype),
    )


def test_fp8_blocks_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    codes = (torch.randn(256, 384) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3) * 0.01
    save_file({"q.weight": codes, "q.weight_scale_inv": scales}, tmp_path / "m.safetensors")
    assert_values(
        tmp_path / "m.safetensors",
        "q.weight",
        lambda dtype: Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=dtype),
    )


def test_the_scale_byte_255(tmp_path: Path) -> None:
    """NaN by OCP Microscaling Formats 1.0 and in torchao. compressed-tensors makes 2^128 of it, which is infinite: no
    value of theirs in such a group is a number either."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    scales = torch.tensor([255, 120, 254, 255, 0, 127, 1, 255], dtype=torch.uint8)[:, None]
    state = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scales}
    save_file(state, tmp_path / "m.safetensors")
    values = dequantized(tmp_path / "m.safetensors", "bf16")["weight"]
    exponents = scales.view(torch.float8_e8m0fnu)
    theirs = to_dtype(state["weight"], exponents, torch.float8_e4m3fn, 32, torch.float32)
    assert torch.equal(values.isnan(), theirs.isnan())
    assert values[scales[:, 0] == 255].isnan().all()
    settings = QuantizationArgs(**FLOAT8, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=settings)
    compressor = BaseCompressor.get_value_from_registry("mxfp8-quantized")
    expected = compressor.decompress(state, scheme)["weight"]
    known = scales[:, 0] != 255
    assert torch.equal(values[known].nan_to_num(7.0), expected[known].nan_to_num(7.0))
    assert not expected[~known].isfinite().any()


def test_tied_weights_of_torchao_stay_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = quantised_layers()
    layers["head.weight"] = layers["int8.weight"]
    torch.save(layers, tmp_path / "model.pt")
    values = dequantized(tmp_path / "model.pt", "fp32")
    assert values["head.weight"].data_ptr() == values["int8.weight"].data_ptr()
    assert torch.equal(values["head.weight"], layers["int8.weight"].dequantize(torch.float32))
    result = ema_ckpt.consolidate(
        tmp_path / "model.pt", tmp_path / "o.safetensors", dequantize="bf16"
    )
    assert result.ties == {"head.weight": "int8.weight"}
