"""What callers in Python give is taken if it means something, and else refused as the command line does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ema_ckpt
from ema_ckpt import UsageError


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for number, path in enumerate(paths):
        save_file({"w": torch.full((4,), float(number))}, path)
    return paths


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, out: ema_ckpt.reshard(a, out, "2"),
        lambda a, b, out: ema_ckpt.reshard(a, out, 2.0),
        lambda a, b, out: ema_ckpt.reshard(a, out, None),
        lambda a, b, out: ema_ckpt.convert(a, out, "dcp", "2"),
        lambda a, b, out: ema_ckpt.convert(a, out, tree=5),
        lambda a, b, out: ema_ckpt.verify(a, threads="2"),
        lambda a, b, out: ema_ckpt.consolidate(a, out, threads="2"),
        lambda a, b, out: ema_ckpt.consolidate(a, out, threads=2.5),
        lambda a, b, out: ema_ckpt.consolidate(a, out, tree=["model"]),
        lambda a, b, out: ema_ckpt.consolidate(a, out, match=5),
        lambda a, b, out: ema_ckpt.consolidate(a, out, match=[5]),
        lambda a, b, out: ema_ckpt.consolidate(a, out, rename=[("w", "v")]),
        lambda a, b, out: ema_ckpt.consolidate(a, out, rename={5: "v"}),
        lambda a, b, out: ema_ckpt.consolidate(a, out, max_memory=[1]),
        lambda a, b, out: ema_ckpt.consolidate(a, out, max_shard_size=2.5),
        lambda a, b, out: ema_ckpt.synthesize([a, b], out, weights=0.5),
        lambda a, b, out: ema_ckpt.synthesize([a, b], out, weights=[0.5, None, 0.5]),
        lambda a, b, out: ema_ckpt.synthesize([a, b], out, weights="0.5,0.5"),
        lambda a, b, out: ema_ckpt.synthesize([a, b], out, weights=["0.5", "0.5"]),
        lambda a, b, out: ema_ckpt.synthesize([a, b], out, sigma_rel="0.1"),
        lambda a, b, out: ema_ckpt.synthesize([a, b], out, sigma_rel=0.1, sigma_rels=0.1),
        lambda a, b, out: ema_ckpt.synthesize(a.parent, out, last="2"),
    ],
)
def test_what_means_nothing_is_refused(
    call: Callable[..., object], pair: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        call(*pair, tmp_path / "out")
    assert caught.value.code == "usage"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "weights", [torch.tensor([0.5, 0.5]), np.array([0.5, 0.5]), iter([0.5, 0.5]), (0.5, 0.5)]
)
def test_numbers_of_any_kind_are_taken(weights: object, pair: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    ema_ckpt.synthesize((path for path in pair), out, weights=weights, world_size=np.int64(1))  # type: ignore[arg-type]
    assert load_file(out)["w"].tolist() == [0.5] * 4


def test_none_is_no_pattern_and_a_float_a_size(pair: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    none = {"match": None, "exclude": None, "rename": None, "keep_dtype": None}
    ema_ckpt.consolidate(pair[1], out, max_shard_size=5e9, max_memory=64e6, **none)  # type: ignore[arg-type]
    ema_ckpt.convert(pair[1], tmp_path / "dcp", tree=None)  # type: ignore[arg-type]
    assert load_file(out / "model.safetensors")["w"].tolist() == [1.0] * 4
