"""What `save` accepts `restore` reads; the rest is refused by name before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ema_ckpt import restore, save
from ema_ckpt.core.errors import EmaCkptError, UsageError
from ema_ckpt.ema.manager import ShardedEMA
from tests.ema.test_tensor_kinds import READABLE, UNREADABLE, quiet
from tests.resume.training import Run


class Keeping(torch.optim.SGD):
    """Keeps a value of any kind beside each parameter."""

    def __init__(self, parameters: Any, value: Any) -> None:
        super().__init__(parameters, 0.1)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = value


def states(kind: str, value: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """The value in every place where a training state may have it, by name."""
    model, holder = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    holder.register_buffer("kept", value)
    return {
        "buffer": ("kept", {"model": holder}),
        "extra": ("extra.kept", {"model": model, "extra": {"kept": value}}),
        "list": ("extra.kept.0", {"model": model, "extra": {"kept": [value]}}),
        "optimizer": (
            "optimizer.state.weight.kept",
            {"model": model, "optimizer": Keeping(model.parameters(), value)},
        ),
    }


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_tensor_that_restore_could_not_bring_back_is_refused(kind: str, tmp_path: Path) -> None:
    for name, state in states(kind, quiet(UNREADABLE[kind][0])).values():
        with pytest.raises(EmaCkptError, match=rf"{name}'.*no reader brings back") as caught:
            save(tmp_path / "new" / "c", **state)
        assert caught.value.code == "unsupported"
        assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("kind", READABLE)
def test_what_is_accepted_comes_back(kind: str, tmp_path: Path) -> None:
    value = READABLE[kind]().detach()
    for place, (_, state) in states(kind, value).items():
        path = tmp_path / place
        save(path, **state)
        _, other = states(kind, torch.zeros_like(value.clone()))[place]
        if "optimizer" in other:
            other["optimizer"].state.clear()
        extra = restore(path, **other).extra
        found = {
            "buffer": lambda: other["model"].kept,
            "extra": lambda: extra["kept"],
            "list": lambda: extra["kept"][0],
            "optimizer": lambda: other["optimizer"].state[other["model"].weight]["kept"],
        }[place]()
        assert found.tolist() == value.tolist()


class Schedule:
    def __call__(self, step: int) -> float:
        return 0.5**step


class Stateful(nn.Linear):
    def get_extra_state(self) -> Any:
        return Schedule()

    def set_extra_state(self, state: Any) -> None:
        pass


def test_an_object_that_restore_would_refuse_is_refused(run: Run, tmp_path: Path) -> None:
    model, stateful = nn.Linear(2, 2), Stateful(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.param_groups[0]["schedule"] = Schedule()
    refused: dict[str, dict[str, Any]] = {
        "extra.args": {"model": model, "extra": {"args": Schedule()}},
        "extra.deep.args": {"model": model, "extra": {"deep": {"args": (1, Schedule())}}},
        "optimizer.param_groups.0.schedule": {"model": model, "optimizer": optimizer},
        "model._extra_state": {"model": stateful},
    }
    for name, state in refused.items():
        with pytest.raises(UsageError, match=rf"'{name}' of type .*more than plain") as caught:
            save(tmp_path / "c", **state)
        assert caught.value.code == "unsupported"
    with torch.serialization.safe_globals([Schedule]):
        save(tmp_path / "c", **refused["extra.args"])
        found = restore(tmp_path / "c", model=model, extra={"args": None}).extra["args"]
        assert found(2) == 0.25


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"model": "state"}, "model is a torch.nn.Module; found OrderedDict"),
        ({"ema": "state"}, "ema is a ShardedEMA, or several by name; found Tensor in a dict"),
        ({"ema": "own"}, "ema is a ShardedEMA, or several by name; found dict in a dict"),
        ({"ema": "model"}, "ema is a ShardedEMA, or several by name; found Linear"),
        ({"optimizer": "model"}, "optimizer is an optimizer, or several of them; found Linear"),
        ({"optimizer": "state"}, "optimizer is an optimizer, or several of them; found Tensor"),
        ({"extra": "list"}, "extra is a dict of values by name; found list"),
    ],
)
def test_arguments_of_another_kind_are_refused(
    argument: dict[str, str], message: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    ema = ShardedEMA(model)
    values = {"state": model.state_dict(), "own": ema.state_dict(), "model": model, "list": [1]}
    given = {name: values[kind] for name, kind in argument.items()}
    save(tmp_path / "good", model=model, ema=ema)
    calls = [lambda: save(tmp_path / "c", **{"model": model, **given})]
    calls.append(lambda: restore(tmp_path / "good", **{"model": model, **given}))
    for call in calls:
        with pytest.raises(UsageError, match=message):
            call()
    assert not (tmp_path / "c").exists()


class Beside(torch.optim.SGD):
    """Counts beside the state of its parameters, as StableSPAM does."""

    total = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total}


def test_an_optimizer_with_entries_beside_its_state_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = Beside(model.parameters(), 0.1)
    with pytest.raises(UsageError, match=r"Beside keeps 'total' in its state_dict\(\) beside"):
        save(tmp_path / "c", model=model, optimizer=optimizer)
    save(tmp_path / "c", model=model, extra={"optimizer": optimizer})


def test_state_under_keys_that_are_no_text_comes_back(tmp_path: Path) -> None:
    """As AggMo keeps a momentum for each of its betas."""
    model = nn.Linear(2, 1, bias=False)
    kept = {0.0: torch.ones(1, 2), 0.9: torch.zeros(1, 2), 3: {}}
    optimizer, other = Keeping(model.parameters(), kept), Keeping(model.parameters(), {})
    optimizer.param_groups[0]["table"] = {1: 0.5}
    other.param_groups[0]["table"] = None
    save(tmp_path / "c", model=model, optimizer=optimizer)
    restore(tmp_path / "c", model=model, optimizer=other)
    found = other.state[model.weight]["kept"]
    assert found.keys() == kept.keys()
    assert torch.equal(found[0.0], kept[0.0])
    assert other.param_groups[0]["table"] == {1: 0.5}
