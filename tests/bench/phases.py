"""Where the time of a command goes: what is shared among workers, and what is not.

    python tests/bench/phases.py verify CHECKPOINT --threads 4
    python tests/bench/phases.py --runs 15 diff OLD NEW

Wall time in ms, medians of whole processes: Python itself, imports before the command begins, opening what it reads
(once for each checkpoint), planning and later imports, the workers at work, and what comes after the last of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import table

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("Python", "imports", "opening", "planning", "workers", "end", "all")
PROGRAM = """
import json, os, sys, time
begun, spent = float(os.environ["PHASES_BEGUN"]), {}
python = time.time()
import ema_ckpt.cli.main as cli
from ema_ckpt.discovery import opening
from ema_ckpt.runtime import executor
imported, last = time.time(), [0.0]

def timed(name, function):
    def call(*args, **kwargs):
        start = time.time()
        try:
            return function(*args, **kwargs)
        finally:
            last[0] = time.time()
            spent[name] = spent.get(name, 0.0) + last[0] - start
    return call

opening._open = timed("opening", opening._open)
executor.run = timed("workers", executor.run)
process, leave = os.getpid(), os._exit

def note():
    if os.getpid() == process:
        end = time.time()
        spent.update(Python=python - begun, imports=imported - python, end=end - last[0])
        spent["planning"] = end - begun - sum(spent.values())
        with open(os.environ["PHASES_FILE"], "w") as file:
            json.dump(spent, file)

os._exit = lambda code: (note(), leave(code))
try:
    cli.script()
finally:
    note()
"""


def run(arguments: list[str], file: Path) -> dict[str, float]:
    """Run a command once; return the seconds of each phase."""
    before = {"PYTHONPATH": str(ROOT), "PHASES_FILE": str(file)}
    begun = time.time()
    command = [sys.executable, "-c", PROGRAM, *arguments]
    env = {**os.environ, **before, "PHASES_BEGUN": str(begun)}
    done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=False)
    whole = time.time() - begun
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: exit code {done.returncode}")
    spent: dict[str, float] = json.loads(file.read_text())
    return {**spent, "end": spent["end"] + whole - sum(spent.values()), "all": whole}


def main() -> None:
    arguments, runs = sys.argv[1:], 7
    if arguments[:1] == ["--runs"]:
        runs, arguments = int(arguments[1]), arguments[2:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        results = [run(arguments, Path(scratch, "phases.json")) for _ in range(runs)]
    medians = [statistics.median([one.get(phase, 0.0) for one in results]) for phase in PHASES]
    print(table([list(PHASES), [f"{1000 * seconds:.0f}" for seconds in medians]]))


if __name__ == "__main__":
    main()
