from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.utils.parametrizations import weight_norm

from ema_ckpt.core.errors import StateError, UsageError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.master_weights import master_weights
from ema_ckpt.ema.schedules import HalfLife, PowerFunction, Warmup


def one_parameter(start: complex = 1.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, start)
    return model


def put(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)


def average(ema: ShardedEMA, name: str = "weight") -> torch.Tensor:
    return ema.state_dict()["weights"][name].clone()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))


def shake(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.1
            )


# Arithmetic


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_thousand_small_steps_arrive(dtype: torch.dtype) -> None:
    """In bfloat16 the average would stay at exactly 1."""
    model = one_parameter(1.0, dtype)
    ema = ShardedEMA(model, 0.9999)
    put(model, 2.0)
    for _ in range(1000):
        ema.update()
    assert average(ema).dtype is torch.float32
    assert float(average(ema)) == pytest.approx(1.09517, abs=5e-6)
    with ema.swap():
        assert float(model.weight.detach()) == pytest.approx(1.09517, rel=2**-8)
    assert float(average(ema)) == pytest.approx(1.09517, abs=5e-6)


def test_mixed_dtypes_need_no_option() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4), nn.Linear(4, 4, dtype=torch.float64)
    )
    ema = ShardedEMA(model, 0.9)
    exact = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    for step in range(3):
        shake(model, step)
        ema.update()
        for name, p in model.named_parameters():
            exact[name] = 0.9 * exact[name] + 0.1 * p.detach().double()
    for name, tensor in ema.state_dict()["weights"].items():
        assert tensor.dtype is torch.float32
        torch.testing.assert_close(tensor.double(), exact[name], rtol=2e-6, atol=1e-7)


def test_the_first_update_averages_with_the_start() -> None:
    model = one_parameter(1.0)
    ema = ShardedEMA(model, 0.75)
    put(model, 2.0)
    ema.update()
    assert float(average(ema)) == 1.25


def test_every_moves_at_its_multiples_by_the_product_also_after_a_resume() -> None:
    model = one_parameter(0.0)
    ema = ShardedEMA(model, Warmup(0.9), every=3)
    betas = [Warmup(0.9).beta(i) for i in range(1, 13)]
    expected, moves = torch.zeros(1, 1), []
    for call in range(1, 13):
        put(model, float(call))
        if call == 11:  # between two moves: go on in a new manager
            state = copy.deepcopy(ema.state_dict())
            ema = ShardedEMA(model, Warmup(0.9), every=3)
            ema.load_state_dict(state)
        before = average(ema)
        ema.update()
        if not torch.equal(before, average(ema)):
            moves.append(call)
        if call % 3 == 0:
            product = 1.0 * betas[call - 3] * betas[call - 2] * betas[call - 1]
            expected.lerp_(torch.full((1, 1), float(call)), 1 - product)
            assert ema.current_decay == product
        if call == 10:
            assert ema.num_updates == 10
    assert moves == [3, 6, 9, 12]
    assert torch.equal(average(ema), expected)


@pytest.mark.parametrize("every", [1, 10])
def test_every_does_not_change_the_decay_per_call(every: int) -> None:
    model = one_parameter(0.0)
    ema = ShardedEMA(model, 0.99, every=every)
    put(model, 1.0)
    for _ in range(100):
        ema.update()
    assert float(average(ema)) == pytest.approx(1 - 0.99**100, rel=1e-6)


@pytest.mark.parametrize(
    "schedule", [HalfLife(100, unit="samples"), PowerFunction(0.15, unit="samples")]
)
def test_samples_are_counted_and_survive_a_resume(schedule: Any) -> None:
    def run(resume_after: int | None) -> tuple[torch.Tensor, float, int]:
        model = one_parameter(0.0)
        ema = ShardedEMA(model, schedule, every=2)
        for call, samples in enumerate([8, 16, 8, 32, 8, 4], start=1):
            put(model, float(call))
            ema.update(samples=samples)
            if call == resume_after:
                state = copy.deepcopy(ema.state_dict())
                ema = ShardedEMA(model, schedule, every=2)
                ema.load_state_dict(state)
        return average(ema), ema.current_decay, ema.samples_seen

    straight = run(None)
    for call in (1, 2, 3):
        resumed = run(call)
        assert torch.equal(straight[0], resumed[0])
        assert straight[1:] == resumed[1:]
    assert straight[2] == 76


def test_a_samples_schedule_without_a_number_changes_nothing() -> None:
    model = one_parameter(1.0)
    ema = ShardedEMA(model, HalfLife(10, unit="samples"))
    put(model, 2.0)
    with pytest.raises(UsageError, match="samples"):
        ema.update()
    assert ema.num_updates == 0
    assert float(average(ema)) == 1.0


