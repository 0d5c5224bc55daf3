"""Values that a table of codes and scales holds, against torch: any range, in any layout, in both types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt
from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.reading.quantized import scaled_bytes
from ema_ckpt.reading.quantized.dequantized import with_values
from ema_ckpt.reading.quantized.recognise import recognise

SMALL = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4 = torch.cat([SMALL, -SMALL])
Tensors = dict[str, torch.Tensor]


def halves(data: torch.Tensor) -> torch.Tensor:
    return FP4[torch.stack([data & 15, data >> 4], dim=-1).long()].flatten(-2)


def exponents(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def two(exponent: torch.Tensor) -> torch.Tensor:
    return exponent.view(torch.float8_e8m0fnu).float()


def mxfp4_experts() -> tuple[Tensors, torch.Tensor]:
    """More rows than a tile has, and three bytes of a byte's worth of groups."""
    blocks = torch.randint(0, 256, (3, 1030, 5, 16), dtype=torch.uint8)
    scales = exponents(3, 1030, 5)
    values = (halves(blocks) * two(scales)[..., None]).flatten(-2)
    return {"w_blocks": blocks, "w_scales": scales}, values.transpose(1, 2)


def mxfp4_blocks() -> tuple[Tensors, torch.Tensor]:
    blocks = torch.randint(0, 256, (2, 33, 3, 16), dtype=torch.uint8)
    scales = exponents(2, 33, 3)
    values = halves(blocks) * two(scales)[..., None]
    return {"w.blocks": blocks, "w.scales": scales}, values.flatten(-2)


def mxfp4_packed() -> tuple[Tensors, torch.Tensor]:
    codes, scales = torch.randint(0, 256, (37, 48), dtype=torch.uint8), exponents(37, 3)
    values = halves(codes) * two(scales).repeat_interleave(32, 1)
    return {"w_packed": codes, "w_scale": scales}, values.bfloat16().float()


def mxfp8() -> tuple[Tensors, torch.Tensor]:
    codes, scales = exponents(41, 64).view(torch.float8_e4m3fn), exponents(41, 2)
    values = codes.float() * two(scales).repeat_interleave(32, 1)
    return {"w": codes, "w_scale": scales}, values.bfloat16().float()


def nvfp4() -> tuple[Tensors, torch.Tensor]:
    codes = torch.randint(0, 256, (37, 48), dtype=torch.uint8)
    scales = torch.rand(37, 6).mul(400).to(torch.float8_e4m3fn)
    whole = torch.tensor([37.3])
    values = halves(codes) * (scales.float() / whole).repeat_interleave(16, 1)
    tensors = {"w_packed": codes, "w_scale": scales, "w_global_scale": whole}
    return tensors, values.bfloat16().float()


KINDS = (mxfp4_experts, mxfp4_blocks, mxfp4_packed, mxfp8, nvfp4)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def stored(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Catalog, torch.Tensor]]:
    """A DCP of two ranks, and the values of its weight; every band has a single group."""
    monkeypatch.setattr(scaled_bytes, "_LEAST_NUMEL", 0)
    torch.manual_seed(0)
    tensors, values = request.param()
    save_file(tensors, tmp_path / "plain.safetensors")
    ema_ckpt.reshard(tmp_path / "plain.safetensors", tmp_path / "dcp", 2)
    catalog = open_catalog(tmp_path / "dcp")
    yield catalog, values
    catalog.source.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_any_range(stored: tuple[Catalog, torch.Tensor], dtype: str) -> None:
    catalog, values = stored
    weights = recognise(catalog).tensors
    assert [scaled_bytes.has_table(weight) for weight in weights] == [True]
    computed = with_values(catalog, weights, by_name(dtype), kept_nbytes=40_000)
    (tensor,) = computed.tensors
    kind = getattr(torch, dtype)
    flat = values.to(kind).reshape(-1)
    generator = torch.Generator().manual_seed(1)
    ranges = torch.randint(0, flat.numel() + 1, (30, 2), generator=generator).tolist()
    ranges += [[0, flat.numel()], [flat.numel() - 1, flat.numel()], [3, 70]]
    for first, stop in map(sorted, ranges):
        data = bytearray(kind.itemsize * (stop - first))
        computed.source.read_into(tensor.chunks[0].file, kind.itemsize * first, memoryview(data))
        if data:
            found, expected = torch.frombuffer(data, dtype=kind), flat[first:stop]
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_weights_without_a_table(tmp_path: Path) -> None:
    """Scales of several bytes, scales of blocks, zero points: values are computed."""
    codes = exponents(32, 64).view(torch.float8_e4m3fn)
    tensors = {
        "a": codes, "a_scale": torch.rand(32, 2),
        "b": codes.clone(), "b_scale_inv": exponents(2, 4),
        "c": codes.clone(), "c_scale": exponents(32, 2), "c_zero_point": exponents(32, 2),
        "d": codes.clone(), "d_scale": exponents(32, 2),
    }  # fmt: skip
    save_file(tensors, tmp_path / "m.safetensors")
    catalog = open_catalog(tmp_path / "m.safetensors")
    found = {weight.name: scaled_bytes.has_table(weight) for weight in recognise(catalog).tensors}
    assert found == {"a": False, "b": False, "c": False, "d": True}
    catalog.source.close()
