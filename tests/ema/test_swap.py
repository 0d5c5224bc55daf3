from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from ema_ckpt.core.errors import StateError
from ema_ckpt.ema import swap
from ema_ckpt.ema.manager import ShardedEMA


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def averaged(model: nn.Module, decay: float = 0.5, **settings: Any) -> ShardedEMA:
    ema = ShardedEMA(model, decay, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.dtype))
    ema.update()
    return ema


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def shadows(ema: ShardedEMA) -> list[torch.Tensor]:
    return [shadow.average.clone() for shadow in ema._averages.shadows]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shadow_dtype", [torch.float32, torch.bfloat16])
def test_the_model_shows_the_rounded_average_and_both_keep_their_bits(
    dtype: torch.dtype, shadow_dtype: torch.dtype
) -> None:
    model = network(dtype)
    ema = averaged(model, dtype=shadow_dtype)
    live, average = bits(model), shadows(ema)
    for _ in range(2):
        with ema.swap():
            assert equal(bits(model), [tensor.to(dtype) for tensor in average])
        assert equal(bits(model), live)
        assert equal(shadows(ema), average)


@pytest.mark.filterwarnings("ignore:update.. with decay=1.0", "ignore:ema-stalled")
def test_outputs_come_from_the_average_inside_and_from_the_model_outside() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    ema = ShardedEMA(model, 1.0)
    nn.init.ones_(model.weight)
    ema.update()
    x = torch.ones(1, 2)
    with torch.no_grad():
        with ema.swap():
            assert float(model(x)) == 0.0
        assert float(model(x)) == 2.0


def test_with_decay_0_inside_and_outside_agree_bit_for_bit() -> None:
    model = network()
    ema = averaged(model, decay=0.0)
    x = torch.randn(4, 3)
    outside = model(x)
    with ema.swap():
        assert torch.equal(model(x), outside)


def test_an_exception_inside_brings_the_live_weights_back() -> None:
    model = network()
    ema = averaged(model)
    live, average = bits(model), shadows(ema)
    with pytest.raises(ValueError, match="evaluation failed"), ema.swap():
        raise ValueError("evaluation failed")
    assert equal(bits(model), live)
    assert equal(shadows(ema), average)
    ema.update()


@pytest.mark.parametrize(
    "call",
    [
        lambda ema: ema.update(),
        lambda ema: ema.state_dict(),
        lambda ema: ema.load_state_dict({}),
        lambda ema: ema.full_state_dict(),
        lambda ema: ema.reset(),
        lambda ema: ema.rebind(ema.model),
        lambda ema: ema.copy_to(ema.model),
        lambda ema: ema.swap().__enter__(),
    ],
)
@pytest.mark.parametrize("same", [True, False])
def test_what_would_take_the_average_for_live_weights_is_refused(
    call: Callable[[ShardedEMA], object], same: bool
) -> None:
    model = network()
    ema, other = averaged(model), averaged(model)
    with ema.swap(), pytest.raises(StateError, match=r"inside swap\(\)"):
        call(ema if same else other)
    ema.update()
    with other.swap():
        pass


def test_a_manager_of_another_model_does_not_mind() -> None:
    ema, other = averaged(network()), averaged(network())
    with ema.swap():
        other.update()
        with other.swap():
            pass