def test_the_effective_decay_goes_on_smoothly_after_a_restart() -> None:
    def log(ema: ShardedEMA, calls: int) -> list[float]:
        decays = []
        for _ in range(calls):
            ema.update()
            decays.append(ema.current_decay)
        return decays

    straight = log(ShardedEMA(one_parameter(), Warmup(0.9999)), 20)
    first = ShardedEMA(one_parameter(), Warmup(0.9999))
    part = log(first, 12)
    second = ShardedEMA(one_parameter(), Warmup(0.9999))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.current_decay == part[-1]
    assert part + log(second, 8) == straight
    changed = ShardedEMA(
        one_parameter(), 0.5
    )  # the constructor's settings win, the saved counter too
    changed.load_state_dict(copy.deepcopy(first.state_dict()))
    assert (changed.num_updates, changed.current_decay) == (12, 0.5)
    assert json.loads(changed.state_dict()["config"])["decay"] == 0.5


def test_compensation_keeps_a_slow_drift() -> None:
    """At 100, float32 has steps of 8e-6; no update here is as large as half of that."""
    model = one_parameter(100.0)
    plain, careful = ShardedEMA(model, 0.99999), ShardedEMA(model, 0.99999, compensate=True)
    exact = 100.0
    for step in range(1, 1001):
        put(model, 100.0 + 1e-4 * step)
        plain.update()
        careful.update()
        exact += (float(model.weight.detach()) - exact) * (1 - 0.99999)
    assert float(average(careful)) == pytest.approx(exact, rel=1e-7)
    assert abs(float(average(plain)) - exact) == pytest.approx(exact - 100.0)
    assert set(careful.state_dict()["residual"]) == {"weight"}
    resumed = ShardedEMA(model, 0.99999, compensate=True)
    resumed.load_state_dict(copy.deepcopy(careful.state_dict()))
    for ema in (careful, resumed):
        ema.update()
    assert torch.equal(average(careful), average(resumed))
    assert careful.nbytes == 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_complex_numbers_beside_a_dtype_that_has_no_complex_one(dtype: torch.dtype) -> None:
    model = one_parameter(1 + 2j, torch.complex64)
    manager = ShardedEMA(model, 0.5, dtype=dtype)
    with torch.no_grad():
        model.weight.mul_(3)
    manager.update()
    value = manager.state_dict()["weights"]["weight"]
    assert value.dtype == (torch.complex128 if dtype == torch.float64 else torch.complex64)
    assert complex(value) == 2 + 4j


def test_compensation_keeps_both_parts_of_a_complex_number() -> None:
    model = one_parameter(100.0, torch.complex64)
    careful = ShardedEMA(model, 0.99999, compensate=True)
    start, exact = 100.0 + 0.0j, 100.0 + 0.0j
    with torch.no_grad():
        for step in range(1, 1001):
            model.weight.fill_(start + 1e-4 * step * (1 + 2j) + 50j)
            careful.update()
            exact += (complex(model.weight) - exact) * (1 - 0.99999)
    found = complex(average(careful))
    assert found.real == pytest.approx(exact.real, rel=1e-7)
    assert found.imag == pytest.approx(exact.imag, rel=1e-7)
    resumed = ShardedEMA(model, 0.99999, compensate=True)
    resumed.load_state_dict(copy.deepcopy(careful.state_dict()))
    for ema in (careful, resumed):
        ema.update()
    assert torch.equal(average(careful), average(resumed))


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_one_bad_step_is_counted_and_leaves_the_average_finite(nonfinite: Any) -> None:
    model = network()
    ema = ShardedEMA(model, 0.9, nonfinite=nonfinite)
    for step in range(1, 8):
        shake(model, step)
        with torch.no_grad():
            kept = model[0].weight.clone()
            if step == 5:
                model[0].weight.fill_(torch.nan)
            before = ema._averages.shadows[0].average.clone()
            ema.update()
            if step == 5:
                assert torch.equal(ema._averages.shadows[0].average, before)
                assert ema.num_updates == 5
            model[0].weight.copy_(kept)
    assert ema.nonfinite_events == 1
    if nonfinite == "raise":
        with pytest.raises(StateError, match="not finite in 1 updates") as caught:
            ema.state_dict()
        assert caught.value.code == "non-finite"
    assert all(torch.isfinite(t).all() for t in ema.state_dict()["weights"].values())


def test_ignored_nan_spreads() -> None:
    model = one_parameter()
    ema = ShardedEMA(model, 0.9)
    put(model, float("nan"))
    ema.update()
    assert average(ema).isnan().all()
    assert ema.nonfinite_events == 0


# What is averaged


