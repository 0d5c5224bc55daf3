"""Averages in the checkpoint of their run: casts, settings, ties, residuals, several managers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ema_ckpt import restore, save
from ema_ckpt.core.errors import EmaCkptError, SourceError, StateError, UsageError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.master_weights import master_weights
from ema_ckpt.ema.schedules import HalfLife
from tests.resume.training import Run, refused, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_what_dcp_writes_of_a_manager_is_restored(run: Run, tmp_path: Path) -> None:
    dcp.save({"model": run.model.state_dict(), "ema": run.ema}, checkpoint_id=tmp_path / "c")
    other = Run(seed=9)
    report = other.restore(tmp_path / "c", optimizer=None)
    assert report.trees == {"model": "restored", "ema": "restored"}
    mine, theirs = run.bits(), other.bits()
    assert all(
        torch.equal(mine[name], theirs[name])
        for name in mine
        if name.startswith(("model.", "ema."))
    )


def test_casts_that_lose_nothing_are_made_and_told(tmp_path: Path) -> None:
    small = Run(dtype=torch.bfloat16)
    small.train(0, 2)
    path = small.save(tmp_path / "c")
    other = Run(seed=9)
    with pytest.warns(
        UserWarning, match="ema.weights: .*'enter.weight'.* were bfloat16 there, cast to float32"
    ):
        report = other.restore(path)
    assert report.changed_settings["ema.dtype"] == ("bfloat16", "float32")
    weights = small.ema.state_dict()["weights"]
    assert torch.equal(
        other.ema.state_dict()["weights"]["enter.weight"], weights["enter.weight"].float()
    )


def test_averages_that_are_missing(run: Run, tmp_path: Path) -> None:
    path = save(tmp_path / "c", model=run.model, optimizer=run.optimizer)
    error = refused(Run(seed=9), path, SourceError)
    assert "missing_ema='seed'" in str(error)
    other = Run(seed=9)
    other.train(0, 2)
    with pytest.warns(UserWarning, match="start from the restored live weights"):
        report = other.restore(path, missing_ema="seed")
    assert set(report.seeded) == {f"ema.weights.{name}" for name, _ in run.model.named_parameters()}
    assert other.ema.num_updates == 0
    for name, parameter in run.model.named_parameters():
        assert torch.equal(other.ema.state_dict()["weights"][name], parameter)
    with pytest.raises(UsageError, match="missing_ema"):
        other.restore(path, missing_ema="ignore")


def test_some_averages_that_are_missing(run: Run, tmp_path: Path) -> None:
    partial = ShardedEMA(run.model, 0.9, exclude="leave.*")
    partial.update()
    path = save(tmp_path / "c", model=run.model, ema=partial)
    error = refused(Run(seed=9), path, SourceError, optimizer=None)
    assert "it lacks 'ema.weights.leave.weight'" in str(error)
    other = Run(seed=9)
    report = other.restore(path, optimizer=None, strict=False)
    assert report.seeded == ("ema.weights.leave.weight",)
    assert torch.equal(other.ema.state_dict()["weights"]["leave.weight"], run.model.leave.weight)
    assert other.ema.num_updates == 1


class KeepsMasters(torch.optim.SGD):
    """Steps float32 copies of bfloat16 parameters, and keeps them in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                master = self.state[param].setdefault("master_param", param.float())
                master.sub_(torch.ones_like(master), alpha=group["lr"])
                param.copy_(master)


@pytest.mark.parametrize("compensate", [False, True])
def test_averages_that_are_missing_begin_with_what_the_source_gives(
    tmp_path: Path, compensate: bool
) -> None:
    def made(**options: Any) -> Run:
        one = Run()
        one.model.bfloat16()
        one.optimizer = KeepsMasters(one.model.parameters(), lr=1e-4)
        source = master_weights(one.optimizer)
        one.ema = ShardedEMA(one.model, 0.9, source=source, compensate=compensate, **options)
        return one

    one, other = made(exclude="leave.*"), made()
    for _ in range(3):
        one.optimizer.step()
        one.ema.update()
    path = one.save(tmp_path / "c")
    report = other.restore(path, strict=False)
    assert report.seeded == ("ema.weights.leave.weight",)
    master = one.optimizer.state[one.model.leave.weight]["master_param"]
    assert not torch.equal(master, one.model.leave.weight.float())
    assert torch.equal(other.ema.state_dict()["weights"]["leave.weight"], master)
    assert torch.equal(
        other.ema.state_dict()["weights"]["enter.bias"],
        one.ema.state_dict()["weights"]["enter.bias"],
    )


