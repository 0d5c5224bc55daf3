"""Types are kept unless asked for, casts equal torch's, and what is no weight is never cast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ema_ckpt
from tests.checkpoints import save_dcp, torch_at
from tests.sharded import save_cut

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CASTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SPARED = {
    "count": torch.tensor(2**53 + 1),
    "mask": torch.tensor([True, False, True]),
    "small": torch.tensor([-128, 127], dtype=torch.int8),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "short": torch.tensor([60000], dtype=torch.uint16),
    "scaled": torch.tensor([448.0, -0.5]).to(torch.float8_e4m3fn),
    "wave": torch.tensor([1.5 - 2j, 0j]),
}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal type, shape and bits; one NaN is as good as another."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point() and a.element_size() > 1 and bool((a.isnan() != b.isnan()).any()):
        return False
    ours, theirs = (x.clone().contiguous().reshape(-1) for x in (a, b))
    if a.is_floating_point() and a.element_size() > 1:
        ours, theirs = ours[~ours.isnan()], theirs[~theirs.isnan()]
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def _edges(dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, ties between neighbours, the least and the largest numbers, NaN and infinities."""
    limits = torch.finfo(dtype)
    values = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        limits.max,
        limits.min,
        limits.tiny,
        -limits.tiny,
        limits.smallest_normal / 2,
    ]
    steps = [1 + k * 2.0**-e for e in (7, 8, 9, 10, 11, 12, 23, 24) for k in (1, 2, 3)]
    fixed = torch.tensor(
        [*values, *steps, float("nan"), float("inf"), -float("inf")], dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(3000, generator=generator, dtype=torch.float64) * 10 ** torch.linspace(
        -12, 12, 3000
    )
    return torch.cat([fixed, spread]).to(dtype)


@pytest.mark.parametrize("out", ["out.safetensors", "out.pt"])
@pytest.mark.parametrize("dtype", ["keep", *CASTS])
def test_counters_and_masks_keep_their_types_under_any_cast(
    tmp_path: Path, dtype: str, out: str
) -> None:
    """pytorch/pytorch#192485: integer and bool tensors crashed or were cast."""
    source = save_dcp(tmp_path / "run", {"model": {"w": torch.randn(3, 4), **SPARED}})
    ema_ckpt.consolidate(source, tmp_path / out, dtype=dtype)
    found = (
        load_file(tmp_path / out)
        if out.endswith("s")
        else torch.load(tmp_path / out, weights_only=True)
    )
    assert found["w"].dtype == CASTS.get(dtype, torch.float32)
    for name, value in SPARED.items():
        assert _same(found[name], value), name


@pytest.mark.parametrize("stored", FLOATS, ids=str)
@pytest.mark.parametrize("asked", CASTS)
def test_casts_equal_torchs_bit_for_bit(tmp_path: Path, stored: torch.dtype, asked: str) -> None:
    values = _edges(stored)
    source = save_dcp(tmp_path / "run", {"model": {"w": values, "one": values[3].clone()}})
    written = ema_ckpt.consolidate(source, tmp_path / "out.safetensors", dtype=asked)
    found = load_file(tmp_path / "out.safetensors")
    expected = values.to(CASTS[asked])
    assert _same(found["w"], expected)
    assert found["one"].shape == ()
    grown = int((expected.isinf() & values.isfinite()).sum())
    assert [w.code for w in written.warnings] == (["overflow"] if grown else [])
    assert all(f"{grown:,} finite values of 'w'" in w.message for w in written.warnings)


@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_a_frozen_base_in_half_precision_beside_an_adapter(tmp_path: Path, dtype: str) -> None:
    """deepspeedai/DeepSpeed#8378: frozen parameters came out in half precision although fp32 was promised."""
    model = {
        "base.w": torch.randn(64, 8).bfloat16(),
        "base.norm": torch.randn(8).half(),
        "lora.a": torch.randn(2, 8),
    }
    source = save_dcp(tmp_path / "run", {"model": model})
    written = ema_ckpt.consolidate(source, tmp_path / "out.safetensors", dtype=dtype)
    found = load_file(tmp_path / "out.safetensors")
    for name, value in model.items():
        assert _same(found[name], value.float() if dtype == "fp32" else value), name
    assert written.nbytes == sum(t.numel() * t.element_size() for t in found.values())
    listed = {t.fqn: t.dtype for t in ema_ckpt.inspect(tmp_path / "out.safetensors").tensors}
    assert listed == {name: str(t.dtype).removeprefix("torch.") for name, t in found.items()}


def test_kept_types_are_chosen_by_name_and_only_weights_are_cast(tmp_path: Path) -> None:
    tree = {
        "ema": {
            "weights": {"norm.w": torch.ones(2), "fc.w": torch.ones(2)},
            "num_updates": torch.tensor(1),
        }
    }
    source = torch_at(tmp_path / "run.pt", tree)
    ema_ckpt.consolidate(
        source, tmp_path / "out.pt", dtype="bf16", keep_dtype=["norm*"], rename=["norm=n"]
    )
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {name: t.dtype for name, t in found.items()} == {
        "n.w": torch.float32,
        "fc.w": torch.bfloat16,
    }


def test_overflow_is_told_in_the_order_of_the_tensors(tmp_path: Path) -> None:
    model = {f"l{index}": torch.full((300,), 7e4) for index in (3, 1, 2, 0)}
    source = torch_at(tmp_path / "run.pt", model)
    written = ema_ckpt.consolidate(source, tmp_path / "out.pt", dtype="fp16")
    assert [w.message.split("'")[1] for w in written.warnings] == ["l3", "l1", "l2", "l0"]


@pytest.mark.parametrize("source", ["whole", "columns", "small"])
def test_a_resumed_run_tells_of_overflow_in_what_was_cast_before_it(
    tmp_path: Path, source: str
) -> None:
    """As runs of bytes, as bands that are put together from columns, and as a batch of small tensors."""
    rows = 4 if source == "small" else 600
    model = {f"model.l{index}": torch.full((rows, 1024), 7e4) for index in (0, 1)}
    halves = (
        [((0, 0), (rows, 512)), ((0, 512), (rows, 512))]
        if source == "columns"
        else [((0, 0), (rows, 1024))]
    )
    run = save_cut(tmp_path / "run", model, {name: [halves] for name in model})
    options: dict[str, Any] = {"dtype": "fp16", "threads": 1, "resume": True, "max_memory": "4MiB"}
    expected = ema_ckpt.consolidate(run, tmp_path / "whole.safetensors", **options).warnings
    assert [w.message.split("'")[1] for w in expected] == ["l0", "l1"]

    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ema_ckpt.consolidate(run, tmp_path / "out.safetensors", progress=interrupt, **options)
    found = ema_ckpt.consolidate(run, tmp_path / "out.safetensors", **options)
    assert found.warnings == expected
    assert (tmp_path / "out.safetensors").read_bytes() == (
        tmp_path / "whole.safetensors"
    ).read_bytes()
