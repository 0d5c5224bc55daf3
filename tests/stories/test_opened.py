"""Tensors read into this process: names, dtypes and shapes as stored, casts that spare what is no weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from tests.checkpoints import dcp_at, save_dcp

MIXED = {
    "w": torch.linspace(-1, 1, 12).reshape(3, 4),
    "half": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "double": torch.tensor(3.5, dtype=torch.float64),
    "scaled": torch.tensor([1.0, 0.5]).to(torch.float8_e4m3fn),
    "counter": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "wave": torch.tensor([1 + 2j]),
    "none": torch.zeros(0, 5),
}


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.bfloat16])
def test_a_cast_touches_floating_weights_only(tmp_path: Path, dtype: torch.dtype | str) -> None:
    with ema_ckpt.open(save_dcp(tmp_path / "run", {"model": MIXED})) as opened:
        state = opened.state_dict(dtype=dtype)
    for name, value in MIXED.items():
        cast = name in ("w", "half", "double", "none")
        expected = value.to(torch.bfloat16) if cast else value
        assert state[name].dtype == expected.dtype, name
        assert state[name].shape == expected.shape, name
        same = state[name].reshape(-1).view(torch.uint8) == expected.reshape(-1).view(torch.uint8)
        assert bool(same.all()), name


@pytest.mark.parametrize("dtype", [None, "keep"])
def test_without_a_cast_everything_is_as_stored(tmp_path: Path, dtype: str | None) -> None:
    with ema_ckpt.open(save_dcp(tmp_path / "run", {"model": MIXED})) as opened:
        state = opened.state_dict("model", dtype=dtype)
    assert list(state) == list(MIXED)
    for name, value in MIXED.items():
        assert state[name].dtype == value.dtype, name
        assert state[name].shape == value.shape, name


@pytest.mark.parametrize("dtype", ["fp8", "int64", torch.int64, torch.float8_e5m2, 3])
def test_other_types_are_refused(tmp_path: Path, dtype: object) -> None:
    with ema_ckpt.open(dcp_at(tmp_path / "run")) as opened, pytest.raises(EmaCkptError) as caught:
        opened.state_dict(dtype=dtype)  # type: ignore[arg-type]
    assert caught.value.code == "usage"


def test_a_checkpoint_is_a_mapping_of_full_names(tmp_path: Path) -> None:
    with ema_ckpt.open(dcp_at(tmp_path / "run")) as opened:
        assert list(opened) == opened.keys()
        assert len(opened) == len(opened.keys())
        assert opened.keys("model") == ["model.layer.w", "model.b"]
        assert "model.b" in opened
        assert "b" not in opened
        with pytest.raises(KeyError, match=r"model\.b"):
            opened["model.bb"]
