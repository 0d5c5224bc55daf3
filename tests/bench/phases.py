"""Where the time of a command goes: what is shared among workers, and what is not.

    python tests/bench/phases.py verify CHECKPOINT --threads 4
    python tests/bench/phases.py --runs 15 diff OLD NEW
    python tests/bench/phases.py --target OUT consolidate CHECKPOINT OUT --threads 2
    python tests/bench/phases.py --target OUT --calls 8 consolidate CHECKPOINT OUT --threads 1

Wall time in ms, medians of whole processes: Python itself, imports before the command begins, opening what it reads
(once for each checkpoint), planning and later imports, the workers at work, and what comes after the last of them.
With --calls it is the CPU time of one run instead, of the functions that take most of it, without those they call:
of the first process alone, so that the command has to have one worker.
"""

from __future__ import annotations

import argparse
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import remove, table

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("Python", "imports", "opening", "planning", "workers", "end", "all")
PROGRAM = """
import cProfile, json, os, sys, time
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

def profile():
    calls = cProfile.Profile(time.process_time)

    def end(code):
        calls.disable()
        calls.dump_stats(os.environ["PHASES_CALLS"])
        leave(code)

    os._exit = end
    calls.enable()
    try:
        cli.script()
    finally:
        end(1)

if "PHASES_CALLS" in os.environ:
    profile()
os._exit = lambda code: (note(), leave(code))
try:
    cli.script()
finally:
    note()
"""


def run(arguments: list[str], **files: Path) -> float:
    """Run a command once, which writes what is measured to files; return its wall time in seconds."""
    paths = {name: str(path) for name, path in files.items()}
    begun = time.time()
    command = [sys.executable, "-c", PROGRAM, *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PHASES_BEGUN": str(begun), **paths}
    done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: exit code {done.returncode}")
    return time.time() - begun


def phases(arguments: list[str], scratch: Path) -> dict[str, float]:
    """Run a command once; return the seconds of each phase."""
    file = scratch / "phases.json"
    whole = run(arguments, PHASES_FILE=file)
    spent: dict[str, float] = json.loads(file.read_text())
    return {**spent, "end": spent["end"] + whole - sum(spent.values()), "all": whole}


def calls(arguments: list[str], scratch: Path, count: int) -> list[list[str]]:
    """Run a command once; return the functions that take most CPU time, and all of it."""
    file = scratch / "calls"
    run(arguments, PHASES_CALLS=file)
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, object]]
    stats = vars(pstats.Stats(str(file)))["stats"]
    functions = sorted(stats.items(), key=lambda one: -one[1][2])
    rows = [
        [f"{Path(source).name} {name}", str(number), f"{1000 * seconds:.0f}"]
        for (source, _, name), (_, number, seconds, _, _) in functions
    ]
    total = sum(seconds for _, _, seconds, _, _ in stats.values())
    return [["function", "calls", "CPU ms"], *rows[:count], ["all", "", f"{1000 * total:.0f}"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--target", type=Path, help="is removed before each run")
    parser.add_argument("--calls", type=int, metavar="N", help="the N functions with most CPU time")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="of ema-ckpt")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(1 if options.calls else options.runs):
            if options.target is not None:
                remove(options.target)
            if options.calls:
                print(table(calls(options.command, Path(scratch), options.calls)))
            else:
                results.append(phases(options.command, Path(scratch)))
    if results:
        medians = [statistics.median([one.get(phase, 0.0) for one in results]) for phase in PHASES]
        print(table([list(PHASES), [f"{1000 * seconds:.0f}" for seconds in medians]]))


if __name__ == "__main__":
    main()
