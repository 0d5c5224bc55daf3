"""Writers of stages, as processes that can be killed, and what the staging tests look at."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ema_ckpt.writing.staging import Staged

REPO = Path(__file__).parents[1]

# argv: target, generation, how many files, pause in ms, then any of: overwrite, resume, plain, term, wait.
WRITER = """
import os, signal, sys, time, zlib
from ema_ckpt.writing.journal import Finished
from ema_ckpt.writing.staging import stage
target, generation, count, pause, *words = sys.argv[1:]
if "term" in words:
    def stop(number, frame): raise SystemExit(128 + number)
    signal.signal(signal.SIGTERM, stop)
if "wait" in words:
    print("ready", flush=True); sys.stdin.readline()
with stage(target, is_directory=True, overwrite="overwrite" in words, resume="resume" in words,
           plain_rename="plain" in words, identity={"source": "s", "plan": generation}) as staged:
    print("staged", flush=True)
    for i in range(int(count)):
        data = (generation.encode() * 4096)[:4096]
        (staged.path / f"part{i}.distcp").write_bytes(data)
        staged.journal.done(f"part{i}.distcp", 0, 4096, Finished(zlib.crc32(data)))
        time.sleep(int(pause) / 1000)
    (staged.path / ".metadata").write_bytes(generation.encode())
"""


def spawn(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process that runs `code` in the repository, with pipes, and hears SIGINT.

    A shell that runs the tests in the background has made all their children deaf to it.
    """
    hearing = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.Popen(
        [sys.executable, "-c", hearing + code, *map(str, arguments)],
        cwd=REPO,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def writer(
    target: Path, generation: str, count: int, pause: int, *words: str
) -> subprocess.Popen[str]:
    return spawn(WRITER, target, generation, count, pause, *words)


@contextlib.contextmanager
def writing(target: Path, *args, **kwargs) -> Iterator[subprocess.Popen[str]]:
    process = writer(target, *args, **kwargs)
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def generation_of(directory: Path, count: int) -> str:
    """The generation a directory holds, proven complete: no file missing, none of another generation."""
    generation = (directory / ".metadata").read_text()
    names = {f"part{i}.distcp" for i in range(count)} | {".metadata"}
    assert {entry.name for entry in directory.iterdir()} == names
    for name in names - {".metadata"}:
        assert (directory / name).read_bytes() == (generation.encode() * 4096)[:4096]
    return generation


def write_new(staged: Staged, text: str = "new") -> None:
    if staged.policy.is_directory:
        (staged.path / "model.safetensors").write_text(text)
    else:
        staged.path.write_text(text)


def read_target(target: Path) -> str:
    return (target / "model.safetensors" if target.is_dir() else target).read_text()


def make_old(target: Path, *, is_directory: bool) -> None:
    if is_directory:
        target.mkdir()
        (target / "__0_0.distcp").write_text("old")
        (target / ".metadata").write_text("old")
    else:
        target.write_text("old")


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    paths = sorted(root.rglob("*"))
    return {str(p): (p.lstat().st_ino, p.lstat().st_size, p.lstat().st_mtime_ns) for p in paths}
