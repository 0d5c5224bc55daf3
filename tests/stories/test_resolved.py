"""Every document says what was named and what was read, and diff repeats the warnings of both checkpoints."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import ema_ckpt
from ema_ckpt.ops.results.as_json import as_json


@pytest.fixture
def run(tmp_path: Path, fixtures: Path) -> Path:
    """A run of two steps."""
    for step in (3, 20):
        shutil.copytree(fixtures / "dcp" / "fsdp2-w4", tmp_path / "run" / f"step_{step}")
    return tmp_path / "run"


def test_writers_name_the_step(run: Path, tmp_path: Path) -> None:
    newest = str(run / "step_20")
    for result in (
        ema_ckpt.consolidate(run, tmp_path / "out.safetensors", dry_run=True),
        ema_ckpt.reshard(run, tmp_path / "two", world_size=2, dry_run=True),
        ema_ckpt.convert(run, tmp_path / "out.pt", dry_run=True),
    ):
        assert (result.source, result.resolved) == (str(run), newest)


def test_synthesize_lists_each_snapshot(run: Path, tmp_path: Path) -> None:
    snapshots = [run / "step_3", run]
    result = ema_ckpt.synthesize(
        snapshots, tmp_path / "o.safetensors", weights=[1, 1], dry_run=True
    )
    assert as_json(result)["resolved"] == [str(run / "step_3"), str(run / "step_20")]


def test_diff_names_both_sides(run: Path) -> None:
    result = ema_ckpt.diff(run, run / "step_3", threads=1)
    assert (result.a, result.resolved_a) == (str(run), str(run / "step_20"))
    assert (result.b, result.resolved_b) == (str(run / "step_3"),) * 2
    alone = ema_ckpt.diff(run, threads=1)
    assert alone.a == alone.b == str(run)
    assert alone.resolved_a == alone.resolved_b == str(run / "step_20")


def test_verify_names_the_step(run: Path) -> None:
    result = ema_ckpt.verify(run)
    assert (result.path, result.resolved) == (str(run), str(run / "step_20"))


def test_verify_of_what_has_no_metadata(run: Path) -> None:
    (run / "step_20" / ".metadata").unlink()
    step = str(run / "step_20")
    result = ema_ckpt.verify(step)
    assert (result.path, result.resolved, result.status) == (step, step, "damaged")


def test_diff_repeats_warnings(tmp_path: Path) -> None:
    """An object of an unknown class is a warning of its checkpoint, whichever side it is."""
    for name in ("one", "two"):
        torch.save({"model": {"w": torch.ones(3)}, "note": Fraction(1, 3)}, tmp_path / f"{name}.pt")
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    (warning,) = ema_ckpt.inspect(one).warnings
    (both,) = ema_ckpt.diff(one, one, threads=1).warnings
    assert both == warning
    found = ema_ckpt.diff(one, two, threads=1).warnings
    assert [w.code for w in found] == [warning.code] * 2
    assert [str(path) in w.message for path, w in zip((one, two), found, strict=True)] == [True] * 2
