"""`save`, `restore` and `latest` in one process: what is compared, what is reported, what is left alone."""

from __future__ import annotations

import datetime
import io
import json
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ema_ckpt import consolidate, latest, restore, rng_state, save
from ema_ckpt.core.errors import EmaCkptError, SourceError, StateError, TargetError, UsageError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.schedules import HalfLife, PowerFunction, Warmup
from ema_ckpt.ema.sources import master_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    def __init__(self, seed: int = 0, wide: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter = nn.Linear(3, wide)
        self.norm = nn.BatchNorm1d(wide)
        self.leave = nn.Linear(wide, 2, bias=False)
        self.empty = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(self.enter(x)))


class Run:
    def __init__(self, seed: int = 0, wide: int = 5, **options: Any) -> None:
        self.model = Net(seed, wide)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.ema = ShardedEMA(self.model, **{"decay": Warmup(0.9), **options})
        self.ema.attach(self.optimizer)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            self.model(x).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def bits(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            f"model.{k}": v.clone() for k, v in self.model.state_dict().items()
        }
        found |= {f"ema.{k}": v.clone() for k, v in self.ema.state_dict()["weights"].items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{k}": v.clone() for k, v in state.items()}
        found["groups"] = json.dumps(self.optimizer.state_dict()["param_groups"])
        found["counter"] = (self.ema.num_updates, self.ema.current_decay, self.ema.samples_seen)
        return found

    def save(self, path: Path, **options: Any) -> Path:
        found = save(path, model=self.model, ema=self.ema, optimizer=self.optimizer, **options)
        assert isinstance(found, Path)
        return found

    def restore(self, path: Path, **options: Any) -> Any:
        return restore(
            path, **{"model": self.model, "ema": self.ema, "optimizer": self.optimizer, **options}
        )


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert (
            torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name]
        ), name


@pytest.fixture
def run() -> Run:
    one = Run()
    one.train(0, 3)
    return one


def refused(other: Run, path: Path, kind: type[EmaCkptError], **options: Any) -> EmaCkptError:
    """The error of a restore that must leave every bit as it was."""
    before = other.bits()
    with pytest.raises(kind) as caught:
        other.restore(path, **options)
    same(other.bits(), before)
    return caught.value


def test_a_run_goes_on_as_if_it_had_never_stopped(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "run" / "step_3", extra={"step": 3})
    assert path == tmp_path / "run" / "step_3"
    before = run.bits()
    other = Run(seed=9)
    report = other.restore(tmp_path / "run", extra={"step": None})
    same(other.bits(), before)
    assert report.path == path
    assert report.world_size == 1
    assert report.trees == {
        "model": "restored",
        "ema": "restored",
        "optimizer": "restored",
        "extra": "restored",
    }
    assert report.extra == {"step": 3}
    assert {"model.enter.weight", "ema.weights.enter.weight", "model.empty", "extra.step"} <= set(
        report.loaded
    )
    assert not report.missing + report.unexpected + report.seeded + report.warnings
    assert not report.renamed
    assert not report.changed_settings
    run.train(3, 6)
    other.train(3, 6)
    same(other.bits(), run.bits())
    assert other.ema.num_updates == 6