@pytest.mark.parametrize("compensate", [False, True])
def test_an_average_of_tied_weights_is_restored_into_untied_ones(
    tmp_path: Path, compensate: bool
) -> None:
    def made(tied: bool) -> tuple[nn.Module, ShardedEMA]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        if tied:
            model[1].weight = model[0].weight
        return model, ShardedEMA(model, 0.9, compensate=compensate)

    (model, ema), (untied, other) = made(True), made(False)
    with torch.no_grad():
        model[0].weight.add_(0.1)
    ema.update()
    restore(save(tmp_path / "c", model=model, ema=ema), model=untied, ema=other)
    for name in ("0.weight", "1.weight"):
        assert torch.equal(
            other.state_dict()["weights"][name], ema.state_dict()["weights"]["0.weight"]
        )
        if compensate:
            assert ema.state_dict()["residual"]["0.weight"].any()
            assert torch.equal(
                other.state_dict()["residual"][name], ema.state_dict()["residual"]["0.weight"]
            )


def test_managers_may_bear_any_name(tmp_path: Path) -> None:
    run = Run()
    managers = {name: ShardedEMA(run.model, 0.5) for name in ("optimizer", "model", "rng", "fast")}
    run.train(0, 2)
    for number, manager in enumerate(managers.values()):
        for _ in range(number):
            manager.update()
    before = {
        name: {k: v.clone() for k, v in m.state_dict()["weights"].items()}
        for name, m in managers.items()
    }
    path = save(tmp_path / "c", model=run.model, ema=managers, optimizer=run.optimizer)
    run.train(2, 4)
    for manager in managers.values():
        manager.update()
    restore(path, model=run.model, ema=managers, optimizer=run.optimizer)
    for number, (name, manager) in enumerate(managers.items()):
        same(before[name], manager.state_dict()["weights"])
        assert manager.num_updates == number


@pytest.mark.parametrize("counter", ["num_updates", "samples_seen"])
def test_a_negative_counter_is_refused_before_anything_is_copied(
    run: Run, tmp_path: Path, counter: str
) -> None:
    state = {**run.ema.state_dict(), counter: torch.tensor(-3)}
    dcp.save({"model": run.model.state_dict(), "ema": state}, checkpoint_id=tmp_path / "c")
    error = refused(Run(seed=9), tmp_path / "c", SourceError, optimizer=None)
    assert f"nothing was restored: ema.{counter} is -3" in str(error)


@pytest.mark.parametrize("change", [
    {"num_updates": torch.tensor(2**63 - 1)},
    {"num_updates": torch.tensor(float("nan"))},
    {"num_updates": 1e308},
    {"samples_seen": torch.tensor(2**63 - 1)},
    {"samples_seen": "many"},
    {"config": "[" * 100_000},
    {"config": {"counter": 5}},
    {"config": {"counter": {"moved_at": 4}}},
    {"config": {"counter": {"moved_at": -1}}},
    {"config": {"counter": {"moved_at": "2"}}},
    {"config": {"counter": {"moved_at": 2, "pending": float("nan")}}},
    {"config": {"counter": {"moved_at": 2, "applied": 2.0}}},
])  # fmt: skip
def test_a_counter_that_no_run_can_have_is_refused(
    run: Run, tmp_path: Path, change: dict[str, Any]
) -> None:
    if isinstance(change.get("config"), dict):
        change = {"config": json.dumps(change["config"])}
    state = {**run.ema.state_dict(), **change}
    dcp.save({"model": run.model.state_dict(), "ema": state}, checkpoint_id=tmp_path / "c")
    with pytest.raises(StateError):
        Run(seed=9).ema.load_state_dict(state)
    refused(Run(seed=9), tmp_path / "c", EmaCkptError, optimizer=None)


def test_a_counter_of_more_calls_than_the_average_waited_for_is_refused(
    run: Run, tmp_path: Path
) -> None:
    state = {**run.ema.state_dict(), "num_updates": torch.tensor(2**61)}
    dcp.save({"model": run.model.state_dict(), "ema": state}, checkpoint_id=tmp_path / "c")
    error = refused(Run(seed=9), tmp_path / "c", SourceError, optimizer=None)
    assert "the saved counter.moved_at is none that a run can have counted" in str(error)


