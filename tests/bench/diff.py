"""`diff` and `verify` against `cat`, against plain arithmetic, and against loading everything with torch.

    python tests/bench/diff.py                        # an EMA and its model, 2 GB each, 7 runs
    python tests/bench/diff.py --size 0.5GB --runs 3
    python tests/bench/diff.py --keep /tmp/ckpt       # build there, keep the checkpoint, and reuse it

Eight gloo processes save a model and its EMA in float32, split on dim 0 (`--layout column` or `2d` for others).
Everything is read from the page cache, which is filled before the first run. Timed in random order:

    cat                 every file of the checkpoint to /dev/null
    arithmetic          the same differences, norms and counts by numpy in float64, on blocks that stay in cache, from
                        as many threads as `diff` uses: the work itself, without any file
    crc32               zlib.crc32 over as many bytes in memory, from as many threads as `verify` uses
    diff, verify        this package, process start included; verify reads every byte and checks every checksum
    dcp.load            both trees loaded by torch and compared there

    start               verify of a checkpoint of a few kB: what its process costs before it reads

The bars: diff within 1.5 times cat plus arithmetic, 12 times faster than dcp.load, below 96 MB; verify at 80 % of
crc32's rate per worker or better (bytes a CPU second, process start taken off), below 64 MB.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import checkpoints
from measure import Contender, file_system, machine, race, save_json, table

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": str(ROOT)}

_THREADS = "import os, sys, threading\nthreads = min(len(os.sched_getaffinity(0)), 8)\nwanted = int(sys.argv[1])\n"
_JOIN = "crew = [threading.Thread(target=work) for _ in range(threads)]\n[t.start() for t in crew]; [t.join() for t in crew]\n"
ARITHMETIC = (
    "import os; os.environ['OPENBLAS_NUM_THREADS'] = '1'\nimport numpy as np\n"
    + _THREADS
    + "N = 1 << 15\n"
    "def work():\n"
    "    a = np.random.default_rng(0).standard_normal(N, 'f4'); b = a + np.float32(1e-3)\n"
    "    for _ in range(wanted // 8 // N // threads):\n"
    "        x, y = a.astype('f8'), b.astype('f8'); d = x - y\n"
    "        d @ d, x @ x, y @ y, x @ y; m = np.abs(d); m.max(), m.sum(), np.count_nonzero(a != b)\n"
    + _JOIN
)
CRC32 = _THREADS + (
    "import zlib\n"
    "def work():\n"
    "    block = memoryview(bytearray(os.urandom(1 << 19)))\n"
    "    for _ in range(wanted // len(block) // threads): zlib.crc32(block)\n" + _JOIN
)
DCP_LOAD = """
import sys, torch, torch.distributed.checkpoint as dcp
metadata = dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata
state = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in metadata.items() if hasattr(m, 'size')}
dcp.load(state, checkpoint_id=sys.argv[1])
dd = bb = 0.0
for name, live in state.items():
    average = state.get('ema.weights.' + name.removeprefix('model.'))
    if name.startswith('model.') and average is not None:
        d = average - live
        dd, bb = dd + float(d.square().sum(dtype=torch.float64)), bb + float(live.square().sum(dtype=torch.float64))
        d.abs().max(), int((d != 0).sum()), torch.dot(average.view(-1), live.view(-1))
print((dd / bb) ** 0.5)
"""


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="ema-ckpt-bench-") as scratch:
        folder = Path(options.keep or scratch)
        source = folder / f"ema-{options.layout}.dcp"
        if not source.exists():
            folder.mkdir(parents=True, exist_ok=True)
            checkpoints.build(options.layout, options.size, source, ema=True)
        print(
            ", ".join(
                f"{key} {value}"
                for key, value in {**machine(), "file system": file_system(folder)}.items()
            )
        )
        nbytes = sum(file.stat().st_size for file in source.iterdir())
        print(
            f"{options.layout}: {nbytes / 1e9:.2f} GB in {len(list(source.iterdir()))} files, from the page cache\n"
        )
        contenders = _contenders(source, nbytes, options)
        for file in source.iterdir():
            file.read_bytes()
        race(contenders, lambda: None, folder / "log")
        _print(contenders, nbytes)
        if options.json:
            save_json(
                options.json,
                contenders,
                {"size": options.size, "layout": options.layout, **machine()},
            )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", type=_size, default="2GB", help="bytes of the model; the EMA has as many"
    )
    parser.add_argument("--layout", default="row", choices=("row", "column", "2d"))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--rival-runs", type=int, default=3)
    parser.add_argument("--dir", help="where to put the temporary directory")
    parser.add_argument(
        "--keep", help="build here, keep the checkpoint, and reuse one that is there"
    )
    parser.add_argument("--json", type=Path, help="write every single result to this file")
    return parser.parse_args()


def _size(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)\s*([kMG]?B)", text).groups()
    return int(float(number) * {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}[unit])


def _contenders(source: Path, nbytes: int, options: argparse.Namespace) -> list[Contender]:
    python, runs = sys.executable, options.runs
    ours = [python, "-m", "ema_ckpt"]
    return [
        Contender("cat", ["/bin/sh", "-c", f"cat '{source}'/* > /dev/null"], [], runs),
        Contender("arithmetic", [python, "-c", ARITHMETIC, str(nbytes)], [], runs),
        Contender("crc32", [python, "-c", CRC32, str(nbytes)], [], runs),
        Contender("diff", [*ours, "diff", str(source), "-q"], [], runs, ENV),
        Contender("verify", [*ours, "verify", str(source), "-q"], [], runs, ENV),
        Contender(
            "start", [*ours, "verify", str(ROOT / "fixtures/dcp/fsdp2-w8"), "-q"], [], runs, ENV
        ),
        Contender(
            "dcp.load",
            [python, "-W", "ignore", "-c", DCP_LOAD, str(source)],
            [],
            options.rival_runs,
        ),
    ]


def _print(contenders: list[Contender], nbytes: int) -> None:
    rows = [["", "seconds (min-max)", "CPU s", "GB/s", "peak RSS MB"]]
    for c in contenders:
        seconds = sorted(run.seconds for run in c.results)
        spread = f"{c.seconds:.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f})"
        rows.append(
            [
                c.name,
                spread,
                f"{c.cpu_seconds:.2f}",
                f"{nbytes / c.seconds / 1e9:.2f}",
                f"{c.peak_mb:.0f}",
            ]
        )
    print(table(rows), end="\n\n")
    by = {contender.name: contender for contender in contenders}
    diff, verify = by["diff"], by["verify"]
    bars = [
        (
            "diff / (cat + arithmetic)",
            diff.seconds / (by["cat"].seconds + by["arithmetic"].seconds),
            "<=",
            1.5,
        ),
        ("dcp.load / diff", by["dcp.load"].seconds / diff.seconds, ">=", 12),
        ("diff, peak RSS MB", diff.peak_mb, "<=", 96),
        (
            "crc32 / verify, CPU",
            by["crc32"].cpu_seconds / (verify.cpu_seconds - by["start"].cpu_seconds),
            ">=",
            0.8,
        ),
        ("verify, peak RSS MB", verify.peak_mb, "<=", 64),
    ]
    for name, value, sign, bar in bars:
        met = value <= bar if sign == "<=" else value >= bar
        print(f"{'met   ' if met else 'MISSED'} {name}: {value:.2f} (bar {sign} {bar})")


if __name__ == "__main__":
    main()
