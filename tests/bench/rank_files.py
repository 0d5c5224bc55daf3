"""`inspect` of a directory with one torch file a rank.

    python tests/bench/rank_files.py                     # 32 files of 2 000 tensors
    python tests/bench/rank_files.py --ranks 8 --runs 3

Three kinds of files: replicas, tensors that differ between ranks without saying how they belong together, and DTensors. Each
command is a process of its own, once on one processor, where it reads the files itself, and once on all, where child
processes do. CPU time is that of all of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from measure import Contender, heading, race, table

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": str(ROOT)}
KINDS = ("replicas", "different", "dtensors")


def make(kind: str, folder: Path, ranks: int, tensors: int) -> None:
    """Write the files of all ranks; a fake process group stands for the others of DTensors."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder.mkdir()
    for rank in range(ranks):
        torch.manual_seed(0 if kind == "replicas" else rank)
        state = {}
        if kind == "dtensors":
            dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
            mesh = init_device_mesh("cpu", (ranks,))
        for index in range(tensors):
            value = torch.randn(2, 16)
            if kind == "dtensors":
                value = DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
            state[f"model.layers.{index // 10}.block.{index % 10}.weight"] = value
        torch.save(state, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        if kind == "dtensors":
            dist.destroy_process_group()


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="ema-ckpt-bench-") as scratch:
        print(heading(Path(scratch)), end="\n\n")
        contenders = []
        for kind in KINDS:
            folder = Path(scratch, kind)
            make(kind, folder, options.ranks, options.tensors)
            command = [sys.executable, "-m", "ema_ckpt", "inspect", str(folder), "-q"]
            alone = ["taskset", "-c", "0", *command]
            contenders += [
                Contender(f"{kind}, one processor", alone, [], options.runs, ENV),
                Contender(f"{kind}, all", command, [], options.runs, ENV),
            ]
        race(contenders, lambda: None, Path(scratch, "log"))
    rows = [["", "seconds", "CPU s", "peak RSS MB"]]
    for contender in contenders:
        seconds, spent = f"{contender.seconds:.2f}", f"{contender.cpu_seconds:.2f}"
        rows.append([contender.name, seconds, spent, f"{contender.peak_mb:.0f}"])
    print(f"{options.ranks} files of {options.tensors} tensors\n")
    print(table(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", help="where to put the temporary directory")
    return parser.parse_args()


if __name__ == "__main__":
    main()