def test_integer_buffers_are_carried_along_and_floating_ones_as_asked() -> None:
    model = network()
    managers: dict[str, ShardedEMA] = {
        b: ShardedEMA(model, 0.5, buffers=b) for b in ("copy", "average", "skip")
    }  # type: ignore[arg-type]
    mean = model[1].running_mean.clone()
    for step in range(5):
        model(torch.randn(8, 3, generator=torch.Generator().manual_seed(step)))
        mean.lerp_(model[1].running_mean, 0.5)
        for ema in managers.values():
            ema.update()
    names = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    states = {kind: ema.state_dict()["weights"] for kind, ema in managers.items()}
    assert names & set(states["skip"]) == set()
    assert names <= set(states["copy"])
    assert torch.equal(states["copy"]["1.running_mean"], model[1].running_mean)
    assert torch.equal(states["average"]["1.running_mean"], mean)
    for kind in ("copy", "average"):
        assert states[kind]["1.num_batches_tracked"].dtype is torch.int64
        assert int(states[kind]["1.num_batches_tracked"]) == 5


@torch.no_grad()
def test_evaluation_uses_the_statistics_that_were_asked_for() -> None:
    model = nn.BatchNorm1d(1, affine=True, eps=1e-12)
    averaged, copied = ShardedEMA(model, 0.5, buffers="average"), ShardedEMA(model, 0.5)
    with torch.no_grad():
        model.running_mean.fill_(4.0)
        model.running_var.fill_(9.0)
    averaged.update(), copied.update()
    model.eval()
    x = torch.tensor([[10.0]])
    assert float(model(x)) == pytest.approx((10 - 4) / 3)
    with averaged.swap():  # mean (0 + 4) / 2, variance (1 + 9) / 2
        assert float(model(x)) == pytest.approx((10 - 2) / 5**0.5)
    with copied.swap():
        assert float(model(x)) == pytest.approx((10 - 4) / 3)
    assert float(model(x)) == pytest.approx((10 - 4) / 3)


def test_non_persistent_buffers_are_swapped_and_never_saved() -> None:
    model = one_parameter()
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    ema = ShardedEMA(model, 0.5, buffers="average")
    model.scratch.fill_(1.0)
    ema.update()
    assert set(ema.state_dict()["weights"]) == {"weight"}
    with ema.swap():
        assert model.scratch.tolist() == [0.5, 0.5]
    assert model.scratch.tolist() == [1.0, 1.0]


def test_a_buffer_that_the_model_replaces_is_still_followed() -> None:
    model = one_parameter()
    model.register_buffer("mean", torch.zeros(1))
    ema = ShardedEMA(model, 0.5, buffers="average")
    model.mean = torch.ones(1)
    ema.update()
    model.mean = torch.ones(1) * 3
    ema.update()
    assert float(average(ema, "mean")) == 1.75


def test_include_and_exclude_cross_dots_and_know_all_names_of_a_tied_tensor() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False), "norm": nn.LayerNorm(2)}
    )
    model["head"].weight = model["embed"].weight
    model["norm"].requires_grad_(False)
    assert [s.shard.fqn for s in ShardedEMA(model)._averages.shadows] == ["embed.weight"]
    assert [s.shard.fqn for s in ShardedEMA(model, include="head*")._averages.shadows] == [
        "embed.weight"
    ]
    included = ShardedEMA(model, include=["*"], exclude="norm.b*")
    assert [s.shard.fqn for s in included._averages.shadows] == ["embed.weight", "norm.weight"]
    assert json.loads(included.state_dict()["config"])["tied"] == {"embed.weight": ["head.weight"]}


def test_globs_that_match_nothing_are_mistakes() -> None:
    model = network()
    with pytest.raises(UsageError, match=r"include='head\.\*' matches none of '0.weight'"):
        ShardedEMA(model, include="head.*")
    with pytest.raises(UsageError, match="exclude='lora"):
        ShardedEMA(model, exclude=["lora*"])
    with pytest.raises(UsageError, match="0 of 6 parameters"):
        ShardedEMA(model, exclude="*")
    with pytest.raises(UsageError, match="0 of 6 parameters"):
        ShardedEMA(model.requires_grad_(False))
    assert (
        "1.running_mean"
        not in ShardedEMA(model, include="*", exclude="*running*").state_dict()["weights"]
    )


def _placeholder() -> nn.Module:
    model = one_parameter()
    model.weight.ds_id = 3  # as DeepSpeed marks a parameter of stage 3
    model.weight.data = torch.empty(0)
    return model