def test_a_step_of_an_attached_optimizer_inside_raises_before_weights_move() -> None:
    model = network()
    ema = averaged(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ema.attach(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    with ema.swap():
        inside = bits(model)
        with pytest.raises(StateError, match="a step of the attached optimizer"):
            optimizer.step()
        assert equal(bits(model), inside)


def test_autocast_does_not_remember_the_other_weights() -> None:
    model = network()
    ema = averaged(model)
    x = torch.randn(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        with ema.swap():
            inside = model(x)
        after = model(x)
    assert torch.equal(before, after)
    assert not torch.equal(before, inside)
    with ema.swap(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), inside)


def test_large_tensors_pass_through_a_bounded_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "_SCRATCH_NBYTES", 16)
    model = network()
    ema = averaged(model)
    live, average = bits(model), shadows(ema)
    with ema.swap():
        assert equal(bits(model), average)
    assert equal(bits(model), live)


def test_gradients_survive() -> None:
    model = network()
    ema = averaged(model)
    model(torch.ones(1, 3)).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    with ema.swap(), torch.no_grad():
        model(torch.ones(1, 3))
    assert equal([parameter.grad for parameter in model.parameters()], gradients)


def test_a_failing_entry_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    ema = averaged(model)
    live, average = bits(model), shadows(ema)
    exchange, calls = swap._exchange, []

    def failing(a: torch.Tensor, b: torch.Tensor) -> None:
        calls.append(a)
        if len(calls) == 3:
            raise MemoryError("no room")
        exchange(a, b)

    monkeypatch.setattr(swap, "_exchange", failing)
    with pytest.raises(MemoryError), ema.swap():
        pass
    assert equal(bits(model), live)
    assert equal(shadows(ema), average)
    ema.update()


def test_warnings() -> None:
    model = network()
    ema = ShardedEMA(model)
    with pytest.warns(UserWarning, match="before the first update"), ema.swap():
        pass
    for _ in range(100):
        ema.update()
    with pytest.warns(UserWarning, match="equals the live weights in every element"), ema.swap():
        pass


def test_managers_of_other_parameters_of_the_model_see_a_swap() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = ShardedEMA(model, 0.5, include="0.*"), ShardedEMA(model, 0.5, include="1.*")
    first.update()
    second.update()
    with first.swap():
        for call in (second.update, second.state_dict, second.full_state_dict, second.reset):
            with pytest.raises(StateError, match="inside swap"):
                call()
        with pytest.raises(StateError, match="inside swap"), second.swap():
            pass
    second.update()


def test_averages_survive_a_change_of_dtype_inside() -> None:
    model = nn.Linear(3, 3)
    ema = ShardedEMA(model, 0.5)
    with torch.no_grad():
        model.weight.add_(1)
    ema.update()
    before = [shadow.average.clone() for shadow in ema._averages.shadows]
    with pytest.raises(StateError), ema.swap():
        model.bfloat16()
    assert all(
        torch.equal(shadow.average, kept)
        for shadow, kept in zip(ema._averages.shadows, before, strict=True)
    )


def test_weights_that_share_memory_come_back() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight.data = model[0].weight.data
    ema = ShardedEMA(model, 0.5)
    with torch.no_grad():
        model[0].weight.mul_(2)
    ema.update()
    live = model[0].weight.detach().clone()
    shadows = [value.clone() for value in ema.state_dict()["weights"].values()]
    with ema.swap():
        pass
    assert torch.equal(model[0].weight, live)
    assert all(map(torch.equal, shadows, ema.state_dict()["weights"].values()))


def test_copy_to_a_module_inside_its_own_block_is_refused() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    ours, theirs = ShardedEMA(a, 0.5), ShardedEMA(b, 0.5)
    theirs.update()
    with theirs.swap(), pytest.raises(StateError, match=r"inside a swap\(\)"):
        ours.copy_to(b)


def test_what_was_tied_must_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    ema = ShardedEMA(model, 0.5)
    model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}, assign=True
    )
    with pytest.raises(StateError, match=r"were one tensor.*tie them again"):
        ema.update()
    model[1].weight = model[0].weight
    ema.update()


def test_a_further_name_of_a_tied_tensor_is_followed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied = model[1].weight = model[0].weight
    ema = ShardedEMA(model, 0.5)
    model[1].weight = nn.Parameter(tied.detach() + 1)
    calls: list[Callable[[], object]] = [ema.update, ema.state_dict, ema.full_state_dict]
    for call in calls:
        with pytest.raises(StateError, match=r"were one tensor.*tie them again"):
            call()
    model[1].weight = tied
    ema.update()
    del model[1].weight
    ema.update()
    assert list(ema.full_state_dict()) == list(model.state_dict())


def test_a_forward_in_training_mode_inside_leaves_the_averages_of_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ema = ShardedEMA(model, 0.5, buffers="average")
    model(torch.randn(8, 3))
    ema.update()
    live = {name: value.clone() for name, value in model.state_dict().items()}
    averages = {name: value.clone() for name, value in ema.state_dict()["weights"].items()}
    assert not torch.equal(live["1.running_mean"], averages["1.running_mean"])
    with ema.swap():
        assert torch.equal(model[1].running_mean, averages["1.running_mean"])
        model(torch.randn(8, 3))
    now = ema.state_dict()["weights"]
    assert all(torch.equal(now[n], averages[n]) for n in averages if n != "1.num_batches_tracked")
    assert all(
        torch.equal(v, live[n])
        for n, v in model.state_dict().items()
        if n != "1.num_batches_tracked"
    )


