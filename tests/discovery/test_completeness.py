"""Steps that are not complete: passed over with a word, damage to `verify` unless they may still be written."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from tests.checkpoints import dcp_at, safetensors_at, save_dcp, torch_at, touch

MINUTES = 60


def age(root: Path, seconds: float = 11 * MINUTES) -> None:
    """Make all below `root`, and itself, look as if it had last changed so long ago."""
    then = time.time() - seconds
    for path in [*root.rglob("*"), root]:
        os.utime(path, (then, then))


def without_metadata(step: Path) -> None:
    (dcp_at(step) / ".metadata").unlink()


def without_a_part(step: Path) -> None:
    dcp_at(step / "model")
    save_dcp(step / "optim", {"state": {"b": {"exp_avg": torch.zeros(2)}}})
    (step / "optim" / ".metadata").unlink()


def without_index(step: Path) -> None:
    safetensors_at(step / "model-00001-of-00002.safetensors")


def with_half_a_file(step: Path) -> None:
    file = safetensors_at(step / "model.safetensors")
    os.truncate(file, file.stat().st_size - 4)


def empty(step: Path) -> None:
    step.mkdir()


UNFINISHED = [without_metadata, without_a_part, without_index, with_half_a_file, empty]


@pytest.mark.parametrize("damage", UNFINISHED)
def test_a_step_without_its_marker_may_still_be_written(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    dcp_at(tmp_path / "step_9")
    damage(tmp_path / "step_10")
    result = ema_ckpt.verify(tmp_path)
    assert (result.status, Path(result.resolved).name) == ("sound", "step_9")
    (warning,) = result.warnings
    assert warning.code == "left-out"
    assert warning.message.startswith("step_10 ")
    assert "may still be written" in warning.message
    age(tmp_path / "step_10")
    result = ema_ckpt.verify(tmp_path)
    assert result.status == "damaged"
    assert [problem.message.partition(":")[0] for problem in result.problems] == ["step_10"]
    assert result.problems[0].code in ("missing-metadata", "truncated-file", "incomplete")
    assert not result.warnings


def test_a_clock_that_is_ahead_makes_no_step_old(tmp_path: Path) -> None:
    """Times come from the server of a file system."""
    dcp_at(tmp_path / "step_9")
    without_metadata(tmp_path / "step_10")
    an_hour_ahead = time.time() + 3600
    for path in (tmp_path / "step_10").iterdir():
        os.utime(path, (an_hour_ahead, an_hour_ahead))
    result = ema_ckpt.verify(tmp_path)
    assert result.status == "sound"
    assert "may still be written" in result.warnings[0].message


def without_a_file(step: Path) -> None:
    (dcp_at(step) / "__0_0.distcp").unlink()


def without_a_shard(step: Path) -> None:
    content = {"weight_map": {"a": "gone.safetensors"}}
    touch(step / "model.safetensors.index.json", json.dumps(content))


def without_a_torch_shard(step: Path) -> None:
    touch(step / "pytorch_model.bin.index.json", json.dumps({"weight_map": {"a": "gone.bin"}}))


@pytest.mark.parametrize("damage", [without_a_file, without_a_shard, without_a_torch_shard])
def test_a_step_with_its_marker_is_damaged_however_young(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    dcp_at(tmp_path / "step_9")
    damage(tmp_path / "step_10")
    result = ema_ckpt.verify(tmp_path)
    assert result.status == "damaged"
    (problem,) = result.problems
    assert problem.code == "missing-file"
    assert problem.message.startswith("step_10: newer, and not complete: ")
    assert str(problem.file).startswith("step_10/")


def test_a_damaged_older_step_is_not_looked_at(tmp_path: Path) -> None:
    without_a_file(tmp_path / "step_9")
    dcp_at(tmp_path / "step_10")
    result = ema_ckpt.verify(tmp_path)
    assert (result.status, result.warnings) == ("sound", ())


def test_a_directory_with_the_name_of_a_newer_step_that_holds_something_else(
    tmp_path: Path,
) -> None:
    dcp_at(tmp_path / "step_9")
    touch(tmp_path / "step_10" / "sample.png")
    result = ema_ckpt.verify(tmp_path)
    assert result.status == "sound"
    assert [w.message for w in result.warnings] == ["step_10 is left out: it holds no checkpoint"]
    done = ema_ckpt.consolidate(tmp_path, tmp_path / "out.pt", strict=True)
    assert [w.code for w in done.warnings] == ["left-out"]


def test_rank_files_say_that_others_are_missing(tmp_path: Path) -> None:
    """Names of three files tell nothing of a fourth, but the tensors in them do."""
    dcp_at(tmp_path / "step_9")
    torch_at(tmp_path / "step_10" / "model_rank_0.pt")
    torch_at(tmp_path / "step_10" / "model_rank_2.pt")
    result = ema_ckpt.inspect(tmp_path)
    assert Path(result.resolved).name == "step_9"
    assert "rank 1 of 3 are missing" in result.warnings[0].message


@pytest.mark.parametrize("damage", UNFINISHED)
def test_a_run_without_a_complete_step_is_never_taken_for_a_new_one(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(tmp_path / "step_10")
    with pytest.raises(EmaCkptError, match="remove 'step_10'") as caught:
        ema_ckpt.latest(tmp_path)
    assert caught.value.code == "incomplete"
    assert ema_ckpt.latest(tmp_path, incomplete="ignore") is None
