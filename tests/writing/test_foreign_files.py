"""Foreign files that appear in the old directory while it is replaced: carried late, or kept, never deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ema_ckpt.storage.stage_names import NOTE, OLD, stage_path, stages_of
from ema_ckpt.writing import staging
from ema_ckpt.writing.staging import Staged, stage
from tests.staged_writer import make_old, read_target, snapshot, spawn, write_new

PLAIN = pytest.mark.parametrize("plain", [False, True], ids=["flags", "plain"])


@pytest.fixture(params=[True, False], ids=["links", "copies"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system has hard links; without them foreign files are copied."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    if not request.param:
        monkeypatch.setattr(os, "link", refuse)
    return bool(request.param)


@pytest.fixture
def just_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have somebody do something at the last moment before the switch."""

    def install(act: Callable[[], object]) -> None:
        usual = staging.exchange

        def late(*args: Any, **kwargs: Any) -> None:
            act()
            usual(*args, **kwargs)

        monkeypatch.setattr(staging, "exchange", late)

    return install


def make_model(target: Path) -> None:
    (target / "data" / "deep").mkdir(parents=True)
    (target / "model.safetensors").write_text("old")
    for name in ("README.md", "LICENSE", "data/one", "data/deep/two"):
        (target / name).write_text("old")
    (target / "link").symlink_to("LICENSE")


def replace(path: Path, text: str) -> None:
    """As an editor does it."""
    draft = path.with_name(".draft")
    draft.write_text(text)
    os.replace(draft, path)


def overwrite(target: Path, plain: bool = False, **options: Any) -> Staged:
    with stage(target, is_directory=True, overwrite=True, plain_rename=plain, **options) as staged:
        write_new(staged)
    return staged


@PLAIN
def test_what_comes_after_the_carrying_is_carried_too(
    tmp_path: Path, just_before: Any, plain: bool, links: bool
) -> None:
    target = tmp_path / "hf"
    make_model(target)

    def act() -> None:
        replace(target / "README.md", "newer")
        replace(target / "data" / "one", "newer")
        with open(target / "data" / "deep" / "two", "a") as file:  # in place
            file.write(" and newer")
        (target / "notes.txt").write_text("mine")
        (target / "data" / "added").write_text("mine")
        (target / "folder").mkdir()
        (target / "folder" / "file").write_text("mine")
        (target / "link2").symlink_to("notes.txt")

    just_before(act)
    staged = overwrite(target, plain, keep_foreign=True)
    assert staged.warnings == []
    assert os.listdir(tmp_path) == ["hf"]
    assert read_target(target) == "new"
    texts = {
        str(path.relative_to(target)): path.read_text()
        for path in target.rglob("*")
        if path.is_file()
    }
    assert texts == {
        "model.safetensors": "new",
        "README.md": "newer",
        "LICENSE": "old",
        "link": "old",
        "link2": "mine",
        "data/one": "newer",
        "data/deep/two": "old and newer",
        "data/added": "mine",
        "folder/file": "mine",
        "notes.txt": "mine",
    }