def test_a_counter_whose_name_is_damaged_is_missing(run: Run, tmp_path: Path) -> None:
    state = run.ema.state_dict()
    state["-um_updates"] = state.pop("num_updates")
    dcp.save({"model": run.model.state_dict(), "ema": state}, checkpoint_id=tmp_path / "c")
    error = refused(Run(seed=9), tmp_path / "c", SourceError, optimizer=None)
    assert (error.code, "ema.num_updates is missing" in str(error)) == ("incomplete", True)


def test_a_long_run_without_a_record_of_its_last_move_goes_on(run: Run, tmp_path: Path) -> None:
    state = {**run.ema.state_dict(), "num_updates": torch.tensor(2**40), "config": "{}"}
    dcp.save({"model": run.model.state_dict(), "ema": state}, checkpoint_id=tmp_path / "c")
    other = Run(seed=9)
    other.restore(tmp_path / "c", optimizer=None)
    assert other.ema.num_updates == 2**40


@pytest.mark.parametrize("tied", [5, ["a"], {"enter.weight": 5}, {"enter.weight": [["a"], None]}])
def test_ties_of_an_odd_form_tie_nothing(run: Run, tmp_path: Path, tied: Any) -> None:
    config = json.dumps({**json.loads(run.ema.state_dict()["config"]), "tied": tied})
    state = {**run.ema.state_dict(), "config": config}
    dcp.save({"model": run.model.state_dict(), "ema": state}, checkpoint_id=tmp_path / "c")
    for load in (
        lambda one: one.restore(tmp_path / "c", optimizer=None),
        lambda one: one.ema.load_state_dict(state),
    ):
        other = Run(seed=9)
        load(other)
        for shadow, expected in zip(
            other.ema._averages.shadows, run.ema._averages.shadows, strict=True
        ):
            assert torch.equal(shadow.average, expected.average)


