"""`latest`, and the step that `restore` takes from a directory of steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ema_ckpt import latest
from tests.resume.training import Run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