def _emptied() -> nn.Module:
    model = network()
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), "materialise first"),
        (_placeholder, "ZeRO stage 3"),
        (_emptied, "placeholders"),
        (lambda: nn.LazyLinear(3), "not initialised"),
    ],
)
def test_parameters_without_elements_to_average(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(StateError, match=words):
        ShardedEMA(make())


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_parameter_with_no_elements_keeps_its_shape() -> None:
    model = nn.Sequential(nn.Linear(8, 0, bias=False), nn.Linear(0, 2))
    ema = ShardedEMA(model)
    ema.update()
    with ema.swap():
        assert model[0].weight.shape == (0, 8)
    state = ema.state_dict()
    assert state["weights"]["0.weight"].shape == (0, 8)
    ema.load_state_dict(copy.deepcopy(state))


def test_memory_layouts_of_parameters_do_not_matter() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(2, 2)).to(memory_format=torch.channels_last)
    model[1].weight = nn.Parameter(torch.randn(2, 2).t())
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        ema = ShardedEMA(model, 0.9)
        expected = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        shake(model, 1)
        ema.update()
        for name, p in model.named_parameters():
            assert torch.equal(
                average(ema, name), expected[name].lerp_(p.detach().float(), 1 - 0.9)
            ), name
        live = {name: p.detach().clone() for name, p in model.named_parameters()}
        with ema.swap():
            assert torch.equal(model[0].weight, expected["0.weight"].to(dtype))
        assert all(torch.equal(p, live[name]) for name, p in model.named_parameters())


def test_modules_with_computed_weights() -> None:
    """No copy of the module is made, so tensors that cannot be copied do no harm."""
    model = nn.Sequential(weight_norm(nn.Linear(3, 3)), nn.Linear(3, 1))
    model(torch.zeros(1, 3))
    model.cache = model[0].weight * 2  # not a leaf
    ema = ShardedEMA(model, 0.5)
    shake(model, 0)
    ema.update()
    assert set(ema.state_dict()["weights"]) == set(dict(model.named_parameters()))


# Names


def test_names_are_those_of_torch_whatever_wraps_the_model() -> None:
    expected = list(get_model_state_dict(network()))
    compiled = torch.compile(network(), backend="eager")
    checkpointed = network()
    checkpointed[3] = checkpoint_wrapper(checkpointed[3])
    inner = network()
    inner[0] = torch.compile(inner[0], backend="eager")
    inplace = network()
    inplace.compile(backend="eager")
    for model in (network(), compiled, checkpointed, inner, inplace):
        assert sorted(ShardedEMA(model).state_dict()["weights"]) == sorted(expected)


def test_a_module_that_is_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1), "_orig_mod": nn.Linear(1, 1)})
    assert [s.shard.fqn for s in ShardedEMA(model)._averages.shadows] == list(
        dict(model.named_parameters())
    )


def test_compiling_and_checkpointing_later_changes_nothing() -> None:
    model = network()
    ema = ShardedEMA(model, 0.5)
    compiled = torch.compile(model, backend="eager")
    model[3] = checkpoint_wrapper(model[3])
    compiled(torch.randn(2, 3))
    shake(model, 0)
    start = average(ema, "3.weight")
    ema.update()
    assert torch.equal(average(ema, "3.weight"), start.lerp(model[3].weight.detach(), 0.5))


# Changes of the model


def test_exchanged_memory_is_found_again() -> None:
    model = network()
    ema = ShardedEMA(model, 0.5)
    ema.update()
    start = average(ema, "0.weight")
    model.load_state_dict(
        {k: v + 1 if v.is_floating_point() else v for k, v in model.state_dict().items()},
        assign=True,
    )
    ema.update()
    assert torch.equal(average(ema, "0.weight"), start.lerp(model[0].weight.detach(), 0.5))
    model[0].weight.data = model[0].weight.data + 1
    start = average(ema, "0.weight")
    ema.update()
    assert torch.equal(average(ema, "0.weight"), start.lerp(model[0].weight.detach(), 0.5))


def _to_bfloat16(model: nn.Sequential) -> None:
    model.to(torch.bfloat16)


def _wider(model: nn.Sequential) -> None:
    model[0] = nn.Linear(4, 5)


def _broadcastable(model: nn.Sequential) -> None:
    model[0].bias.data = torch.zeros(1)


def _gone(model: nn.Sequential) -> None:
    del model[3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_to_bfloat16, "changed its dtype from torch.float32 to torch.bfloat16"),
        (_wider, r"changed its shape from \(5, 3\) to \(5, 4\)"),
        (_broadcastable, r"'0.bias' changed its shape from \(5,\) to \(1,\)"),
        (_gone, "no longer in the model: '3.weight', '3.bias'"),
    ],
)
def test_a_changed_model_raises_and_nothing_moves(
    change: Callable[[nn.Sequential], None], words: str
) -> None:
    model = network()
    ema = ShardedEMA(model, 0.5)
    before = copy.deepcopy(ema.state_dict()["weights"])
    averages = [shadow.average for shadow in ema._averages.shadows]
    change(model)
    with pytest.raises(StateError, match=words):
        ema.update()
    assert ema.num_updates == 0
    for shadow, average in zip(ema._averages.shadows, averages, strict=True):
        assert torch.equal(before[shadow.shard.fqn], average)


