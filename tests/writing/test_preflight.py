"""Every check that is made before anything is written, through the dry run and the real one alike."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ema_ckpt.core.errors import EmaCkptError, TargetError, UsageError
from ema_ckpt.writing.preflight import (
    OverwritePolicy,
    check_replaceable,
    foreign_entries,
    look_again,
    resolve_target,
)
from ema_ckpt.writing.staging import check_target, stage
from tests.staged_writer import REPO, make_old, read_target, snapshot, write_new


class TestRefusals:
    def refused(self, target: object, code: str, **options) -> EmaCkptError:
        options.setdefault("is_directory", True)
        for attempt in (stage, check_target):
            with pytest.raises(EmaCkptError) as caught:
                result = attempt(target, **options)
                if attempt is stage:
                    result.__enter__()
            assert caught.value.code == code, str(caught.value)
            assert "\n" not in str(caught.value)
        return caught.value

    def test_existing(self, tmp_path: Path) -> None:
        for kind in (False, True):
            target = tmp_path / f"out{kind}"
            make_old(target, is_directory=kind)
            before = snapshot(tmp_path)
            error = self.refused(target, "target-exists", is_directory=kind)
            assert str(target) in str(error)
            assert "--overwrite" in str(error)
            assert snapshot(tmp_path) == before
        (tmp_path / "empty").mkdir()
        self.refused(tmp_path / "empty", "target-exists")

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_source(self, tmp_path: Path, overwrite: bool) -> None:
        source = tmp_path / "runs" / "step_10"
        source.mkdir(parents=True)
        (source / ".metadata").write_text("m")
        (tmp_path / "alias").symlink_to(source)
        (tmp_path / "runs-alias").symlink_to(tmp_path / "runs")
        for target in (
            source,
            source / "out",
            tmp_path / "runs",
            tmp_path / "alias",
            tmp_path / "alias" / "out",
            tmp_path / "runs-alias" / "step_10",
            f"{source}/../step_10",
        ):
            for named in (source, tmp_path / "alias"):
                self.refused(
                    target,
                    "target-is-source",
                    sources=[tmp_path / "other", named],
                    overwrite=overwrite,
                )
        check_target(tmp_path / "runs" / "step_10-hf", sources=[source], is_directory=True)
        check_target(tmp_path / "runs" / "step_1", sources=[source], is_directory=True)

    def test_source_under_another_name(self, tmp_path: Path) -> None:
        (tmp_path / "a.safetensors").write_text("x")
        os.link(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        options = {
            "sources": [tmp_path / "a.safetensors"],
            "is_directory": False,
            "overwrite": True,
        }
        self.refused(tmp_path / "b.safetensors", "target-is-source", **options)

    def test_places_nothing_may_replace(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "a" / "b").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "a" / "b")
        for target in ("/", ".", "..", "../..", "", str(tmp_path), "/proc", "/dev", "x\0y"):
            assert isinstance(self.refused(target, "usage", overwrite=True), UsageError)
        assert (tmp_path / "a" / "b").is_dir()

    def test_devices_and_fifos(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        for target in ("/dev/null", tmp_path / "fifo"):
            for kind in (False, True):
                self.refused(target, "usage", overwrite=True, is_directory=kind)

    def test_urls(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for target in ("s3://bucket/key", "memory://x/y", "file:///tmp/x", "gs://b/k/"):
            self.refused(target, "usage")
        error = self.refused(Path("s3://bucket/key"), "usage")
        assert "URL" in str(error)
        assert os.listdir(tmp_path) == []

    def test_parent(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        self.refused(tmp_path / "file" / "out", "usage")
        self.refused(tmp_path / "file" / "deep" / "out", "usage")
        self.refused(tmp_path / "no" / ("n" * 300) / "out", "usage")
        assert os.listdir(tmp_path) == ["file"]

    def test_missing_parents(self, tmp_path: Path) -> None:
        with stage(tmp_path / "no" / "such" / "out", is_directory=True) as staged:
            write_new(staged)
        assert read_target(tmp_path / "no" / "such" / "out") == "new"

    def test_missing_parents_go_again_after_a_failure(self, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        with pytest.raises(ZeroDivisionError), stage(tmp_path / "there/a/b/out", is_directory=True):
            (tmp_path / "there/mine").touch()
            raise ZeroDivisionError
        assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == [
            "there",
            "there/mine",
        ]

    def test_a_parent_with_something_in_it_stays(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), stage(tmp_path / "a/b/out", is_directory=False):
            (tmp_path / "a/mine").touch()
            raise ZeroDivisionError
        assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["a", "a/mine"]

    def test_a_dry_run_makes_no_parents(self, tmp_path: Path) -> None:
        check_target(tmp_path / "no" / "such" / "out", is_directory=True, nbytes=1)
        assert os.listdir(tmp_path) == []

    def test_names_with_spaces_and_slashes(self, tmp_path: Path) -> None:
        with stage(f"{tmp_path}/a name/", is_directory=True) as staged:
            write_new(staged)
        assert read_target(tmp_path / "a name") == "new"
        self.refused(tmp_path / ("n" * 250), "usage", is_directory=False)

    def test_foreign_files(self, tmp_path: Path) -> None:
        target = tmp_path / "out"
        make_old(target, is_directory=True)
        for name, data in (
            ("notes.txt", b"mine"),
            ("train.bin", b"\x12\x34tokens"),
            ("optimizer.pt", b"PK\x03\x04"),
        ):
            (target / name).write_bytes(data)
            before = snapshot(tmp_path)
            error = self.refused(target, "foreign-files", overwrite=True)
            assert repr(name) in str(error)
            self.refused(
                target, "foreign-files", overwrite=True, is_directory=False, keep_foreign=True
            )
            assert snapshot(tmp_path) == before
            (target / name).unlink()
        (target / "step_5").mkdir()
        self.refused(target, "foreign-files", overwrite=True)
        (tmp_path / "thesis.txt").write_text("mine")
        self.refused(tmp_path / "thesis.txt", "foreign-files", overwrite=True)

    def test_what_was_deleted_while_it_was_open_is_nobodys(self, tmp_path: Path) -> None:
        """NFS and FUSE keep it under such a name until it is closed."""
        target = tmp_path / "out"
        make_old(target, is_directory=True)
        (target / ".nfs000000000005031200000e6a").write_text("old")
        (target / ".fuse_hidden0000000500000003").write_text("old")
        with stage(target, is_directory=True, overwrite=True) as staged:
            write_new(staged)
        assert read_target(target) == "new"
        assert os.listdir(tmp_path) == ["out"]
        (target / ".nfsettings").write_text("mine")
        self.refused(target, "foreign-files", overwrite=True)

    def test_no_space(self, tmp_path: Path) -> None:
        error = self.refused(tmp_path / "out", "no-space", nbytes=1 << 60)
        assert f"{1 << 60:,}" in str(error)
        assert os.listdir(tmp_path) == []

    def test_no_permission(self) -> None:
        """As nobody where the tests run as root, whom no mode keeps out."""
        with tempfile.TemporaryDirectory() as base:
            os.chmod(base, 0o755)
            locked = Path(base, "locked")
            locked.mkdir(mode=0o555)
            code = (
                "import os, sys\nfrom ema_ckpt.writing.staging import stage\nfrom ema_ckpt.core.errors import TargetError\n"
                "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
                "try:\n with stage(sys.argv[1], is_directory=True): pass\n"
                "except TargetError as error: print(error.code, error)\n"
            )
            command = [sys.executable, "-c", code, str(locked / "out")]
            found = subprocess.run(
                command, cwd=REPO, capture_output=True, text=True, check=True
            ).stdout
            assert found.startswith("usage ")
            assert "permission" in found
            assert os.listdir(locked) == []


def test_what_counts_as_foreign(tmp_path: Path) -> None:
    ours = {
        ".metadata": b"\x80\x04",
        "__0.metadata": b"",
        "__1_0.distcp": b"",
        "model.safetensors": b"",
        "model.safetensors.index.json": b"{}",
        "model.safetensors.index.fp16.json": b"{}",
        "pytorch_model.bin": b"PK\x03\x04",
        "old.pt": b"\x80\x02}q",
        "torn.pth": b"",
        "ema_ckpt.json": b"{}",
    }
    theirs = {
        "config.json": b"{}",
        "README.md": b"#",
        "train.bin": b"\0\1",
        "scheduler.pt": b"PK\x03\x04",
        "rng_state_0.pth": b"PK\x03\x04",
        "training_args.bin": b"PK\x03\x04",
        ".gitattributes": b"",
    }
    for name, data in {**ours, **theirs}.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "linked.safetensors").symlink_to("model.safetensors")
    (tmp_path / "dangling.safetensors").symlink_to("nowhere")
    (tmp_path / "dir.safetensors").mkdir()
    os.mkfifo(tmp_path / "fifo.pt")
    assert foreign_entries(tmp_path) == sorted(
        [*theirs, "dangling.safetensors", "dir.safetensors", "fifo.pt"]
    )


@pytest.mark.parametrize("name", ["closed/out", "n" * 300])
def test_a_target_that_cannot_be_looked_at_is_refused(name: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ema-ckpt-tests-") as place:
        os.chmod(place, 0o755)
        Path(place, "closed").mkdir(mode=0)
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            with pytest.raises(TargetError):
                check_target(Path(place, name), is_directory=True)
        finally:
            os.seteuid(user)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes what another user owns")
@pytest.mark.parametrize("case", ["sticky directory", "sticky file", "closed"])
def test_what_the_switch_may_not_move_is_refused_before_it(case: str) -> None:
    """Else it is refused after everything has been written, by a bare `Operation not permitted`."""
    with tempfile.TemporaryDirectory(prefix="ema-ckpt-tests-") as place:
        target = Path(place, "out")
        if case == "sticky file":
            target.touch()
        else:
            target.mkdir(mode=0o755)
        os.chmod(place, 0o777 if case == "closed" else 0o1777)
        os.seteuid(65534)
        try:
            with pytest.raises(TargetError) as caught:
                check_replaceable(target, OverwritePolicy(target.is_dir(), overwrite=True))
        finally:
            os.seteuid(0)
        assert caught.value.code == "usage"
        assert ("no permission" if case == "closed" else "only owners") in str(caught.value)
        check_replaceable(target, OverwritePolicy(target.is_dir(), overwrite=True))


def run_after_mount(mount: str, program: str) -> str:
    """Run a Python program where something is mounted for it alone; return its stderr."""
    namespaces = ["unshare", "--mount", *["--map-root-user"] * bool(os.geteuid())]
    if subprocess.run([*namespaces, "sh", "-c", mount], capture_output=True, check=False).returncode:  # fmt: skip
        pytest.skip("nothing can be mounted here")
    ended = subprocess.run(
        [*namespaces, "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, program],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stderr


def test_a_read_only_file_system_is_called_that(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    mount = f"mount --bind {place} {place} && mount -o remount,ro,bind {place}"
    program = f"from ema_ckpt.writing.staging import check_target as c; c({str(place / 'out')!r}, is_directory=True)"
    told = run_after_mount(mount, program)
    assert f"the file system is read-only: {place}" in told, told


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_directory_with_a_mount_point_in_it_is_not_replaced(tmp_path: Path, kind: str) -> None:
    """With it, what is mounted there would be deleted: the files of a volume, say."""
    elsewhere, inside = tmp_path / "volume", tmp_path / "hf" / "deep" / "data"
    inside.parent.mkdir(parents=True)
    for path in (elsewhere, inside):
        path.mkdir() if kind == "directory" else path.touch()
    if kind == "directory":
        (elsewhere / "precious").write_text("mine")
    program = (
        "from ema_ckpt.writing.staging import stage\n"
        f"with stage({str(tmp_path / 'hf')!r}, is_directory=True, overwrite=True, keep_foreign=True): pass"
    )
    told = run_after_mount(f"mount --bind {elsewhere} {inside}", program)
    assert f"has a mount point in it: '{inside}'" in told, told
    if kind == "directory":
        assert (elsewhere / "precious").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["hf", "volume"]


def test_a_deleted_current_directory_stops_only_relative_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert resolve_target(str(tmp_path / "target")) == tmp_path / "target"
    with pytest.raises(UsageError, match="the current directory was deleted"):
        resolve_target("target")


def test_processes_that_look_for_a_directory_at_once_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a second host that does not share the file system."""
    others, make = [], os.mkdir

    def mkdir(path: Path) -> None:
        make(path)
        make(path / "run")  # another process has found this one there, and looks further
        others.append(threading.Timer(0.05, os.rmdir, [path / "run"]))
        others[-1].start()

    monkeypatch.setattr("ema_ckpt.writing.preflight.os.mkdir", mkdir)
    look_again(tmp_path / "runs" / "run")
    others[0].join()
    assert not list(tmp_path.iterdir())


def test_a_file_of_a_lower_layer_on_another_disk_is_no_mount_point(tmp_path: Path) -> None:
    """An overlay shows such a file on another device than the directory that it is in."""
    names = "lower disk merged"
    for name in names.split():
        (tmp_path / name).mkdir()
    lower, disk, merged = (tmp_path / name for name in names.split())
    make_old(lower / "out.safetensors", is_directory=False)
    layers = f"lowerdir={lower},upperdir={disk}/upper,workdir={disk}/work"
    mount = f"mount -t tmpfs none {disk} && mkdir {disk}/upper {disk}/work && mount -t overlay none -o {layers} {merged}"
    program = (
        "from ema_ckpt.writing.staging import check_target as c\n"
        f"print(c({str(merged / 'out.safetensors')!r}, is_directory=False, overwrite=True))"
    )
    assert "is a mount point" not in run_after_mount(mount, program)
