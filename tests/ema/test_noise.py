"""Stochastic rounding on CPU: where elements lie, the bits drawn there, and what becomes of an average."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ema_ckpt.core.box import Box
from ema_ckpt.core.errors import UsageError
from ema_ckpt.ema.engines import stochastic
from ema_ckpt.ema.engines.noise import Noise, Position, positions, random_bits
from ema_ckpt.ema.engines.update_batch import UpdateBatch
from ema_ckpt.ema.manager import ShardedEMA

CPU = torch.device("cpu")


def _places(numel: int, position: Position) -> list[int]:
    along = range(position.first, position.first + numel)
    return [position.base + j // position.run * position.stride + j % position.run for j in along]


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(
        draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)
    )
    return shape, Box(offsets, sizes)


@given(_boxes())
def test_positions_are_those_of_the_global_tensor(drawn: tuple[tuple[int, ...], Box]) -> None:
    shape, box = drawn
    numbers = np.arange(prod(shape)).reshape(shape)
    expected = numbers[
        tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    ].reshape(-1)
    found = [
        place
        for numel, position in positions("w", [box], shape)
        for place in _places(numel, position)
    ]
    assert found == expected.tolist()
    numel, position = positions("w", [box], shape)[0]
    assert _places(numel, position)[numel // 2 :] == _places(
        numel - numel // 2, position.after(numel // 2)
    )


def test_a_shard_of_any_dimension_is_one_piece() -> None:
    for box in (
        Box((2, 0, 0), (3, 4, 6)),
        Box((0, 1, 0), (8, 2, 6)),
        Box((0, 0, 3), (8, 4, 3)),
        Box((2, 0, 3), (3, 4, 3)),
    ):
        assert len(positions("w", [box], (8, 4, 6))) == 1


def test_bits_are_those_of_philox() -> None:
    """Against the known answers that come with Random123, for a counter and key of ones and of zeros."""
    zeros = random_bits(Position(0, 1, 1, 0), 0, 1, 0, 0, CPU)
    assert int(zeros) == 0x6627E8D5 & 0xFFFF
    ones = random_bits(Position(-1, 1, 1, 0xFFFFFFFF), 0, 1, -1, 0xFFFFFFFF, CPU)
    assert int(ones) == 0x408F276D & 0xFFFF


def test_seed_call_and_name_all_matter() -> None:
    position = positions("w", [Box((0,), (1000,))], (1000,))[0][1]
    other = positions("v", [Box((0,), (1000,))], (1000,))[0][1]
    drawn = [
        random_bits(place, 0, 1000, seed, call, CPU)
        for place, seed, call in (
            (position, 1, 1),
            (position, 2, 1),
            (position, 1 << 40, 1),
            (position, 1, 2),
            (other, 1, 1),
        )
    ]
    same = [torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i]]
    assert not any(same)
    assert abs(float(torch.cat(drawn).double().mean()) - 32767.5) < 4 * 18918 / 5000**0.5


@pytest.mark.thorough
def test_rounding_goes_to_a_neighbour_with_the_probability_of_the_distance() -> None:
    numel = 200_000
    values = torch.full((numel,), 1 + 2**-7 * 0.3)  # bfloat16 has 1 and 1 + 2^-7
    bits = random_bits(Position(0, numel, numel, 5), 0, numel, 3, 1, CPU)
    got = stochastic.round_stochastically(values, bits)
    assert set(got.tolist()) == {1.0, 1 + 2**-7}
    assert abs(float((got > 1).double().mean()) - 0.3) < 4 * (0.3 * 0.7 / numel) ** 0.5
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.5, -2.0])
    kept = stochastic.round_stochastically(odd, torch.full((7,), 0xFFFF, dtype=torch.int32))
    assert torch.equal(kept.nan_to_num(7), odd.nan_to_num(7))


def test_what_is_not_finite_is_kept_and_counted() -> None:
    events = torch.zeros((), dtype=torch.int64)
    shadow = torch.ones(4, dtype=torch.bfloat16)
    place = Position(0, 4, 4, 0)
    batch = UpdateBatch(
        [shadow],
        [torch.tensor([1.0, torch.nan, 3.0, torch.inf])],
        None,
        events,
        Noise(0, lambda: 1, [place]),
    )
    stochastic.prepare(batch, Noise(0, lambda: 1, [place]))(0.5)
    assert shadow.tolist() == [1.0, 1.0, 2.0, 1.0]
    assert int(events) == 1


def test_the_manager_draws_by_call_so_that_a_resumed_run_goes_on_alike() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(40, 30)

    def moved(ema: ShardedEMA, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            with torch.no_grad():
                for param in ema.model.parameters():
                    param.copy_(torch.randn_like(param))
            ema.update()

    options = {"dtype": torch.bfloat16, "rounding": "stochastic", "seed": 4}
    through, first, second = (ShardedEMA(model(), 0.999, **options) for _ in range(3))  # type: ignore[arg-type]
    moved(through, range(20))
    moved(first, range(9))
    second.load_state_dict(first.state_dict())
    moved(second, range(9, 20))
    want = through.state_dict()["weights"]
    assert all(
        torch.equal(tensor, want[name]) for name, tensor in second.state_dict()["weights"].items()
    )
    assert want["weight"].dtype is torch.bfloat16


@pytest.mark.thorough
def test_two_thousand_updates_are_unbiased() -> None:
    numel, weight = 4096, 5e-3
    model = nn.Linear(numel, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
        ema = ShardedEMA(model, 1 - weight, dtype=torch.bfloat16, rounding="stochastic", seed=1)
        model.weight.fill_(1.01)
    for _ in range(2000):
        ema.update()
    target = float(model.weight.detach()[0, 0])
    exact = target + (1 - target) * (1 - weight) ** 2000
    error = ema.state_dict()["weights"]["weight"].double() - exact
    assert abs(float(error.mean())) < 4 * float(error.std()) / numel**0.5


def test_it_is_for_bfloat16() -> None:
    with pytest.raises(UsageError, match=r"dtype=torch\.bfloat16"):
        ShardedEMA(nn.Linear(2, 2), rounding="stochastic")
