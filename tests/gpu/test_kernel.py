"""The kernel against torch's own operations on the same card, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ema_ckpt.core.box import Box
from ema_ckpt.ema.engines import cuda, stochastic
from ema_ckpt.ema.engines.noise import Noise, positions
from ema_ckpt.ema.engines.update_batch import UpdateBatch
from tests.ema import reference_engine as reference

SHAPES = [(3,), (), (7, 5), (1,), (2048,), (4096,), (4097,), (33, 65), (300, 1000)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
WEIGHTS = [0.3, 1e-4, 0.5, 0.49999999, 0.7, 0.9999, 1.0, 2.0**-30, 1e-6]


def _values(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Normal values, and the extremes: subnormal, huge, signed zeros."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    made = [torch.randn(shape, generator=generator, device="cuda") for shape in SHAPES]
    extremes = torch.tensor([1e-42, -1e-42, 0.0, -0.0, 3e4, -3e4, 1e-30, 1.0], device="cuda")
    made[4][:8] = extremes[torch.randperm(8, generator=generator, device="cuda")]
    if dtype is not torch.float16:
        made[5][:2] = torch.tensor([3e37, -3e37], device="cuda")
    return [values.to(dtype) for values in made]


def _unaligned(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same in memory that begins one element after an aligned address."""
    moved = []
    for value in values:
        memory = torch.zeros(value.numel() + 1, dtype=value.dtype, device="cuda")
        moved.append(memory[1:].view(value.shape).copy_(value))
    return moved


def _batch(
    shadow: torch.dtype,
    param: torch.dtype,
    *,
    compensate: bool = False,
    skip: bool = False,
    aligned: bool = True,
) -> UpdateBatch:
    params = _values(param, 1)
    # What float16 cannot hold becomes infinite, and then NaN of no certain bits.
    shadows = [
        s.clamp(-6e4, 6e4).to(shadow) if shadow is torch.float16 else s.to(shadow)
        for s in _values(param, 0)
    ]
    residuals = (
        [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in SHAPES]
        if compensate
        else None
    )
    if not aligned:
        shadows, params = _unaligned(shadows), _unaligned(params)
    events = torch.zeros((), dtype=torch.int64, device="cuda") if skip else None
    return UpdateBatch(shadows, params, residuals, events)


def _feed(batch: UpdateBatch, seed: int) -> None:
    for param, value in zip(batch.params, _values(batch.params[0].dtype, seed), strict=True):
        param.copy_(value.clamp(-6e4, 6e4) if batch.averages[0].dtype is torch.float16 else value)


