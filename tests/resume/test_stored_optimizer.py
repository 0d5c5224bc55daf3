"""Optimizer state in the forms that trainers save it in, restored into optimizers of torch's."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ema_ckpt
from ema_ckpt import restore
from ema_ckpt.core.errors import EmaCkptError
from tests.checkpoints import save_dcp
from tests.resume.test_optimizer_containers import Container, train
from tests.resume.training import Net

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Write = Callable[[Path, nn.Module, torch.optim.Optimizer], Path]


def adam(model: nn.Module, lr: float = 0.01, **options: Any) -> torch.optim.AdamW:
    """Two groups, as `Trainer` makes them: weights and biases."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr, **options
    )


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return get_optimizer_state_dict(model, optimizer, options=options)


def torchtitan(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Weights at the root, the optimizer flattened, all in one DCP."""
    state = {"optimizer": flat(model, optimizer), "train_state": {"step": 3}}
    return save_dcp(path / "step-3", {**model.state_dict(), **state})


def flattened_names(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """A flattened state under dotted names only, in a torch file."""
    state = {f"optimizer.{name}": value for name, value in flat(model, optimizer).items()}
    torch.save({**model.state_dict(), **state}, path / "flat.pt")
    return path / "flat.pt"


def lightning(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    tree = {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "global_step": 3,
    }
    torch.save(tree, path / "last.ckpt")
    return path / "last.ckpt"


def trainer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """transformers' `Trainer`: `optimizer.pt` beside the weights."""
    from safetensors.torch import save_file

    (path / "checkpoint-3").mkdir()
    save_file(model.state_dict(), path / "checkpoint-3" / "model.safetensors")
    torch.save(optimizer.state_dict(), path / "checkpoint-3" / "optimizer.pt")
    torch.save({"last_epoch": 3}, path / "checkpoint-3" / "scheduler.pt")
    return path / "checkpoint-3"


def composer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """By the optimizer's class, one level down, under names."""
    states = {"AdamW": get_optimizer_state_dict(model, optimizer)}
    tree = {"state": {"model": model.state_dict(), "optimizers": states, "run_name": "x"}}
    torch.save(tree, path / "ep0-ba3-rank0.pt")
    return path / "ep0-ba3-rank0.pt"


def plain_dcp(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """`optimizer.state_dict()` saved by DCP as it is: by position."""
    tree = {"model": model.state_dict(), "opt": optimizer.state_dict()}
    return save_dcp(path / "dcp", tree)


def wrapped(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    tree = {"ckpt": {"model": model.state_dict(), "optim": optimizer.state_dict(), "foo": {"a": 1}}}
    torch.save(tree, path / "wrapped.pt")
    return path / "wrapped.pt"


FORMS: list[Write] = [
    torchtitan, flattened_names, lightning, trainer, composer, plain_dcp, wrapped,
]  # fmt: skip
by_form = pytest.mark.parametrize("write", FORMS, ids=[form.__name__ for form in FORMS])


def assert_alike(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first["param_groups"] == second["param_groups"]
    assert first["state"].keys() == second["state"].keys()
    for position, state in first["state"].items():
        assert state.keys() == second["state"][position].keys()
        for name, value in state.items():
            assert torch.equal(value, second["state"][position][name]), (position, name)


@by_form
def test_it_is_restored_and_trains_on_alike(tmp_path: Path, write: Write) -> None:
    model, other = Net(), Net(seed=5)
    optimizer, fresh = adam(model), adam(other, lr=0.5)
    train(model, optimizer)
    report = restore(write(tmp_path, model, optimizer), model=other, optimizer=fresh)
    assert not report.missing
    assert not report.unexpected
    assert list(report.trees.values()).count("restored") == 2
    assert_alike(fresh, optimizer)
    train(model, optimizer)
    train(other, fresh)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("given", ["list", "dict", "container"])
@pytest.mark.parametrize("form", ["flattened", "list", "trees"])
def test_several_optimizers(tmp_path: Path, form: str, given: str) -> None:
    model, other = Net(), Net(seed=5)
    container, fresh = Container(model), Container(other)
    train(model, container)
    for optimizer in fresh.each():
        optimizer.param_groups[0]["lr"] = 0.5
    one, two = container.each()
    tree: dict[str, Any] = {"model": model.state_dict()}
    if form == "flattened":
        tree["optimizer"] = {**flat(model, one), **flat(model, two)}
        options = {"optimizer": tree["optimizer"]}
        # Each call lists the options of its own parameters alone.
        tree |= options
    elif form == "list":
        tree["optimizer_states"] = [one.state_dict(), two.state_dict()]
    else:
        tree |= {"one_optimizer": one.state_dict(), "two_optimizer": two.state_dict()}
    torch.save(tree, tmp_path / "run.pt")
    target: Any = {"list": fresh.each(), "dict": dict(enumerate(fresh.each()))}.get(given, fresh)
    restore(tmp_path / "run.pt", model=other, optimizer=target)
    for saved, restored in zip(container.each(), fresh.each(), strict=True):
        assert_alike(restored, saved)


def test_one_of_several_trees_is_told_by_its_groups(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=5)
    optimizer, fresh = adam(model), adam(other)
    train(model, optimizer)
    critic = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], 0.1)
    tree = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "opt": critic.state_dict(),
    }
    torch.save(tree, tmp_path / "run.pt")
    report = restore(tmp_path / "run.pt", model=other, optimizer=fresh)
    assert (report.trees["optim"], report.trees["opt"]) == ("restored", "ignored")
    assert_alike(fresh, optimizer)
    tree["opt"] = optimizer.state_dict()
    torch.save(tree, tmp_path / "run.pt")
    with pytest.raises(EmaCkptError, match="'optim', 'opt' all hold optimizer state") as caught:
        restore(tmp_path / "run.pt", model=other, optimizer=fresh)
    assert caught.value.code == "ambiguous-tree"


def test_recorded_names_count_more_than_positions(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=5)
    optimizer = torch.optim.AdamW(list(model.named_parameters())[::-1], lr=0.01)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    train(model, optimizer)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, tmp_path / "run.pt")
    restore(tmp_path / "run.pt", model=other, optimizer=fresh)
    assert fresh.param_groups[0]["lr"] == 0.01
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        if mine.numel():
            assert torch.equal(optimizer.state[mine]["exp_avg"], fresh.state[theirs]["exp_avg"])