def test_settings_that_changed(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    other = Run(seed=9, decay=HalfLife(100), every=2)
    report = other.restore(path)
    assert report.changed_settings["ema.every"] == (1, 2)
    assert "ema.schedule" in report.changed_settings
    assert report.changed_settings["ema.decay"] == (0.9, None)
    said = [text for text in report.warnings if text.endswith("here, which counts")]
    assert "ema.decay was 0.9 in the saved run and is None here, which counts" in said
    assert len(said) == len(report.changed_settings)
    assert other.ema.num_updates == 3
    other.train(3, 4)
    assert other.ema.current_decay == pytest.approx(
        0.5 ** (1 / 100)
    )  # moved at 3, so that only call 4 is pending


def test_residuals_travel(tmp_path: Path) -> None:
    one = Run(compensate=True, decay=0.999)
    one.train(0, 3)
    path = one.save(tmp_path / "c")
    other = Run(seed=9, compensate=True, decay=0.999)
    other.restore(path)
    one.train(3, 6)
    other.train(3, 6)
    same(one.bits(), other.bits())
    plain = Run(seed=9, decay=0.999)
    assert plain.restore(path).changed_settings == {"ema.compensate": (True, False)}


def test_residuals_of_complex_parameters_travel(tmp_path: Path) -> None:
    def drift(model: nn.Module, ema: ShardedEMA, steps: range) -> None:
        with torch.no_grad():
            for step in steps:
                model.weight.add_(complex(1e-4 * step, -1e-4))
                ema.update()

    torch.manual_seed(0)
    models = [nn.Linear(3, 2, bias=False, dtype=torch.complex64) for _ in range(2)]
    one, other = (ShardedEMA(model, 0.999, compensate=True) for model in models)
    drift(models[0], one, range(5))
    assert one._averages.shadows[0].residual.imag.any()  # type: ignore[union-attr]
    path = save(tmp_path / "c", model=models[0], ema=one)
    restore(path, model=models[1], ema=other)
    for model, ema in zip(models, (one, other), strict=True):
        drift(model, ema, range(5, 9))
    for name in ("weights", "residual"):
        assert torch.equal(one.state_dict()[name]["weight"], other.state_dict()[name]["weight"])


def test_several_managers(run: Run, tmp_path: Path) -> None:
    slow = ShardedEMA(run.model, 0.999)
    slow.update()
    path = save(tmp_path / "c", model=run.model, ema={"fast": run.ema, "slow": slow})
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert {"ema.fast.weights.enter.weight", "ema.slow.num_updates"} <= set(names)
    other = Run(seed=9)
    second = ShardedEMA(other.model, 0.999)
    other.restore(path, ema={"slow": second, "fast": other.ema}, optimizer=None)
    assert (other.ema.num_updates, second.num_updates) == (3, 1)
    assert torch.equal(
        second.state_dict()["weights"]["enter.weight"], slow.state_dict()["weights"]["enter.weight"]
    )
    assert torch.equal(
        other.ema.state_dict()["weights"]["enter.weight"],
        run.ema.state_dict()["weights"]["enter.weight"],
    )
    with pytest.raises(SourceError, match=r"ema\.third"):
        other.restore(path, ema={"third": second}, optimizer=None)


def test_settings_in_a_dict_are_read(run: Run, tmp_path: Path) -> None:
    state = run.ema.state_dict()
    config = {**json.loads(state["config"]), "every": 5, "num_updates": 9}
    old = {"weights": state["weights"], "config": config}
    dcp.save({"model": run.model.state_dict(), "ema": old}, checkpoint_id=tmp_path / "c")
    other = Run(seed=9)
    assert other.restore(tmp_path / "c", optimizer=None).changed_settings == {"ema.every": (5, 1)}
    assert other.ema.num_updates == 9


@pytest.mark.parametrize("saved", ["copy", "average", "skip"])
@pytest.mark.parametrize("now", ["copy", "average", "skip"])
def test_buffers_may_be_treated_in_another_way(saved: str, now: str, tmp_path: Path) -> None:
    """The setting of the constructor wins, and the difference is reported."""
    save(tmp_path / "step", model=(before := Run(buffers=saved)).model, ema=before.ema)
    after = Run(seed=1, buffers=now)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = restore(tmp_path / "step", model=after.model, ema=after.ema)
    assert report.changed_settings == ({} if saved == now else {"ema.buffers": (saved, now)})
    assert bool(report.seeded) == (saved == "skip" and now == "average")
    for name in ("enter.weight", "leave.weight"):
        ours, theirs = (run.ema.state_dict()["weights"][name] for run in (after, before))
        assert torch.equal(ours.to_local() if hasattr(ours, "to_local") else ours, theirs)


def test_settings_that_the_bits_depend_on_are_compared(run: Run, tmp_path: Path) -> None:
    options = {"dtype": torch.bfloat16, "rounding": "stochastic"}
    before, after = (ShardedEMA(run.model, 0.9, seed=seed, **options) for seed in (1, 2))  # type: ignore[arg-type]
    save(tmp_path / "step", model=run.model, ema=before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert restore(tmp_path / "step", model=run.model, ema=after).changed_settings == {
            "ema.seed": (1, 2)
        }


class Pair:
    """A model of two halves with an optimizer each, stepped one after the other."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.optimizers = [torch.optim.AdamW(half.parameters(), 0.1) for half in self.model]
        self.ema = ShardedEMA(self.model, 0.5)
        self.state: dict[str, Any] = {
            "model": self.model,
            "ema": self.ema,
            "optimizer": self.optimizers,
        }

    def step(self, number: int) -> int:
        """Step one optimizer; returns the updates since."""
        before = self.ema.num_updates
        torch.manual_seed(self.ema.num_updates)
        self.model.zero_grad()
        self.model(torch.randn(3, 2)).square().sum().backward()
        self.optimizers[number].step()
        return self.ema.num_updates - before


@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((0, 1, 0, 1), (0, 1, 0, 1)),
        ((0, 1, 0), (1, 0, 1, 0, 1)),  # saved between the two
        ((0, 1, 0, 1), (1, 0, 1, 0, 1)),  # the first is skipped after the save
        ((0, 1, 1), (0, 1, 0, 1)),  # and before it
    ],
)
def test_a_resumed_run_updates_at_the_same_steps(
    first: tuple[int, ...], then: tuple[int, ...], attached: str, tmp_path: Path
) -> None:
    one, other = Pair(0), Pair(1)
    one.ema.attach(*one.optimizers)
    for number in first:
        one.step(number)
    save(tmp_path / "c", **one.state)
    if attached == "before":
        other.ema.attach(*other.optimizers)
        other.step(0)
    restore(tmp_path / "c", **other.state)
    if attached == "after":
        other.ema.attach(*other.optimizers)
    assert [other.step(number) for number in then] == [one.step(number) for number in then]
    same(one.ema.state_dict()["weights"], other.ema.state_dict()["weights"])
