"""NaN, infinities and the largest magnitude in blocks of every type; torch is the oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ema_ckpt.analysis.value_scan import Scanner, ValueCounts, has_values
from ema_ckpt.core.dtypes import DTYPES, DType

SCANNED = [dtype for dtype in DTYPES if has_values(dtype)]


def expected(raw: torch.Tensor, dtype: DType) -> ValueCounts:
    if dtype.name == "float4_e2m1fn_x2":
        nibbles = {int(code) & 7 for code in torch.cat([raw & 15, raw >> 4])}
        return ValueCounts(largest=max([0, 0.5, 1, 1.5, 2, 3, 4, 6][code] for code in nibbles))
    values = raw.view(getattr(torch, dtype.part.name)).to(torch.float64)
    finite = values[values.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return ValueCounts(int(values.isnan().sum()), int(values.isinf().sum()), largest)


@pytest.mark.parametrize("dtype", SCANNED, ids=[dtype.name for dtype in SCANNED])
def test_values_of_any_bits(dtype: DType) -> None:
    scanner = Scanner(dtype)
    generator = torch.Generator().manual_seed(0)
    for count, top in ((1000, 256), (100, 60), (1, 1)):
        shape = (count * dtype.itemsize,)
        raw = torch.randint(0, top, shape, generator=generator, dtype=torch.uint8)
        assert scanner.scan(memoryview(raw.numpy())) == expected(raw, dtype)
    specials = np.array([math.inf, -math.inf, math.nan, 1.5, -2.5], "<f4")
    if dtype.name == "float32":
        assert scanner.scan(memoryview(specials.view("u1"))) == ValueCounts(1, 2, 2.5)


def test_counts_of_parts_add_up() -> None:
    total = ValueCounts(1, 2, 3.0)
    total.add(ValueCounts(10, 20, 2.0))
    assert total == ValueCounts(11, 22, 3.0)


def test_integers_have_no_values_to_scan() -> None:
    assert {dtype.kind for dtype in DTYPES if not has_values(dtype)} == {"int", "bool"}
