"""Every verb over the cores, beside `cp`, `cat`, torch, and what a bare loop reaches.

    python tests/bench/scaling.py                            # 5.6 GB, as many workers as there are cores
    python tests/bench/scaling.py --size 100MB --runs 3      # small
    python tests/bench/scaling.py --svg docs/about/scaling.svg --json results.json

For 1, 2, 4, 8 and 16 workers, as far as the machine has cores: `verify`; `consolidate` of rows and of columns to
one file, of rows to bfloat16 and to a directory of 500 MB files; `reshard` to 16 and to 3 ranks; `diff` of two
trees; `consolidate` of 20 000 small tensors. Beside them `cat`, `cp -r`, torch's `dcp_to_torch_save` (of the small
tensors), and a bare loop: processes that each read 1 MiB at a time and compute its CRC-32.

A time is a median of whole processes, start included, in random order. Memory is the sum of the proportional set
sizes (PSS) of a command's processes at its largest, from `/proc`, sampled in a run of its own. `--used` writes,
reads and removes other files first: a machine whose free memory is in pieces, as after some hours of use.

The result is a Markdown table on stdout and, with --svg, a drawing: how many times as fast as one worker.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import checkpoints
from consolidate import ENV, RIVALS, ours, size_of
from drawing import Curve, draw
from measure import Contender, file_system, machine, remove, run_once, table

WORKERS = (1, 2, 4, 8, 16)
BARE_LOOP = Path(__file__).parent / "bare_loop.py"
LARGE = "5.6GB"


class Work(NamedTuple):
    """What is measured: a verb, what it reads, its options without `--threads`, what it leaves behind."""

    name: str
    verb: str
    source: str
    options: Sequence[object] = ()
    target: Path | None = None


def main() -> None:
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="ema-ckpt-bench-") as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(headline(folder), flush=True)
        works, rivals = plan(folder, options)
        if options.used:
            use_memory(folder, size_of(options.used))
        race([*works.values(), *rivals.values()], folder / "log", options.runs)
        report(works, rivals, folder / "log", options)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=size_of, default=LARGE, help=f"bytes of rows: {LARGE}")
    parser.add_argument("--small", type=int, default=20_000, help="how many small tensors")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="+", help="1 2 4 8 16, as the machine has")
    parser.add_argument("--only", nargs="+", default=(), help="works whose names hold one of these")
    parser.add_argument("--no-rivals", action="store_true", help="without torch's own tool")
    parser.add_argument("--used", help="bytes of other files to write, read and remove first")
    parser.add_argument("--dir", help="where to put the temporary directory")
    parser.add_argument("--keep", help="build here, keep the checkpoints, reuse those there")
    parser.add_argument("--svg", type=Path, help="draw speed over workers to this file")
    parser.add_argument("--json", type=Path, help="write every single result to this file")
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    options.workers = options.workers or [count for count in WORKERS if count <= cores]
    return options


def headline(folder: Path) -> str:
    facts = {**machine(), "file system": file_system(folder)}
    facts["usable cores"] = str(len(os.sched_getaffinity(0)))
    for name in ("ema_ckpt", "torch", "numpy"):
        facts[name] = importlib.metadata.version(name)
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def build(folder: Path, name: str, options: argparse.Namespace) -> Path:
    """Save what is read under that name, unless it is there: only what is measured takes its time."""
    half = min(options.size, 2_000_000_000)
    layout, size, ema = {
        "rows": ("row", options.size, False),
        "columns": ("column", options.size, False),
        "two trees": ("row", half, True),
        "small": (f"small:{options.small}", 0, False),
    }[name]
    path = folder / f"{name.replace(' ', '-')}.dcp"
    if not path.exists():
        checkpoints.build(layout, size, path, ema=ema)
    return path


def use_memory(folder: Path, nbytes: int) -> None:
    """Write, read and remove other files, so that the free memory is what they left."""
    path, block = folder / "other", random.Random(0).randbytes(64_000)
    for _ in range(0, nbytes, 500_000_000):
        with path.open("wb") as file:
            for _ in range(500_000_000 // len(block)):
                file.write(block)
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass
        path.unlink()


def plan(
    folder: Path, options: argparse.Namespace
) -> tuple[dict[tuple[str, int], Contender], dict[tuple[str, int], Contender]]:
    """Make our commands and their rivals, by name and workers (0: it does not choose them)."""
    file, ranks, shards = folder / "out.safetensors", folder / "out.dcp", folder / "out"
    works = [
        Work("verify", "verify", "rows"),
        Work("consolidate rows, one file", "consolidate", "rows", [file, "--no-fsync"], file),
        Work("consolidate columns, one file", "consolidate", "columns", [file, "--no-fsync"], file),
        Work("consolidate rows to bf16", "consolidate", "rows", [file, "--dtype", "bf16", "--no-fsync"], file),
        Work("consolidate rows, 500 MB files", "consolidate", "rows",
             [shards, "--max-shard-size", "500MB", "--no-fsync"], shards),
        Work("reshard 8 to 16", "reshard", "rows", [ranks, "--world-size", 16, "--no-fsync"], ranks),
        Work("reshard 8 to 3", "reshard", "rows", [ranks, "--world-size", 3, "--no-fsync"], ranks),
        Work("diff", "diff", "two trees"),
        Work("consolidate small tensors", "consolidate", "small", [file, "--no-fsync"], file),
    ]  # fmt: skip
    contenders = {}
    for work in works:
        if options.only and not any(word in work.name for word in options.only):
            continue
        source = build(folder, work.source, options)
        for count in options.workers:
            command = ours(work.verb, source, *work.options, "--threads", count, "-q")
            targets = [work.target] if work.target is not None else []
            contenders[work.name, count] = Contender(work.name, command, targets, 0, ENV)
    return contenders, _rivals(folder, options)


def _rivals(folder: Path, options: argparse.Namespace) -> dict[tuple[str, int], Contender]:
    rows, copy, rival = build(folder, "rows", options), folder / "copy", folder / "rival"
    every = [str(path) for path in sorted(rows.glob("*.distcp"))]
    rivals = {
        ("cp -r", 0): Contender("cp -r", ["cp", "-r", str(rows), str(copy)], [copy]),
        ("cat", 0): Contender("cat", ["cat", *every]),
    }
    for count in options.workers:
        command = [sys.executable, str(BARE_LOOP), str(count), *every]
        rivals["bare loop", count] = Contender("bare loop", command)
    if not options.no_rivals:
        tool = "dcp_to_torch_save"
        code = [sys.executable, "-W", "ignore", "-c", RIVALS[tool]]
        command = [*code, str(build(folder, "small", options)), "-", str(rival)]
        rivals[f"{tool}, small tensors", 0] = Contender(tool, command, [rival], 1)
    return rivals


def race(contenders: Sequence[Contender], log: Path, runs: int) -> None:
    """Run all in random order, each `runs` times; torch's own tool, which takes minutes, once."""
    order = [one for one in contenders for _ in range(1 if one.name in RIVALS else runs)]
    random.Random(0).shuffle(order)
    for index, one in enumerate(order):
        for target in one.targets:
            remove(target)
        os.sync()
        # `cat` writes to the log otherwise, whose disk would be what is measured.
        sink = Path(os.devnull) if one.name == "cat" else log
        one.results.append(run_once(one.command, sink, one.env))
        for target in one.targets:
            remove(target)
        if sys.stderr.isatty():
            print(f"\r{index + 1}/{len(order)} ", end="", file=sys.stderr)


