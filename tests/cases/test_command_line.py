"""What scripts rely on: exit codes and output where a stream is full, closed, or read by nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import dcp_at

ROOT = Path(__file__).parents[2]


def _shell(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which `"$@"` is the command with `words`."""
    command = [sys.executable, "-m", "ema_ckpt", *words]
    return subprocess.run(
        ["sh", "-c", script, "sh", *command], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("words", [["inspect", "PATH"], ["inspect", "PATH", "--json"], ["verify", "PATH"], ["--help"]])
def test_output_on_a_full_disk_is_trouble_and_no_bug(tmp_path: Path, words: list[str]) -> None:
    path = dcp_at(tmp_path / "run")
    done = _shell('"$@" > /dev/full', *(str(path) if word == "PATH" else word for word in words))
    assert done.returncode == 2
    assert done.stderr == "Error: standard output: No space left on device\n"


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_stream_changes_no_exit_code(tmp_path: Path, closed: str) -> None:
    path = dcp_at(tmp_path / "run")
    done = _shell(f'"$@" {closed}>&-', "inspect", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    failed = _shell(f'"$@" {closed}>&-', "inspect", str(tmp_path / "none"))
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr


def test_an_error_stays_out_of_the_document_if_stderr_is_closed(tmp_path: Path) -> None:
    done = _shell('"$@" 2>&-', "inspect", str(tmp_path / "none"), "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "not-found"


@pytest.mark.parametrize("words", [["inspect", "PATH", "--json"], ["--help"], ["inspect", "--help"]])
def test_a_reader_that_left_before_the_first_line(tmp_path: Path, words: list[str]) -> None:
    path = dcp_at(tmp_path / "run")
    words = [str(path) if word == "PATH" else word for word in words]
    done = _shell('{ "$@"; echo $? >&2; } | sleep 0', *words)
    assert done.stderr == "141\n"


@pytest.mark.parametrize(
    "words",
    [["consolidate"], ["consolidate", "a"], ["consolidate", "a", "b", "--threads", "x"], ["nonsense"], ["inspect"]],
)
def test_usage_errors_are_a_document_too(words: list[str]) -> None:
    done = _shell('"$@"', *words, "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "usage"
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert ".;" not in done.stderr
