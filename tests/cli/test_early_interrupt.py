"""Ctrl-C before a command has handlers of its own: while it imports, one line and no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
# Sends the process SIGINT when a module is looked for, or raises, and then runs the command as Python's `-m` does.
INTERRUPTED = """
import os, runpy, signal, sys
place = sys.argv.pop(1)
place, _, failure = place.partition(" ")

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == place:
            if failure:
                raise eval(failure)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
runpy.run_module("ema_ckpt", run_name="__main__", alter_sys=True)
"""
PLACES = [
    "ema_ckpt.cli.main", "atexit",  # before there are handlers
    "ema_ckpt.cli.commands", "click", "ema_ckpt.ops.inspect",  # after
]  # fmt: skip


FAILURES = ["OSError(5, 'a \"bad\" disk', 'file.py')", "ImportError('line 1\\n2')", "MemoryError()"]


def run_with(place: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-c", "import sys; sys.path[:0] = " + repr(sys.path) + INTERRUPTED, place, *words],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_json", [False, True])
def test_one_line(place: str, is_json: bool, fixtures: Path) -> None:
    ended = run_with(place, "inspect", str(fixtures / "tiny-lm"), *["--json"] * is_json)
    assert (ended.returncode, ended.stderr) == (130, "Error: interrupted\n")
    if is_json:
        assert json.loads(ended.stdout)["error"]["code"] == "interrupted"
    else:
        assert ended.stdout == ""


@pytest.mark.parametrize("place", [*PLACES[:4], "ema_ckpt.ops.verify"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_package_that_cannot_be_loaded_is_no_damage(
    place: str, failure: str, fixtures: Path
) -> None:
    """Python itself would end with 1, which says that the checkpoint is damaged."""
    ended = run_with(f"{place} {failure}", "verify", str(fixtures / "tiny-lm"), "--json")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert ended.stderr.startswith("Error: ")
    error = json.loads(ended.stdout)["error"]
    assert error["code"] == "unreadable"
    assert ended.stderr == f"Error: {error['message']}\n"


def test_the_command_begins_there() -> None:
    """The installed command and `python -m` run the same guarded lines, which import nothing before."""
    assert 'ema-ckpt = "ema_ckpt.cli.start:script"' in (REPO / "pyproject.toml").read_text()
    code = "import sys; before = set(sys.modules); import ema_ckpt.__main__; print(*sorted(set(sys.modules) - before))"
    ended = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert set(ended.stdout.split()) == {
        "__future__", "ema_ckpt", "ema_ckpt.__main__", "ema_ckpt.cli", "ema_ckpt.cli.start",
    }  # fmt: skip
