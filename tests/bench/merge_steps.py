"""`synthesize RUN --last N` against the time to read the same steps.

    python tests/bench/merge_steps.py                          # 10 steps of 2 GB, 5 runs
    python tests/bench/merge_steps.py --size 0.2GB --runs 3
    python tests/bench/merge_steps.py --cold                   # from the disk, not from the page cache

N steps of a run, each a DCP checkpoint of eight ranks, are merged into one safetensors file, not synced, so that the
disk counts as little as it can. Beside it `cat` reads every file of the steps, `cp` writes what the merge writes, and a
bare loop of numpy (`bare_sum.py`) reads, adds up and writes the files with as many workers: how far the machine lets a
merge go. In random order, process start included.

The bars: at most 1.3 times the time to read them, at most 100 MB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import checkpoints
from diff import _size
from measure import Contender, heading, race, table

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": str(ROOT)}


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="ema-ckpt-bench-") as scratch:
        folder = Path(scratch)
        print(heading(folder), end="\n\n")
        _merge(folder, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=_size, default="2GB", help="bytes of one step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="drop the steps from the page cache")
    parser.add_argument("--dir", help="where to put the temporary directory")
    return parser.parse_args()


def _merge(folder: Path, options: argparse.Namespace) -> None:
    run = folder / "run"
    run.mkdir()
    first = run / "step_1"
    checkpoints.build("row", options.size, first)
    for step in range(2, options.steps + 1):
        shutil.copytree(first, run / f"step_{step}")
    target, copied = folder / "merged.safetensors", folder / "copied"
    merge = [sys.executable, "-m", "ema_ckpt", "synthesize", str(run), str(target), "-q"]
    merge += ["--last", str(options.steps), "--scheme", "linear", "--no-fsync"]
    files = [str(path) for path in sorted(run.glob("*/*"))]
    steps = [str(run / f"step_{step}") for step in range(1, options.steps + 1)]
    summed, workers = folder / "summed", min(len(os.sched_getaffinity(0)), 8)
    bare = [sys.executable, str(ROOT / "tests" / "bench" / "bare_sum.py"), str(workers)]
    count = options.runs
    contenders = [
        Contender(
            "cat of all steps", ["/bin/sh", "-c", 'cat "$@" > /dev/null', "-", *files], [], count
        ),
        Contender("cp of one step", ["cp", "-r", str(first), str(copied)], [copied], count),
        Contender("bare loop of numpy", [*bare, str(summed), *steps], [summed], count),
        Contender("synthesize --last", merge, [target], count, ENV),
    ]
    race(contenders, partial(_drop, files) if options.cold else _nothing, folder / "log")
    read = contenders[0]
    rows = [["", "seconds", "CPU s", "peak RSS MB", "x cat", "CPU x cat"]]
    for contender in contenders:
        spent, memory = f"{contender.cpu_seconds:.2f}", f"{contender.peak_mb:.0f}"
        ratios = [
            f"{contender.seconds / read.seconds:.2f}",
            f"{contender.cpu_seconds / read.cpu_seconds:.2f}",
        ]
        rows.append([contender.name, f"{contender.seconds:.2f}", spent, memory, *ratios])
    nbytes = sum(os.path.getsize(file) for file in files)
    place = "the disk" if options.cold else "the page cache, as far as it holds them"
    print(f"{options.steps} steps, {nbytes / 1e9:.2f} GB, from {place}\n")
    print(table(rows))


def _nothing() -> None:
    pass


def _drop(files: Sequence[str]) -> None:
    """Drop files from the page cache; what is dirty is written first."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


if __name__ == "__main__":
    main()
