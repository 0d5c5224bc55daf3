"""The example as a user runs it: torchrun on four ranks, kill, two ranks, consolidate, evaluate."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import ema_ckpt

REPO = Path(__file__).parents[2]
EXAMPLE = REPO / "docs" / "examples" / "train_resume.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}


def torchrun(ranks: int, *arguments: str) -> list[str]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    return [*launcher, str(EXAMPLE), *arguments]


def finished(command: list[str]) -> str:
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def killed_after(command: list[str], line: str) -> None:
    """Start a command, wait for a line of its output, and kill all its processes at once."""
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert any(found.startswith(line) for found in process.stdout), (
            f"ended before it printed {line!r}"
        )
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


def losses(text: str) -> dict[str, float]:
    return {kind: float(value) for kind, value in re.findall(r"(live|average) (\d+\.\d+)", text)}


def test_train_kill_resume_on_fewer_ranks_consolidate_evaluate(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Many more steps than it gets: it is killed in the middle of its work, most likely while it writes.
    killed_after(torchrun(4, "train", str(run), "--steps", "100000"), "saved step_20")
    newest = ema_ckpt.latest(run)
    assert newest is not None
    done = int(newest.name.removeprefix("step_"))
    assert done >= 20

    steps = done + 30
    text = finished(torchrun(2, "train", str(run), "--steps", str(steps)))
    assert f"resumed {newest.name}, written by 4 ranks, on 2" in text
    assert f"after {steps} updates" in text
    resumed = losses(text)

    out = tmp_path / "average.safetensors"
    finished([sys.executable, "-m", "ema_ckpt", "consolidate", str(run), str(out)])
    average = losses(finished([sys.executable, str(EXAMPLE), "evaluate", str(out)]))["average"]
    assert abs(average - resumed["average"]) < 1e-6
    assert average != resumed["live"]
    assert average < 0.6
