"""Ranks whose scans of a run find different steps: rank 0 decides for all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ema_ckpt import restore, save
from ema_ckpt.core.errors import EmaCkptError
from tests.distributed.launcher import run


def _restore(parent: str) -> tuple[str, list[float]]:
    """Each rank sees a directory `run` of its own, as through caches of a network file system."""
    os.chdir(Path(parent, f"seen-by-{dist.get_rank()}"))
    model = nn.Linear(1, 1)
    report = restore("run", model=model)
    return str(report.path), model.weight.flatten().tolist()


def _missing(parent: str) -> str:
    os.chdir(Path(parent, f"seen-by-{dist.get_rank()}"))
    with pytest.raises(EmaCkptError) as caught:
        restore("run", model=nn.Linear(1, 1))
    return f"{caught.value.code}: {caught.value}"


@pytest.fixture
def views(tmp_path: Path) -> Path:
    model = nn.Linear(1, 1)
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(step)
        save(tmp_path / "all" / f"step_{step}", model=model)
    shutil.copytree(tmp_path / "all", tmp_path / "seen-by-1" / "run")
    shutil.copytree(tmp_path / "all" / "step_1", tmp_path / "seen-by-0" / "run" / "step_1")
    return tmp_path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_new_step_that_one_rank_sees(views: Path) -> None:
    assert run(2, _restore, str(views)) == [("run/step_1", [1.0])] * 2


def test_a_step_that_one_rank_does_not_see_is_an_error_on_all(views: Path) -> None:
    shutil.rmtree(views / "seen-by-1" / "run" / "step_1")
    for message in run(2, _missing, str(views)):
        assert message.startswith("not-found: rank 1: run/step_1: no such file")
