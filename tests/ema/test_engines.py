from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from ema_ckpt.ema.engines import cpu, foreach
from ema_ckpt.ema.engines.update_batch import Step, UpdateBatch
from tests.ema import reference_engine as reference

pytestmark = pytest.mark.usefixtures("small_blocks")

Prepare = Callable[[UpdateBatch], Step]
PREPARES = [cpu.prepare, foreach.prepare]
SHAPES = [(3,), (), (0, 8), (7, 5), (1,), (8, 11), (33, 65), (2, 3, 4, 5), (700,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that the tensors here meet every way of being cut and joined."""
    monkeypatch.setattr(cpu, "BLOCK_NUMEL", 256)
    monkeypatch.setattr(foreach, "_SCRATCH_NUMEL", 1000)


def _arena(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors that follow each other in memory, as the manager's averages do."""
    numels = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.zeros(sum(numels), dtype=dtype)
    return [piece.view(shape) for piece, shape in zip(flat.split(numels), shapes, strict=True)]


def _params(dtype: torch.dtype, seed: int, strided: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.complex64 if dtype.is_complex else torch.float32
    made = [torch.randn(shape, generator=generator, dtype=drawn).to(dtype) for shape in SHAPES]
    if strided:
        made = [p.t().contiguous().t() if p.dim() == 2 else p for p in made]
        made[-2] = made[-2].to(memory_format=torch.channels_last)
    return made


def _batch(
    shadow_dtype: torch.dtype,
    param_dtype: torch.dtype,
    *,
    compensate: bool,
    skip: bool,
    strided: bool = False,
) -> UpdateBatch:
    shadows = _arena(SHAPES, shadow_dtype)
    for shadow, start in zip(shadows, _params(param_dtype, 0), strict=True):
        shadow.copy_(start)
    residuals = (
        _arena(SHAPES, shadow_dtype if shadow_dtype.is_complex else torch.bfloat16)
        if compensate
        else None
    )
    events = torch.zeros((), dtype=torch.int64) if skip else None
    return UpdateBatch(shadows, _params(param_dtype, 0, strided), residuals, events)


def _run(batch: UpdateBatch, move: Step, weights: list[float], spoil: bool) -> None:
    for seed, weight in enumerate(weights, start=1):
        for param, value in zip(batch.params, _params(batch.params[0].dtype, seed), strict=True):
            param.copy_(value)
        if spoil and seed == 2:
            batch.params[3][2, 3] = torch.nan
            batch.params[6][31, 7] = torch.inf
        move(weight)


@pytest.mark.parametrize("prepare", PREPARES)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shadow_dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", DTYPES)
def test_engines_equal_torch_lerp_bit_for_bit(
    prepare: Prepare, shadow_dtype: torch.dtype, param_dtype: torch.dtype, strided: bool
) -> None:
    batch = _batch(shadow_dtype, param_dtype, compensate=False, skip=False, strided=strided)
    expected = [shadow.clone() for shadow in batch.averages]
    weights = [0.3, 1e-4, 0.7, 1.0, 0.0]
    _run(batch, prepare(batch), weights, spoil=False)
    for seed, weight in enumerate(weights, start=1):
        for shadow, value in zip(expected, _params(param_dtype, seed), strict=True):
            shadow.copy_(
                torch.lerp(shadow.to(batch.compute_dtype), value.to(batch.compute_dtype), weight)
            )
    for got, want in zip(batch.averages, expected, strict=True):
        assert torch.equal(got, want)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).nan_to_num(5)


@pytest.mark.parametrize("prepare", PREPARES)
@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("shadow_dtype", "param_dtype"),
    [
        *product([torch.float32, torch.bfloat16], repeat=2),
        *product([torch.complex64], [torch.complex64, torch.complex128]),
    ],
)
@pytest.mark.parametrize("spoil", [False, True])
def test_engines_equal_the_reference(
    prepare: Prepare,
    compensate: bool,
    skip: bool,
    param_dtype: torch.dtype,
    shadow_dtype: torch.dtype,
    spoil: bool,
) -> None:
    fast = _batch(shadow_dtype, param_dtype, compensate=compensate, skip=skip)
    plain = _batch(shadow_dtype, param_dtype, compensate=compensate, skip=skip)
    weights = [0.3, 1e-4, 0.7, 1e-3]
    _run(fast, prepare(fast), weights, spoil)
    _run(plain, lambda weight: reference.update(plain, weight), weights, spoil)
    for got, want in zip(fast.averages, plain.averages, strict=True):
        assert torch.equal(_numbers(got), _numbers(want))
    for got, want in zip(fast.residuals or (), plain.residuals or (), strict=True):
        assert torch.equal(_numbers(got), _numbers(want))
    if fast.nonfinite_count is not None and plain.nonfinite_count is not None:
        assert int(fast.nonfinite_count) == int(plain.nonfinite_count) == int(spoil)


def test_an_element_whose_new_value_is_not_finite_keeps_its_average() -> None:
    batch = _batch(torch.float32, torch.bfloat16, compensate=True, skip=True)
    step = cpu.prepare(batch)
    before = [shadow.clone() for shadow in batch.averages]
    batch.params[3][2, 3] = torch.nan
    step(0.5)
    assert batch.averages[3][2, 3] == before[3][2, 3]
    batch.params[3][2, 3] = 4.0
    step(0.5)
    assert batch.averages[3][2, 3] == (before[3][2, 3] + 4) / 2
    assert int(batch.nonfinite_count) == 1  # type: ignore[arg-type]


def test_neighbours_are_moved_as_one_block() -> None:
    batch = _batch(torch.float32, torch.bfloat16, compensate=False, skip=False)
    blocks = list(cpu._blocks(batch))
    assert (
        max(len(block.params) for block in blocks) == 6
    )  # 3 + 1 + 35 + 1 + 88 + 120; (0, 8) has none
    assert all(block.average.numel() <= cpu.BLOCK_NUMEL for block in blocks)
    assert sum(block.average.numel() for block in blocks) == sum(
        shadow.numel() for shadow in batch.averages
    )


def test_scratch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    made: list[int] = []
    empty = torch.empty

    def counting(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        made.append(tensor.nbytes)
        return tensor

    batch = _batch(torch.float32, torch.bfloat16, compensate=True, skip=True)
    big = UpdateBatch([torch.zeros(3_000_000)], [torch.zeros(3_000_000, dtype=torch.bfloat16)])
    monkeypatch.setattr(torch, "empty", counting)
    for step in (cpu.prepare(batch), cpu.prepare(big)):
        step(0.1)
    assert sum(made) <= 64 << 20


def _random_walk(steps: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return 1.0 + torch.randn(steps, numel, generator=generator).mul_(1e-4).cumsum(0)


def _constant_target(steps: int, numel: int) -> torch.Tensor:
    return torch.full((steps, numel), 1.01)


def _noise(steps: int, numel: int) -> torch.Tensor:
    return torch.randn(steps, numel, generator=torch.Generator().manual_seed(3))


def _slow_drift(steps: int, numel: int) -> torch.Tensor:
    return 1.0 + 1e-4 * torch.arange(1, steps + 1, dtype=torch.float32)[:, None].expand(
        steps, numel
    )


def _error(path: torch.Tensor, decay: float, compensate: bool) -> tuple[float, float]:
    """Relative L2 error after the path, and that of `torch.lerp` itself, against float64."""
    start = torch.ones(path.shape[1])
    residuals = [torch.zeros(path.shape[1], dtype=torch.bfloat16)] if compensate else None
    live = start.clone()
    batch = UpdateBatch([start.clone()], [live], residuals)
    step, exact, lerped = cpu.prepare(batch), start.double(), start.clone()
    for value in path:
        live.copy_(value)
        step(1 - decay)
        exact.lerp_(value.double(), 1 - decay)
        lerped.lerp_(value, 1 - decay)
    norm = exact.norm()
    return float((batch.averages[0].double() - exact).norm() / norm), float(
        (lerped.double() - exact).norm() / norm
    )


@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999, 0.9999])
def test_errors_against_float64(decay: float) -> None:
    noise, _ = _error(_noise(1000, 1000), decay, compensate=False)
    assert noise <= 1e-6
    for path in (_random_walk(1000, 1000), _constant_target(1000, 1000)):
        error, lerp_error = _error(path, decay, compensate=False)
        assert error <= 1.05 * lerp_error


@pytest.mark.thorough
@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999, 0.9999, 0.99999])
@pytest.mark.parametrize("path", [_noise, _random_walk, _constant_target, _slow_drift])
def test_compensated_errors_against_float64(
    decay: float, path: Callable[[int, int], torch.Tensor]
) -> None:
    error, _ = _error(path(1000, 1000), decay, compensate=True)
    assert error <= 1e-7


def test_low_precision_averages_stand_still_and_float32_does_not() -> None:
    """1 000 updates from 1 towards 2 at decay 0.9999 are 1.0952; bfloat16 rounds every one of them away."""
    ends = {}
    for dtype in (torch.bfloat16, torch.float32):
        batch = UpdateBatch(
            [torch.ones(1, dtype=dtype)], [torch.full((1,), 2.0, dtype=torch.bfloat16)]
        )
        step = cpu.prepare(batch)
        for _ in range(1000):
            step(1 - 0.9999)
        ends[dtype] = float(batch.averages[0])
    assert ends[torch.bfloat16] == 1.0
    assert ends[torch.float32] == pytest.approx(2 - 0.9999**1000, rel=1e-5)


def test_pieces_of_a_strided_tensor_tile_it() -> None:
    param = torch.arange(3 * 200, dtype=torch.float32).view(200, 3).t()
    shadow = torch.zeros(3, 200)
    pieces = list(cpu._split(cpu._Tensors(shadow, None, param)))
    assert all(piece[0].numel() <= cpu.BLOCK_NUMEL for piece in pieces)
    for piece in pieces:
        piece[0].copy_(piece[2])
    assert torch.equal(shadow, param)
