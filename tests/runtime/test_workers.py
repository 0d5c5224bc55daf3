"""The number of workers follows the work, and what a child process costs."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import sys
from ema_ckpt.runtime.executor import Workers
held = bytearray(int(sys.argv[1]) << 20)
for page in range(0, len(held), 4096):
    held[page] = 1
print([Workers.fit(16, seconds).number for seconds in (0.01, 0.07, 0.5, 4.0)])
"""


def chosen(held_megabytes: int) -> list[int]:
    """Workers for 0.01, 0.07, 0.5 and 4 seconds of work, in a process that holds so much memory."""
    command = [sys.executable, "-c", PROGRAM, str(held_megabytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    numbers: list[int] = json.loads(done.stdout)
    return numbers


def test_more_work_has_more_workers_and_little_has_one() -> None:
    numbers = chosen(0)
    assert numbers == sorted(numbers)
    assert numbers[0] == 1
    assert numbers[-1] == 16


def test_a_process_that_is_slow_to_fork_has_fewer() -> None:
    """Every child copies the pages of a large catalog on which it counts references."""
    few, many = chosen(400), chosen(0)
    assert few[0] == 1
    assert 1 < few[-1] < many[-1]
