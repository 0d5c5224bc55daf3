"""`latest`, and the step that `restore` takes from a directory of steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest

from ema_ckpt import inspect, latest, reshard
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.discovery import locate
from tests.checkpoints import dcp_at, safetensors_at, torch_at, touch
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


def test_a_checkpoint_is_its_own_latest(tmp_path: Path) -> None:
    source = dcp_at(tmp_path / "run" / "step_1")
    on_three = tmp_path / "on-3"
    reshard(source, on_three, 3)
    assert latest(on_three) == on_three
    for made in (
        safetensors_at(tmp_path / "hf" / "model.safetensors").parent,
        safetensors_at(tmp_path / "parts" / "unet" / "model.safetensors").parents[1],
        torch_at(tmp_path / "model.state"),
    ):
        if made.name == "parts":
            safetensors_at(made / "unet_ema" / "model.safetensors")
        assert latest(made) == made
    (on_three / "__1_0.distcp").unlink()
    with pytest.raises(EmaCkptError, match="__1_0"):
        latest(on_three)
    assert latest(on_three, incomplete="ignore") is None


@pytest.mark.parametrize("incomplete", ["raise", "ignore"])
def test_a_step_that_replaces_the_one_before_it_is_found(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, incomplete: str
) -> None:
    """As where a run keeps one step: what was listed is deleted before it is looked into."""
    parent = tmp_path / "run"
    run.save(parent / "step_1")
    run.save(tmp_path / "next")
    usual = locate.list_directory

    def list_and_replace(path: str) -> locate.Folder:
        folder = usual(path)
        if path == str(parent) and (tmp_path / "next").exists():
            (tmp_path / "next").rename(parent / "step_2")
            shutil.rmtree(parent / "step_1")
        return folder

    monkeypatch.setattr(locate, "list_directory", list_and_replace)
    assert latest(parent, incomplete) == parent / "step_2"


@pytest.mark.parametrize("incomplete", ["raise", "ignore"])
def test_steps_that_always_come_and_go_are_not_none(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, incomplete: str
) -> None:
    parent = tmp_path / "run"
    run.save(parent / "step_1")
    usual, number = locate.list_directory, 1

    def list_and_replace(path: str) -> locate.Folder:
        nonlocal number
        folder = usual(path)
        if path == str(parent):
            (parent / f"step_{number}").rename(parent / f"step_{number + 1}")
            number += 1
        return folder

    monkeypatch.setattr(locate, "list_directory", list_and_replace)
    with pytest.raises(EmaCkptError, match="come and go") as caught:
        latest(parent, incomplete)
    assert caught.value.code == "source-changed"


def test_what_is_neither_checkpoint_nor_run_has_no_latest(tmp_path: Path) -> None:
    touch(tmp_path / "notes.txt")
    touch(tmp_path / "step_1" / "picture.png")
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "nowhere"):
        assert latest(path) is None
    with pytest.raises(EmaCkptError, match="'raise' or 'ignore'"):
        latest(tmp_path, incomplete="later")


def test_the_latest_step_of_files_is_a_file_and_a_pair_opens_as_such(tmp_path: Path) -> None:
    for step in (9, 10):
        safetensors_at(tmp_path / f"step_{step}.safetensors")
        safetensors_at(tmp_path / f"step_{step}_ema.safetensors", 0.5)
    found = latest(tmp_path)
    assert found == tmp_path / "step_10.safetensors"
    assert [tree.role for tree in inspect(found).trees] == ["live", "ema"]


def test_a_newer_step_that_is_not_complete_is_told(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.save(tmp_path / "step_1")
    (dcp_at(tmp_path / "step_2") / ".metadata").unlink()
    assert latest(tmp_path) == tmp_path / "step_1"
    assert caplog.text.count("step_2 is left out: newer, and not complete") == 1
    caplog.clear()
    report = Run(seed=9).restore(tmp_path)
    assert report.path == tmp_path / "step_1"
    assert "step_2 is left out: newer, and not complete" in report.warnings[0]
    assert caplog.text.count("step_2 is left out: newer, and not complete") == 1


def test_of_many_newer_steps_that_are_not_complete_some_are_told_and_the_others_counted(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.save(tmp_path / "step_1")
    for step in range(2, 34):
        touch(tmp_path / f"step_{step}" / "__0_0.distcp")
    assert latest(tmp_path) == tmp_path / "step_1"
    assert len(caplog.messages) == 11
    assert "step_33 is left out" in caplog.messages[0]
    assert "left out too, newer and not complete: 22 further steps" in caplog.messages[-1]


@pytest.mark.parametrize("name", [Path("s3://bucket/run"), "simplecache::s3://bucket/run"])
def test_what_is_no_path_does_not_let_a_run_begin_anew(
    name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Path` takes a slash from a URL; on a disk there is nothing of that name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EmaCkptError, match=r"as text|chain of URLs") as caught:
        latest(name)
    assert caught.value.code == "usage"
    (tmp_path / name / "step_1").mkdir(parents=True)  # unless there is
    with pytest.raises(EmaCkptError) as caught:
        latest(name)
    assert caught.value.code == "incomplete"


def test_checkpoints_that_are_not_named_as_steps_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("1", "2"):
        dcp_at(tmp_path / name)
    assert latest(tmp_path) is None
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: latest passes over '1', '2': a checkpoint, but not named as a step is, such as step_500"
    ]
    caplog.clear()
    dcp_at(tmp_path / "step_3")
    assert latest(tmp_path) == tmp_path / "step_3"
    assert not caplog.records


def test_the_latest_behind_a_url_is_text(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    dcp_at(tmp_path / "step_7")
    try:
        memory.put(str(tmp_path / "step_7"), "/latest-run/step_7", recursive=True)
        found = latest("memory://latest-run")
        assert found == "memory://latest-run/step_7"
        assert latest(found) == found
        assert inspect(found).format == "dcp"
    finally:
        memory.rm("/latest-run", recursive=True)
