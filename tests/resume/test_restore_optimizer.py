"""Optimizer state and options."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ema_ckpt import ShardedEMA, restore, save
from ema_ckpt.core.errors import SourceError, UsageError
from tests.resume.training import Net, Run, refused, same, stepped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(("saved", "here"), [
    (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.optim.AdamW),
    (torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
])  # fmt: skip
def test_another_kind_of_optimizer_is_refused(tmp_path: Path, saved: Any, here: Any) -> None:
    model = nn.Linear(2, 2)
    optimizers = [saved(model.parameters()), here(model.parameters())]
    for optimizer in optimizers:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    path = save(tmp_path / "c", model=model, optimizer=optimizers[0])
    before = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optimizers[1].state.items()}
    with pytest.raises(SourceError, match="another kind of optimizer") as caught:
        restore(path, model=model, optimizer=optimizers[1])
    assert caught.value.code == "index-mismatch"
    after = {id(p): s for p, s in optimizers[1].state.items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(v, after[p][k]) for p, s in before.items() for k, v in s.items())
    assert not restore(path, model=model, optimizer=saved(model.parameters())).missing


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_moment_that_one_parameter_lacks_is_noticed(tmp_path: Path, kind: Any) -> None:
    model = Net()
    dcp_to_torch_save(
        save(tmp_path / "c", model=model, optimizer=stepped(kind, model)), tmp_path / "c.pt"
    )
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    lost = list(content["optimizer"]["state"]["norm.weight"])[-1]
    del content["optimizer"]["state"]["norm.weight"][lost]
    torch.save(content, tmp_path / "torn.pt")
    fresh = kind(model.parameters(), lr=1e-3)
    before = str(fresh.state_dict())
    with pytest.raises(SourceError, match=f"optimizer.state.norm.weight.{lost}") as caught:
        restore(tmp_path / "torn.pt", model=model, optimizer=fresh)
    assert caught.value.code == "incomplete"
    assert str(fresh.state_dict()) == before


@pytest.mark.parametrize(("kind", "options", "updates", "warns"), [
    (torch.optim.AdamW, {}, 1, True),
    (torch.optim.SGD, {"momentum": 0.9}, 1, True),
    (torch.optim.SGD, {}, 1, False),
    (torch.optim.AdamW, {}, 0, False),
])  # fmt: skip
def test_an_optimizer_without_state_beside_updated_averages_is_told(
    tmp_path: Path, kind: Any, options: dict[str, Any], updates: int, warns: bool
) -> None:
    model = Net()
    ema = ShardedEMA(model, decay=0.9)
    for _ in range(updates):
        ema.update()
    optimizer = kind(model.parameters(), lr=1e-3, **options)
    path = save(tmp_path / "c", model=model, ema=ema, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = restore(path, model=model, ema=ema, optimizer=optimizer)
    said = [w for w in report.warnings if "no state of the optimizer after 1 update" in w]
    assert len(said) == len(report.warnings) == len(caught) == warns


def test_an_optimizer_whose_state_differs_by_shape(tmp_path: Path) -> None:
    model = Net()
    optimizer = stepped(torch.optim.Adafactor, model)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)
    fresh = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    restore(path, model=model, optimizer=fresh)
    for one, other in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        same(one, other)


def test_state_that_is_not_a_parameters_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state["global"] = {"step": 3}
    with pytest.raises(UsageError, match="'global', which is not in its parameter groups"):
        save(tmp_path / "c", model=model, optimizer=optimizer)


def test_optimizer_groups_are_paired_by_their_parameters(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    other = Run(seed=9)
    other.optimizer = torch.optim.AdamW(
        [{"params": other.model.enter.parameters()}, {"params": other.model.leave.parameters()}]
    )
    error = refused(other, path, SourceError)
    assert "1 parameter groups there, 2 here" in str(error)

    def two(model: Net, turned: bool) -> torch.optim.Optimizer:
        groups = [
            {"params": list(model.enter.parameters()), "lr": 0.1},
            {"params": list(model.leave.parameters()), "lr": 0.2},
        ]
        return torch.optim.SGD(groups[::-1] if turned else groups, momentum=0.9)

    first, second = two(run.model, False), two(other.model, True)
    run.model(torch.ones(4, 3)).sum().backward()
    first.step()
    path = save(tmp_path / "d", model=run.model, optimizer=first)
    other.restore(path, ema=None, optimizer=second)
    assert [group["lr"] for group in second.param_groups] == [0.2, 0.1]
    buffer = first.state[run.model.leave.weight]["momentum_buffer"]
    assert torch.equal(second.state[other.model.leave.weight]["momentum_buffer"], buffer)
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(UsageError, match="no parameter of the model"):
        save(tmp_path / "e", model=run.model, optimizer=stranger)


def test_state_that_the_checkpoint_lacks_is_dropped(run: Run, tmp_path: Path) -> None:
    fresh = Run(seed=3)
    path = fresh.save(tmp_path / "c")
    run.restore(path)
    assert not run.optimizer.state_dict()["state"]
    fresh.train(0, 2)
    run.train(0, 2)
    same(run.bits(), fresh.bits())


def test_two_optimizers_of_one_parameter_are_refused(tmp_path: Path) -> None:
    model = Net()
    first, second = (stepped(torch.optim.AdamW, model) for _ in range(2))
    with pytest.raises(UsageError, match="two optimizers keep state of"):
        save(tmp_path / "c", model=model, optimizer=[first, second])
    assert list(tmp_path.iterdir()) == []


def test_state_that_an_optimizer_hides_is_refused(tmp_path: Path) -> None:
    model = Net()
    apex = stepped(torch.optim.SGD, model)
    apex.param_groups_master = [{"params": []}]  # type: ignore[attr-defined]
    zero = stepped(torch.optim.SGD, model)
    zero.consolidate_state_dict = print  # type: ignore[attr-defined]
    for optimizer, what in ((zero, "optimizers of its own"), (apex, "param_groups_master")):
        with pytest.raises(UsageError, match=what) as caught:
            save(tmp_path / "c", model=model, optimizer=optimizer)
        assert caught.value.code == "unsupported"
    wrapper = stepped(torch.optim.SGD, model)
    wrapper.optimizer = stepped(torch.optim.AdamW, model)  # type: ignore[attr-defined]
    wrapper.state = wrapper.optimizer.state  # type: ignore[attr-defined]
    save(tmp_path / "c", model=model, optimizer=wrapper)
    two = nn.ModuleList([Net(), Net()])
    first, second = (stepped(torch.optim.SGD, part) for part in two)
    first.friend = second  # type: ignore[attr-defined]
    save(tmp_path / "d", model=two, optimizer=[first, second])


@pytest.mark.filterwarnings("ignore:.*cast")
@pytest.mark.parametrize(
    ("there", "here"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
def test_moments_follow_the_dtype_of_their_weights(
    tmp_path: Path, there: torch.dtype, here: torch.dtype
) -> None:
    models = [nn.Linear(3, 3).to(dtype) for dtype in (there, here)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    models[0](torch.ones(1, 3, dtype=there)).sum().backward()
    optimizers[0].step()
    path = save(tmp_path / "c", model=models[0], optimizer=optimizers[0])
    report = restore(path, model=models[1], optimizer=optimizers[1])
    assert any("optimizer's state of" in message for message in report.warnings)
    moments = optimizers[1].state[models[1].weight]["exp_avg"]
    assert moments.dtype is here
    assert torch.equal(moments, optimizers[0].state[models[0].weight]["exp_avg"].to(here))
    models[1](torch.ones(1, 3, dtype=here)).sum().backward()
    optimizers[1].step()


def test_masters_keep_their_own_dtype(tmp_path: Path) -> None:
    models = [nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).bfloat16()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for parameter in models[0].parameters():
        optimizers[0].state[parameter]["master_param"] = torch.randn(parameter.shape)
    restore(
        save(tmp_path / "c", model=models[0], optimizer=optimizers[0]),
        model=models[1],
        optimizer=optimizers[1],
    )
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(
            optimizers[0].state[one]["master_param"], optimizers[1].state[other]["master_param"]
        )


def test_learning_rates_that_are_tensors_stay_apart(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    groups = [
        {"params": [model.weight], "lr": torch.tensor(0.05)},
        {"params": [model.bias], "lr": torch.tensor(0.01)},
    ]
    path = save(tmp_path / "c", model=model, optimizer=torch.optim.AdamW(groups, foreach=False))
    shared = torch.optim.AdamW(
        [{"params": [model.weight]}, {"params": [model.bias]}], torch.tensor(0.1), foreach=False
    )
    restore(path, model=model, optimizer=shared)
    assert [round(group["lr"].item(), 4) for group in shared.param_groups] == [0.05, 0.01]


@pytest.mark.filterwarnings("ignore:.* tied to")
@pytest.mark.parametrize("turn", [1, -1])
def test_an_untied_run_into_a_tied_model_takes_all_of_the_first_name(
    tmp_path: Path, turn: int
) -> None:
    apart, tied = (
        nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)) for _ in range(2)
    )
    tied[1].weight = tied[0].weight
    optimizer, fresh = (
        torch.optim.AdamW(list(model.parameters())[::turn]) for model in (apart, tied)
    )
    apart(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    report = restore(
        save(tmp_path / "c", model=apart, optimizer=optimizer), model=tied, optimizer=fresh
    )
    assert any("'1.weight' are tied to '0.weight' here" in message for message in report.warnings)
    assert len(set(report.loaded)) == len(report.loaded)
    same(optimizer.state[apart[0].weight], fresh.state[tied[0].weight])
    assert torch.equal(tied[0].weight, apart[0].weight)


def test_tuples_in_an_optimizers_state(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "betas": (0.9, 0.99),
            "shape": tuple(parameter.shape),
            "none": (),
        }
    path = save(tmp_path / "c", model=model, optimizer=optimizer)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    restore(path, model=model, optimizer=fresh)
    assert fresh.state[model.weight]["betas"] == (0.9, 0.99)
    assert fresh.state[model.weight]["shape"] == (2, 3)