def test_restoring_neither_steps_nor_averages(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    other = Run(seed=9)
    steps = []
    other.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    other.restore(path)
    assert not steps
    assert other.ema.num_updates == 3


def test_plain_torch_reads_it(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    state = {
        "model": {k: torch.zeros_like(v) for k, v in run.model.state_dict().items()},
        "ema": Run(9).ema.state_dict(),
    }
    dcp.load(state, checkpoint_id=path)
    for name, value in run.model.state_dict().items():
        assert torch.equal(state["model"][name], value)
    for name, value in run.ema.state_dict()["weights"].items():
        assert torch.equal(state["ema"]["weights"][name], value)
    assert int(state["ema"]["num_updates"]) == 3


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


def test_digests_and_paths_in_the_files(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    digests = json.loads((path / "ema_ckpt.json").read_text())["digests"]
    for name, value in run.model.state_dict().items():
        crc = zlib.crc32(value.contiguous().view(-1).view(torch.uint8).numpy())
        assert digests[f"model.{name}"]["crc32"] == f"crc32:{crc:08x}"
    assert all(str(tmp_path).encode() not in file.read_bytes() for file in path.iterdir())
    metadata = dcp.FileSystemReader(path).read_metadata()
    assert metadata.planner_data["ema.weights.enter.weight"] == ("ema", "weights", "enter.weight")
    assert metadata.storage_meta.checkpoint_id == "c"


def test_names_shapes_and_dtypes_are_compared_before_anything_is_written(
    run: Run, tmp_path: Path
) -> None:
    path = run.save(tmp_path / "c")
    error = refused(Run(seed=9, wide=6), path, SourceError)
    assert error.code == "index-mismatch"
    assert "'ema.weights.enter.weight' has shape [5, 3] there and [6, 3] here" in str(error)

    other = Run(seed=9)
    other.model.register_buffer("new", torch.ones(2))
    del other.model.empty
    other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=1e-2)
    other.ema.detach()
    other.ema = ShardedEMA(other.model)
    error = refused(other, path, SourceError, ema=None, optimizer=None)
    assert error.code == "incomplete"
    assert "it lacks 'model.new' and it has 'model.empty'" in str(error)
    report = other.restore(path, ema=None, optimizer=None, strict=False)
    assert report.missing == ("model.new",)
    assert report.unexpected == ("model.empty",)
    assert torch.equal(other.model.enter.weight, run.model.enter.weight)
    assert report.trees["ema"] == "ignored"

    error = refused(Run(seed=9, dtype=torch.bfloat16), path, SourceError)
    assert "is float32 there and bfloat16 here, which would lose values" in str(error)


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


def test_a_tied_model_saved_with_a_wrapper_prefix(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    torch.save(
        {"model": {f"module.{name}": value for name, value in model.state_dict().items()}},
        tmp_path / "c.pt",
    )
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    other[1].weight = other[0].weight
    assert not restore(tmp_path / "c.pt", model=other).unexpected
    assert torch.equal(other[1].weight, model[0].weight)


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


def stepped(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=1e-3)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


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


def test_an_optimizer_whose_state_differs_by_shape(tmp_path: Path) -> None:
    model = Net()
    optimizer = stepped(torch.optim.Adafactor, model)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)
    fresh = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    restore(path, model=model, optimizer=fresh)
    for one, other in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        same(one, other)


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


def test_state_that_is_not_a_parameters_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state["global"] = {"step": 3}
    with pytest.raises(UsageError, match="'global', which is not in its parameter groups"):
        save(tmp_path / "c", model=model, optimizer=optimizer)


def test_averages_that_a_separate_file_lacks(run: Run, tmp_path: Path) -> None:
    live = save(tmp_path / "c", model=run.model)
    theirs = {name: torch.full_like(value, 3.5) for name, value in run.model.state_dict().items()}
    averages = {name: value - 1 for name, value in theirs.items() if not name.startswith("enter")}
    torch.save({"generator": theirs, "generator_ema": averages}, tmp_path / "pair.pt")
    assert "enter" in str(
        refused(Run(seed=9), live, SourceError, optimizer=None, ema_path=tmp_path / "pair.pt")
    )
    other = Run(seed=9)
    report = other.restore(live, optimizer=None, ema_path=tmp_path / "pair.pt", strict=False)
    assert set(report.filled) == {"ema.weights.enter.weight", "ema.weights.enter.bias"}
    assert not report.seeded
    found = other.ema.state_dict()["weights"]
    assert all(
        found[name].eq(3.5 if name.startswith("enter") else 2.5).all()
        for name in dict(other.model.named_parameters())
    )
    assert torch.equal(other.model.enter.weight, run.model.enter.weight)


def test_a_foreign_configuration_means_nothing_to_names(run: Run, tmp_path: Path) -> None:
    live = save(tmp_path / "c", model=run.model)
    weights = {name: torch.full_like(p.detach(), 2.5) for name, p in run.model.named_parameters()}
    torch.save({"ema": {"weights": weights, "config": {"tied": True}}}, tmp_path / "averages.pt")
    other = Run(seed=9)
    other.restore(live, optimizer=None, ema_path=tmp_path / "averages.pt")
    assert other.ema.state_dict()["weights"]["enter.weight"].eq(2.5).all()


@pytest.mark.parametrize(
    "form",
    ["safetensors", "torch", "torch-nested", "dcp", "diffusers", "averaged-model", "lit-ema"],
)
def test_foreign_averages(run: Run, tmp_path: Path, form: str) -> None:
    live = save(tmp_path / "c", model=run.model, optimizer=run.optimizer)
    weights = {
        f"module.{name}": torch.full_like(p.detach(), 2.5)
        for name, p in run.model.named_parameters()
    }
    names = {name.removeprefix("module."): value for name, value in weights.items()}
    file = tmp_path / ("averages.safetensors" if form == "safetensors" else "averages.pt")
    expected = 0
    if form == "safetensors":
        safetensors.torch.save_file(weights, file)
    elif form == "torch":
        torch.save(weights, file)
    elif form == "torch-nested":
        torch.save({"model": names, "model_ema": weights, "epoch": 3}, file)
    elif form == "diffusers":
        torch.save(
            {"shadow_params": list(names.values()), "optimization_step": 7, "decay": 0.99}, file
        )
        expected = 7
    elif form == "lit-ema":
        dotless = {name.replace(".", ""): value for name, value in names.items()}
        torch.save(
            {"model_ema": {**dotless, "decay": torch.tensor(0.9), "num_updates": torch.tensor(4)}},
            file,
        )
        expected = 4
    elif form == "averaged-model":
        torch.save({"model": names, "ema": {"n_averaged": torch.tensor(5), **weights}}, file)
        expected = 5
    else:
        file = tmp_path / "averages"
        dcp.save({"net": names, "net_ema": weights}, checkpoint_id=file)
    other = Run(seed=9)
    report = other.restore(live, ema_path=file)
    assert all(
        torch.equal(other.ema.state_dict()["weights"][name], value) for name, value in names.items()
    )
    assert torch.equal(other.model.enter.weight, run.model.enter.weight)
    assert other.ema.num_updates == expected
    if form not in ("averaged-model", "diffusers", "lit-ema"):
        assert "ema.weights.enter.weight" in report.renamed.values()


def test_settings_that_changed(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    other = Run(seed=9, decay=HalfLife(100), every=2)
    report = other.restore(path)
    assert report.changed_settings["ema.every"] == (1, 2)
    assert "ema.schedule" in report.changed_settings
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
    assert one.averages.shadows[0].residual.imag.any()  # type: ignore[union-attr]
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


def test_extra_values_and_objects(run: Run, tmp_path: Path) -> None:
    schedule = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [2, 4], 0.5)
    run.train(3, 4)
    schedule.step()
    extra = {
        "schedule": schedule,
        "seen": torch.arange(3),
        "names": ["a", ("b", 1)],
        "list": [torch.ones(2), {"x": 2.5}],
        "odd": {"none": {}, 3: {4: ()}},
    }
    path = run.save(tmp_path / "c", extra=extra)
    other = Run(seed=9)
    fresh = torch.optim.lr_scheduler.MultiStepLR(other.optimizer, [9], 0.5)
    report = other.restore(
        path, extra={"schedule": fresh, "seen": None, "names": None, "list": None, "odd": 0}
    )
    assert report.extra["odd"] == extra["odd"]
    assert fresh.state_dict() == schedule.state_dict()
    assert report.extra["schedule"] is fresh
    assert torch.equal(report.extra["seen"], torch.arange(3))
    assert report.extra["names"] == ["a", ("b", 1)]
    assert report.extra["list"][1] == {"x": 2.5}
    assert "extra.absent" in str(refused(Run(seed=9), path, SourceError, extra={"absent": None}))
    unexpected = Run(seed=9).restore(path, extra={"seen": None}).unexpected
    assert set(unexpected) == {"extra.list", "extra.odd", "extra.schedule", "extra.names"}


class Counting:
    def __init__(self, count: int, refuses: bool = False) -> None:
        self.count, self.refuses = count, refuses

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        if self.refuses:
            self.refuses = False
            raise ValueError("not this one")


def test_an_object_that_refuses_its_state_leaves_all_as_it_was(run: Run, tmp_path: Path) -> None:
    run.train(2, 4)
    path = run.save(tmp_path / "c", extra={"a": Counting(1), "b": Counting(2)})
    other = Run(seed=9)
    before = [
        p.tolist() for p in (*other.model.parameters(), *other.ema.state_dict()["weights"].values())
    ]
    extra = {"a": Counting(7), "b": Counting(8, refuses=True)}
    with pytest.raises(ValueError, match="not this one"):
        other.restore(path, extra=extra)
    assert (extra["a"].count, extra["b"].count) == (7, 8)
    assert [
        p.tolist() for p in (*other.model.parameters(), *other.ema.state_dict()["weights"].values())
    ] == before
    other.restore(path, extra=extra)
    assert (extra["a"].count, extra["b"].count) == (1, 2)


def test_values_of_numpy_and_time_come_back(run: Run, tmp_path: Path) -> None:
    extra = {
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(3).bit_generator.state,
        "loss": np.float32(0.25),
        "names": np.array(["a", "bc"]),
        "root": Path("/data/run"),
        "began": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC),
        "blob": io.BytesIO(b"fp8"),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = run.save(tmp_path / "c", extra=extra)
    found = Run(seed=9).restore(path, extra=dict.fromkeys(extra)).extra
    assert found["numpy"][0] == extra["numpy"][0]
    assert np.array_equal(found["numpy"][1], extra["numpy"][1])
    assert found["generator"] == extra["generator"]
    assert (found["loss"], found["loss"].dtype) == (0.25, np.float32)
    assert found["names"].tolist() == ["a", "bc"]
    assert (found["root"], found["began"]) == (extra["root"], extra["began"])
    assert found["blob"].getvalue() == b"fp8"


class Hostile:
    def __reduce__(self) -> Any:
        return (print, ("run by the checkpoint",))


def test_objects_of_a_checkpoint_are_not_executed(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match=r"unsafe-pickle: 'extra\.bad'"):
        path = run.save(tmp_path / "c", extra={"bad": Hostile()})
    error = refused(Run(seed=9), path, SourceError, extra={"bad": None})
    assert error.code == "unsafe-pickle"
    assert "extra.bad" in str(error)
    assert "run by" not in capsys.readouterr().out


def test_generators(run: Run, tmp_path: Path) -> None:
    import random

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    path = run.save(tmp_path / "c", extra={"rng": rng_state()})
    drawn = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.manual_seed(6)
    Run(seed=9).restore(path, extra={"rng": rng_state()})
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == drawn


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


def test_damage_is_noticed_before_anything_is_written(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    file = path / "__0_0.distcp"
    data = file.read_bytes()
    needle = run.optimizer.state[run.model.enter.weight]["exp_avg_sq"].numpy().tobytes()
    at = data.index(needle)
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    error = refused(Run(seed=9), path, SourceError)
    assert error.code == "checksum"
    assert "optimizer.state.enter.weight.exp_avg_sq" in str(error)
    file.write_bytes(data[:-10])
    assert refused(Run(seed=9), path, SourceError).code == "truncated-file"
    file.unlink()
    assert refused(Run(seed=9), path, SourceError).code == "missing-file"


def test_the_newest_complete_step_counts(run: Run, tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for step in (500, 2500):
        run.save(tmp_path / f"step_{step}")
    assert latest(tmp_path) == tmp_path / "step_2500"
    shutil.copytree(tmp_path / "step_2500", tmp_path / "step_3000")
    (tmp_path / "step_3000" / ".metadata").unlink()
    shutil.copytree(tmp_path / "step_2500", tmp_path / "step_4000")
    file = tmp_path / "step_4000" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    shutil.copytree(tmp_path / "step_2500", tmp_path / ".step_5000.ema-ckpt-0a1b2c3d" / "step_5000")
    assert latest(tmp_path) == tmp_path / "step_2500"
    assert Run(seed=9).restore(tmp_path).path == tmp_path / "step_2500"


def test_targets(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.save(tmp_path / "with space" / "c")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(TargetError) as caught:
        run.save(path)
    assert caught.value.code == "target-exists"
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    run.train(3, 4)
    assert run.save(path, overwrite=True) == path
    assert sorted(child.name for child in path.parent.iterdir()) == ["c"]
    other = Run(seed=9)
    other.restore(path)
    same(other.bits(), run.bits())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="URL"):
        run.save("s3://bucket/key")  # type: ignore[arg-type]
    assert not (tmp_path / "s3:").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(TargetError) as caught:
        run.save(tmp_path / "mine", overwrite=True)
    assert caught.value.code == "foreign-files"


def test_swapped_models_are_neither_saved_nor_restored(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    with run.ema.swap():
        for options in ({"ema": run.ema}, {}):
            with pytest.raises(StateError, match="inside swap"):
                save(tmp_path / "d", model=run.model, **options)
            with pytest.raises(StateError, match="inside swap"):
                restore(path, model=run.model, **options)
    assert not (tmp_path / "d").exists()


def test_a_saved_state_is_that_of_the_call(run: Run, tmp_path: Path) -> None:
    before = run.bits()
    first = save(
        tmp_path / "a", model=run.model, ema=run.ema, optimizer=run.optimizer, async_save=True
    )
    run.train(3, 6)
    between = run.bits()
    second = save(
        tmp_path / "b", model=run.model, ema=run.ema, optimizer=run.optimizer, async_save=True
    )
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    assert first.result(30) == tmp_path / "a"
    assert second.result(30) == tmp_path / "b"
    for name, expected in (("a", before), ("b", between)):
        other = Run(seed=9)
        other.restore(tmp_path / name)
        same(other.bits(), expected)


def test_a_failed_background_save_is_not_forgotten(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "c")
    lost = save(tmp_path / "c", model=run.model, async_save=True)
    with pytest.warns(
        UserWarning, match="asynchronous save before this call failed: .*already exists"
    ):
        run.save(tmp_path / "d")
    with pytest.raises(TargetError):
        lost.result()
    asked = save(tmp_path / "c", model=run.model, async_save=True)
    with pytest.raises(TargetError):
        asked.result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.save(tmp_path / "e")


def test_extra_state_of_modules(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    model = nn.Sequential(Counting(2, 2), nn.Linear(2, 1))
    model[0].count = 7
    path = save(tmp_path / "c", model=model)
    other = nn.Sequential(Counting(2, 2), nn.Linear(2, 1))
    restore(path, model=other)
    assert other[0].count == 7
    names = [
        name
        for name in dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        if name.startswith("model.")
    ]
    assert names == [
        f"model.{name}".replace("_extra_state", "_extra_state.count") for name in model.state_dict()
    ]


def test_a_checkpoint_saved_while_swapped_is_put_right(run: Run, tmp_path: Path) -> None:
    live = {name: value.clone() for name, value in run.model.state_dict().items()}
    state = run.ema.state_dict()
    averages = {name: value.clone() for name, value in state["weights"].items()}
    parameters = {name for name, _ in run.model.named_parameters()}
    exchanged = {
        "model": {
            name: averages[name] if name in parameters else value for name, value in live.items()
        },
        "ema": {**state, "weights": {name: live[name] for name in averages}},
        "swapped": True,
    }
    dcp.save(exchanged, checkpoint_id=tmp_path / "c")
    other = Run(seed=9)
    with pytest.warns(UserWarning, match="marked as swapped"):
        other.restore(tmp_path / "c", optimizer=None)
    for name in parameters:
        assert torch.equal(other.model.state_dict()[name], live[name])
        assert torch.equal(other.ema.state_dict()["weights"][name], averages[name])
    assert not torch.equal(live["enter.weight"], averages["enter.weight"])


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


def test_an_optimizer_among_the_extra_values_keeps_its_integer_keys(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    before, after = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    before.step()
    save(tmp_path / "step", model=model, extra={"optimizer": before})
    restore(tmp_path / "step", model=model, extra={"optimizer": after})
    for param in model.parameters():
        assert torch.equal(after.state[param]["exp_avg"], before.state[param]["exp_avg"])


def test_names_that_look_like_a_mark_of_exchange(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, ShardedEMA]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 3)
        model.register_buffer("is_swapped", torch.tensor(True))
        ema = ShardedEMA(model, 0.5)
        with torch.no_grad():
            model.weight.add_(1)
        ema.update()
        return model, ema

    (model, ema), (again, averaged) = made(0), made(1)
    save(tmp_path / "step", model=model, ema=ema, extra={"swapped": True})
    restore(tmp_path / "step", model=again, ema=averaged, extra={"swapped": None})
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(
        averaged.state_dict()["weights"]["weight"], ema.state_dict()["weights"]["weight"]
    )


def test_a_separate_file_for_a_named_manager(run: Run, tmp_path: Path) -> None:
    torch.save({"ema": run.model.state_dict()}, tmp_path / "foreign.pt")
    save(tmp_path / "step", model=run.model)
    ema = ShardedEMA(run.model, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restore(
            tmp_path / "step", model=run.model, ema={"fast": ema}, ema_path=tmp_path / "foreign.pt"
        )


def test_a_target_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="file") as caught:
        save(tmp_path / "file" / "step", model=nn.Linear(2, 2))
    assert caught.value.code == "not-found"


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_separate_file_with_buffers_under_any_prefix(
    run: Run, tmp_path: Path, prefix: str
) -> None:
    live = save(tmp_path / "c", model=run.model)
    theirs = {
        f"{prefix}{name}": torch.full_like(v, 3) for name, v in run.model.state_dict().items()
    }
    torch.save(theirs, tmp_path / "ema.pt")
    other = Run(seed=9)
    report = restore(live, model=other.model, ema=other.ema, ema_path=tmp_path / "ema.pt")
    assert not report.unexpected
    weights = other.ema.state_dict()["weights"]
    assert all(torch.all(weights[name] == 3) for name, _ in other.model.named_parameters())


@pytest.mark.parametrize("nested", [True, False])
def test_a_separate_file_of_torchs_averaged_model(run: Run, tmp_path: Path, nested: bool) -> None:
    live = save(tmp_path / "c", model=run.model)
    averaged = torch.optim.swa_utils.AveragedModel(run.model)
    run.train(0, 3)
    averaged.update_parameters(run.model)
    run.train(3, 5)
    averaged.update_parameters(run.model)
    state = averaged.state_dict()
    if nested:
        state = {"module": averaged.module.state_dict(), "n_averaged": state["n_averaged"]}
    torch.save(state, tmp_path / "ema.pt")
    other = Run(seed=9)
    restore(live, model=other.model, ema=other.ema, ema_path=tmp_path / "ema.pt")
    weights = other.ema.state_dict()["weights"]
    assert all(
        torch.equal(weights[name], value) for name, value in averaged.module.named_parameters()
    )
    assert other.ema.num_updates == 2


@pytest.mark.parametrize("decay", [Warmup(0.9), PowerFunction(0.1), 0.9])
def test_averages_whose_counter_is_not_told(run: Run, tmp_path: Path, decay: Any) -> None:
    run.train(0, 3)
    path = run.save(tmp_path / "c")
    consolidate(path, tmp_path / "ema.safetensors")
    model = Net(seed=9)
    ema = ShardedEMA(model, decay)
    told = restore(path, model=model, ema=ema, ema_path=tmp_path / "ema.safetensors").warnings
    assert ["the first update replaces them" in message for message in told] == [True] * (
        decay != 0.9
    )
    assert restore(path, model=model, ema=ema).warnings == ()


def test_two_optimizers_of_one_parameter_are_refused(tmp_path: Path) -> None:
    model = Net()
    first, second = (stepped(torch.optim.AdamW, model) for _ in range(2))
    with pytest.raises(UsageError, match="two optimizers keep state of"):
        save(tmp_path / "c", model=model, optimizer=[first, second])
    assert list(tmp_path.iterdir()) == []


def test_state_that_an_optimizer_hides_is_refused(tmp_path: Path) -> None:
    model = Net()
    sharp = stepped(torch.optim.SGD, model)
    sharp.base_optimizer = stepped(torch.optim.AdamW, model)  # type: ignore[attr-defined]
    apex = stepped(torch.optim.SGD, model)
    apex.param_groups_master = [{"params": []}]  # type: ignore[attr-defined]
    for optimizer, what in ((sharp, "optimizers of its own"), (apex, "param_groups_master")):
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
