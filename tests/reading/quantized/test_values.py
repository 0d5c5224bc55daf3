"""Values of arbitrary ranges of elements, from parts in any chunks, against torch in one piece."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.reading.quantized import computation
from ema_ckpt.reading.quantized.dequantized import with_values
from ema_ckpt.reading.quantized.recognise import recognise

CONFIG = '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 24]}}'


def expected(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = scales.repeat_interleave(16, -2).repeat_interleave(24, -1)
    return codes.float() * wide[..., : codes.shape[-2], : codes.shape[-1]]


@pytest.fixture
def experts(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """Three matrices, with cut blocks, in a DCP of four ranks that cut the experts' scales too."""
    torch.manual_seed(0)
    codes = torch.randn(3, 37, 50).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3, 3)
    tensors = {"w": codes, "w_scale_inv": scales}
    save_file(tensors, tmp_path / "plain.safetensors")
    ema_ckpt.reshard(tmp_path / "plain.safetensors", tmp_path / "dcp", 2)
    (tmp_path / "dcp/config.json").write_text(CONFIG)
    return tmp_path / "dcp", expected(codes, scales)


@pytest.mark.parametrize("passes", [1 << 20, 64, 7])
def test_any_range(
    experts: tuple[Path, torch.Tensor], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computation, "_PASS_NUMEL", passes)
    path, values = experts
    catalog = open_catalog(path)
    computed = with_values(catalog, recognise(catalog).tensors, by_name("float32"))
    (tensor,) = computed.tensors
    flat = values.reshape(-1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(min(60, passes)):  # a pass of seven elements takes as long as one of a million
        first, stop = sorted(torch.randint(0, flat.numel() + 1, (2,), generator=generator).tolist())
        data = bytearray(4 * (stop - first))
        computed.source.read_into(tensor.chunks[0].file, 4 * first, memoryview(data))
        if data:
            assert torch.equal(torch.frombuffer(data, dtype=torch.float32), flat[first:stop])
    catalog.source.close()


def test_codes_in_columns_and_a_vector(tmp_path: Path) -> None:
    """Rank files whose codes are cut along columns; a weight of one dim; one without elements."""
    torch.manual_seed(0)
    vector = torch.randn(40).to(torch.float8_e5m2)
    empty = torch.empty(0, 8).to(torch.float8_e4m3fn)
    state = {
        "v": vector, "v_scale": torch.tensor([0.3, 0.7]),
        "e": empty, "e_scale": torch.ones(1),
    }  # fmt: skip
    torch.save(state, tmp_path / "m.pt")
    ema_ckpt.consolidate(tmp_path / "m.pt", tmp_path / "out.pt", dequantize="fp32")
    values = torch.load(tmp_path / "out.pt", weights_only=True)
    scales = torch.tensor([0.3, 0.7]).repeat_interleave(20)
    assert torch.equal(values["v"], vector.float() * scales)
    assert values["e"].shape == (0, 8)
    transposed = torch.randn(30, 20).to(torch.float8_e4m3fn)
    torch.save({"t": transposed.t(), "t_scale": torch.rand(20, 1)}, tmp_path / "t.pt")
    ema_ckpt.consolidate(tmp_path / "t.pt", tmp_path / "t-out.pt", dequantize="fp32")
    source = torch.load(tmp_path / "t.pt", weights_only=True)
    values = torch.load(tmp_path / "t-out.pt", weights_only=True)
    assert torch.equal(values["t"], source["t"].float() * source["t_scale"])


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Rows so long that one of them exceeds the budget are computed in pieces."""
    codes = torch.zeros(2, 3 << 20, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes.view(torch.uint8)[:, ::7] = 0x38
    tensors = {"w": codes, "w_scale": torch.tensor([[2.0], [3.0]])}
    save_file(tensors, tmp_path / "m.safetensors")
    ema_ckpt.consolidate(
        tmp_path / "m.safetensors", tmp_path / "o.pt", dequantize="bf16", max_memory="4MiB"
    )
    values = torch.load(tmp_path / "o.pt", weights_only=True)["w"]
    assert torch.equal(values, (codes.float() * tensors["w_scale"]).bfloat16())


def test_two_sets_of_scales_are_refused(tmp_path: Path) -> None:
    """Either gives other values, and nothing tells which are meant."""
    weight = torch.ones(8, 6).to(torch.float8_e4m3fn)
    scales = {"w.weight_scale_inv": torch.tensor(2.0), "w.weight_scale": torch.tensor(3.0)}
    save_file({"w.weight": weight, **scales}, tmp_path / "in.safetensors")
    with pytest.raises(ema_ckpt.EmaCkptError, match="several scales") as caught:
        ema_ckpt.convert(
            tmp_path / "in.safetensors", tmp_path / "out.safetensors", dequantize="fp32"
        )
    assert caught.value.code == "unsupported"
