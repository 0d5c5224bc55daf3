"""Resuming: what the journal vouches for, and what it must not."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import time
import zlib
from pathlib import Path

import pytest

from ema_ckpt.core.errors import TargetError
from ema_ckpt.storage.stage_names import JOURNAL, stage_path, stages_of
from ema_ckpt.writing import staging
from ema_ckpt.writing.journal import Finished, Journal, recorded_identity
from ema_ckpt.writing.staging import Staged, stage
from tests.staged_writer import (
    generation_of,
    line,
    make_old,
    read_target,
    snapshot,
    write_new,
    writing,
)


def checked(told: str) -> str:
    """A line of the journal, with its checksum."""
    return f'{told[:-1]},"{zlib.crc32(told.encode()):08x}"]'


class TestResume:
    IDENTITY = {"source": "abc", "plan": "def"}
    PARTS = {f"part{i}.distcp": bytes([i]) * 5000 for i in range(4)}

    def interrupted(self, target: Path, count: int = 3, **options) -> None:
        options = {"is_directory": True, "resume": True, "identity": self.IDENTITY, **options}
        with pytest.raises(KeyboardInterrupt), stage(target, **options) as staged:
            for name in list(self.PARTS)[:count]:
                self.write(staged, name)
            raise KeyboardInterrupt

    def write(self, staged: Staged, name: str) -> None:
        data = self.PARTS[name]
        (staged.path / name).write_bytes(data)
        for offset in (0, 2500):
            staged.journal.done(
                name, offset, 2500, Finished(zlib.crc32(data[offset : offset + 2500]))
            )

    def left(self, target: Path) -> Path:
        (root,) = stages_of(target)
        return root

    def resumed(self, target: Path) -> contextlib.AbstractContextManager[Staged]:
        return stage(target, is_directory=True, resume=True, identity=self.IDENTITY)

    @pytest.mark.parametrize(
        "told",
        [
            '["part0.distcp", 1e400, 2500, "0"]',
            '["part0.distcp", NaN, 2500, "0"]',
            '["part0.distcp", true, 2500, "0"]',
            '["part0.distcp", -1, 1, "0"]',
            '["part0.distcp", 0, 1e3, "0"]',
            '["part0.distcp", 9223372036854775807, 1, "0"]',
            f'["part0.distcp", {"9" * 4000}, 1, "0"]',
            f'["part0.distcp", 0, {"9" * 5000}, "0"]',
            '["part0.distcp", 0, 1, "0", {"w": 1e400}]',
            '["part0.distcp", 0, 1, "0", {"w": -1}]',
            '["part0.distcp", 0, 1, "0", [["w", 1]]]',
            '["part0.distcp", 0, 1, "0", {}, 1]',
            '[null, 0, 1, "0"]',
            "[[], 0, 1, 0]",
            '["../part0.distcp", 0, 1, "0"]',
            "[" * 100_000,
            "{}",
            "5",
        ],
    )
    def test_a_line_that_nobody_writes_tells_nothing(self, told: str, tmp_path: Path) -> None:
        target = tmp_path / "out"
        self.interrupted(target)
        with open(self.left(target) / JOURNAL, "a") as journal:
            journal.write(f"{told}\n{checked(told)}\n")
        with self.resumed(target) as staged:
            assert len(staged.journal.completed()) == 6

    def test_a_line_with_a_flipped_bit_tells_nothing(self, tmp_path: Path) -> None:
        """With another offset, it could tell that zeros belong where nothing is written yet."""
        target = tmp_path / "out"
        options = {"is_directory": True, "resume": True, "identity": self.IDENTITY}
        with pytest.raises(KeyboardInterrupt), stage(target, **options) as staged:
            (staged.path / "part0.distcp").write_bytes(bytes(30000))
            staged.journal.done("part0.distcp", 10000, 2500, Finished(zlib.crc32(bytes(2500))))
            raise KeyboardInterrupt
        journal = self.left(target) / JOURNAL
        head, line = journal.read_bytes().splitlines()
        for bit in range(0, 8 * len(line), 7):
            flipped = bytearray(line)
            flipped[bit // 8] ^= 1 << bit % 8
            journal.write_bytes(head + b"\n" + flipped + b"\n")
            again = Journal(self.left(target), self.left(target) / "out", self.IDENTITY)
            assert set(again.completed()) <= {("part0.distcp", 10000, 2500)}
            again.close()

    @pytest.mark.parametrize("first", ["[" * 100_000, '{"journal": 1, "identity": NaN}', "1e400"])
    def test_a_first_line_that_nobody_writes_begins_anew(self, first: str, tmp_path: Path) -> None:
        target = tmp_path / "out"
        self.interrupted(target)
        journal = self.left(target) / JOURNAL
        journal.write_text("\n".join([first, *journal.read_text().split("\n")[1:]]))
        with self.resumed(target) as staged:
            assert not staged.journal.completed()

    def test_goes_on(self, tmp_path: Path) -> None:
        target = tmp_path / "out"
        self.interrupted(target)
        with self.resumed(target) as staged:
            assert staged.resumed
            done = staged.journal.completed()
            expected = [
                (name, offset, 2500) for name in list(self.PARTS)[:3] for offset in (0, 2500)
            ]
            assert list(done) == expected
            assert all(
                found.crc == zlib.crc32(self.PARTS[name][o : o + n])
                for (name, o, n), found in done.items()
            )
            self.write(staged, "part3.distcp")
        assert {p.name: p.read_bytes() for p in target.iterdir()} == self.PARTS
        assert os.listdir(tmp_path) == ["out"]

    @pytest.mark.parametrize(
        ("cause", "trusted"), [(KeyboardInterrupt(), 8), (OSError(errno.ENOSPC, "full"), 0)]
    )
    def test_ended_while_the_disk_is_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: BaseException, trusted: int
    ) -> None:
        """What the disk has refused is written anew, though the cache still has it."""

        def interrupted(_path: Path) -> None:
            raise cause

        target = tmp_path / "out"
        monkeypatch.setattr(staging, "fsync_tree", interrupted)
        with pytest.raises((KeyboardInterrupt, TargetError)), self.resumed(target) as staged:
            for name in self.PARTS:
                self.write(staged, name)
        monkeypatch.undo()
        assert not target.exists()
        with self.resumed(target) as staged:
            assert len(staged.journal.completed()) == trusted
            for name in () if trusted else self.PARTS:
                self.write(staged, name)
        assert {p.name: p.read_bytes() for p in target.iterdir()} == self.PARTS
        assert os.listdir(tmp_path) == ["out"]

    def test_only_what_reads_back(self, tmp_path: Path) -> None:
        target = tmp_path / "out"
        self.interrupted(target)
        payload = self.left(target) / "out"
        data = bytearray(self.PARTS["part0.distcp"])
        data[2600] ^= 1
        (payload / "part0.distcp").write_bytes(data)
        os.truncate(payload / "part1.distcp", 4999)
        (payload / "part2.distcp").unlink()
        with self.resumed(target) as staged:
            assert list(staged.journal.completed()) == [
                ("part0.distcp", 0, 2500),
                ("part1.distcp", 0, 2500),
            ]
            for name in self.PARTS:
                self.write(staged, name)
        assert {p.name: p.read_bytes() for p in target.iterdir()} == self.PARTS

    def test_torn_and_foreign_lines(self, tmp_path: Path) -> None:
        target = tmp_path / "out"
        self.interrupted(target, 1)
        journal = self.left(target) / JOURNAL
        text = journal.read_text()
        (tmp_path / "secret").write_bytes(bytes(10))
        outside = json.dumps(["../../secret", 0, 10, f"{zlib.crc32(bytes(10)):08x}"])
        lines = f'{checked(outside)}\n{{}}\n["a"]\nnonsense\n'
        journal.write_text(text + lines + text.splitlines()[1][:9])
        with pytest.raises(KeyboardInterrupt), self.resumed(target) as staged:
            assert len(staged.journal.completed()) == 2
            self.write(staged, "part1.distcp")
            raise KeyboardInterrupt
        with self.resumed(target) as staged:
            assert len(staged.journal.completed()) == 4

    def test_what_save_has_left_is_begun_anew(self, tmp_path: Path) -> None:
        target = tmp_path / "out"
        with pytest.raises(KeyboardInterrupt), stage(target, is_directory=True):
            raise KeyboardInterrupt
        with self.resumed(target) as staged:
            assert not staged.journal.completed()

    @pytest.mark.parametrize("differing", ["source", "plan"])
    def test_mismatch(self, tmp_path: Path, differing: str) -> None:
        target = tmp_path / "out"
        self.interrupted(target)
        before = snapshot(tmp_path)
        identity = {**self.IDENTITY, differing: "other"}
        with (
            pytest.raises(TargetError) as caught,
            stage(target, is_directory=True, resume=True, identity=identity),
        ):
            pass
        assert caught.value.code == "resume-mismatch"
        assert differing in str(caught.value)
        assert snapshot(tmp_path) == before
        with stage(target, is_directory=True, identity=identity) as staged:
            assert not staged.resumed
            assert staged.journal.completed() == {}
        assert os.listdir(target) == []

    def test_nothing_to_go_on_from(self, tmp_path: Path) -> None:
        target = tmp_path / "out"
        root = stage_path(target, "0a1b2c3d")
        (root / "out").mkdir(parents=True)
        (root / "out" / "junk").write_text("junk")
        for text in (None, "", "[]", '{"journal": 99}'):
            if text is not None:
                root.mkdir(exist_ok=True)
                (root / JOURNAL).write_text(text)
            with pytest.raises(KeyboardInterrupt), self.resumed(target) as staged:
                assert not staged.resumed
                assert os.listdir(staged.path) == []
                staged.publish()
                raise KeyboardInterrupt
            assert os.listdir(tmp_path) == ["out"]
            os.rmdir(target)

    def test_after_sigkill_of_a_plain_run(self, tmp_path: Path) -> None:
        target = tmp_path / "out"
        with writing(target, "g", 3, 200) as process:
            assert line(process) == "staged"
            while (
                not stages_of(target) or not (self.left(target) / "out" / "part1.distcp").exists()
            ):
                time.sleep(0.01)
            process.kill()
        with writing(target, "g", 3, 0, "resume") as process:
            assert process.wait(30) == 0
        assert generation_of(target, 3) == "g"
        assert os.listdir(tmp_path) == ["out"]

    def test_sigterm_keeps_the_stage(self, tmp_path: Path) -> None:
        target = tmp_path / "out"
        with writing(target, "g", 50, 20, "resume", "term") as process:
            assert line(process) == "staged"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 143
        assert len(stages_of(target)) == 1
        assert not target.exists()

    def test_never_into_the_old_target(self, tmp_path: Path) -> None:
        """After the switch the stage holds the old one; an exception then must not leave it to be resumed."""
        target = tmp_path / "out"
        make_old(target, is_directory=True)
        with (
            pytest.raises(KeyboardInterrupt),
            stage(target, is_directory=True, overwrite=True, resume=True) as staged,
        ):
            write_new(staged)
            staged.publish()
            assert not (staged.root / JOURNAL).exists()
            raise KeyboardInterrupt
        assert read_target(target) == "new"
        assert os.listdir(tmp_path) == ["out"]

    def test_single_file(self, tmp_path: Path) -> None:
        target = tmp_path / "out.safetensors"
        options = {"is_directory": False, "resume": True}
        with pytest.raises(SystemExit), stage(target, **options) as staged:
            staged.path.write_bytes(b"abcdef")
            staged.journal.done("", 2, 3, Finished(zlib.crc32(b"cde")))
            raise SystemExit
        with stage(target, **options) as staged:
            assert staged.journal.completed() == {("", 2, 3): Finished(zlib.crc32(b"cde"))}
        assert target.read_bytes() == b"abcdef"
        assert os.listdir(tmp_path) == ["out.safetensors"]

    def test_what_cannot_be_read_back_is_written_again(self, tmp_path: Path) -> None:
        target = tmp_path / "out"
        self.interrupted(target, count=1)
        with open(self.left(target) / JOURNAL, "a", encoding="utf-8") as journal:
            journal.write(checked('["",0,2500,"00000000"]') + "\n")  # the directory itself
        with self.resumed(target) as staged:
            assert len(staged.journal.completed()) == 2

    def test_space_already_taken_counts(self, tmp_path: Path) -> None:
        target = tmp_path / "out"
        self.interrupted(target)
        taken = 64 << 20  # others use the disk meanwhile
        with open(self.left(target) / "out" / "part0.distcp", "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, taken)
        status = os.statvfs(tmp_path)
        nbytes = status.f_bavail * status.f_frsize + taken // 2
        with self.resumed_needing(target, nbytes) as staged:
            assert staged.resumed

    def resumed_needing(
        self, target: Path, nbytes: int
    ) -> contextlib.AbstractContextManager[Staged]:
        return stage(target, is_directory=True, resume=True, identity=self.IDENTITY, nbytes=nbytes)


def test_what_has_been_read_back_is_intact_whatever_closing_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, target = TestResume(), tmp_path / "out"
    run.interrupted(target)
    with run.resumed(target) as staged:
        close = os.close

        def told(fd: int) -> None:
            close(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, "close", told)
            completed = staged.journal.completed()
        assert completed == staged.journal.completed()
        assert completed


def test_a_short_run_leaves_no_journal_on_the_disk(tmp_path: Path) -> None:
    journal = Journal(tmp_path, tmp_path / "out", {"plan": "1"}, after=0.2)
    journal.done("", 0, 4, Finished(1))
    assert not (tmp_path / JOURNAL).exists()
    assert recorded_identity(tmp_path) is None
    time.sleep(0.25)
    journal.done("", 4, 4, Finished(2))
    journal.close()
    assert recorded_identity(tmp_path) == {"plan": "1"}
    assert len((tmp_path / JOURNAL).read_text().splitlines()) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="makes what another user owns")
@pytest.mark.parametrize("owner_of_parent", [0, 12345])
def test_a_stage_of_another_user_is_not_continued(tmp_path: Path, owner_of_parent: int) -> None:
    """Where all may write, its content and the checksums in its journal are of whoever made it."""
    run = TestResume()
    target = tmp_path / "out"
    run.interrupted(target)
    os.chown(run.left(target), 12345, 12345)
    os.chown(tmp_path, owner_of_parent, owner_of_parent)
    with run.resumed(target) as staged:
        assert bool(staged.journal.completed()) == (owner_of_parent == 12345)
        told = [warning.message for warning in staged.warnings]
    assert any("another user made it; starting anew" in text for text in told) == (
        not owner_of_parent
    )


def test_lines_that_only_closing_tells_to_be_lost_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing believes a line unchecked."""
    close = os.close

    def told(fd: int) -> None:
        is_journal = os.readlink(f"/proc/self/fd/{fd}").endswith(JOURNAL)
        close(fd)
        if is_journal:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "close", told)
    with stage(tmp_path / "target", is_directory=False, resume=True) as staged:
        write_new(staged)
    assert read_target(tmp_path / "target")
