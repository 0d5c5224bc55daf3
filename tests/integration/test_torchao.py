"""torchao: quantised weights and the states of its 8-bit optimizer."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import ema_ckpt
from tests.distributed import launcher
from tests.integration.proving import assert_same_bits, whole
from tests.integration.table import Row
from tests.integration.training import keep, kept

pytestmark = pytest.mark.integration


def saves(folder: Path) -> None:
    from torchao.optim import AdamW8bit

    warnings.simplefilter("ignore")
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64, bias=False))
    optimizer = AdamW8bit(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt"
    )
    keep(model.state_dict(), folder / "whole.pt")


def test_states_of_an_8_bit_optimizer(tmp_path: Path) -> None:
    with Row("torchao", "`AdamW8bit` beside plain weights, torch file") as row:
        launcher.run(1, saves, tmp_path, timeout=120)
        state = kept(tmp_path / "whole.pt")
        refuses_only_what_is_selected(
            row, tmp_path / "last.pt", "model", state, "optimizer.*", tmp_path
        )


def refuses_only_what_is_selected(
    row: Row, path: Path, tree: str, state: dict[str, torch.Tensor], glob: str, folder: Path
) -> None:
    """`inspect` shows what it can and warns of the rest; a verb refuses, by name, only what it would write."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = ema_ckpt.inspect(path)
        assert {one.name: one.role for one in seen.trees if one.tensors}[tree] == "live"
        assert any(
            "unsupported" in (one.code, one.message) or "subclass" in one.message
            for one in seen.warnings
        )
        row.shown("inspect", "live; the quantised said")
        assert_same_bits(whole(path, tree, folder / "one.safetensors"), state)
        row.shown("consolidate")
        with pytest.raises(ema_ckpt.EmaCkptError) as refused:
            ema_ckpt.convert(path, folder / "all")
        assert refused.value.code == "unsupported"
        ema_ckpt.convert(path, folder / "some", exclude=[glob])
        assert_same_bits(whole(folder / "some", tree, folder / "two.safetensors"), state)
        row.shown("convert", "refused by name; with `--exclude` yes")


def saves_quantised(folder: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    warnings.simplefilter("ignore")
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128))
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
    torch.save({"model": model.state_dict()}, folder / "last.pt")
    rest = {name: tensor for name, tensor in model.state_dict().items() if name != "0.weight"}
    keep(rest, folder / "rest.pt")


def test_quantised_weights(tmp_path: Path) -> None:
    with Row("torchao", "int8 weights, torch file") as row, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        launcher.run(1, saves_quantised, tmp_path, timeout=120)
        path = tmp_path / "last.pt"
        seen = ema_ckpt.inspect(path)
        assert any("0.weight" in one.message for one in seen.warnings)
        row.shown("inspect", "live; the quantised said")
        with pytest.raises(ema_ckpt.EmaCkptError) as refused:
            ema_ckpt.consolidate(path, tmp_path / "one.safetensors")
        assert refused.value.code == "unsupported"
        assert "0.weight" in str(refused.value)
        ema_ckpt.consolidate(path, tmp_path / "one.safetensors", exclude=["0.weight"])
        assert_same_bits(whole_file(tmp_path / "one.safetensors"), kept(tmp_path / "rest.pt"))
        row.shown("consolidate", "refused by name; with `--exclude` yes")


def whole_file(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def saves_sharded_file_of_8_bit_floats(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    warnings.simplefilter("ignore")
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128)).bfloat16()
    quantize_(model, Float8WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
    dcp.save(model.state_dict(), checkpoint_id=folder / "dcp")
    rest = {name: tensor for name, tensor in model.state_dict().items() if name != "0.weight"}
    keep(rest, folder / "rest.pt")


def test_quantised_weights_in_dcp_are_unproven_and_not_damaged(tmp_path: Path) -> None:
    with Row("torchao", "float8 weights, DCP") as row, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        launcher.run(1, saves_sharded_file_of_8_bit_floats, tmp_path, timeout=120)
        path = tmp_path / "dcp"
        report = ema_ckpt.verify(path)
        assert (report.status, report.problems) == ("unproven", ())
        assert any("Float8Tensor" in one.message for one in report.warnings)
        row.shown("inspect", "`verify` says which are not read")
        with pytest.raises(ema_ckpt.EmaCkptError, match="Float8Tensor") as refused:
            ema_ckpt.convert(path, tmp_path / "all.safetensors")
        assert refused.value.code == "unsupported"
        ema_ckpt.convert(path, tmp_path / "some.safetensors", exclude=["0.weight"])
        assert_same_bits(
            whole(tmp_path / "some.safetensors", "", tmp_path / "one.safetensors"),
            kept(tmp_path / "rest.pt"),
        )
        row.shown("convert", "refused by name; with `--exclude` yes")
