"""A short run of the fuzzer, and its guard: what a parser must not do is noticed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

REPO = Path(__file__).parents[2]
RUN = [sys.executable, "-m", "tests.fuzz.run", "--random"]


@pytest.mark.parametrize("name", TARGETS)
def test_a_short_run_finds_nothing(name: str) -> None:
    command = [*RUN, name, "--inputs", "400", "--seed", "short"]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{name}: 400 inputs" in ended.stdout


def test_every_target_begins_from_inputs_that_it_reads() -> None:
    for name, target in TARGETS.items():
        read = 0
        for data in target.seeds():
            try:
                target.run(data)
            except Exception:
                continue
            read += 1
        assert read, name


MISDEEDS = {
    "opens": "open('/etc/hostname')",
    "imports": "import this",
    "starts": "subprocess.run(['true'])",
    "connects": "socket.socket()",
    "removes": "os.remove('/nonexistent')",
    "raises": "raise ValueError('x')",
    "takes time": "[i * i for i in range(40_000_000)]",
    "takes memory": "bytearray(200 << 20)",
}


@pytest.mark.parametrize("how", MISDEEDS)
def test_the_guard_notices(how: str) -> None:
    code = (
        "import os, socket, subprocess\n"
        "from tests.fuzz.run import Guard\n"
        "from tests.fuzz.targets import Target\n"
        "guard = Guard()\n"
        f"def misdeed(data):\n    {MISDEEDS[how]}\n"
        "try:\n    guard.run(Target(misdeed, list), b'x')\n"
        "except BaseException as error: print('noticed', type(error).__name__)\n"
        "guard.run(Target(len, list), b'x')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("noticed "), how
    assert os.path.exists("/etc/hostname") and socket is not None
