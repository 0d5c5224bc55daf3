"""Sums computed as they are read: ranges cut into boxes, any layout, any dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ema_ckpt.analysis.accumulator import BLOCK_NUMEL
from ema_ckpt.analysis.weighted_sum import Part, WeightedSum, blended_dtype
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.discovery.opening import open_catalog
from tests.checkpoints import save_dcp


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["float32", "float32"], "float32"),
        (["bfloat16", "bfloat16"], "bfloat16"),
        (["bfloat16", "float16"], "float32"),
        (["bfloat16", "float32"], "float32"),
        (["float32", "float64"], "float64"),
    ],
)
def test_dtype_of_a_sum(names: list[str], expected: str) -> None:
    assert blended_dtype([by_name(name) for name in names]).name == expected


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "bfloat16", "float16", "complex64", "complex128"]
)
def test_any_range_of_a_sum(dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    tensors = [
        torch.randn(7, 5, 3, dtype=torch.complex128 if "complex" in dtype else torch.float64).to(
            kind
        )
        for _ in range(3)
    ]
    weights = [0.5, -0.25, 0.75]
    catalogs = [
        open_catalog(save_dcp(tmp_path / str(i), {"m": {"w": t}})) for i, t in enumerate(tensors)
    ]
    blend = WeightedSum(verify=True)
    parts = [
        Part(c, next(t for t in c.tensors if t.name == "m.w"), w)
        for c, w in zip(catalogs, weights, strict=True)
    ]
    tensor = blend.add("w", parts)
    wide = torch.complex128 if "complex" in dtype else torch.float64
    total = sum(w * t.to(wide) for w, t in zip(weights, tensors, strict=True))
    expected = (
        total.to(torch.float32).to(kind) if dtype in ("bfloat16", "float16") else total.to(kind)
    )
    raw = expected.contiguous().view(torch.uint8).numpy().tobytes()
    size = tensor.dtype.itemsize
    assert blend.size("sum-0") == len(raw)
    for first, last in ((0, 105), (0, 1), (4, 9), (14, 16), (15, 45), (29, 104), (104, 105)):
        assert (
            blend.read("sum-0", first * size, (last - first) * size)
            == raw[first * size : last * size]
        )
    blend.finish_state()


def test_what_is_taken_alone_keeps_its_bits(tmp_path: Path) -> None:
    counter = torch.tensor([2**62 + 1, -3])
    catalog = open_catalog(save_dcp(tmp_path / "c", {"m": {"n": counter}}))
    blend = WeightedSum(verify=True)
    blend.add("n", [Part(catalog, catalog.tensors[0], 1.0)])
    assert blend.read("sum-0", 0, 16) == counter.numpy().tobytes()


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "float32", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("complex64", "complex64", "complex64"),
        ("float64", "float32", "float64"),
    ],
)
def test_sums_longer_than_any_buffer(dtypes: tuple[str, ...], tmp_path: Path) -> None:
    """Two and a half blocks: the same bits as one sum of whole tensors, in the same order."""
    torch.manual_seed(0)
    numel = 5 * BLOCK_NUMEL // 2 + 17
    weights = [0.3, -0.123, 0.77]
    wide = torch.complex128 if "complex64" in dtypes else torch.float64
    blend, parts, total = WeightedSum(verify=True), [], torch.zeros(numel, dtype=wide)
    for index, (dtype, weight) in enumerate(zip(dtypes, weights, strict=True)):
        tensor = torch.randn(numel, dtype=wide).to(getattr(torch, dtype))
        catalog = open_catalog(save_dcp(tmp_path / str(index), {"m": {"w": tensor}}))
        parts.append(Part(catalog, catalog.tensors[0], weight))
        total = total + weight * tensor.to(wide)
    tensor = blend.add("w", parts)
    kind = getattr(torch, tensor.dtype.name)
    expected = total.to(torch.float32).to(kind) if kind == torch.bfloat16 else total.to(kind)
    raw = expected.view(torch.uint8).numpy().tobytes()
    size = tensor.dtype.itemsize
    for first, last in ((0, numel), (3, numel - 5), (BLOCK_NUMEL - 1, BLOCK_NUMEL + 1)):
        data = blend.read("sum-0", first * size, (last - first) * size)
        assert data == raw[first * size : last * size]
    blend.finish_state()