def peak_pss(one: Contender) -> int:
    """Run a command once more; return the largest sum of its processes' PSS, in bytes."""
    for target in one.targets:
        remove(target)
    environment = {**os.environ, **one.env}
    null = subprocess.DEVNULL
    most = 0
    with subprocess.Popen(one.command, env=environment, stdout=null, stderr=null) as process:
        while process.poll() is None:
            most = max(most, sum(map(_pss, _family(process.pid))))
            time.sleep(0.005)
    for target in one.targets:
        remove(target)
    return most


def _family(pid: int) -> list[int]:
    family = [pid]
    for parent in family:
        try:
            text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:
            continue
        family += [int(word) for word in text.split()]
    return family


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def report(
    works: dict[tuple[str, int], Contender],
    rivals: dict[tuple[str, int], Contender],
    log: Path,
    options: argparse.Namespace,
) -> None:
    counts = options.workers
    most = counts[-1]
    heads = [f"{count} workers" if count > 1 else "1 worker" for count in counts]
    rows = [["seconds, medians", *heads, f"CPU s with {most}", "x cp -r", f"PSS MB with {most}"]]
    cp = rivals["cp -r", 0].seconds
    for name in dict.fromkeys(name for name, _ in works):
        last = works[name, most]
        times = [_time(works[name, count]) for count in counts]
        pss = peak_pss(last) / 1e6
        rows.append(
            [name, *times, f"{last.cpu_seconds:.2f}", f"{last.seconds / cp:.2f}", f"{pss:.0f}"]
        )
    for name in dict.fromkeys(name for name, _ in rivals):
        chosen = [rivals.get((name, count)) or rivals[name, 0] for count in counts]
        cells = [_time(one) for one in chosen]
        if (name, 0) in rivals:
            cells[1:] = [""] * (len(cells) - 1)
        last = chosen[-1]
        rows.append([name, *cells, f"{last.cpu_seconds:.2f}", f"{last.seconds / cp:.2f}", ""])
    print(f"\nmedians of {options.runs}, {options.size / 1e9:g} GB\n\n{table(rows)}")
    if options.svg is not None:
        options.svg.write_text(draw(_curves(works, rivals, counts), counts, headline(log.parent)))
    if options.json is not None:
        results = {}
        for (name, count), one in {**works, **rivals}.items():
            results[f"{name} {count}"] = [[run.seconds, run.cpu_seconds] for run in one.results]
        options.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))


def _time(one: Contender) -> str:
    seconds = sorted(run.seconds for run in one.results)
    return f"{statistics.median(seconds):.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f})"


def _curves(
    works: dict[tuple[str, int], Contender],
    rivals: dict[tuple[str, int], Contender],
    counts: Sequence[int],
) -> list[Curve]:
    """Speed over workers: how many times as fast as the same with one; `cp` beside rows."""
    curves = []
    for group, is_rival in ((works, False), (rivals, True)):
        for name in dict.fromkeys(name for name, count in group if count):
            base = group[name, counts[0]].seconds
            points = [(count, base / group[name, count].seconds) for count in counts]
            curves.append(Curve(name, points, is_rival))
    base = works.get(("consolidate rows, one file", counts[0]))
    if base is not None:
        level = base.seconds / rivals["cp -r", 0].seconds
        curves.append(Curve("cp -r, to rows", [(count, level) for count in counts], True))
    return curves


if __name__ == "__main__":
    main()
