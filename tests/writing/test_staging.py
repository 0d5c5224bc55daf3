"""Staging against the real file system: kills, races, full disks, symbolic links, foreign files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ema_ckpt.core.errors import TargetError
from ema_ckpt.storage.stage_names import (
    NOTE,
    OLD,
    find_interrupted_switch,
    is_stage_name,
    stage_path,
    stages_of,
)
from ema_ckpt.writing import switch as publishing
from ema_ckpt.writing.journal import Finished
from ema_ckpt.writing.output_files import OutputFiles, preallocate
from ema_ckpt.writing.stage_files import take_permissions
from ema_ckpt.writing.stage_locks import lock_stage
from ema_ckpt.writing.staging import Staged, check_target, stage
from tests.staged_writer import (
    REPO,
    generation_of,
    line,
    make_old,
    read_target,
    snapshot,
    write_new,
    writing,
)

PLAIN = pytest.mark.parametrize("plain", [False, True], ids=["flags", "plain"])


@PLAIN
@pytest.mark.parametrize("is_directory", [False, True], ids=["file", "directory"])
class TestSwitch:
    def test_absent_target(self, tmp_path: Path, plain: bool, is_directory: bool) -> None:
        target = tmp_path / "out.safetensors"
        with stage(target, is_directory=is_directory, plain_rename=plain) as staged:
            assert staged.path.name == target.name
            assert is_stage_name(staged.root.name)
            assert staged.root.parent == tmp_path
            write_new(staged)
            assert not target.exists()
        assert read_target(target) == "new"
        assert os.listdir(tmp_path) == [target.name]

    @pytest.mark.parametrize("was_directory", [False, True], ids=["over-file", "over-directory"])
    def test_overwrite(
        self, tmp_path: Path, plain: bool, is_directory: bool, was_directory: bool
    ) -> None:
        target = tmp_path / "out.safetensors"
        make_old(target, is_directory=was_directory)
        with stage(target, is_directory=is_directory, overwrite=True, plain_rename=plain) as staged:
            write_new(staged)
        assert target.is_dir() == is_directory
        assert read_target(target) == "new"
        assert os.listdir(tmp_path) == [target.name]

    def test_failure_leaves_the_old_one(
        self, tmp_path: Path, plain: bool, is_directory: bool
    ) -> None:
        target = tmp_path / "out"
        make_old(target, is_directory=is_directory)
        before = snapshot(tmp_path)
        for error in (ValueError, KeyboardInterrupt, SystemExit):
            with (
                pytest.raises(error),
                stage(
                    target, is_directory=is_directory, overwrite=True, plain_rename=plain
                ) as staged,
            ):
                write_new(staged)
                raise error
        assert snapshot(tmp_path) == before

    def test_target_made_by_another_meanwhile(
        self, tmp_path: Path, plain: bool, is_directory: bool
    ) -> None:
        target = tmp_path / "out"
        with (
            pytest.raises(TargetError) as caught,
            stage(target, is_directory=is_directory, plain_rename=plain) as staged,
        ):
            write_new(staged)
            make_old(target, is_directory=is_directory)
        assert caught.value.code == "target-exists"
        assert ((target / ".metadata") if is_directory else target).read_text() == "old"
        assert os.listdir(tmp_path) == ["out"]

    def test_target_gone_meanwhile(self, tmp_path: Path, plain: bool, is_directory: bool) -> None:
        target = tmp_path / "out"
        make_old(target, is_directory=is_directory)
        with stage(target, is_directory=is_directory, overwrite=True, plain_rename=plain) as staged:
            write_new(staged)
            target.rename(tmp_path / "moved")
        assert read_target(target) == "new"
        assert sorted(os.listdir(tmp_path)) == ["moved", "out"]

    def test_publish_inside_the_block(
        self, tmp_path: Path, plain: bool, is_directory: bool
    ) -> None:
        target = tmp_path / "out"
        with stage(target, is_directory=is_directory, plain_rename=plain) as staged:
            write_new(staged)
            staged.publish()
            assert staged.published
            assert read_target(target) == "new"
        assert os.listdir(tmp_path) == ["out"]


def test_put_never_replaces(tmp_path: Path) -> None:
    for plain in (False, True):
        for kind in ("file", "directory"):
            new, target = tmp_path / f"new-{plain}-{kind}", tmp_path / f"target-{plain}-{kind}"
            for path in (new, target):
                make_old(path, is_directory=kind == "directory")
            before = snapshot(tmp_path)
            with pytest.raises(FileExistsError):
                publishing.put(new, target, plain=plain)
            assert snapshot(tmp_path) == before


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    for mask, directory_mode, file_mode in (
        (0o022, 0o755, 0o644),
        (0o007, 0o770, 0o660),
        (0o077, 0o700, 0o600),
    ):
        old = os.umask(mask)
        try:
            with stage(tmp_path / f"d{mask}", is_directory=True) as staged:
                write_new(staged)
                assert staged.root.stat().st_mode & 0o777 == directory_mode
        finally:
            os.umask(old)
        assert (tmp_path / f"d{mask}").stat().st_mode & 0o777 == directory_mode
        assert (tmp_path / f"d{mask}" / "model.safetensors").stat().st_mode & 0o777 == file_mode


@PLAIN
@pytest.mark.parametrize("case", ["emptied", "deleted", "replaced"])
def test_what_is_emptied_as_it_becomes_the_target_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, plain: bool
) -> None:
    """`rm -rf` of a stage goes on below the open directory, whatever its name is by then."""
    target = tmp_path / "target"
    make_old(target, is_directory=True)

    def switch(new: Path, target: Path, **options: bool) -> None:
        publishing.exchange(new, target, **options)
        if case == "emptied":
            (target / "model.safetensors").unlink()
        else:
            shutil.rmtree(target)
        if case == "replaced":
            target.mkdir()

    monkeypatch.setattr("ema_ckpt.writing.staging.exchange", switch)
    with contextlib.ExitStack() as stack:
        if case == "emptied":
            stack.enter_context(pytest.raises(TargetError, match="removed or shortened"))
        staged = stack.enter_context(
            stage(target, is_directory=True, overwrite=True, plain_rename=plain)
        )
        write_new(staged)
        staged.expected = {"model.safetensors": 1}
    if case == "emptied":
        assert (target / ".metadata").read_text() == "old"
    else:  # that was meant for the target
        assert target.exists() == (case == "replaced")
    if target.exists():  # else the old one is kept after a switch in two steps
        assert os.listdir(tmp_path) == [target.name]


@pytest.mark.parametrize("plain", [True, False])
def test_what_is_made_in_a_target_that_is_taken_back_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    target = tmp_path / "target"
    make_old(target, is_directory=True)
    (target / "notes.txt").write_text("old notes")

    def switch(new: Path, target: Path, **options: bool) -> None:
        publishing.exchange(new, target, **options)
        (target / "late.txt").write_text("mine")
        (target / "draft").write_text("new notes")
        (target / "draft").rename(target / "notes.txt")
        (target / "model.safetensors").unlink()

    monkeypatch.setattr("ema_ckpt.writing.staging.exchange", switch)
    kept = {"is_directory": True, "overwrite": True, "keep_foreign": True, "plain_rename": plain}
    with pytest.raises(TargetError, match="removed or shortened"), stage(target, **kept) as staged:
        write_new(staged)
        staged.expected = {"model.safetensors": 1}
    assert (target / ".metadata").read_text() == "old"
    assert (target / "late.txt").read_text() == "mine"
    assert (target / "notes.txt").read_text() == "new notes"
    assert os.listdir(tmp_path) == [target.name]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("is_directory", [True, False])
@pytest.mark.parametrize("mode", [0o700, 0o750, 0o777])
def test_what_replaces_a_target_has_its_permissions(
    tmp_path: Path, mode: int, is_directory: bool, plain: bool
) -> None:
    target = tmp_path / ("target" if is_directory else "target.safetensors")
    make_old(target, is_directory=is_directory)
    target.chmod(mode)
    with stage(target, is_directory=is_directory, overwrite=True, plain_rename=plain) as staged:
        write_new(staged)
        assert staged.root.stat().st_mode & 0o777 == mode & 0o755  # by the umask at most
    assert target.stat().st_mode & 0o777 == mode
    assert staged.warnings == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other groups to give")
@pytest.mark.parametrize("is_directory", [True, False])
def test_what_replaces_a_target_has_its_owner_and_its_group(
    tmp_path: Path, is_directory: bool
) -> None:
    target = tmp_path / ("target" if is_directory else "target.safetensors")
    make_old(target, is_directory=is_directory)
    os.chown(target, 6001, 7000)
    target.chmod(0o2750 if is_directory else 0o640)
    before = target.stat()
    with stage(target, is_directory=is_directory, overwrite=True) as staged:
        write_new(staged)
        assert staged.root.stat().st_gid == 7000
    after = target.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (6001, 7000, before.st_mode)
    if is_directory:
        assert {path.stat().st_gid for path in target.iterdir()} == {7000}
    assert staged.warnings == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other groups to give")
@pytest.mark.parametrize(("mode", "given"), [(0o640, 0o600), (0o664, 0o644), (0o644, 0o644)])
def test_a_group_that_cannot_be_given_has_no_rights_that_others_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, given: int
) -> None:
    target = tmp_path / "target.safetensors"
    make_old(target, is_directory=False)
    os.chown(target, 0, 7000)
    target.chmod(mode)

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    with stage(target, is_directory=False, overwrite=True) as staged:
        write_new(staged)
        assert bool(staged.root.stat().st_mode & 0o070) == bool(given & 0o040)
    assert target.stat().st_mode & 0o777 == given
    assert [warning.code for warning in staged.warnings] == ["permissions"] * (mode != given)


@pytest.mark.parametrize("is_directory", [True, False])
def test_what_replaces_a_target_has_its_access_list(tmp_path: Path, is_directory: bool) -> None:
    target = tmp_path / ("target" if is_directory else "target.safetensors")
    make_old(target, is_directory=is_directory)
    # Version 2; the owner reads and writes, user 6002 reads, the group nothing, others nothing.
    entries = [(1, 6, -1), (2, 4, 6002), (4, 0, -1), (16, 4, -1), (32, 0, -1)]
    access = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    _set_access_list(target, "system.posix_acl_access", access)
    target_mode = target.stat().st_mode
    with stage(target, is_directory=is_directory, overwrite=True) as staged:
        write_new(staged)
        assert staged.root.stat().st_mode & 0o077 == 0
    assert os.getxattr(target, "system.posix_acl_access") == access
    assert target.stat().st_mode == target_mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other groups to give")
@pytest.mark.parametrize("is_directory", [True, False])
def test_who_writes_by_an_inherited_access_list_keeps_the_group(is_directory: bool) -> None:
    """A project's directory, for a user who is not of its group."""
    entries = [(1, 7, -1), (2, 7, 65534), (2, 5, 6002), (4, 7, -1), (16, 7, -1), (32, 0, -1)]
    access = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    with tempfile.TemporaryDirectory(prefix="ema-ckpt-tests-") as place:
        os.chown(place, 0, 7000)
        os.chmod(place, 0o2770)
        try:
            for kind in ("access", "default"):
                os.setxattr(place, f"system.posix_acl_{kind}", access)
        except OSError:
            pytest.skip("the file system has no access lists")
        target = Path(place, "target" if is_directory else "target.safetensors")
        os.seteuid(65534)
        try:
            make_old(target, is_directory=is_directory)
            before, given = target.stat(), os.getxattr(target, "system.posix_acl_access")
            with stage(target, is_directory=is_directory, overwrite=True) as staged:
                write_new(staged)
            after = target.stat()
            assert (after.st_gid, after.st_mode) == (7000, before.st_mode)
            assert os.getxattr(target, "system.posix_acl_access") == given
        finally:
            os.seteuid(0)
    assert staged.warnings == []


