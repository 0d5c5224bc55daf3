"""Averages in pinned host memory: the bits of those on the device, whatever races the training loop offers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ema_ckpt.ema.engines import cuda, offload
from ema_ckpt.ema.manager import ShardedEMA

DECAY = 0.9


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slots so small that tensors are cut and joined."""
    monkeypatch.setattr(offload, "SLOT_NBYTES", 1 << 20)
    yield
    torch.cuda.synchronize()


class Bag(nn.Module):
    def __init__(self, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(shape).to("cuda", dtype) for shape in shapes])


SMALL = [(3,), (), (70, 50), (1000, 700), (5,), (513, 1025), (2048,)]
LARGE = [
    (4096, 4096),
    (100,),
    (4096, 4096),
    (3000, 1111),
]  # tens of milliseconds to copy: a race is lost for sure


def _noise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, device="cuda"))


def _weights(ema: ShardedEMA) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in ema.state_dict()["weights"].items()}


def _equal(a: ShardedEMA, b: ShardedEMA) -> bool:
    want = _weights(b)
    return all(torch.equal(tensor, want[name]) for name, tensor in _weights(a).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [True, "sync"])
@pytest.mark.parametrize("options", [
    {},
    {"compensate": True},
    {"nonfinite": "skip"},
    {"every": 2},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16, "rounding": "stochastic", "seed": 11},
])  # fmt: skip
def test_bits_are_those_of_the_device(
    dtype: torch.dtype, mode: Any, options: dict[str, Any]
) -> None:
    model = Bag(dtype, SMALL)
    plain = ShardedEMA(model, DECAY, **options)
    away = ShardedEMA(model, DECAY, offload=mode, **options)
    for seed in range(5):
        away.wait()
        _noise(model, seed)
        if options.get("nonfinite") and seed == 2:
            model.weights[3].data[5, 5] = torch.nan
        plain.update()
        away.update()
    assert all(shadow.average.is_pinned() for shadow in away._averages.shadows)
    assert _equal(away, plain)
    assert away.nonfinite_events == plain.nonfinite_events == int(bool(options.get("nonfinite")))
    if options.get("compensate"):
        want = {name: tensor.cpu() for name, tensor in plain.state_dict()["residual"].items()}
        assert all(torch.equal(t, want[name]) for name, t in away.state_dict()["residual"].items())


def test_bits_are_the_same_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Bag(torch.bfloat16, SMALL)
    plain = ShardedEMA(model, DECAY)
    monkeypatch.setattr(cuda, "serves", lambda batch: False)
    away = ShardedEMA(model, DECAY, offload=True)
    for seed in range(3):
        away.wait()
        _noise(model, seed)
        plain.update()
        away.update()
    assert _equal(away, plain)


def test_parameters_overwritten_after_wait_do_not_reach_the_average() -> None:
    model = Bag(torch.float32, LARGE)
    plain = ShardedEMA(model, DECAY)
    away = ShardedEMA(model, DECAY, offload=True)
    for seed in range(200):
        plain.update()
        away.update()
        away.wait()
        _noise(model, seed)
    assert _equal(away, plain)


def test_without_wait_they_do() -> None:
    """The control: the race that the others do not lose is there."""
    model = Bag(torch.float32, LARGE)
    plain = ShardedEMA(model, DECAY)
    away = ShardedEMA(model, DECAY, offload=True)
    for seed in range(5):
        plain.update()
        away.update()
        _noise(model, seed)
    assert not _equal(away, plain)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_steps_of_an_optimizer_wait(options: dict[str, bool]) -> None:
    model = Bag(torch.float32, LARGE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    plain = ShardedEMA(model, DECAY)
    away = ShardedEMA(model, DECAY, offload=True)
    generator = torch.Generator(device="cuda").manual_seed(0)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator, device="cuda")
    for _ in range(200):
        optimizer.step()
        plain.update()
        away.update()
    assert _equal(away, plain)


def test_attached_managers_of_two_decays_share_the_slots() -> None:
    model = Bag(torch.bfloat16, LARGE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = [
        (ShardedEMA(model, decay, offload=True), ShardedEMA(model, decay)) for decay in (0.9, 0.99)
    ]
    for ema in (ema for pair in pairs for ema in pair):
        ema.attach(optimizer)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    held = torch.cuda.memory_allocated()
    for _ in range(10):
        optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - held < 4 << 20
    for away, plain in pairs:
        assert _equal(away, plain)


def test_swap_shows_the_average_and_gives_the_live_weights_back() -> None:
    model = Bag(torch.float32, LARGE)
    away = ShardedEMA(model, DECAY, offload=True)
    for seed in range(3):
        away.wait()
        _noise(model, seed)
        away.update()
    live = [param.detach().clone() for param in model.parameters()]
    with away.swap():
        inside = [param.detach().cpu() for param in model.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), live, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(inside, _weights(away).values(), strict=True))


def test_state_goes_out_and_in() -> None:
    model = Bag(torch.float32, LARGE)
    away = ShardedEMA(model, DECAY, offload=True)
    other = ShardedEMA(model, DECAY, offload=True)
    for seed in range(3):
        away.wait()
        _noise(model, seed)
        away.update()
        state = away.state_dict()
    assert all(tensor.device.type == "cpu" for tensor in state["weights"].values())
    other.load_state_dict(state)
    away.update()
    other.update()
    assert _equal(away, other)
    assert other.num_updates == 4
    other.update()
    other.reset()
    assert other.num_updates == 0
    live = dict(model.named_parameters())
    assert all(torch.equal(t, live[name].detach().cpu()) for name, t in _weights(other).items())


def test_the_average_follows_a_model_to_the_device() -> None:
    model = Bag(torch.float32, SMALL).cpu()
    away = ShardedEMA(model, DECAY, offload=True)
    plain = ShardedEMA(model, DECAY)
    model.cuda()
    for seed in range(3):
        away.wait()
        _noise(model, seed)
        plain.update()
        away.update()
    assert all(shadow.average.is_pinned() for shadow in away._averages.shadows)
    assert _equal(away, plain)


def test_memory_is_of_the_size_asked_for_and_given_back() -> None:
    before = torch.cuda.memory_allocated()
    model = Bag(torch.float32, LARGE)
    held = torch.cuda.memory_allocated()
    away = ShardedEMA(model, DECAY, offload=True)
    away.update()
    away.wait(host=True)
    slab = away._averages.shadows[0].average.untyped_storage().nbytes()
    assert slab < away.nbytes + 64 * 4 * len(LARGE)
    assert torch.cuda.memory_allocated() - held <= 4 << 20
    away.update()
    del away, model
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("offers_time", [True, False])
def test_slots_go_side_by_side_only_where_updates_fall_behind(offers_time: bool) -> None:
    model = Bag(torch.float32, LARGE)
    others = set(offload._steps)
    reference, ema = ShardedEMA(model, DECAY), ShardedEMA(model, DECAY, offload=True)
    for manager in (reference, ema):
        manager.update()
    ema.wait(host=True)
    (step,) = set(offload._steps) - others
    for seed in range(4):
        _noise(model, seed)
        for _ in range(4):
            reference.update()
            ema.update()
            if offers_time:
                torch.cuda._sleep(200_000_000)  # about 100 ms
        ema.wait(host=True)
    assert step.slots_in_flight == (1 if offers_time else offload._SLOTS)
    assert _equal(ema, reference)
