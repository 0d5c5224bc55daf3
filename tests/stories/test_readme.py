"""The README does what it says: its commands print what stands there, its training script runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import FENCE, REPO, command_on_path, text_of

SECONDS = re.compile(r"in \d+\.\d\d s$", re.MULTILINE)


def sessions() -> list[list[tuple[str, str]]]:
    """Each console block as (command, what it prints)."""
    blocks = [
        m["body"] for m in FENCE.finditer(text_of(REPO / "README.md")) if m["info"] == "console"
    ]
    parts = [re.split(r"^\$ (.*)\n", body, flags=re.MULTILINE)[1:] for body in blocks]
    return [list(zip(part[::2], part[1::2], strict=True)) for part in parts]


def printed(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    lines = "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"
    return SECONDS.sub("in … s", lines)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "fixtures").symlink_to(REPO / "fixtures")
    found = command_on_path(tmp_path)
    runner = f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n'
    (tmp_path / ".bin" / "torchrun").write_text(runner)
    (tmp_path / ".bin" / "torchrun").chmod(0o755)
    return {**found, "OMP_NUM_THREADS": "1"}


def test_commands_print_what_stands_there(tmp_path: Path, environment: dict[str, str]) -> None:
    shown = sessions()[0]
    assert [command.split()[1] for command, _ in shown] == ["inspect", "consolidate", "verify"]
    for command, expected in shown:
        assert printed(command, tmp_path, environment) == SECONDS.sub("in … s", expected), command


def test_training_script_runs_and_goes_on(tmp_path: Path, environment: dict[str, str]) -> None:
    (script,) = [
        m["body"] for m in FENCE.finditer(text_of(REPO / "README.md")) if m["info"] == "python"
    ]
    (tmp_path / "train.py").write_text(script)
    assert len([line for line in script.splitlines() if line.strip()]) <= 25
    *runs, (export, told) = sessions()[1]
    # Ranks write to one terminal: two may share a line.
    line = re.compile(r"rank (\d), step (\d+): (-?\d\.\d\d\d), expected 0")
    for (command, expected), (ranks, step) in zip(runs, ((2, 300), (3, 600)), strict=True):
        shown = line.findall(printed(command, tmp_path, environment))
        assert sorted(int(rank) for rank, _, _ in shown) == list(range(ranks))
        assert {int(number) for _, number, _ in shown} == {step}
        assert max(abs(float(value)) for _, _, value in shown) < 0.5
        assert len(line.findall(expected)) == ranks
        assert f"step {step}:" in expected
    assert printed(export, tmp_path, environment) == SECONDS.sub("in … s", told)
    assert os.path.getsize(tmp_path / "ema.safetensors") > 2560
