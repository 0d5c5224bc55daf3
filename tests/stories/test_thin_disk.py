"""A disk that takes writes into the page cache and cannot store them: nothing of that is trusted by a later run.

A thin volume that is full, a network volume that is gone, or a bad disk says so only when Linux writes pages back.
It reports that once, at `fsync`, and keeps the pages as if they were stored.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ema_ckpt import verify
from tests.stories.commands import environment

TOOLS = ("mount", "umount", "losetup", "mkfs.ext4")
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, TOOLS)), reason="mounts a file system"
)
MB = 1 << 20
TRIES = 3  # a failure of one run may be told to the next one alone


def system(*words: object) -> str:
    return subprocess.run(
        [*map(str, words)], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


class ThinDisk:
    """A file system of 200 MB on a volume with room for less."""

    def __init__(self, folder: Path) -> None:
        self.pool, self.root = folder / "pool", folder / "disk"

    def mount(self) -> None:
        self.pool.mkdir(exist_ok=True)
        self.root.mkdir(exist_ok=True)
        system("mount", "-t", "tmpfs", "-o", f"size={20 * MB}", "tmpfs", self.pool)
        with open(self.pool / "image", "wb") as image:
            image.truncate(200 * MB)
        options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
        system("mkfs.ext4", "-q", "-J", "size=4", "-E", options, self.pool / "image")
        self.device = system("losetup", "-f", "--show", self.pool / "image")
        system("mount", self.device, self.root)

    def extend(self) -> None:
        """Give it all the room that it says it has."""
        system("mount", "-o", f"remount,size={300 * MB}", self.pool)

    def forget_cache(self) -> None:
        """As after a reboot: what is read from now on comes from the disk."""
        Path("/proc/sys/vm/drop_caches").write_text("3")

    def unmount(self) -> None:
        for command in (
            ("umount", self.root),
            ("losetup", "-d", self.device),
            ("umount", self.pool),
        ):
            subprocess.run([*map(str, command)], check=False, capture_output=True, timeout=60)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ThinDisk]:
    made = ThinDisk(tmp_path)
    made.device = ""
    try:
        made.mount()
    except (subprocess.CalledProcessError, OSError) as error:
        made.unmount()
        pytest.skip(f"no file system in a file here: {error}")
    yield made
    made.unmount()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    values = np.random.default_rng(0).standard_normal((12, MB), dtype="float32")
    save_file({f"layer_{i}": row for i, row in enumerate(values)}, tmp_path / "big.safetensors")
    return tmp_path / "big.safetensors"


def start(*words: object, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *launcher, "ema_ckpt", *map(str, words)]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(*words: object, launcher: tuple[str, ...] = ()) -> tuple[int, str]:
    process = start(*words, launcher=launcher)
    said, _ = process.communicate(timeout=150)
    return process.returncode, said


def test_what_the_disk_refused_at_the_end_is_written_again(disk: ThinDisk, source: Path) -> None:
    words = ("convert", source, disk.root / "out.pt", "--resume")
    for _ in range(TRIES):
        code, said = run(*words)
        if "Read-only file system" not in said:
            break
        disk.unmount()  # its journal was refused too, which ends all writing for good
        disk.mount()
    assert code == 2 and "No space left on device" in said
    disk.extend()
    assert run(*words)[0] == 0
    disk.forget_cache()
    assert verify(disk.root / "out.pt").status == "sound"
    assert run("verify", disk.root / "out.pt", "--against", source)[0] == 0


def test_what_the_disk_refused_before_a_kill_is_written_again(disk: ThinDisk, source: Path) -> None:
    target = disk.root / "out.pt"
    process = start("convert", source, target, "--resume")
    # All is written, the disk is full and the run is about to hear of it, or has just heard.
    while process.poll() is None and not (ranges_in(disk.root) == 12 and has_failed(disk)):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    disk.extend()
    assert any(run("convert", source, target, "--resume")[0] == 0 for _ in range(TRIES))
    disk.forget_cache()
    assert verify(target).status == "sound"


def ranges_in(folder: Path) -> int:
    """Count the ranges in the journal of a run."""
    try:
        return sum(path.read_bytes().count(b"\n") - 1 for path in folder.glob(".*/*.journal"))
    except OSError:
        return 0


def has_failed(disk: ThinDisk) -> bool:
    status = os.statvfs(disk.pool)
    return status.f_bfree == 0


@pytest.mark.slow
def test_what_the_disk_refused_of_one_process_of_several_is_written_again(
    disk: ThinDisk, source: Path
) -> None:
    pytest.importorskip("torch")
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    target = disk.root / "out.pt"
    words = ("convert", source, target, "--resume", "--distributed")
    code, said = run(*words, launcher=launcher)
    assert code and "No space left on device" in said
    disk.extend()
    assert any(run(*words, launcher=launcher)[0] == 0 for _ in range(TRIES))
    disk.forget_cache()
    assert verify(target).status == "sound"