@pytest.mark.skipif(os.geteuid() != 0, reason="maps users of its own choice")
def test_an_owner_whom_a_container_cannot_name_is_not_given(tmp_path: Path) -> None:
    """It shows them as nobody, and to root in it nobody is a third user."""
    target = tmp_path / "target.safetensors"
    make_old(target, is_directory=False)
    target.chmod(0o660)
    os.chown(target, 6001, 7000)
    program = f"""
import ctypes, os
from pathlib import Path
from ema_ckpt.writing.staging import stage
pid, (mapped, map), (ready, is_ready) = os.getpid(), os.pipe(), os.pipe()
if not os.fork():
    os.read(ready, 1)
    for kind in "ug":
        Path(f"/proc/{{pid}}/{{kind}}id_map").write_text("0 0 1\\n1 100000 65536\\n")
    os.write(map, b"x")
    os._exit(0)
if ctypes.CDLL(None).unshare(0x10000000):
    print("no namespaces")
    os._exit(0)
os.write(is_ready, b"x")
os.read(mapped, 1)
with stage({str(target)!r}, is_directory=False, overwrite=True) as staged:
    staged.path.write_bytes(b"new")
print([warning.code for warning in staged.warnings])
"""
    # Others may write there: root of the namespace owns neither.
    tmp_path.chmod(0o777)
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    if "no namespaces" in run.stdout:
        pytest.skip("the system has no user namespaces")
    assert run.stdout == "['permissions']\n", run.stderr
    status = target.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (0, 0, 0o600)