def test_bfloat16_parameters_that_become_float32_raise() -> None:
    model = network().bfloat16()
    ema = ShardedEMA(model, 0.5)
    ema.update()
    model.float()
    with pytest.raises(StateError, match="changed its dtype"):
        ema.update()


def test_reset_and_rebind() -> None:
    model = network()
    ema = ShardedEMA(model, 0.5)
    shake(model, 0)
    ema.update()
    other = network()
    shake(other, 1)
    start = average(ema, "0.weight")
    ema.rebind(other)
    ema.update()
    assert torch.equal(average(ema, "0.weight"), start.lerp(other[0].weight.detach(), 0.5))
    ema.reset()
    assert (ema.num_updates, ema.samples_seen, ema.current_decay) == (0, 0, 1.0)
    assert torch.equal(average(ema, "0.weight"), other[0].weight)
    with pytest.raises(StateError, match="no longer in the model"):
        ema.rebind(nn.Linear(3, 5))


def test_copy_to() -> None:
    model = network().bfloat16()
    ema = ShardedEMA(model, 0.5)
    shake(model, 0)
    ema.update()
    other = network().half()
    ema.copy_to(other)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, average(ema, name).half())
    with pytest.raises(StateError, match=r"lacks '0\.weight'"):
        ema.copy_to(nn.Linear(3, 5))
    with pytest.raises(StateError, match="cut in another way"):
        ema.copy_to(nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)))


