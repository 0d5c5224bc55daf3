"""Every element type decoded to numbers; torch is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ema_ckpt.core.dtypes import DTYPES, DType
from ema_ckpt.reading.decode import decode, table


def each(kind: str) -> pytest.MarkDecorator:
    types = [dtype for dtype in DTYPES if dtype.kind == kind]
    return pytest.mark.parametrize("dtype", types, ids=[dtype.name for dtype in types])


def random_bytes(nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)


def torch_type(dtype: DType) -> torch.dtype:
    kind: torch.dtype = getattr(torch, dtype.name)
    return kind


@each("low")
def test_all_codes_of_small_floats(dtype: DType) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    if dtype.name == "float4_e2m1fn_x2":
        # torch has no cast of it; the values are those of the OCP specification.
        values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
        expected = np.array([[values[code & 15], values[code >> 4]] for code in range(256)])
    else:
        expected = codes.view(torch_type(dtype)).to(torch.float64).numpy()
    assert np.array_equal(table(dtype.name), expected, equal_nan=True)
    found = decode(codes.numpy(), dtype, np.float64)
    assert np.array_equal(found, expected.reshape(-1), equal_nan=True)


@each("float")
def test_floats_of_any_bits(dtype: DType) -> None:
    raw = random_bytes(4096 * dtype.itemsize)
    expected = raw.view(torch_type(dtype)).to(torch.float64).numpy()
    with np.errstate(all="ignore"):  # signalling NaNs, and twice the largest
        found = decode(raw.numpy(), dtype, np.float64)
        assert np.array_equal(found, expected, equal_nan=True)
        found *= 2  # a new array, not a view of the block
    assert torch.equal(raw, random_bytes(4096 * dtype.itemsize))


@each("int")
def test_integers_are_exact(dtype: DType) -> None:
    raw = random_bytes(512 * dtype.itemsize)
    found = decode(raw.numpy(), dtype, np.longdouble)
    assert [int(value) for value in found] == raw.view(torch_type(dtype)).tolist()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@each("complex")
def test_complex_numbers_are_pairs(dtype: DType) -> None:
    values = torch.randn(100, 2, dtype=torch.float64)
    stored = torch.view_as_complex(values).to(torch_type(dtype))
    raw = torch.view_as_real(stored).reshape(-1).view(torch.uint8)
    expected = torch.view_as_real(stored).to(torch.float64).reshape(-1).numpy()
    assert np.array_equal(decode(raw.numpy(), dtype, np.float64), expected)
    assert dtype.part.itemsize * 2 == dtype.itemsize


def test_bools_are_0_and_1() -> None:
    dtype = next(dtype for dtype in DTYPES if dtype.kind == "bool")
    assert decode(bytes([0, 1, 1]), dtype, np.float64).tolist() == [0, 1, 1]
