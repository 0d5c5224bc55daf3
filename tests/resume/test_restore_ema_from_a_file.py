"""Averages from a separate file or directory, in whatever form other trainers write them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from ema_ckpt import consolidate, restore, save
from ema_ckpt.core.errors import SourceError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.schedules import PowerFunction, Warmup
from tests.resume.training import Net, Run, refused

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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


def test_a_separate_file_for_a_named_manager(run: Run, tmp_path: Path) -> None:
    torch.save({"ema": run.model.state_dict()}, tmp_path / "foreign.pt")
    save(tmp_path / "step", model=run.model)
    ema = ShardedEMA(run.model, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restore(
            tmp_path / "step", model=run.model, ema={"fast": ema}, ema_path=tmp_path / "foreign.pt"
        )


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
    told = restore(path, model=model, ema=ema).warnings
    assert all("which counts" in message for message in told)  # the changed decay
