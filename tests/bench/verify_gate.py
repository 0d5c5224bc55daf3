"""What `verify --quick` costs a stored piece, and how fast `verify --manifest` hashes.

    python tests/bench/verify_gate.py                 # 2 000 pieces, 9 runs; 2 GB in 8 files for the manifest
    python tests/bench/verify_gate.py --size 0.5GB --runs 3

2 000 chunks (250 tensors on 8 ranks) are checked once in a checkpoint as torch writes it and once as this package
does. `start` is the same command on a checkpoint of a few kB: what the process costs before it looks at anything.
CPU time of whole processes, in random order; what is said of a piece is the difference to `start`. Within one
process, `check` is timed as a trainer calls it, imports done.

Files are hashed from the page cache, `sha256sum` by as many processes as there are CPUs (`xargs -P`), `verify --quick
--manifest` by as many threads.

The bars: 2 000 chunks in less than 0.1 s of CPU time beside the start; hashing at 90 % of sha256sum or better.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import checkpoints
from diff import _size
from measure import Contender, heading, race, table

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": str(ROOT)}
OURS = [sys.executable, "-m", "ema_ckpt", "verify", "--quick", "-q"]
TENSORS, RANKS = 250, 8
CHECK = """
import sys, time, ema_ckpt
ema_ckpt.check(sys.argv[1])
begin = time.process_time()
for _ in range(20): ema_ckpt.check(sys.argv[1])
print((time.process_time() - begin) / 20)
"""


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="ema-ckpt-bench-") as scratch:
        folder = Path(scratch)
        print(heading(folder), end="\n\n")
        _pieces(folder, options.runs)
        _hashes(folder, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=_size, default="2GB", help="bytes to hash")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--dir", help="where to put the temporary directory")
    return parser.parse_args()


def _pieces(folder: Path, runs: int) -> None:
    stock, ours = _sharded(folder)
    tiny = ROOT / "fixtures/dcp/fsdp2-w8"
    sources = {"start": tiny, "torch's, 2 000 chunks": stock, "ours, 2 000 chunks": ours}
    contenders = [
        Contender(name, [*OURS, str(path)], [], runs, ENV) for name, path in sources.items()
    ]
    race(contenders, lambda: None, folder / "log")
    start, *others = contenders
    rows = [["", "CPU s, process", "CPU ms without start", "check() again, CPU ms"]]
    rows.append(["start", f"{start.cpu_seconds:.3f}", "", ""])
    for contender in others:
        more = (contender.cpu_seconds - start.cpu_seconds) * 1000
        again = _check_again(sources[contender.name])
        rows.append([contender.name, f"{contender.cpu_seconds:.3f}", f"{more:.0f}", f"{again:.0f}"])
    print(table(rows), end="\n\n")


def _sharded(folder: Path) -> tuple[Path, Path]:
    """The same 2 000 chunks in two checkpoints: written by torch, and by this package."""
    sys.path.insert(0, str(ROOT))
    import torch

    import ema_ckpt
    from tests.sharded import rows, save_cut

    state = {f"model.layers.{i}.weight": torch.randn(64, 32) for i in range(TENSORS)}
    cuts = {name: rows(tensor.shape, RANKS) for name, tensor in state.items()}
    stock = save_cut(folder / "stock", state, cuts)
    ema_ckpt.reshard(stock, folder / "ours", world_size=RANKS)
    return stock, folder / "ours"


def _check_again(path: Path) -> float:
    """CPU time in ms of one more `check` in a process that has checked before."""
    command = [sys.executable, "-c", CHECK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | ENV)
    return float(done.stdout) * 1000


def _hashes(folder: Path, options: argparse.Namespace) -> None:
    source = folder / "large"
    checkpoints.build("row", options.size, source)
    nbytes = sum(file.stat().st_size for file in source.iterdir())
    cpus = len(os.sched_getaffinity(0))
    listed = f"find '{source}' -type f -print0 | xargs -0 -n 1 -P {cpus} sha256sum > /dev/null"
    sums = folder / "sums"
    write = [*OURS, str(source), "--manifest", str(sums)]
    contenders = [
        Contender("start", [*OURS, str(ROOT / "fixtures/dcp/fsdp2-w8")], [], options.runs, ENV),
        Contender(f"sha256sum, {cpus} processes", ["/bin/sh", "-c", listed], [], options.runs),
        Contender("verify --quick --manifest", write, [sums], options.runs, ENV),
    ]
    for file in source.iterdir():
        file.read_bytes()
    race(contenders, lambda: None, folder / "log")
    rows = [["", "seconds", "CPU s", "GB a CPU second, without start"]]
    start = contenders[0].cpu_seconds
    for contender in contenders[1:]:
        cpu = contender.cpu_seconds - (start if contender.command[0] == OURS[0] else 0)
        seconds, spent = f"{contender.seconds:.2f}", f"{contender.cpu_seconds:.2f}"
        rows.append([contender.name, seconds, spent, f"{nbytes / cpu / 1e9:.2f}"])
    print(f"{nbytes / 1e9:.2f} GB in {len(list(source.iterdir()))} files\n")
    print(table(rows))


if __name__ == "__main__":
    main()
