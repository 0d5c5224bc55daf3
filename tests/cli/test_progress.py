"""The bar on a terminal: totals known at once, never backwards, only for work over a second."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from ema_ckpt.cli.progress import Bar
from ema_ckpt.core.text import parse_size

MIB = 1 << 20
FRAME = re.compile(
    r"(?P<task>\w+)  (?:[█░]+  )?\s*(?P<percent>\d+) %  +(?P<done>[\d.]+ \w+) of (?P<total>[\d.]+ \w+)"
    r"  +(?P<rate>[\d.e+]+ \w+/s)  (?P<left>.+) left"
)
SLOW = (
    "import sys, time; from ema_ckpt.runtime import executor; from ema_ckpt.cli.main import main;"
    "executor.on_job = lambda job: time.sleep(job.nbytes / {rate}); main(sys.argv[1:])"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 MiB of model and 96 MiB of average, in DCP."""
    import torch

    from tests.checkpoints import save_dcp

    torch.manual_seed(0)
    model = {f"layer{i}.weight": torch.randn(1024, 1536) for i in range(16)}
    ema = {name: value * 0.999 for name, value in model.items()}
    folder = tmp_path_factory.mktemp("progress") / "step_1"
    return save_dcp(folder, {"model": model, "ema": {"weights": ema}})


def on_terminal(
    *args: object, rate: float, columns: int = 80, codes: tuple[int, ...] = (0,)
) -> str:
    """What a command shows on a terminal whose workers do at most so many bytes a second."""
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    code = SLOW.format(rate=rate)
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=subprocess.DEVNULL,
        stderr=far,
        env=environment,
    )
    os.close(far)
    shown = b""
    while True:
        try:
            shown += os.read(near, 65536)
        except OSError:  # the other end was closed
            break
    os.close(near)
    assert process.wait(timeout=60) in codes, shown.decode()
    return shown.decode()


def frames_of(shown: str, columns: int) -> list[re.Match[str]]:
    """Every state of the bar, in order; each fits its line."""
    frames = []
    for line in shown.replace("\n", "\r").split("\r"):
        assert len(line) < columns, line
        if " of " in line and " % " in line:
            found = FRAME.fullmatch(line.rstrip())
            assert found, repr(line)
            frames.append(found)
    return frames


COPY = ["consolidate", "OUT.safetensors", "--threads", "1"]


@pytest.mark.parametrize(
    ("verb", "columns", "total"),
    [
        (COPY, 60, 96 * MIB),
        (COPY, 200, 96 * MIB),
        (["consolidate", "OUT.st", "--dtype", "bf16", "--threads", "2"], 80, 48 * MIB),
        (["convert", "OUT.pt", "--threads", "1"], 80, 192 * MIB),
        (["diff", "--threads", "1"], 80, 192 * MIB),
        (["diff", "--threads", "2"], 80, 192 * MIB),  # in children
        (["verify", "--threads", "1"], 80, 192 * MIB),
        (["verify", "--values", "--threads", "2"], 80, 384 * MIB),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_the_bar(
    source: Path,
    tmp_path: Path,
    verb: list[str],
    columns: int,
    total: int,
) -> None:
    args = [str(tmp_path / word) if word.startswith("OUT") else word for word in verb[1:]]
    shown = on_terminal(verb[0], source, *args, rate=total / 3 / int(verb[-1]), columns=columns)
    frames = frames_of(shown, columns)
    assert len(frames) >= 3
    task = {"diff": "comparing", "verify": "checking"}.get(verb[0], "writing")
    assert {frame["task"] for frame in frames} == {task}
    (told,) = {frame["total"] for frame in frames}
    assert parse_size(told) == pytest.approx(total, rel=0.01)
    percents = [int(frame["percent"]) for frame in frames]
    assert percents == sorted(percents)
    assert percents[-1] > 50
    done = [parse_size(frame["done"]) for frame in frames]
    assert done == sorted(done)
    assert ("█" in shown) == (columns >= 80)
    assert re.search(r"\r +\r$", shown.replace("\r\n", "\n")), "the line is removed at the end"


def test_work_under_a_second_shows_none(fixtures: Path, tmp_path: Path) -> None:
    args = [fixtures / "tiny-lm", tmp_path / "out.safetensors", "--no-fsync"]
    assert on_terminal("consolidate", *args, rate=1e12) == ""


def test_a_resumed_run_counts_what_is_left(source: Path, tmp_path: Path) -> None:
    """The bytes that an interrupted run wrote are not in the total."""
    import ema_ckpt

    class Interrupt:
        seen = total = 0

        def expect(self, nbytes: int) -> None:
            self.total += nbytes

        def __call__(self, nbytes: int) -> None:
            self.seen += nbytes
            if self.total == 96 * MIB and self.seen >= 40 * MIB:
                raise InterruptedError

    first, second = Interrupt(), Interrupt()
    out = tmp_path / "out.safetensors"
    with pytest.raises(InterruptedError):
        ema_ckpt.consolidate(source, out, resume=True, threads=1, progress=first)
    ema_ckpt.consolidate(source, out, resume=True, threads=1, progress=second)
    assert first.total == 96 * MIB
    assert 0 < second.total == second.seen <= 60 * MIB


@pytest.mark.parametrize(
    ("done", "total", "seconds", "columns", "line"),
    [
        (
            3 * 10**8,
            12 * 10**8,
            2.0,
            79,
            "writing  ████░░░░░░░░░░░░░░   25 %   300 MB of 1.2 GB   150 MB/s  6 s left",
        ),
        (
            10**9,
            10**12,
            1.0,
            50,
            "writing    0 %    1 GB of 1 TB     1 GB/s  16 min 39 s left"[:50],
        ),
        (5, 0, 1.0, 79, "writing  5 B  5 B/s"),
        (12, 10, 1.0, 60, "writing  100 %    10 B of 10 B     12 B/s  0 s left"),
    ],
)
def test_a_line(done: int, total: int, seconds: float, columns: int, line: str) -> None:
    bar = Bar("writing")
    bar.expect(total)
    bar(done)
    text = bar.line(seconds, columns)
    assert len(text) <= columns
    assert re.sub("[█░]+", "", text).split() == re.sub("[█░]+", "", line).split()