def test_step_counts_that_are_numbers_become_tensors(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=5)
    optimizer, fresh = adam(model), adam(other)
    train(model, optimizer)
    state = deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        entries["step"] = int(entries["step"])
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "old.pt")
    restore(tmp_path / "old.pt", model=other, optimizer=fresh)
    assert_alike(fresh, optimizer)


def swap_positions(state: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
    positions = [position for position in state["state"] if position < 3]
    first, second = positions[0], positions[1]
    states = state["state"]
    return {**state, "state": {**states, first: states[second], second: states[first]}}


def drop_position(state: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
    state["param_groups"][0]["params"].pop()
    return state


def drop_group(state: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
    state["param_groups"].pop()
    return state


def other_options(_: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "param_groups.enter.weight.lr": 0.7}


def drop_options(_: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    prefix = "param_groups.enter.weight."
    return {name: value for name, value in state.items() if not name.startswith(prefix)}


def foreign_options(_: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "param_groups.critic.weight.lr": 0.7}


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (swap_positions, "index-mismatch", r"exp_avg' has shape \[\d, \d\] there.*\[\d, \d\] here"),
        (drop_position, "index-mismatch", "parameter group 0 has 2 parameters there and 3 here"),
        (drop_group, "index-mismatch", "1 parameter group there, 2 here"),
        (other_options, "index-mismatch", "the parameters of group 0 here have different options"),
        (drop_options, "incomplete", "lacks 'optimizer.param_groups.enter.weight'"),
        (foreign_options, "incomplete", "has 'optimizer.param_groups.critic.weight'"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    tmp_path: Path, change: Callable[..., dict[str, Any]], code: str, message: str
) -> None:
    model = Net()
    optimizer = adam(model)
    train(model, optimizer)
    state = change(optimizer.state_dict(), flat(model, optimizer))
    path = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    other = Net(seed=5)
    fresh = adam(other, lr=0.5)
    before = [parameter.detach().clone() for parameter in other.parameters()]
    with pytest.raises(EmaCkptError, match=message) as caught:
        restore(path, model=other, optimizer=fresh)
    assert caught.value.code == code
    assert all(map(torch.equal, before, other.parameters()))
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("positions", [False, True])
def test_an_optimizer_that_has_not_stepped_yet(tmp_path: Path, positions: bool) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    state = optimizer.state_dict()
    if positions:
        state["state"] = {position: {} for position in state["param_groups"][0]["params"]}
    path = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    fresh = torch.optim.SGD(model.parameters(), lr=0.5)
    restore(path, model=model, optimizer=fresh)
    assert fresh.param_groups[0]["lr"] == 0.25
    assert not fresh.state


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["state"], 5),
        (["state"], torch.ones(2)),
        (["state"], {"enter.weight": 5}),
        (["state"], {0: [1]}),
        (["param_groups", 0], 5),
        (["param_groups", 0, "params"], 5),
        (["param_groups", 0, "params"], [[0]]),
        (["param_groups", 0, "params"], "enter.weight"),
        (["param_groups", 0, 5], torch.ones(1)),
        (["param_groups", 0, "lr"], "fast"),
        (["param_groups", 0, "lr"], None),
        (["param_groups", 0, "betas"], ["a", 1]),
        (["state", 0, "step"], None),
        (["state", 0, "step"], "2"),
        (["state", 0, "step"], -1),
        (["state", 0, "step"], torch.tensor([1.0, 2.0])),
        (["state", 0, "step"], torch.tensor(1j)),
        (["state", 0, "exp_avg"], 5),
        (["state", 0, "exp_avg"], torch.tensor(0.0)),
        (["state", 0, "exp_avg"], torch.ones(5, 3, dtype=torch.int64)),
        (["param_groups", 0, "betas"], 0.9),
        (["param_groups", 0, "betas"], (0.9,)),
        (["param_groups", 0, "lr"], torch.ones(2)),
    ],
)
def test_what_has_not_the_form_of_an_optimizers_state_is_refused(
    tmp_path: Path, keys: list[Any], value: object
) -> None:
    model = Net()
    optimizer = adam(model)
    train(model, optimizer)
    state = optimizer.state_dict()
    state["state"] = {0: state["state"].pop(min(state["state"])), **state["state"]}
    place: Any = state
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    other = Net(seed=5)
    fresh = adam(other, lr=0.5)
    before = [parameter.detach().clone() for parameter in other.parameters()]
    with pytest.raises(EmaCkptError, match=r"nothing was restored|holds no optimizer state"):
        restore(path, model=other, optimizer=fresh)
    assert all(map(torch.equal, before, other.parameters()))
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.5


def test_a_file_beside_weights_that_are_named_alone_is_not_taken(tmp_path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    train(model, optimizer)
    weights = trainer(tmp_path, model, optimizer) / "model.safetensors"
    with pytest.raises(EmaCkptError, match="holds no optimizer state") as caught:
        restore(weights, model=model, optimizer=optimizer)
    assert caught.value.code == "unknown-tree"


def test_torch_reads_what_is_written_of_a_flattened_one(tmp_path: Path) -> None:
    """`convert` keeps the form: torch loads the flattened state from what it writes."""
    model = Net()
    optimizer = adam(model)
    train(model, optimizer)
    ema_ckpt.convert(flattened_names(tmp_path, model, optimizer), tmp_path / "dcp", to="dcp")
    wanted = {f"optimizer.{name}": value for name, value in flat(model, optimizer).items()}
    found = {
        n: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for n, v in wanted.items()
    }
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(found[n], v) for n, v in wanted.items() if isinstance(v, torch.Tensor))