def test_without_its_access_list_a_target_is_closed_to_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target.safetensors"
    make_old(target, is_directory=False)
    target.chmod(0o660)

    def refuse(new: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("ema_ckpt.writing.stage_files._give_access_list", refuse)
    with stage(target, is_directory=False, overwrite=True) as staged:
        write_new(staged)
    assert target.stat().st_mode & 0o777 == 0o600
    assert [warning.code for warning in staged.warnings] == ["permissions"]


def _set_access_list(path: Path, attribute: str, access_list: bytes) -> None:
    try:
        os.setxattr(path, attribute, access_list)
    except OSError:
        pytest.skip("the file system has no access lists")


def _access_list(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o664])
@pytest.mark.parametrize("is_directory", [True, False])
def test_what_replaces_a_target_of_the_other_kind_has_its_permissions(
    tmp_path: Path, is_directory: bool, mode: int
) -> None:
    target = tmp_path / "target.safetensors"
    make_old(target, is_directory=not is_directory)
    searched = 0o700 | mode | (mode & 0o444) >> 2
    target.chmod(mode if is_directory else searched)
    with stage(target, is_directory=is_directory, overwrite=True) as staged:
        write_new(staged)
        assert staged.root.stat().st_mode & 0o007 == (0o005 if mode & 0o004 else 0)
    assert target.stat().st_mode & 0o777 == (searched if is_directory else mode | 0o600)
    assert staged.warnings == []


@pytest.mark.parametrize("is_directory", [True, False])
def test_an_access_list_is_given_to_the_other_kind(tmp_path: Path, is_directory: bool) -> None:
    target, name = tmp_path / "target.safetensors", "system.posix_acl_access"
    make_old(target, is_directory=not is_directory)

    def entries(search: int) -> bytes:
        reads = 4 | search
        some = [(2, reads, 6002), (4, 0, -1), (16, reads, -1), (32, 0, -1)]
        return _access_list((1, 6 | search, -1), *some)

    _set_access_list(target, name, entries(0 if is_directory else 1))
    with stage(target, is_directory=is_directory, overwrite=True) as staged:
        write_new(staged)
    assert os.getxattr(target, name) == entries(1 if is_directory else 0)
    assert staged.warnings == []


def test_a_stage_lets_in_nobody_by_a_list_that_it_inherits(tmp_path: Path) -> None:
    target = tmp_path / "target.safetensors"
    make_old(target, is_directory=False)
    target.chmod(0o640)  # whose group may read it, and nobody else
    inherited = [(1, 7, -1), (2, 5, 6002), (4, 5, -1), (16, 5, -1), (32, 0, -1)]
    _set_access_list(tmp_path, "system.posix_acl_default", _access_list(*inherited))
    with stage(target, is_directory=False, overwrite=True) as staged:
        write_new(staged)
        assert staged.root.stat().st_mode & 0o077 == 0
    assert "system.posix_acl_access" not in os.listxattr(target)
    assert target.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("mode", "expected"), [(0o644, 0o745), (0o664, 0o775), (0o640, 0o740), (0o606, 0o707)]
)
def test_in_a_stage_nobody_writes_who_may_not_write_to_the_target(
    tmp_path: Path, mode: int, expected: int
) -> None:
    """Whoever can put a file into it puts that in the place of the one that is written."""
    target = tmp_path / "target.safetensors"
    make_old(target, is_directory=False)
    target.chmod(mode)
    mask = os.umask(0o000 if mode & 0o002 else 0o002)
    try:
        with stage(target, is_directory=False, overwrite=True) as staged:
            write_new(staged)
            assert staged.root.stat().st_mode & 0o777 == expected
    finally:
        os.umask(mask)
    assert target.stat().st_mode & 0o777 == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users")