class Tied(nn.Module):
    """Two layers with one weight, or with `tied=False` a weight each, registered in the order of `names`."""

    def __init__(self, *names: str, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in names:
            setattr(self, name, nn.Linear(3, 3))
        if tied:
            for name in names[1:]:
                getattr(self, name).weight = getattr(self, names[0]).weight


def test_a_tied_tensor_is_taken_and_copied_under_any_of_its_names() -> None:
    model = Tied("embed", "head")
    ema = ShardedEMA(model, 0.9999, compensate=True)
    for step in range(3):
        shake(model, step)
        ema.update()
    state = copy.deepcopy(ema.state_dict())
    assert "head.weight" not in state["weights"]
    for other in (Tied("head", "embed"), Tied("head"), Tied("embed", "head", tied=False)):
        loaded, start = (
            ShardedEMA(other, 0.9999, compensate=True),
            average(ShardedEMA(other), "head.bias"),
        )
        loaded.load_state_dict(state)
        for part in ("weights", "residual"):
            taken = loaded.state_dict()[part]
            for name in taken:
                assert torch.equal(
                    taken[name], state[part].get(name, state[part]["embed.weight"])
                ), (part, name)
        assert not torch.equal(average(loaded, "head.bias"), start)
        if hasattr(other, "embed"):
            ema.copy_to(other)
            assert torch.equal(other.head.weight, state["weights"]["embed.weight"])
            assert torch.equal(other.embed.weight, state["weights"]["embed.weight"])
    separate = ShardedEMA(Tied("embed", "head", tied=False))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(StateError, match=r"separate here: 'embed\.weight', 'head\.weight'"):
        separate.copy_to(model)
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(StateError, match=r"lacks averages: 'other\.weight', 'other\.bias'"):
        ShardedEMA(Tied("other")).load_state_dict(state)


def test_nothing_is_made_under_inference_mode() -> None:
    model = network()
    with torch.inference_mode():
        ema = ShardedEMA(model, 0.5)
        ema.update()
        with ema.swap():
            model(torch.randn(2, 3))
    assert not any(shadow.average.is_inference() for shadow in ema._averages.shadows)
    model(torch.randn(4, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    ema.update()


# Sources


def test_a_source_replaces_what_is_averaged() -> None:
    model = one_parameter(1.0, torch.bfloat16)
    masters = {"weight": torch.full((1, 1), 1.0)}
    asked: list[str] = []

    def source(fqn: str, param: torch.Tensor) -> torch.Tensor:
        asked.append(fqn)
        return masters[fqn]

    ema = ShardedEMA(model, 0.5, source=source)
    masters["weight"].fill_(1.001)  # bfloat16 cannot tell this from 1
    ema.update()
    assert float(average(ema)) == pytest.approx(1.0005)
    masters["weight"] = torch.full((1, 1), 3.0)  # another tensor
    ema.update()
    assert float(average(ema)) == pytest.approx(2.00025)
    assert asked == ["weight"] * 3
    with ema.swap():
        assert float(model.weight.detach()) == 2.0
    assert float(masters["weight"]) == 3.0
    masters["weight"] = torch.zeros(3)
    with pytest.raises(StateError, match=r"source gives 'weight' a tensor of \(3,\)"):
        ema.update()


class KeepsMasters(torch.optim.SGD):
    """Steps float32 copies, as fused optimizers with master weights do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master_param", p.detach().float().clone())
                master.sub_(p.grad.float(), alpha=group["lr"])
                p.data.copy_(master)


def test_master_weights() -> None:
    model = one_parameter(1.0, torch.bfloat16)
    optimizer = KeepsMasters(model.parameters(), lr=1e-4)
    ema = ShardedEMA(model, 0.5, source=master_weights(optimizer))
    expected = torch.ones(1, 1)
    for step in range(4):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        ema.update()
        expected.lerp_(torch.full((1, 1), 1.0 - 1e-4 * (step + 1)), 0.5)
    torch.testing.assert_close(average(ema), expected, rtol=1e-6, atol=0)
    assert float(model.weight.detach()) == 1.0
    plain = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.weight.grad = torch.ones_like(model.weight)
    plain.step()
    with pytest.raises(StateError, match="SGD keeps no master weights of 'weight'"):
        ShardedEMA(model, source=master_weights(plain))


# State


def test_the_state_aliases_the_average_and_loads_from_whole_tensors() -> None:
    model = network()
    ema = ShardedEMA(model, 0.5)
    shake(model, 0)
    ema.update()
    state = ema.state_dict()
    assert set(state) == {"weights", "num_updates", "samples_seen", "config"}
    assert state["num_updates"].dtype is torch.int64
    assert state["num_updates"].dim() == 0
    state["weights"]["0.weight"].fill_(7.0)
    assert ema._averages.shadows[0].average.eq(7.0).all()
    other = ShardedEMA(network(), 0.5)
    other.load_state_dict(state | {"config": json.loads(state["config"])})
    assert torch.equal(average(other, "0.weight"), state["weights"]["0.weight"])
    assert other.num_updates == 1


def test_loading_does_not_touch_the_models_buffers() -> None:
    model = network()
    ema = ShardedEMA(model)
    state = ema.state_dict()
    state["weights"]["1.running_mean"].fill_(9.0)
    ema.load_state_dict(state)
    assert model[1].running_mean.eq(0).all()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda weights: weights.pop("3.weight"), "lacks averages: '3.weight'"),
        (
            lambda weights: weights.update({"3.weight": torch.zeros(5, 2)}),
            r"'3.weight' has shape \(2, 5\)",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    spoil: Callable[[dict[str, Any]], object], words: str
) -> None:
    ema = ShardedEMA(network(), 0.5)
    state = copy.deepcopy(ema.state_dict())
    for tensor in state["weights"].values():
        tensor.fill_(5)
    state["num_updates"].fill_(9)
    spoil(state["weights"])
    before = copy.deepcopy(ema.state_dict()["weights"])
    with pytest.raises(StateError, match=words):
        ema.load_state_dict(state)
    assert ema.num_updates == 0
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in ema.state_dict()["weights"].items()
    )


@pytest.mark.filterwarnings("ignore")
def test_a_handmade_checkpoint_has_the_state_under_its_key(tmp_path: Path) -> None:
    model = network()
    ema = ShardedEMA(model, 0.5)
    shake(model, 0)
    ema.update()
    dcp.save({"model": model.state_dict(), "ema": ema}, checkpoint_id=tmp_path, no_dist=True)
    keys = set(dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata)
    assert {
        "ema.weights.0.weight",
        "ema.num_updates",
        "ema.samples_seen",
        "ema.config",
        "model.0.weight",
    } <= keys
    other = ShardedEMA(network(), 0.5)
    dcp.load({"ema": other}, checkpoint_id=tmp_path, no_dist=True)
    assert other.num_updates == 1
    for name, tensor in ema.state_dict()["weights"].items():
        assert torch.equal(tensor, average(other, name))


@pytest.mark.filterwarnings("ignore")
def test_a_manager_is_no_data_to_pickle(tmp_path: Path) -> None:
    ema = ShardedEMA(network())
    for attempt in (pickle.dumps, copy.deepcopy, lambda e: torch.save(e, tmp_path / "ema.pt")):
        with pytest.raises(UsageError, match="at the top of the tree"):
            attempt(ema)
    with pytest.raises(BaseException, match="at the top of the tree"):
        dcp.save({"state": {"ema": ema}}, checkpoint_id=tmp_path / "nested", no_dist=True)


# Settings


@pytest.mark.parametrize(
    "settings",
    [
        {"every": 0},
        {"every": 1.5},
        {"buffers": "average_all"},
        {"nonfinite": "drop"},
        {"dtype": torch.int8},
        {"compensate": True, "dtype": torch.bfloat16},
        {"rounding": "stochastic"},
        {"offload": "async"},
        {"decay": 2.0},
        {"shard_replicas": True},
        {"compensate": "yes"},
        {"shard_replicas": "yes"},
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ShardedEMA(network(), **settings)


@pytest.mark.parametrize(
    ("decay", "dtype", "warns"),
    [
        (0.9999, torch.bfloat16, True),
        (0.99, torch.bfloat16, True),
        (0.95, torch.bfloat16, False),
        (0.9999, torch.float16, True),
        (0.999, torch.float16, True),
        (0.99, torch.float16, False),
        (Warmup(0.9999), torch.bfloat16, True),
        (HalfLife(10_000), torch.bfloat16, True),
        (HalfLife(10**7, unit="samples"), torch.bfloat16, True),
        (PowerFunction(0.1), torch.bfloat16, True),
        (PowerFunction(0.1), torch.float32, False),
        (0.9999999, torch.float32, True),
        (1.0, torch.float32, False),
        (Warmup(1.0), torch.float32, False),
        (Warmup(1.0), torch.bfloat16, True),
        (0.99999, torch.float32, False),
    ],
)
def test_a_dtype_too_coarse_for_its_decay_is_warned_of(
    decay: Any, dtype: torch.dtype, warns: bool, recwarn: pytest.WarningsRecorder
) -> None:
    ShardedEMA(network(), decay, dtype=dtype)
    messages = [str(warning.message) for warning in recwarn.list]
    assert [("updates round to nothing" in message) for message in messages] == [True] * warns


def test_bytes_on_this_rank() -> None:
    model = network()
    numel = sum(p.numel() for p in model.parameters())
    assert ShardedEMA(model).nbytes == 4 * numel
    assert ShardedEMA(model, 0.9, dtype=torch.bfloat16).nbytes == 2 * numel
    assert repr(ShardedEMA(model)).startswith(f"ShardedEMA(6 tensors, {4 * numel} bytes")


def test_a_state_without_its_counter_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    ema, other = ShardedEMA(model, 0.5), ShardedEMA(nn.Linear(2, 2), 0.5)
    before = [shadow.average.clone() for shadow in ema._averages.shadows]
    state = {name: value for name, value in other.state_dict().items() if name != "num_updates"}
    with pytest.raises(StateError, match="num_updates"):
        ema.load_state_dict(state)
    assert all(
        torch.equal(shadow.average, kept)
        for shadow, kept in zip(ema._averages.shadows, before, strict=True)
    )


@pytest.mark.parametrize("value", [5, b"w", ["w*", 5], [None], object, True])
@pytest.mark.parametrize("option", ["include", "exclude"])
def test_globs_are_text(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{option} is a glob over names, or several; found "):
        ShardedEMA(nn.Linear(2, 2), **{option: value})


@pytest.mark.parametrize(("option", "value"), [("source", 3), ("source", "x"), ("seed", "0")])
def test_a_source_is_a_function_and_a_seed_a_number(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{option} is a "):
        ShardedEMA(nn.Linear(2, 2), **{option: value})


@pytest.mark.parametrize(
    "samples",
    [
        *(-1, 1.5, float("nan"), float("inf"), 1 << 63, "5", b"5", [5], 1j),
        torch.tensor([5, 6]),
        torch.empty((), device="meta"),
    ],
)
def test_samples_are_a_whole_number(samples: Any) -> None:
    model = nn.Linear(2, 2)
    ema = ShardedEMA(model, HalfLife(10, unit="samples"))
    with pytest.raises(UsageError, match="samples is the number of samples"):
        ema.update(samples=samples)
    with pytest.raises(UsageError, match="samples is the number of samples"):
        ema.attach(torch.optim.SGD(model.parameters()), samples=samples)
    assert (ema.num_updates, ema.samples_seen) == (0, 0)
    assert torch.isfinite(average(ema)).all()


@pytest.mark.parametrize(("change", "message"), [
    ({"weights": None}, "lacks 'weights'"),
    ({"num_updates": None}, "lacks 'num_updates'"),
    ({"num_updates": -1}, "saved num_updates is none"),
    ({"config": "{"}, "no JSON document"),
    ({"weights": 5}, "'weights' of the state to load are tensors by name; found int"),
    ({"weights": {"weight": "x"}}, "are tensors by name; found str"),
    ({"residual": [1]}, "'residual' of the state to load are tensors by name; found list"),
])  # fmt: skip
def test_states_that_are_none(change: dict[str, Any], message: str) -> None:
    ema = ShardedEMA(nn.Linear(2, 2), 0.5)
    state = {
        name: value for name, value in {**ema.state_dict(), **change}.items() if value is not None
    }
    with pytest.raises(StateError, match=message):
        ema.load_state_dict(state)


class Drifting(nn.Module):
    """A buffer that each forward replaces by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.inner(x)


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_a_buffer_that_a_forward_replaces(buffers: Any) -> None:
    model = Drifting()
    ema = ShardedEMA(model, 0.5, buffers=buffers)
    model(torch.ones(3, 2))
    ema.update()
    model(torch.ones(3, 2))
    expected = model.mean if buffers == "copy" else torch.full((2,), 0.05)
    assert torch.allclose(ema.state_dict()["weights"]["mean"], expected)
    assert torch.allclose(ema.full_state_dict()["mean"], expected)


def test_a_call_that_raises_does_not_count() -> None:
    model, broken = network(), [False]

    def source(name: str, parameter: torch.Tensor) -> torch.Tensor | None:
        if broken[0]:
            raise ValueError(name)
        return None

    ema = ShardedEMA(model, 0.5, source=source)
    broken[0] = True
    with pytest.raises(ValueError, match="weight"):
        ema.update()
    with pytest.raises(StateError, match="none was recorded"):
        ema.advance()
    assert (ema.num_updates, ema.current_decay) == (0, 1.0)
    broken[0] = False
    ema.update()
    assert (ema.num_updates, ema.current_decay) == (1, 0.5)


def test_a_source_of_another_shape_is_refused() -> None:
    model = nn.Linear(4, 2, bias=False)
    for wrong in (torch.zeros(4, 2), torch.zeros(2, 2, 2), torch.zeros(2, 3)):
        with pytest.raises(StateError, match="source gives 'weight' a tensor of"):
            ShardedEMA(model, source=lambda *_, wrong=wrong: wrong)
    ShardedEMA(model, source=lambda *_: torch.zeros(8)).update()


def test_a_schedule_in_samples_is_attached_with_their_number() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = ShardedEMA(model, HalfLife(10, unit="samples"))
    with pytest.raises(UsageError, match="pass samples="):
        ema.attach(optimizer)
    ema.attach(optimizer, samples=4)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert ema.samples_seen == 4


def test_a_start_of_half_a_call_is_refused() -> None:
    with pytest.raises(UsageError, match="whole number of calls"):
        Warmup(0.9, start=0.5)  # type: ignore[arg-type]


def test_whole_tensors_asked_for_in_inference_mode_can_be_trained() -> None:
    model = nn.Linear(2, 2)
    ema = ShardedEMA(model)
    ema.update()
    with torch.inference_mode():
        whole = ema.full_state_dict()
    assert not any(tensor.is_inference() for tensor in whole.values())
    other = nn.Linear(2, 2)
    other.load_state_dict(whole, assign=True)
    other(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("count", [np.int64(3), np.array(3), np.float64(3), torch.tensor([3])])
def test_a_counter_may_be_a_number_of_numpy_or_of_torch(count: Any) -> None:
    model = nn.Linear(2, 2)
    state = ShardedEMA(model).state_dict() | {"num_updates": count, "config": None}
    ema = ShardedEMA(model)
    ema.load_state_dict(state)
    assert ema.num_updates == 3


@pytest.mark.parametrize("count", [True, "3", None, np.array([3, 4]), 2.5])
def test_a_counter_that_is_no_whole_number_is_refused(count: Any) -> None:
    model = nn.Linear(2, 2)
    state = ShardedEMA(model).state_dict() | {"num_updates": count, "config": None}
    with pytest.raises(StateError, match="num_updates is none that a run can have counted"):
        ShardedEMA(model).load_state_dict(state)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.empty(2, device="meta"), "meta"),
        (torch.ones(2, dtype=torch.complex64), "complex"),
        (torch.ones(2).to_sparse(), "layout"),
    ],
)
def test_a_state_that_cannot_be_copied_changes_nothing(value: torch.Tensor, what: str) -> None:
    ema = ShardedEMA(nn.Linear(2, 2), 0.5)
    before = {name: tensor.clone() for name, tensor in ema.state_dict()["weights"].items()}
    weights = {name: tensor + 1 for name, tensor in before.items()} | {"bias": value}
    with pytest.raises(StateError, match=f"'bias': the state to load has .*{what}"):
        ema.load_state_dict({"weights": weights, "num_updates": 1})
    assert ema.num_updates == 0
    assert all(map(torch.equal, before.values(), ema.state_dict()["weights"].values()))
