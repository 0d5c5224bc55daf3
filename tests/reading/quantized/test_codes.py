"""Tables of codes against torch: every byte of every type, and packed integers by arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ema_ckpt.reading.quantized.codes import decoded, packed_integers

BYTES = np.arange(256, dtype=np.uint8)
PAIRS = np.arange(65536, dtype=np.uint16).view(np.uint8)


@pytest.mark.parametrize("data", [BYTES, PAIRS], ids=["few", "many"])
@pytest.mark.parametrize(
    "codes",
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu int8 uint8".split(),
)
def test_bytes(codes: str, data: np.ndarray) -> None:
    expected = torch.from_numpy(data.copy()).view(getattr(torch, codes)).float().numpy()
    assert np.array_equal(decoded(data, codes), expected, equal_nan=True)


@pytest.mark.parametrize("codes", ["bfloat16", "float16", "float32", "int32"])
def test_wider_types(codes: str) -> None:
    values = torch.tensor([[0.5, -3, 1e4], [7, 8, -9]]).to(getattr(torch, codes))
    raw = values.view(torch.uint8).numpy()
    assert np.array_equal(decoded(raw, codes), values.float().numpy())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_integers(bits: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << bits, 96)
    word = sum(int(number) << (index * bits) for index, number in enumerate(numbers))
    raw = np.frombuffer(word.to_bytes(96 * bits // 8, "little"), np.uint8)
    expected = numbers - (1 << (bits - 1))
    assert np.array_equal(decoded(raw, packed_integers(bits) or ""), expected)


def test_integers_that_straddle_bytes_have_no_table() -> None:
    assert [bits for bits in range(1, 9) if packed_integers(bits) is None] == [3, 5, 6, 7]


def test_half_bytes() -> None:
    values = decoded(np.array([0x10, 0x2F, 0x87], np.uint8), "float4_e2m1fn_x2")
    assert values.tolist() == [0.0, 0.5, -6.0, 1.0, 6.0, -0.0]
