"""Values and objects under `extra`."""

from __future__ import annotations

import datetime
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ema_ckpt import restore, rng_state, save
from ema_ckpt.core.errors import SourceError
from tests.resume.training import Run, refused

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
    path = tmp_path / "c"
    dcp.save({"model": run.model.state_dict(), "extra": {"bad": Hostile()}}, checkpoint_id=path)
    options = {"ema": None, "optimizer": None, "extra": {"bad": None}}
    error = refused(Run(seed=9), path, SourceError, **options)
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


def test_an_optimizer_among_the_extra_values_keeps_its_integer_keys(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    before, after = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    before.step()
    save(tmp_path / "step", model=model, extra={"optimizer": before})
    restore(tmp_path / "step", model=model, extra={"optimizer": after})
    for param in model.parameters():
        assert torch.equal(after.state[param]["exp_avg"], before.state[param]["exp_avg"])