@PLAIN
def test_what_has_no_place_is_kept_beside(
    tmp_path: Path, just_before: Any, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    """A name that the new checkpoint has, and a folder where a file was carried."""
    target = tmp_path / "hf"
    make_model(target)

    def act() -> None:
        (target / "model.safetensors").unlink()
        (target / "model.safetensors").mkdir()
        (target / "model.safetensors" / "mine").write_text("mine")
        (target / "README.md").unlink()
        (target / "README.md").mkdir()
        (target / "README.md" / "chapter").write_text("mine")
        (target / "notes.txt").write_text("mine")

    just_before(act)
    staged = overwrite(target, plain, keep_foreign=True)
    (kept,) = (path for path in tmp_path.iterdir() if path != target)
    assert [warning.code for warning in staged.warnings] == ["stale-file"]
    assert str(kept) in staged.warnings[0].message
    assert "README.md" in staged.warnings[0].message
    assert kept.name.startswith("hf.kept-")
    assert (kept / "model.safetensors" / "mine").read_text() == "mine"
    assert (kept / "README.md" / "chapter").read_text() == "mine"
    assert (target / "notes.txt").read_text() == "mine"
    assert (target / "model.safetensors").read_text() == "new"
    assert (target / "README.md").read_text() == "old"
    monkeypatch.undo()
    before = snapshot(kept)
    overwrite(target, plain, keep_foreign=True)  # the next run leaves it alone
    assert snapshot(kept) == before
    assert sorted(os.listdir(tmp_path)) == ["hf", kept.name]


@PLAIN
def test_a_directory_that_carries_nothing(tmp_path: Path, just_before: Any, plain: bool) -> None:
    """As one of DCP: what is foreign there is refused, or kept if it came after the check."""
    target = tmp_path / "dcp"
    make_old(target, is_directory=True)
    just_before(lambda: (target / "notes.txt").write_text("mine"))
    staged = overwrite(target, plain)
    (kept,) = (path for path in tmp_path.iterdir() if path != target)
    assert os.listdir(target) == ["model.safetensors"]
    assert os.listdir(kept) == ["notes.txt"]  # the old checkpoint is not kept with it
    assert (kept / "notes.txt").read_text() == "mine"
    (warning,) = staged.warnings
    assert warning.code == "stale-file"
    assert str(kept) in warning.message and "notes.txt" in warning.message


@PLAIN
def test_a_link_in_place_of_the_old_one_is_not_followed(
    tmp_path: Path, just_before: Any, plain: bool
) -> None:
    target, elsewhere = tmp_path / "dcp", tmp_path / "elsewhere"
    make_old(target, is_directory=True)
    make_old(elsewhere, is_directory=True)
    before = snapshot(elsewhere)

    def act() -> None:
        shutil.rmtree(target)
        target.symlink_to("elsewhere")

    just_before(act)
    staged = overwrite(target, plain)
    assert snapshot(elsewhere) == before
    assert len(staged.warnings) == 1
    assert read_target(target) == "new"


def test_entries_that_are_written_anew_are_not_kept(tmp_path: Path, just_before: Any) -> None:
    target = tmp_path / "hf"
    make_model(target)
    just_before(lambda: replace(target / "config.json", "{}"))
    staged = overwrite(target, keep_foreign=True, replaces=["config.json"])
    assert staged.warnings == []
    assert not (target / "config.json").exists()
    assert os.listdir(tmp_path) == ["hf"]


KILLED = """
import os, signal, sys
from pathlib import Path
from ema_ckpt.writing import staging
target, moment = Path(sys.argv[1]), sys.argv[2]
usual = staging.exchange
def exchange(*args, **kwargs):
    if moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    (target / "notes.txt").write_text("mine")
    (target / "README.md").unlink()
    (target / "README.md").write_text("newer")
    usual(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
staging.exchange = exchange
with staging.stage(target, is_directory=True, overwrite=True, keep_foreign=True) as staged:
    (staged.path / "model.safetensors").write_text("new")
"""


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("keep_foreign", [True, False])
def test_a_run_that_was_killed_at_the_switch(
    tmp_path: Path, keep_foreign: bool, moment: str, resume: bool
) -> None:
    """What came too late to be carried is in its stage, which the next run deletes."""
    target = tmp_path / "hf"
    make_model(target)
    process = spawn(KILLED, target, moment)
    assert process.communicate()[1] == "" and process.returncode == -9
    (left,) = stages_of(target)
    if not keep_foreign:  # as a DCP directory
        for name in os.listdir(target):
            if name != "model.safetensors":
                shutil.move(target / name, tmp_path)
    staged = overwrite(target, keep_foreign=keep_foreign, resume=resume)
    assert read_target(target) == "new"
    assert stages_of(target) == []
    kept = tmp_path / f"hf.kept-{left.name[-8:]}"
    if moment == "before":
        assert staged.warnings == [] and not kept.exists()
        return
    place = target if keep_foreign else kept
    assert (place / "notes.txt").read_text() == "mine"
    assert (kept / "README.md").read_text() == "newer"  # which of the two is newer nobody knows
    assert [warning.code for warning in staged.warnings] == ["stale-file"]


@pytest.mark.parametrize("keep_foreign", [True, False])
def test_a_switch_that_was_cut_in_two(tmp_path: Path, keep_foreign: bool) -> None:
    target = tmp_path / "hf"
    left = stage_path(target, "00000000")
    (left / "hf").mkdir(parents=True)
    (left / "hf" / "model.safetensors").write_text("newer")
    (left / NOTE).write_text(f'{{"old": "{OLD}", "new": "hf"}}')
    make_old(left / OLD, is_directory=True)
    (left / OLD / "notes.txt").write_text("mine")
    staged = overwrite(target, keep_foreign=keep_foreign)
    assert read_target(target) == "new"
    assert stages_of(target) == []
    if keep_foreign:
        assert (target / "notes.txt").read_text() == "mine"
        assert staged.warnings == []
    else:
        assert (tmp_path / "hf.kept-00000000" / "notes.txt").read_text() == "mine"
        assert [warning.code for warning in staged.warnings] == ["stale-file"]


def test_with_the_command_itself(tmp_path: Path) -> None:
    """An editor and a program write while `consolidate` carries a folder of many files."""
    source, target = tmp_path / "src.safetensors", tmp_path / "hf"
    save_file({f"l{i}.weight": np.full((64, 64), i, np.float32) for i in range(4)}, source)
    command = [sys.executable, "-m", "ema_ckpt", "consolidate", str(source), str(target)]
    subprocess.run([*command, "-q"], check=True)
    (target / "data").mkdir()
    for i in range(1000):
        (target / "data" / str(i)).write_text("kept")
    (target / "README.md").write_text("old")
    with subprocess.Popen([*command, "--overwrite"], stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            if any((left / "hf" / "data").exists() for left in stages_of(target)):
                break
            time.sleep(0.001)
        replace(target / "README.md", "newer")
        (target / "notes.txt").write_text("mine")
        (target / "data" / "added").write_text("mine")
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert (target / "README.md").read_text() == "newer"
    assert (target / "notes.txt").read_text() == "mine"
    assert (target / "data" / "added").read_text() == "mine"
    assert len(os.listdir(target / "data")) == 1001
    assert sorted(os.listdir(tmp_path)) == ["hf", "src.safetensors"]


def test_what_has_the_name_of_a_new_file_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "hf"
    for name in ("model.safetensors", "config.json"):
        (target / name).mkdir(parents=True)
        (target / name / "mine").write_text("mine")
    with stage(
        target, is_directory=True, overwrite=True, keep_foreign=True, replaces=["config.json"]
    ) as staged:
        write_new(staged)
        (staged.path / "config.json").write_text("{}")
    assert read_target(target) == "new"
    (kept,) = (path for path in tmp_path.iterdir() if path != target)
    for name in ("model.safetensors", "config.json"):
        assert (kept / name / "mine").read_text() == "mine"
    (warning,) = staged.warnings
    assert str(kept) in warning.message and "model.safetensors" in warning.message


@PLAIN
def test_links_to_old_shards_are_no_foreign_files(tmp_path: Path, plain: bool) -> None:
    """A folder of Hugging Face's cache has relative links, which lead nowhere from the stage."""
    target, blobs = tmp_path / "snapshots" / "hf", tmp_path / "blobs"
    target.mkdir(parents=True)
    blobs.mkdir()
    shard = "model-00001-of-00001.safetensors"
    for name in (shard, "model.safetensors.index.json", "config.json"):
        (blobs / name).write_text("old")
        (target / name).symlink_to(f"../../blobs/{name}")
    (target / "more.safetensors").write_text("old")
    (target / "same.safetensors").symlink_to("more.safetensors")
    staged = overwrite(target, plain, keep_foreign=True)
    assert sorted(os.listdir(target)) == ["config.json", "model.safetensors"]
    assert (target / "config.json").read_text() == "old"
    assert sorted(os.listdir(blobs)) == ["config.json", shard, "model.safetensors.index.json"]
    assert os.listdir(target.parent) == ["hf"]
    assert staged.warnings == []


def test_owner_mode_and_times_of_what_is_carried(tmp_path: Path, links: bool) -> None:
    target = tmp_path / "hf"
    make_model(target)
    names = ("data/one", "data/deep/two", "data/deep", "data")
    for number, name in enumerate(names):
        if os.geteuid() == 0:
            os.chown(target / name, 65534 - number, 65530 - number)
        os.chmod(target / name, 0o555 if (target / name).is_dir() else 0o440)
        os.utime(target / name, (1e9 + number, 1e9 + number))

    def states() -> list[tuple[int, int, int, float]]:
        found = [(target / name).stat() for name in names]
        return [(one.st_mode, one.st_uid, one.st_gid, one.st_mtime) for one in found]

    before = states()
    overwrite(target, keep_foreign=True)
    assert states() == before
    for name in ("data", "data/deep"):  # so that anybody can delete it
        for place in [target, *(left / "hf" for left in stages_of(target))]:
            os.chmod(place / name, 0o755)


def test_what_is_linked_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    target = tmp_path / "hf"
    make_model(target)
    flushed, usual = set(), os.fsync

    def fsync(fd: int) -> None:
        flushed.add(os.fstat(fd).st_ino)
        usual(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    overwrite(target, keep_foreign=True)
    for name in (".", "model.safetensors", "data", "data/deep"):
        assert (target / name).stat().st_ino in flushed
    for name in ("README.md", "data/one"):
        assert ((target / name).stat().st_ino in flushed) is not links