def _same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    words = {4: torch.int32, 2: torch.int16}
    return all(
        torch.equal(a.view(words[a.element_size()]), b.view(words[b.element_size()]))
        for a, b in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("param", FLOATS)
def test_float32_averages_have_the_bits_of_foreach_lerp(param: torch.dtype, aligned: bool) -> None:
    batch = _batch(torch.float32, param, aligned=aligned)
    expected = [shadow.clone() for shadow in batch.averages]
    step = cuda.prepare(batch)
    assert isinstance(step, cuda.TritonStep)
    for seed, weight in enumerate(WEIGHTS, start=2):
        _feed(batch, seed)
        step(weight)
        torch._foreach_lerp_(expected, [p.float() for p in batch.params], weight)
        assert _same(list(batch.averages), expected), weight


@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("shadow", FLOATS)
@pytest.mark.parametrize("param", FLOATS)
def test_the_kernel_equals_the_reference(
    shadow: torch.dtype, param: torch.dtype, compensate: bool, skip: bool
) -> None:
    if compensate:
        shadow = torch.float32
    fast = _batch(shadow, param, compensate=compensate, skip=skip)
    plain = _batch(shadow, param, compensate=compensate, skip=skip)
    step = cuda.prepare(fast)
    for seed, weight in enumerate(WEIGHTS, start=2):
        for batch in (fast, plain):
            _feed(batch, seed)
            if skip and seed == 3:
                batch.params[3][0] = torch.nan
                batch.params[8][299, 999] = torch.inf
        step(weight)
        reference.update(plain, weight)
    assert _same(list(fast.averages), list(plain.averages))
    assert _same(list(fast.residuals or ()), list(plain.residuals or ()))
    if fast.nonfinite_count is not None and plain.nonfinite_count is not None:
        assert int(fast.nonfinite_count) == int(plain.nonfinite_count) == 1


def test_what_is_not_contiguous_or_not_float32_is_moved_too() -> None:
    torch.manual_seed(0)
    wide = torch.randn(64, 32, device="cuda")
    for params in (
        [torch.randn(32, 64, device="cuda").t(), torch.randn(5, device="cuda")],
        [
            torch.randn(64, 32, device="cuda", dtype=torch.float64),
            torch.randn(5, device="cuda", dtype=torch.float64),
        ],
    ):
        shadows = [wide.to(params[0].dtype), torch.zeros(5, device="cuda", dtype=params[0].dtype)]
        expected = [torch.lerp(s, p, 0.25) for s, p in zip(shadows, params, strict=True)]
        cuda.prepare(UpdateBatch(shadows, params))(0.25)
        assert all(torch.equal(s, e) for s, e in zip(shadows, expected, strict=True))


def test_weight_zero_touches_nothing() -> None:
    batch = _batch(torch.float32, torch.bfloat16)
    before = [shadow.clone() for shadow in batch.averages]
    batch.params[6].fill_(torch.nan)
    cuda.prepare(batch)(0.0)
    assert _same(list(batch.averages), before)


def test_more_elements_than_32_bits_count() -> None:
    numel = 2**31 + 3001
    shadow = torch.zeros(numel, device="cuda")
    param = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    cuda.prepare(UpdateBatch([shadow], [param]))(0.25)
    assert bool((shadow == 0.25).all())


def test_without_triton_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    cuda._installed.cache_clear()
    batch = _batch(torch.float32, torch.bfloat16)
    expected = [
        torch.lerp(s, p.float(), 0.25) for s, p in zip(batch.averages, batch.params, strict=True)
    ]
    try:
        with pytest.warns(UserWarning, match="Triton is not installed"):
            step = cuda.prepare(batch)
        cuda.prepare(batch)  # a second warning would be an error
    finally:
        cuda._installed.cache_clear()
    step(0.25)
    assert all(torch.equal(s, e) for s, e in zip(batch.averages, expected, strict=True))


def _noisy(box: Box, shape: tuple[int, ...], values: torch.Tensor, call: int) -> UpdateBatch:
    """The average of one box of a tensor of `shape`, with the noise that belongs there."""
    local = values[
        tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    ].contiguous()
    pieces = positions("layer.weight", [box], shape)
    split = [part.contiguous() for part in local.view(-1).split([numel for numel, _ in pieces])]
    shadows = [torch.ones_like(part, dtype=torch.bfloat16) for part in split]
    return UpdateBatch(
        shadows, split, noise=Noise(77 << 32 | 5, lambda: call, [place for _, place in pieces])
    )


@pytest.mark.parametrize("boxes", [
    [Box((0, 0, 0), (40, 30, 50))],
    [Box((0, 0, 0), (13, 30, 50)), Box((13, 0, 0), (27, 30, 50))],
    [Box((0, 0, 0), (40, 30, 21)), Box((0, 0, 21), (40, 30, 29))],
    [Box((5, 0, 0), (35, 11, 50)), Box((0, 0, 0), (5, 30, 50)), Box((5, 11, 0), (35, 19, 50))],
    [Box((0, 3, 7), (40, 20, 40))],
])  # fmt: skip
def test_stochastic_rounding_does_not_depend_on_the_cut(boxes: list[Box]) -> None:
    torch.manual_seed(1)
    shape = (40, 30, 50)
    values = torch.randn(shape, device="cuda")
    whole = _noisy(Box((0, 0, 0), shape), shape, values, 3)
    step = stochastic.prepare(whole, whole.noise)  # type: ignore[arg-type]
    step(0.3)
    expected = whole.averages[0].view(shape)
    for box in boxes:
        batch = _noisy(box, shape, values, 3)
        cuda.prepare(batch)(0.3)
        region = expected[
            tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        ]
        assert torch.equal(torch.cat([s.view(-1) for s in batch.averages]), region.reshape(-1))


def test_stochastic_rounding_is_unbiased() -> None:
    """10 000 updates towards a constant target: the mean over elements within 4 standard errors of float64."""
    numel, weight, target = 1 << 16, 1e-3, 1.01
    call = [0]
    shadow = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    param = torch.full((numel,), target, device="cuda")
    noise = Noise(9, lambda: call[0], [positions("w", [Box((0,), (numel,))], (numel,))[0][1]])
    step = cuda.prepare(UpdateBatch([shadow], [param], noise=noise))
    for number in range(1, 10_001):
        call[0] = number
        step(weight)
    exact = float(param[0]) + (1 - float(param[0])) * (1 - weight) ** 10_000
    error = shadow.double() - exact
    assert abs(float(error.mean())) < 4 * float(error.std()) / numel**0.5
    nearest = torch.ones(1, dtype=torch.bfloat16, device="cuda")
    for _ in range(10):
        nearest.copy_(torch.lerp(nearest.float(), param[:1], weight))
    assert float(nearest) == 1.0  # rounded to nearest it would never have moved
