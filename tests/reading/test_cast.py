"""Casts against torch's own, bit for bit."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ema_ckpt.core.dtypes import DType, by_name
from ema_ckpt.core.errors import UsageError
from ema_ckpt.reading.cast import Caster

NAMES = ["float64", "float32", "float16", "bfloat16"]
PAIRS = [(a, b) for a in NAMES for b in NAMES]
BITS = {
    8: (np.uint64, torch.int64, np.int64),
    4: (np.uint32, torch.int32, np.int32),
    2: (np.uint16, torch.int16, np.int16),
}


def cast_block(block: bytes, source: DType, target: DType) -> tuple[memoryview, int]:
    """The block cast, and how many finite values became infinite."""
    caster = Caster(source, target)
    return caster.cast(block), caster.overflow


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    unsigned, view, _ = BITS[tensor.element_size()]
    return tensor.view(view).numpy().view(unsigned)


def from_bits(bits: np.ndarray, name: str) -> torch.Tensor:
    signed = BITS[bits.dtype.itemsize][2]
    return torch.from_numpy(bits.view(signed)).view(getattr(torch, name))


def values(name: str, seed: int = 0) -> np.ndarray:
    """All bit patterns of a 16-bit type; else random ones, every neighbourhood of a 16-bit value, and specials."""
    if name in ("float16", "bfloat16"):
        return np.arange(65536, dtype=np.uint16)
    random = np.random.default_rng(seed)
    halves = np.concatenate(
        [from_bits(values(half), half).to(getattr(torch, name)).numpy() for half in NAMES[2:]]
    )
    halves = halves[np.isfinite(halves)]
    following = np.append(halves[1:], halves[:1])
    with np.errstate(over="ignore"):
        midway = halves / 2 + following / 2
    unsigned = BITS[by_name(name).itemsize][0]
    near = np.concatenate([halves, midway]).view(unsigned)
    step = unsigned(1)
    arbitrary = random.integers(0, np.iinfo(unsigned).max, 300_000, dtype=unsigned, endpoint=True)
    usual = (random.standard_normal(100_000) * 0.02).astype(name).view(unsigned)
    specials = np.array(
        [np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 1e-45, 65520, 65519.99, 3.4e38], name
    ).view(unsigned)
    found = np.concatenate([near, near + step, near - step, arbitrary, usual, specials])
    return np.resize(
        found, found.size // 16 * 16
    )  # torch's kernels for the last few elements give another NaN


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_pair_equals_torch(source, target):
    bits = values(source)
    tensor = from_bits(bits, source)
    expected = bits_of(tensor.to(getattr(torch, target)))
    result, _ = cast_block(bits.tobytes(), by_name(source), by_name(target))
    got = np.frombuffer(result, expected.dtype)
    isnan = tensor.isnan().numpy()
    assert np.array_equal(got[~isnan], expected[~isnan])
    assert torch.equal(from_bits(got.copy(), target).isnan(), tensor.isnan())
    if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() in (
        "AVX2",
        "AVX512",
    ):
        assert np.array_equal(got, expected)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_overflow_counts_finite_values_that_became_infinite(source, target):
    bits = values(source, seed=1)
    tensor = from_bits(bits, source)
    _, overflow = cast_block(bits.tobytes(), by_name(source), by_name(target))
    assert overflow == int((tensor.isfinite() & tensor.to(getattr(torch, target)).isinf()).sum())


def test_overflow_is_seen_among_ordinary_values():
    ordinary = np.full(200_000, 0.5, np.float32)
    caster = Caster(by_name("float32"), by_name("float16"))
    caster.cast(ordinary.tobytes())
    assert caster.overflow == 0
    ordinary[[3, 150_000]] = [65520.0, -1e9]
    ordinary[7] = np.inf
    caster.cast(ordinary.tobytes())
    assert caster.overflow == 2
    caster.cast(ordinary.tobytes())
    assert caster.overflow == 4


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PAIRS),
    st.integers(0, 200_000) | st.sampled_from([0, 1, 65535, 65536, 65537, 131072]),
    st.integers(0, 7),
)
def test_any_length_at_any_address(pair, numel, shift):
    source, target = map(by_name, pair)
    data = np.random.default_rng(numel).standard_normal(numel).astype("f8")
    tensor = torch.from_numpy(data).to(getattr(torch, source.name))
    buffer = bytearray(shift + numel * source.itemsize)
    buffer[shift:] = bits_of(tensor).tobytes()
    got = Caster(source, target).cast(memoryview(buffer)[shift:])
    assert bytes(got) == bits_of(tensor.to(getattr(torch, target.name))).tobytes()


def test_buffers_are_reused_and_results_can_go_to_a_given_place():
    caster = Caster(by_name("float32"), by_name("bfloat16"))
    first = caster.cast(np.ones(1000, np.float32))
    second = caster.cast(np.full(500, 2, np.float32))
    assert np.shares_memory(np.frombuffer(first, np.uint8), np.frombuffer(second, np.uint8))
    out = bytearray(8)
    caster.cast_into(np.array([1, -2], np.float32), memoryview(out)[2:6])
    assert out == b"\0\0\x80\x3f\0\xc0\0\0"


@pytest.mark.parametrize("name", ["int64", "bool", "float8_e4m3fn", "complex64"])
def test_types_that_are_never_cast(name):
    for pair in [(name, "float32"), ("float32", name)]:
        with pytest.raises(UsageError, match=name):
            Caster(*map(by_name, pair))