def test_a_stage_that_one_of_a_group_left_keeps_no_other_from_writing() -> None:
    with tempfile.TemporaryDirectory(prefix="ema-ckpt-tests-") as place:
        target = Path(place, "target.safetensors")
        with stage(target, is_directory=False) as staged:  # imports what others may not read
            write_new(staged)
        target.chmod(0o644)
        os.chown(place, 0, 7000)
        os.chmod(place, 0o2775)
        os.chown(target, 6001, 7000)
        mask = os.umask(0o002)
        os.setegid(7000)
        try:
            os.seteuid(6001)
            with (
                pytest.raises(InterruptedError),
                stage(target, is_directory=False, overwrite=True, resume=True),
            ):
                raise InterruptedError
            assert stages_of(target)
            os.seteuid(0)
            os.seteuid(6002)
            assert check_target(target, is_directory=False, overwrite=True) == target
            with stage(target, is_directory=False, overwrite=True) as staged:
                write_new(staged)
            assert target.stat().st_uid == 6002
        finally:
            os.seteuid(0)
            os.setegid(0)
            os.umask(mask)
    assert [warning.code for warning in staged.warnings] == ["stale-file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users")
def test_a_stage_that_another_may_not_lock_is_not_said_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS locks only what is open for writing."""
    left = stage_path(tmp_path / "target", "0" * 8)
    left.mkdir(0o755)
    monkeypatch.setattr("ema_ckpt.writing.stage_locks._lock", lambda _: False)
    monkeypatch.chdir(left)  # those above it are closed to others
    os.seteuid(6002)
    try:
        with pytest.raises(TargetError, match="may not be opened; wait for it to end, or delete"):
            lock_stage(Path(), tmp_path / "target")
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("plain_rename", [False, True])
def test_no_link_that_is_put_in_place_of_a_stage_is_followed(
    tmp_path: Path, plain_rename: bool
) -> None:
    """Whoever may write beside the target can exchange its stage."""
    place, victim = tmp_path / "place", tmp_path / "victim"
    target = place / "target"
    victim.write_text("untouched")
    victim.chmod(0o600)
    place.mkdir()
    make_old(target, is_directory=True)
    with (
        contextlib.suppress(TargetError),
        stage(target, is_directory=True, overwrite=True, plain_rename=plain_rename) as staged,
    ):
        write_new(staged)
        os.rename(staged.root, tmp_path / "away")
        shutil.copytree(tmp_path / "away", staged.root)
        for name in (".ema-ckpt.new", ".ema-ckpt.note.tmp"):
            (staged.root / name).symlink_to(victim)
    assert victim.read_text() == "untouched"


def test_a_journal_is_not_made_where_a_link_in_place_of_the_stage_leads(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    place.mkdir()
    elsewhere.mkdir()
    with (
        pytest.raises(TargetError),
        stage(place / "target", is_directory=False, journal_after=0.2) as staged,
    ):
        write_new(staged)
        os.rename(staged.root, tmp_path / "away")
        staged.root.symlink_to(elsewhere)
        time.sleep(0.3)
        with contextlib.suppress(OSError):
            staged.journal.done("", 0, 1, Finished(0))
        assert list(elsewhere.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users")
def test_a_stage_that_is_continued_lets_in_nobody_who_may_no_longer_read_the_target(
    tmp_path: Path,
) -> None:
    target = tmp_path / "target.safetensors"
    make_old(target, is_directory=False)
    with (
        pytest.raises(InterruptedError),
        stage(target, is_directory=False, overwrite=True, resume=True) as staged,
    ):
        assert staged.root.stat().st_mode & 0o077 == 0o055
        raise InterruptedError
    target.chmod(0o600)
    with stage(target, is_directory=False, overwrite=True, resume=True) as staged:
        assert staged.resumed
        assert staged.root.stat().st_mode & 0o077 == 0
        write_new(staged)
    assert target.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("bindfs") is None,
    reason="mounts as root: apt-get install bindfs",
)
def test_a_mode_that_the_file_system_silently_does_not_take_is_said(tmp_path: Path) -> None:
    disk, seen = tmp_path / "disk", tmp_path / "seen"
    disk.mkdir()
    seen.mkdir()
    make_old(disk / "target.safetensors", is_directory=False)
    (disk / "target.safetensors").chmod(0o600)
    mounted = subprocess.run(
        ["bindfs", "--chmod-ignore", disk, seen], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("FUSE cannot be mounted here")
    try:
        target = seen / "target.safetensors"
        with stage(target, is_directory=False, overwrite=True) as staged:
            write_new(staged)
        ((code, text),) = ((one.code, one.message) for one in staged.warnings)
        assert code == "permissions"
        assert text.endswith("the file system keeps its own")
        assert target.stat().st_mode & 0o777 == 0o644
    finally:
        subprocess.run(["umount", "-l", seen], check=True)


def test_a_mode_is_not_given_to_what_a_link_leads_to(tmp_path: Path) -> None:
    target, victim, link = tmp_path / "target", tmp_path / "victim", tmp_path / "link"
    for file in (target, victim):
        file.write_text("")
    target.chmod(0o666)
    victim.chmod(0o600)
    link.symlink_to(victim)
    assert take_permissions(link, target)
    assert victim.stat().st_mode & 0o777 == 0o600


def test_permissions_are_given_where_no_more_files_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may have opened the last one, as the loader of a training does."""
    target, new = tmp_path / "target", tmp_path / "new"
    target.touch(0o600)
    new.touch(0o644)

    def refuse(*args: object, **options: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert take_permissions(new, target) is None
    assert new.stat().st_mode & 0o777 == 0o600


def test_one_of_the_group_whom_a_list_keeps_out_is_kept_out_of_the_stage(tmp_path: Path) -> None:
    target = tmp_path / "target.safetensors"
    make_old(target, is_directory=False)
    kept_out = [(1, 6, -1), (2, 0, 6002), (4, 4, -1), (16, 4, -1), (32, 4, -1)]
    _set_access_list(target, "system.posix_acl_access", _access_list(*kept_out))
    with stage(target, is_directory=False, overwrite=True) as staged:
        write_new(staged)
        assert staged.root.stat().st_mode & 0o077 == 0
    assert os.getxattr(target, "system.posix_acl_access") == _access_list(*kept_out)


def test_whom_a_list_keeps_out_is_not_let_in_with_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target.safetensors"
    make_old(target, is_directory=False)
    kept_out = [(1, 6, -1), (2, 0, 6002), (4, 4, -1), (16, 4, -1), (32, 4, -1)]
    _set_access_list(target, "system.posix_acl_access", _access_list(*kept_out))

    def refuse(new: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("ema_ckpt.writing.stage_files._give_access_list", refuse)
    with stage(target, is_directory=False, overwrite=True) as staged:
        write_new(staged)
        assert staged.root.stat().st_mode & 0o007 == 0
    assert target.stat().st_mode & 0o777 == 0o600
    assert [warning.code for warning in staged.warnings] == ["permissions"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_is_given_away_is_closed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root of a container may be one who gives files away but may not change those of others."""
    target, chmod = tmp_path / "target.safetensors", os.chmod
    make_old(target, is_directory=False)
    target.chmod(0o600)
    os.chown(target, 6001, 7000)

    def change(path: Path, mode: int) -> None:
        if os.stat(path).st_uid:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        chmod(path, mode)

    with stage(target, is_directory=False, overwrite=True) as staged:
        write_new(staged)
        monkeypatch.setattr(os, "chmod", change)
    status = target.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (6001, 7000, 0o600)
    assert staged.warnings == []


def test_permissions_that_cannot_be_given_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    make_old(target, is_directory=True)
    target.chmod(0o700)

    def refuse(path: object, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with stage(target, is_directory=True, overwrite=True) as staged:
        write_new(staged)
        monkeypatch.setattr(os, "chmod", refuse)
    assert [warning.code for warning in staged.warnings] == ["permissions"]


@pytest.mark.parametrize("fsync", [True, False])
def test_everything_is_flushed_before_the_switch(tmp_path: Path, fsync: bool) -> None:
    calls: list[str] = []
    made: list[Staged] = []

    def watch(frame, event, arg) -> None:
        if event == "c_call" and arg is os.fsync:
            calls.append(str(frame.f_back.f_locals["path"]))
        elif event == "call" and frame.f_code is publishing.put.__code__:
            calls.append("switch")

    with contextlib.ExitStack() as stack:
        staged = stack.enter_context(stage(tmp_path / "out", is_directory=True, fsync=fsync))
        made.append(staged)
        for name in ("a.distcp", "b.distcp"):
            (staged.path / name).write_text(name)
        sys.setprofile(watch)
        stack.callback(sys.setprofile, None)
        staged.publish()
    if not fsync:
        assert calls == ["switch"]
        return
    path = made[0].path
    assert set(calls[:2]) == {str(path / "a.distcp"), str(path / "b.distcp")}
    root = str(
        path.parent
    )  # the second time without the journal, which must not outlive the switch
    assert calls[2:] == [str(path), root, root, "switch", str(tmp_path)]


@PLAIN
def test_foreign_files_are_carried(tmp_path: Path, plain: bool) -> None:
    target = tmp_path / "hf"
    target.mkdir()
    for name in (
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "README.md",
    ):
        (target / name).write_text(f"old {name}")
    (target / "onnx" / "deep").mkdir(parents=True)
    (target / "onnx" / "deep" / "graph").write_text("kept")
    (target / "vocab").symlink_to("config.json")
    (target / "broken").symlink_to("nowhere")
    inode = (target / "README.md").stat().st_ino
    with stage(
        target, is_directory=True, overwrite=True, keep_foreign=True, plain_rename=plain
    ) as staged:
        write_new(staged)
        (staged.path / "config.json").write_text("ours wins")
    assert read_target(target) == "new"
    assert sorted(os.listdir(target)) == [
        "README.md",
        "broken",
        "config.json",
        "model.safetensors",
        "onnx",
        "vocab",
    ]
    assert (target / "config.json").read_text() == "ours wins"
    assert (target / "README.md").stat().st_ino == inode
    assert (target / "onnx" / "deep" / "graph").read_text() == "kept"
    assert os.readlink(target / "vocab") == "config.json"
    assert os.readlink(target / "broken") == "nowhere"
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("links", [True, False])
def test_special_files_are_carried_unopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    target = tmp_path / "hf"
    (target / "deep").mkdir(parents=True)
    for place in (target, target / "deep"):
        os.mkfifo(place / "fifo")
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as server, contextlib.chdir(place):
            server.bind("socket")
    opened: list[str] = []
    real_open, real_link = os.open, os.link

    def watched(path: str | Path, flags: int, *args: Any, **kwargs: Any) -> int:
        opened.append(os.path.basename(path))
        return real_open(path, flags | os.O_NONBLOCK, *args, **kwargs)

    def link(old: Path, new: Path, **kwargs: Any) -> None:
        if not links:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        real_link(old, new, **kwargs)

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setattr(os, "link", link)
    with stage(target, is_directory=True, overwrite=True, keep_foreign=True) as staged:
        write_new(staged)
    assert not {"fifo", "socket"} & set(opened)
    assert read_target(target) == "new"
    for place in (target, target / "deep"):
        assert (place / "fifo").is_fifo()
        assert (place / "socket").is_socket()


def test_carrying_fails_harmlessly(tmp_path: Path) -> None:
    target = tmp_path / "hf"
    target.mkdir()
    (target / "config.json").write_text("{}")
    before = snapshot(target)
    with (
        pytest.raises(RuntimeError),
        stage(target, is_directory=True, overwrite=True, keep_foreign=True) as staged,
    ):
        write_new(staged)
        raise RuntimeError
    assert snapshot(target) == before


def test_foreign_file_that_appears_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "out"
    make_old(target, is_directory=True)
    with (
        pytest.raises(TargetError) as caught,
        stage(target, is_directory=True, overwrite=True) as staged,
    ):
        write_new(staged)
        (target / "notes.txt").write_text("mine")
    assert caught.value.code == "foreign-files"
    assert sorted(os.listdir(target)) == [".metadata", "__0_0.distcp", "notes.txt"]
    assert os.listdir(tmp_path) == ["out"]


@PLAIN
@pytest.mark.parametrize("exists", [True, False], ids=["present", "dangling"])
def test_symbolic_link_stays(tmp_path: Path, plain: bool, exists: bool) -> None:
    (tmp_path / "disk").mkdir()
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    link.symlink_to("disk/real")
    if exists:
        make_old(real, is_directory=True)
    with stage(link, is_directory=True, overwrite=exists, plain_rename=plain) as staged:
        assert staged.root.parent == real.parent
        write_new(staged)
    assert os.readlink(link) == "disk/real"
    assert read_target(real) == "new"
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]
    assert os.listdir(tmp_path / "disk") == ["real"]


class TestFullDisk:
    @pytest.fixture
    def small(self, tmp_path: Path) -> Iterator[Path]:
        """A directory that takes 4 MiB: a tmpfs, or where mounting is not allowed a limit on file size."""
        place = tmp_path / "small"
        place.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place],
            capture_output=True,
            check=False,
        )
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if mounted.returncode:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, limit[1]))
        try:
            yield place
        finally:
            if mounted.returncode:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            else:
                subprocess.run(["umount", place], check=True)

    def test_while_writing(self, small: Path) -> None:
        target = small / "out"
        make_old(target, is_directory=True)
        with (
            pytest.raises(TargetError) as caught,
            stage(target, is_directory=True, overwrite=True) as staged,
        ):
            (staged.path / "__0_0.distcp").write_bytes(bytes(5 << 20))
        assert caught.value.code == "no-space"
        assert str(target) in str(caught.value)
        assert os.listdir(small) == ["out"]
        assert (target / ".metadata").read_text() == "old"

    def test_while_reserving(self, small: Path) -> None:
        with (
            pytest.raises(TargetError) as caught,
            stage(small / "out", is_directory=False) as staged,
            open(staged.path, "wb") as file,
        ):
            preallocate(file.fileno(), 5 << 20)
        assert caught.value.code == "no-space"
        assert os.listdir(small) == []

    def test_enough_after_a_leftover_is_gone(self, small: Path) -> None:
        left = stage_path(small / "out", "0a1b2c3d")
        left.mkdir()
        (left / "out").write_bytes(bytes(3 << 20))
        with stage(small / "out", is_directory=False, nbytes=3 << 20) as staged:
            staged.path.write_bytes(b"x" * (3 << 20))
        assert os.listdir(small) == ["out"]

    def test_file_size_limit(self, tmp_path: Path) -> None:
        code = (
            "import resource, signal, sys\nfrom ema_ckpt.writing.staging import stage\nfrom ema_ckpt.core.errors import TargetError\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
            "try:\n with stage(sys.argv[1], is_directory=False) as staged: staged.path.write_bytes(bytes(2 << 20))\n"
            "except TargetError as error: print(error.code, error)\n"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "out.safetensors")]
        found = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
        assert found.startswith("no-space ")
        assert os.listdir(tmp_path) == []

    def test_other_errors_of_the_block_are_not_ours(self, tmp_path: Path) -> None:
        with pytest.raises(OSError) as caught, stage(tmp_path / "out", is_directory=True):
            raise OSError(errno.EIO, "source broke")
        assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("check", ["stage", "check_target"])
def test_a_path_whose_stage_would_be_too_long_is_refused(tmp_path: Path, check: str) -> None:
    """4 096 bytes: what is refused here is not begun, and leaves no stage that cannot be named."""
    deep = tmp_path
    while len(str(deep)) < 3800:
        deep /= "d" * 100
    target = deep / ("x" * (4040 - len(str(deep))))
    with pytest.raises(TargetError, match="the path is too long to write beside it"):
        if check == "stage":
            with stage(target, is_directory=False):
                pass
        else:
            check_target(target, is_directory=False)
    assert os.listdir(tmp_path) == []


def test_preallocate(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file:
        preallocate(file.fileno(), 1 << 20)
        preallocate(file.fileno(), 1 << 20)
    assert (tmp_path / "a").stat().st_size == 1 << 20


def test_where_no_blocks_can_be_reserved_not_a_byte_is_written(tmp_path: Path) -> None:
    """NFS before 4.2, FUSE: a zero byte would meet what another process of the command writes there."""
    trace = [str(shutil.which("strace")), "-f", "-e", "trace=pwrite64,fallocate"]
    trace += ["-e", "inject=fallocate:error=EOPNOTSUPP"]
    if (
        trace[0] == "None"
        or subprocess.run([*trace, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("strace is not installed, or may not trace: apt-get install strace")
    code = "import sys\nfrom ema_ckpt.writing.output_files import preallocate\n"
    code += "with open(sys.argv[1], 'r+b') as file: preallocate(file.fileno(), 1 << 20)\n"
    for name, before in (("new", 0), ("there", 1 << 20), ("longer", 2 << 20)):
        (tmp_path / name).write_bytes(bytes(before))
        command = [*trace, sys.executable, "-c", code, str(tmp_path / name)]
        said = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stderr
        assert said.count("fallocate(") == said.count("EOPNOTSUPP") == 1, said
        assert "pwrite64" not in said
        assert (tmp_path / name).stat().st_size == 1 << 20


@PLAIN
def test_killed_at_random_moments(tmp_path: Path, plain: bool) -> None:
    """Twenty times SIGKILL: the target is the old or the new one, whole; the next writer tidies up."""
    rng, target, words = (
        random.Random(9),
        tmp_path / "step_10",
        ["overwrite", *(["plain"] if plain else [])],
    )
    with writing(target, "0", 4, 0) as first:
        assert first.wait(30) == 0
    left_behind = 0
    for attempt in range(1, 21):
        before = generation_of(target, 4)
        with writing(target, str(attempt), 4, 10, *words) as process:
            assert line(process) == "staged"
            time.sleep(rng.uniform(0, 0.06))
            process.kill()
        left_behind += bool(stages_of(target))
        found = find_interrupted_switch(target) or target
        assert generation_of(found, 4) in (before, str(attempt))
        if not target.exists():
            assert plain
            with stage(target, is_directory=True, overwrite=True):
                pass
    assert left_behind
    with writing(target, "last", 4, 0, *words) as process:
        assert process.wait(30) == 0
    assert generation_of(target, 4) == "last"
    assert os.listdir(tmp_path) == ["step_10"]


def test_name_taken_in_the_midst_of_a_plain_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old target and the new one are kept, where the error says."""
    target = tmp_path / "step_10"
    for number in range(2):
        (tmp_path / f"{number}.distcp").write_text(str(number))
    target.mkdir()
    (tmp_path / "0.distcp").rename(target / "0.distcp")
    rename = os.rename

    def rename_and_take(old: Path, new: Path) -> None:
        rename(old, new)
        if Path(old) == target:
            target.mkdir()
            (target / "notes").write_text("somebody else's")

    monkeypatch.setattr(os, "rename", rename_and_take)
    with (
        pytest.raises(TargetError, match="complete in"),
        stage(target, is_directory=True, overwrite=True, plain_rename=True) as staged,
    ):
        rename(tmp_path / "1.distcp", staged.path / "1.distcp")
    assert os.listdir(target) == ["notes"]
    (left,) = stages_of(target)
    assert (left / ".ema-ckpt.old" / "0.distcp").read_text() == "0"
    assert (left / "step_10" / "1.distcp").read_text() == "1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_terminated_at_random_moments(tmp_path: Path, number: signal.Signals) -> None:
    """Twenty times a signal that becomes an exception: nothing is left, the target is the old or the new one."""
    rng, target = random.Random(7), tmp_path / "out"
    with writing(target, "0", 4, 0) as first:
        assert first.wait(30) == 0
    codes = set()
    for attempt in range(1, 21):
        before = generation_of(target, 4)
        with writing(target, str(attempt), 4, 3, "overwrite", "term") as process:
            assert line(process) == "staged"
            time.sleep(rng.uniform(0, 0.02))
            process.send_signal(number)
            codes.add(process.wait(30))
        assert generation_of(target, 4) in (before, str(attempt))
        assert os.listdir(tmp_path) == ["out"]
    # Minus the number: python ends so after KeyboardInterrupt, and when it has already let go of its handlers.
    assert codes & {128 + number, -number}, codes
    assert codes <= {0, 128 + number, -number}, codes


def test_a_skipped_exit_is_made_up_for(tmp_path: Path) -> None:
    """A signal's exception may fall between two bytecodes of the `with` machinery, which then forgets the block."""
    code = (
        "import os, sys\nfrom ema_ckpt.writing.staging import stage\n"
        "kept = []\n"
        "block = stage(sys.argv[1], is_directory=True)\n"
        "staged = block.__enter__(); kept.append(block)\n"
        "child = os.fork()\n"
        "if not child: sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "assert staged.path.is_dir(), 'a forked child deleted the stage'\n"
        "import gc; gc.disable(); sys.kept = kept\n"
        "sys.exit(5)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (5, "")
    assert os.listdir(tmp_path) == []


@PLAIN
def test_two_writers_of_one_new_target(tmp_path: Path, plain: bool) -> None:
    words = ["wait", *(["plain"] if plain else [])]
    for attempt in range(6):
        target = tmp_path / f"out{attempt}"
        with writing(target, "a", 3, 1, *words) as one, writing(target, "b", 3, 1, *words) as two:
            for process in (one, two):
                assert line(process) == "ready"
            for process in (one, two):
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            codes = [process.wait(30) for process in (one, two)]
            errors = [process.stderr.read() for process in (one, two) if process.stderr]
        assert sorted(codes) == [0, 1], errors
        assert generation_of(target, 3) == "ab"[codes.index(0)]
        loser = errors[codes.index(1)]
        assert "another process is writing it" in loser or "already exists" in loser
    assert sorted(os.listdir(tmp_path)) == [f"out{attempt}" for attempt in range(6)]


def test_busy_then_stale(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with writing(target, "a", 2, 20_000) as process:
        assert line(process) == "staged"
        for attempt in (
            lambda: check_target(target, is_directory=True),
            stage(target, is_directory=True).__enter__,
        ):
            with pytest.raises(TargetError) as caught:
                attempt()
            assert caught.value.code == "busy"
        assert len(stages_of(target)) == 1
        with stage(tmp_path / "out2", is_directory=True) as other:
            write_new(other)
    assert len(stages_of(target)) == 1
    with stage(target, is_directory=True) as staged:
        write_new(staged)
        assert len(stages_of(target)) == 1
    assert sorted(os.listdir(tmp_path)) == ["out", "out2"]


def test_a_leftover_that_cannot_be_deleted_keeps_nobody_from_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another user left it, or a file in it is immutable."""
    target = tmp_path / "out"
    left = stage_path(target, "00000000")
    left.mkdir()
    (left / "fixed").touch()
    usual = os.unlink

    def refusing(name: str, **options: Any) -> None:
        if os.path.basename(name) == "fixed":
            raise PermissionError(errno.EPERM, "Operation not permitted", name)
        usual(name, **options)

    monkeypatch.setattr(os, "unlink", refusing)
    with stage(target, is_directory=True) as staged:
        write_new(staged)
    assert [warning.code for warning in staged.warnings] == ["stale-file"]
    assert str(left) in staged.warnings[0].message
    assert sorted(os.listdir(tmp_path)) == [left.name, "out"]


def test_a_file_that_another_process_makes_meanwhile_is_deleted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, made = os.rmdir, []

    def racing(name: str, **options: Any) -> None:
        if is_stage_name(os.path.basename(name)) and not made:
            made.extend(stages_of(tmp_path / "out"))
            (made[0] / "late").touch()
        usual(name, **options)

    monkeypatch.setattr(os, "rmdir", racing)
    with pytest.raises(KeyboardInterrupt), stage(tmp_path / "out", is_directory=True):
        raise KeyboardInterrupt
    assert made and os.listdir(tmp_path) == []


def test_a_leftover_that_may_not_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's, which nobody else can lock: it may be alive."""
    target = tmp_path / "out"
    left = stage_path(target, "00000000")
    left.mkdir()

    def refusing(path: Path) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("ema_ckpt.writing.stage_locks.open_directory", refusing)
    for attempt in (
        lambda: check_target(target, is_directory=True),
        stage(target, is_directory=True).__enter__,
    ):
        with pytest.raises(TargetError) as caught:
            attempt()
        assert caught.value.code == "busy" and str(left) in str(caught.value)
    assert os.listdir(tmp_path) == [left.name]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_called_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def none(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.raises(TargetError) as caught:
        stage(tmp_path / "out", is_directory=True).__enter__()
    assert caught.value.code == "unsupported"
    assert str(tmp_path / "out") in str(caught.value) and "no locks" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_check_writes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "out"
    make_old(target, is_directory=True)
    stage_path(target, "00000000").mkdir()
    before = snapshot(tmp_path)
    assert check_target(target, is_directory=True, overwrite=True, nbytes=10) == target.resolve()
    assert snapshot(tmp_path) == before


class TestCutSwitch:
    """The state between the two renames of a file system without exchange, made by hand."""

    @pytest.fixture
    def target(self, tmp_path: Path) -> Path:
        target = tmp_path / "out"
        root = stage_path(target, "0a1b2c3d")
        (root / "out").mkdir(parents=True)
        (root / "out" / "model.safetensors").write_text("new")
        make_old(root / OLD, is_directory=True)
        (root / NOTE).write_text(json.dumps({"old": OLD, "new": "out"}))
        return target

    def test_reader_finds_the_new_one(self, target: Path) -> None:
        found = find_interrupted_switch(target)
        assert found is not None
        assert found.name == target.name
        assert read_target(found) == "new"

    def test_reader_wants_a_note(self, target: Path) -> None:
        for text in (
            "",
            "{",
            "[]",
            '{"new": "../out"}',
            '{"new": "."}',
            '{"new": 1}',
            '{"new": "other"}',
        ):
            (stage_path(target, "0a1b2c3d") / NOTE).write_text(text)
            assert find_interrupted_switch(target) is None

    def test_reader_prefers_what_is_there(self, target: Path) -> None:
        make_old(target, is_directory=True)
        assert find_interrupted_switch(target) is None

    def test_next_writer_finishes(self, target: Path) -> None:
        with pytest.raises(TargetError) as caught:
            check_target(target, is_directory=True)
        assert caught.value.code == "target-exists"
        assert not target.exists()
        with pytest.raises(TargetError) as caught, stage(target, is_directory=True):
            pass
        assert caught.value.code == "target-exists"
        assert read_target(target) == "new"
        assert os.listdir(target.parent) == ["out"]

    def test_next_writer_goes_on(self, target: Path) -> None:
        with stage(target, is_directory=True, overwrite=True) as staged:
            assert read_target(target) == "new"
            write_new(staged, "newer")
        assert read_target(target) == "newer"
        assert os.listdir(target.parent) == ["out"]


def test_a_signal_that_makes_the_removal_fail_is_still_that_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the closing of a descriptor and the note of it: `shutil.rmtree` then closes it once more."""
    removed, failures = shutil.rmtree, [0]

    def interrupted(path: Path, **options: Any) -> None:
        if failures[0]:
            return removed(path, **options)
        failures[0] += 1
        try:
            raise KeyboardInterrupt
        finally:
            raise OSError(errno.EBADF, "closed twice")

    with pytest.raises(KeyboardInterrupt), stage(tmp_path / "out", is_directory=True):
        monkeypatch.setattr(shutil, "rmtree", interrupted)
        raise ValueError("the write failed")
    assert failures == [1]
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_longer_than_planned_is_cut(tmp_path: Path) -> None:
    """As one in the stage of an interrupted run may be: nothing would ever write over its end."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x" * 5000)
    with contextlib.closing(OutputFiles(tmp_path, {"a": 3000, "b": 0})):
        pass
    assert [(tmp_path / name).stat().st_size for name in ("a", "b")] == [3000, 0]
    assert (tmp_path / "a").read_bytes() == b"x" * 3000
