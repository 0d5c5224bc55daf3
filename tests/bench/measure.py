"""Wall time and peak memory of whole processes, taken so that neither the order nor the measurer colours them.

Peak RSS: a child starts with the high-water mark of the process that forked it, so a benchmark that has
loaded torch would report its own 250 MB for `cp`. `Runner` therefore forks from a fresh Python that has
imported nothing (`-S -E`, about 9 MB) and takes `ru_maxrss` from `wait4`.

Wall time: `settle` runs before each measurement: `sync`, then a 64 MB probe is written and fsynced until it
is back at its usual time, so that one run does not pay for the write-back of the one before it.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Forks, executes and waits; prints wall seconds, peak RSS in KiB, the exit status and CPU seconds.
_HELPER = """
import posix, sys, time
out, argv = sys.argv[1], sys.argv[2:]
begin = time.perf_counter()
pid = posix.fork()
if not pid:
    try:
        log = posix.open(out, posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC, 0o644)
        posix.dup2(log, 1)
        posix.dup2(log, 2)
        for folder in [''] if '/' in argv[0] else posix.environ[b'PATH'].decode().split(':'):
            try:
                posix.execv(folder + '/' + argv[0] if folder else argv[0], argv)
            except OSError:
                pass
    finally:
        posix._exit(127)
_, status, usage = posix.wait4(pid, 0)
print(time.perf_counter() - begin, usage.ru_maxrss, posix.waitstatus_to_exitcode(status),
      usage.ru_utime + usage.ru_stime)
"""


@dataclass(frozen=True)
class Run:
    """One finished process."""

    seconds: float
    peak_kb: int
    code: int
    cpu_seconds: float


@dataclass
class Contender:
    """A command that is timed, what it leaves behind, and its results."""

    name: str
    command: Sequence[str]
    targets: Sequence[Path] = ()
    runs: int = 7
    env: dict[str, str] = field(default_factory=dict)
    results: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median wall time."""
        return statistics.median(run.seconds for run in self.results)

    @property
    def cpu_seconds(self) -> float:
        """Median CPU time of all threads, user and system: tells work from waiting on a busy machine."""
        return statistics.median(run.cpu_seconds for run in self.results)

    @property
    def peak_mb(self) -> float:
        """Median peak RSS, in units of 1000 kB of 1024 bytes each as the kernel counts, given as MB of 10^6."""
        return statistics.median(run.peak_kb for run in self.results) * 1024 / 1e6


def run_once(command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Run:
    """Run `command` under the small helper; its output goes to `log`.

    Raises:
        SystemExit: the command failed; the end of its output is shown.
    """
    helper = [sys.executable, "-S", "-E", "-c", _HELPER, str(log), *map(str, command)]
    # Modules are compiled once, as an installation does it, and not at each start.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **(env or {})}
    done = subprocess.run(helper, capture_output=True, text=True, check=True, env=environment)
    seconds, peak, code, cpu = done.stdout.split()
    result = Run(float(seconds), int(peak), int(code), float(cpu))
    if result.code:
        tail = log.read_text(errors="replace")[-2000:]
        raise SystemExit(f"{' '.join(map(str, command))[:300]}\nended with {result.code}:\n{tail}")
    return result


def remove(path: Path) -> None:
    """Remove a file or a directory, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Settler:
    """Waits for the disk to come to rest."""

    def __init__(self, folder: Path, nbytes: int = 64_000_000, patience: float = 60.0) -> None:
        self.folder, self.nbytes, self.patience = folder, nbytes, patience
        os.sync()
        time.sleep(1)
        self.usual = min(self._probe() for _ in range(5))
        self.gave_up = 0

    def __call__(self) -> None:
        """Return once a probe takes at most 1.5 times its usual time, or after `patience` seconds."""
        os.sync()
        deadline = time.monotonic() + self.patience
        while self._probe() > 1.5 * self.usual:
            if time.monotonic() > deadline:
                self.gave_up += 1
                return
            time.sleep(0.3)

    def _probe(self) -> float:
        path = self.folder / "probe"
        block = bytes(1 << 20)
        begin = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(self.nbytes >> 20):
                file.write(block)
            os.fsync(file.fileno())
        took = time.perf_counter() - begin
        path.unlink()
        return took


def race(
    contenders: Sequence[Contender], settle: Callable[[], None], log: Path, seed: int = 0
) -> None:
    """Run every contender as often as it asks for, all of them mixed in random order."""
    order = [contender for contender in contenders for _ in range(contender.runs)]
    random.Random(seed).shuffle(order)
    for i, contender in enumerate(order):
        for target in contender.targets:
            remove(target)
        settle()
        contender.results.append(run_once(contender.command, log, contender.env))
        for target in contender.targets:
            remove(target)
        if sys.stderr.isatty():
            print(f"\r{i + 1}/{len(order)}", end="", file=sys.stderr)


def machine() -> dict[str, str]:
    """What the numbers were taken on."""
    cpu = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in cpu if line.startswith("model name")), "?")
    memory = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "memory": f"{memory * 1024 / 1e9:.0f} GB",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [pair for pair in mounts if path.resolve().is_relative_to(pair[0])]
    return max(above, key=lambda pair: len(pair[0]), default=["", "?"])[1]


def heading(folder: Path) -> str:
    """Describe the machine, the file system of `folder` and the present load, in one line."""
    told = machine() | {"file system": file_system(folder), "load": f"{os.getloadavg()[0]:.1f}"}
    return ", ".join(f"{key} {value}" for key, value in told.items())


def table(rows: Sequence[Sequence[str]]) -> str:
    """`rows` (the first are headings) as a Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def save_json(path: Path, contenders: Sequence[Contender], notes: dict[str, object]) -> None:
    """Every single result, for whoever doubts a median."""
    results = {
        c.name: [[r.seconds, r.peak_kb, r.cpu_seconds] for r in c.results] for c in contenders
    }
    path.write_text(json.dumps({"notes": notes, "results": results}, indent=1) + "\n")