MOVING = {
    "_enter",
    "_leave",
    "_put_averages",
    "_put_back",
    "_exchange",
    "mark_swapped",
    "unmark",
    "reshard",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ctrl_c_at_any_line_that_moves_weights_loses_none(dtype: torch.dtype) -> None:
    model = network(dtype)
    ema = averaged(model)
    live, average = bits(model), shadows(ema)

    def interrupted(number: int) -> bool:
        """Interrupt at a line of entry or exit; returns whether there was one."""
        lines = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            if frame.f_code.co_name not in MOVING:
                return None
            lines += event == "line"
            if lines == number and event == "line":
                signal.raise_signal(signal.SIGINT)
            return trace

        sys.settrace(trace)
        try:
            with ema.swap():
                pass
        except KeyboardInterrupt:
            # As a handler that saves sees it: all live, or refused.
            sys.settrace(None)
            assert equal(bits(model), live)
            assert equal(shadows(ema), average)
            ema.state_dict()
            return True
        finally:
            sys.settrace(None)
        return False

    numbers = 0
    while interrupted(numbers + 1):
        numbers += 1
    assert numbers > 50
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_runs_code_of_its_own_runs_outside_of_the_exchange() -> None:
    model = network()
    ema = averaged(model)
    live, average, seen = bits(model), shadows(ema), []

    def handler(*_: object) -> None:
        seen.append(equal(bits(model), live) or equal(bits(model), average))

    former = signal.signal(signal.SIGUSR1, handler)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_name not in MOVING:
            return None
        if event == "line":
            signal.raise_signal(signal.SIGUSR1)
        return trace

    sys.settrace(trace)
    try:
        with ema.swap():
            pass
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, former)
    assert len(seen) >= 2
    assert all(seen)
    assert equal(bits(model), live)


def test_a_dtype_that_comes_and_goes_inside_rounds_no_average() -> None:
    model = network()
    ema = averaged(model)
    live, average = bits(model), shadows(ema)
    with ema.swap():
        model.half()
        model.float()
    assert equal(bits(model), live)
    assert equal(shadows(ema), average)


def test_live_weights_come_back_into_another_dtype() -> None:
    model = network()
    ema = averaged(model)
    live, average = bits(model), shadows(ema)
    with pytest.raises(StateError, match="changed its dtype"), ema.swap():
        model.half()
    assert equal(bits(model), [tensor.half() for tensor in live])
    assert equal(shadows(ema), average)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_inside_that_change_an_average_are_told(dtype: torch.dtype) -> None:
    model = network(dtype)
    ema = averaged(model)
    live, average = bits(model), shadows(ema)
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ema.swap():
            model(torch.ones(1, 3, dtype=dtype)).sum().backward()
            optimizer.step()
    assert equal(bits(model), live)
    told = [str(warning.message) for warning in caught]
    changed = not equal(shadows(ema), average)
    assert changed == (dtype is torch.float32)  # else the model has a rounded copy
    assert [text.partition(", where")[0] for text in told] == [
        "swap(): the block wrote to '0.weight'"
    ] * changed
    assert all(warning.filename == __file__ for warning in caught)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_that_replaces_a_module_is_told_what_has_no_place(dtype: torch.dtype) -> None:
    model = network(dtype)
    ema = averaged(model)
    live = bits(model)
    lost = "live weights of '0.weight' have no place any more"
    with pytest.raises(StateError, match=lost), ema.swap():
        torch.nn.utils.parametrizations.weight_norm(model[0])
    assert equal([model[0].bias, *bits(model[2])], live[1:])


def test_an_error_inside_says_that_the_live_weights_are_back() -> None:
    model = network()
    ema = averaged(model)
    back = "the live weights are back in the model$"
    with pytest.raises(StateError, match=back), ema.swap():
        model.half()
