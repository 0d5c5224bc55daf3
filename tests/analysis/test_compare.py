"""How blocks of numbers differ, against torch in float64 and against Python's own integers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ema_ckpt.analysis.compare import Comparer, PairStats
from ema_ckpt.core.dtypes import DTYPES, by_name

FLOATS = [d.name for d in DTYPES if d.kind == "float"]
LOW = [d.name for d in DTYPES if d.kind == "low"]
INTS = [d.name for d in DTYPES if d.kind == "int"]
COMPLEX = [d.name for d in DTYPES if d.kind == "complex"]


def raw(tensor: torch.Tensor) -> memoryview:
    return (
        memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        if tensor.numel()
        else memoryview(b"")
    )


def compare(
    a: torch.Tensor, b: torch.Tensor, *, fast: bool = False, **tolerance: float
) -> PairStats:
    kinds = (by_name(str(side.dtype)) for side in (a, b))
    return Comparer(*kinds, **tolerance).compare([(raw(a), raw(b))], fast=fast)[0]


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's real numbers in float64, by way of torch."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.complex128))
    return tensor.to(torch.float64).reshape(-1)


def check(a: torch.Tensor, b: torch.Tensor, found: PairStats, rel: float = 1e-12) -> None:
    x, y = numbers(a), numbers(b)
    d = x - y
    assert found.aa == pytest.approx(float(x @ x), rel=rel)
    assert found.bb == pytest.approx(float(y @ y), rel=rel)
    assert found.ab == pytest.approx(float(x @ y), rel=rel, abs=rel * float(x.norm() * y.norm()))
    assert found.dd == pytest.approx(float(d @ d), rel=rel)
    assert found.absolute == pytest.approx(float(d.abs().sum()), rel=rel)
    assert found.largest == pytest.approx(float(d.abs().max()), rel=rel)
    differs = x != y
    if a.is_complex() or b.is_complex():
        differs = differs.reshape(-1, 2).any(dim=1)
    assert found.changed == found.unequal == int(differs.sum())
    assert found.rel_l2 == pytest.approx(float(d.norm() / y.norm()), rel=rel)


@pytest.mark.parametrize("a", FLOATS)
@pytest.mark.parametrize("b", FLOATS)
def test_floats_of_any_two_types(a: str, b: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(70001, dtype=torch.float64)
    y = x + 0.01 * torch.randn(70001, dtype=torch.float64)
    x, y = x.to(getattr(torch, a)), y.to(getattr(torch, b))
    check(x, y, compare(x, y))


@pytest.mark.parametrize("name", [name for name in LOW if name != "float4_e2m1fn_x2"])
def test_codes_of_low_precision(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    kind = getattr(torch, name)
    finite = codes[codes.view(kind).to(torch.float64).isfinite()]
    x, y = finite.view(kind), finite.flip(0).view(kind)
    check(x, y, compare(x, y))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_are_pairs(name: str) -> None:
    torch.manual_seed(2)
    x, y = (torch.randn(999, 2, dtype=torch.float64) for _ in range(2))
    y[::3, 1] = x[::3, 1]
    x, y = (torch.view_as_complex(v).to(getattr(torch, name)) for v in (x, y))
    check(x, y, compare(x, y))
    mixed = compare(torch.ones(4, dtype=torch.complex64), torch.ones(4))
    assert (mixed.changed, mixed.bb) == (0, 4.0)
    far = compare(torch.full((4,), 1 + 1j), torch.full((4,), 2 + 2j), rtol=0.1)
    assert far.changed == far.unequal == 4


def test_nothing_is_near_an_infinity() -> None:
    finite, plus, minus = (torch.tensor([1.0, value]) for value in (1.0, torch.inf, -torch.inf))
    for a, b in ((finite, plus), (plus, finite), (plus, minus)):
        assert compare(a, b, rtol=1e-5, atol=1.0).changed == 1
    assert compare(plus, plus, rtol=1e-5).changed == 0


@pytest.mark.parametrize("a", INTS)
@pytest.mark.parametrize("b", INTS)
def test_integers_are_exact(a: str, b: str) -> None:
    """Against Python's integers, the ends of the ranges included."""
    ranges = [torch.iinfo(getattr(torch, name)) for name in (a, b)]
    picks = [[i.min, i.max, i.max - 1, i.max // 3, min(i.max, 2**53) - 1, 0, 1] for i in ranges]
    x, y = ([v for v in p for _ in p] if side == 0 else p * len(p) for side, p in enumerate(picks))
    tensors = [torch.from_numpy(np.array(v, dtype=n)) for v, n in zip((x, y), (a, b), strict=True)]
    found = compare(*tensors)
    exact = [Fraction(p) - Fraction(q) for p, q in zip(x, y, strict=True)]
    assert found.changed == sum(d != 0 for d in exact)
    assert found.largest == pytest.approx(float(max(map(abs, exact))), rel=1e-15)
    assert found.dd == pytest.approx(float(sum(d * d for d in exact)), rel=1e-14)
    assert found.ab == pytest.approx(
        float(sum(Fraction(p) * q for p, q in zip(x, y, strict=True))), rel=1e-14, abs=1
    )


def test_neighbours_beyond_2_to_53_differ() -> None:
    a = torch.tensor([2**62, 2**62 + 1])
    found = compare(a, a.flip(0))
    assert (found.changed, found.largest) == (2, 1.0)


def test_bools_are_0_and_1() -> None:
    a, b = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    found = compare(a, b)
    assert (found.aa, found.bb, found.dd, found.changed) == (2.0, 1.0, 1.0, 1)
    assert compare(a, torch.tensor([1.0, 1.0, 0.0])).changed == 0


def test_nan_equals_nan_and_minus_zero_equals_zero() -> None:
    nan, inf = math.nan, math.inf
    a = torch.tensor([nan, inf, -0.0, 1.0])
    found = compare(a, torch.tensor([nan, inf, 0.0, 1.0]))
    assert (found.changed, found.rel_l2, found.cosine, found.largest) == (0, 0.0, 1.0, 0.0)
    assert (found.nan_a, found.nan_b, found.inf_a, found.inf_b) == (1, 1, 1, 1)
    assert not found.same_bits
    assert compare(a, a.clone()).same_bits
    other = compare(a, torch.tensor([1.0, -inf, 0.0, 1.0]))
    assert other.changed == 2
    assert all(map(math.isnan, (other.rel_l2, other.cosine, other.largest)))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_the_fast_way_is_close(kind: str, scale: float) -> None:
    torch.manual_seed(3)
    x = torch.randn(1 << 18).to(getattr(torch, kind))
    y = (x.float() + scale * torch.randn(1 << 18)).to(getattr(torch, kind))
    y[::100] = x[::100]
    check(x, y, compare(x, y, fast=True), rel=1e-7)


@pytest.mark.parametrize("value", [0.1, 1.0, 1e-3, 3.7])
def test_the_fast_way_on_constants(value: float) -> None:
    """Equal summands round alike: the worst case for sums in float32."""
    x, y = torch.full((1 << 17,), value), torch.full((1 << 17,), value * 1.01)
    check(x, y, compare(x, y, fast=True), rel=1e-6)


@pytest.mark.parametrize("factor", [1e-25, 1e25, 0.0])
@pytest.mark.parametrize("odd", ["", "nan", "inf"])
def test_the_fast_way_gives_up_where_it_is_not_accurate(factor: float, odd: str) -> None:
    torch.manual_seed(4)
    x = torch.randn(1 << 14) * factor
    y = x + torch.randn(1 << 14) * factor
    if odd:
        x[77] = float(odd)
    exact, found = compare(x, y), compare(x, y, fast=True)
    assert str(exact) == str(found)


def test_lopsided_norms() -> None:
    torch.manual_seed(5)
    x, y = torch.randn(1 << 14), torch.randn(1 << 14) * 1e-9
    check(x, y, compare(x, y, fast=True))


def test_tolerance() -> None:
    a, b = torch.tensor([1.0, 1.1, 2.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 1e-9])
    assert compare(a, b).changed == 3
    assert compare(a, b, atol=1e-6).changed == 2
    assert compare(a, b, rtol=0.2).changed == 2
    assert compare(a, b, rtol=0.2, atol=1e-6).changed == 1
    assert compare(torch.tensor([math.nan]), torch.tensor([1.0]), atol=10).changed == 1


@given(st.lists(st.tuples(*[st.floats(-1e6, 1e6, width=32)] * 2), min_size=1, max_size=40))
def test_any_numbers(pairs: list[tuple[float, float]]) -> None:
    a, b = (torch.tensor(side, dtype=torch.float32) for side in zip(*pairs, strict=True))
    found = compare(a, b)
    exact = sum(
        (Fraction(p) - Fraction(q)) ** 2 for p, q in zip(a.tolist(), b.tolist(), strict=True)
    )
    assert found.dd == pytest.approx(float(exact), rel=1e-14)
    assert found.unequal == sum(p != q for p, q in pairs)


def test_totals_do_not_depend_on_order() -> None:
    torch.manual_seed(6)
    parts = [compare(torch.randn(100), torch.randn(100)) for _ in range(20)]
    assert PairStats.total(parts) == PairStats.total(parts[::-1])
    assert PairStats.total([]) == PairStats()


def test_differences_whose_squares_vanish_are_undefined_and_not_zero() -> None:
    found = compare(
        torch.full((4,), 1e-180, dtype=torch.float64), torch.full((4,), 3e-180, dtype=torch.float64)
    )
    assert found.unequal == 4
    assert math.isnan(found.rel_l2)
