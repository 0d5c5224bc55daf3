"""Resharding against `cp`, against torch's own ways to change a world size, and what it saves when loading.

    python tests/bench/reshard.py                  # everything: 4 GB, 5 runs
    python tests/bench/reshard.py --size 1GB --runs 3 --no-rivals
    python tests/bench/reshard.py --quick          # 0.2 GB, 2 runs: does it work at all

One checkpoint of eight ranks (rows) and one safetensors file of the same tensors are written into a temporary
directory (--dir to choose the disk). Timed as whole processes, in random order with the disk at rest before each:

    cp -r of the checkpoint, with and without an fsync of every file
    ema-ckpt reshard to 3 and to 16 ranks, with and without fsync; by two processes under torchrun
    ema-ckpt convert of the safetensors file to DCP, against cp of that file
    torch's planner and FileSystemWriter driven for three ranks in one process, as far as it can be
    dcp.load + dcp.save under torchrun with three processes

Source checksums are verified and written, process start included. `load` then times `dcp.load` on eight ranks of a
checkpoint that one rank saved, before and after resharding it, import and start of the processes not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import checkpoints
from consolidate import _headline, _size
from measure import Contender, Settler, machine, race, run_once, save_json, table

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
HERE = Path(__file__).resolve()


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        WORKERS[sys.argv[2]](*sys.argv[3:])
        return
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="ema-ckpt-bench-") as scratch:
        folder = Path(scratch)
        print(_headline(folder))
        settle = Settler(folder)
        source = folder / "source"
        checkpoints.build("row", options.size, source)
        file = folder / "source.safetensors"
        run_once(_ours("consolidate", source, file, "--no-fsync", "-q"), folder / "log", ENV)
        _check(source, folder)
        contenders = _contenders(source, file, folder, options)
        race(contenders, settle, folder / "log")
        _print(contenders)
        if options.json:
            options.json.mkdir(parents=True, exist_ok=True)
            save_json(
                options.json / "reshard.json", contenders, {"size": options.size, **machine()}
            )
        _loading(source, folder, options)
        if settle.gave_up:
            print(
                f"the disk did not come to rest before {settle.gave_up} runs: take the numbers with care"
            )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=_size, default="4GB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument("--dir", help="where to put the temporary directory")
    parser.add_argument("--json", type=Path, help="write every single result to this directory")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.size, options.runs = 200_000_000, 2
    return options


def _ours(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ema_ckpt", *map(str, arguments)]


def _launched(count: int, *arguments: object) -> list[str]:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    return [torchrun, "--nproc-per-node", str(count), *map(str, arguments)]


def _contenders(
    source: Path, file: Path, folder: Path, options: argparse.Namespace
) -> list[Contender]:
    out, runs = folder / "out", options.runs
    synced = f"cp -r '{source}' '{out}' && sync '{out}'/.metadata '{out}'/*"
    found = [
        Contender("cp -r", ["cp", "-r", str(source), str(out)], [out], runs),
        Contender("cp -r, fsync", ["/bin/sh", "-c", synced], [out], runs),
        Contender("cp, safetensors", ["cp", str(file), str(out)], [out], runs),
    ]
    for ranks in (3, 16):
        command = _ours("reshard", source, out, "--world-size", ranks, "-q")
        found.append(Contender(f"reshard 8 to {ranks}, fsync", command, [out], runs, ENV))
        found.append(Contender(f"reshard 8 to {ranks}", [*command, "--no-fsync"], [out], runs, ENV))
    both = _launched(
        2, "-m", "ema_ckpt", "reshard", source, out, "--world-size", 3, "-q", "--no-fsync"
    )
    found.append(Contender("reshard 8 to 3, 2 processes", both, [out], runs, ENV))
    convert = _ours("convert", file, out, "--to", "dcp", "--world-size", 8, "-q", "--no-fsync")
    found.append(Contender("convert safetensors to DCP", convert, [out], runs, ENV))
    if not options.no_rivals:
        one = [
            sys.executable,
            "-W",
            "ignore",
            str(HERE),
            "worker",
            "planner",
            str(source),
            str(out),
            "3",
        ]
        three = _launched(3, HERE, "worker", "resave", source, out)
        found.append(Contender("torch's planner, one process", one, [out], min(runs, 3), ENV))
        found.append(Contender("dcp.load + dcp.save, 3 processes", three, [out], min(runs, 3), ENV))
    return found


def _check(source: Path, folder: Path) -> None:
    """Reshard once, compare every tensor, and delete it."""
    import shutil

    out = folder / "checked"
    run_once(
        _ours("reshard", source, out, "--world-size", 3, "--no-fsync", "-q"), folder / "log", ENV
    )
    run_once(_ours("verify", out, "--against", source, "-q"), folder / "log", ENV)
    shutil.rmtree(out)


def _print(contenders: list[Contender]) -> None:
    by_name = {contender.name: contender for contender in contenders}
    rows = [["", "seconds (min-max)", "CPU s", "peak RSS MB", "x cp"]]
    for c in contenders:
        seconds = sorted(run.seconds for run in c.results)
        kind = (
            "cp, safetensors"
            if "safetensors" in c.name
            else "cp -r, fsync"
            if "fsync" in c.name
            else "cp -r"
        )
        rows.append(
            [
                c.name,
                f"{c.seconds:.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f})",
                f"{c.cpu_seconds:.2f}",
                f"{c.peak_mb:.0f}",
                f"{c.seconds / by_name[kind].seconds:.2f}",
            ]
        )
    print(table(rows), "\n")


def _loading(source: Path, folder: Path, options: argparse.Namespace) -> None:
    one, eight = folder / "one", folder / "eight"
    run_once(
        _ours("reshard", source, one, "--world-size", 1, "--no-fsync", "-q"), folder / "log", ENV
    )
    run_once(
        _ours("reshard", one, eight, "--world-size", 8, "--no-fsync", "-q"), folder / "log", ENV
    )
    rows = [
        [
            "dcp.load on 8 ranks",
            "seconds of the slowest rank (min of runs)",
            "files opened by rank 3",
        ]
    ]
    kinds = {
        "saved by one rank": one,
        "the same after reshard": eight,
        "saved by eight ranks, torch's own": source,
    }
    for name, path in kinds.items():
        seconds, opened = [], ""
        for _ in range(min(options.runs, 3)):
            run_once(
                _launched(8, HERE, "worker", "load", path, folder / "took"), folder / "log", ENV
            )
            took = (folder / "took").read_text().split()
            seconds.append(float(took[0]))
            opened = took[1]
        rows.append([name, f"{min(seconds):.2f}", opened])
    print(table(rows), "\n")


# What runs in processes of its own.


def _template(source: str, mesh: object) -> dict[str, object]:
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.tensor import Shard, distribute_tensor

    metadata = FileSystemReader(source).read_metadata()
    shapes = {name: entry.size for name, entry in metadata.state_dict_metadata.items()}
    return {
        name: distribute_tensor(torch.empty(size), mesh, [Shard(0)])
        for name, size in shapes.items()
    }


def _mesh() -> object:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),))


def resave(source: str, target: str) -> None:
    """Load into sharded tensors on these ranks and save: what torch offers today."""
    import torch.distributed.checkpoint as dcp

    state = _template(source, _mesh())
    dcp.load(state, checkpoint_id=source)
    dcp.save(state, checkpoint_id=target)


def load(source: str, note: str) -> None:
    """Load on these ranks; rank 0 writes the slowest rank's seconds, and how many files rank 3 opened."""
    import time

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    state = _template(source, _mesh())
    reader = dcp.FileSystemReader(source)
    opened: set[str] = set()
    original = reader.fs.create_stream

    def create_stream(path: object, mode: str) -> object:
        opened.add(str(path))
        return original(path, mode)

    reader.fs.create_stream = create_stream
    dist.barrier()
    begin = time.perf_counter()
    dcp.load(state, storage_reader=reader)
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (time.perf_counter() - begin, len(opened)))
    if dist.get_rank() == 0:
        Path(note).write_text(f"{max(seconds for seconds, _ in found)} {found[3][1]}")


def planner(source: str, target: str, ranks: str) -> None:
    """torch's planner and writer for pretended ranks, one after another in this process."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    metadata = FileSystemReader(source).read_metadata()
    state = {name: torch.empty(entry.size) for name, entry in metadata.state_dict_metadata.items()}
    dcp.load(state, checkpoint_id=source, no_dist=True)

    class Planner(DefaultSavePlanner):
        def resolve_data(self, item: WriteItem) -> torch.Tensor:
            chunk = item.tensor_data.chunk
            return state[item.index.fqn].narrow(0, chunk.offsets[0], chunk.sizes[0])

    def items(rank: int) -> list[WriteItem]:
        made = []
        for name, tensor in state.items():
            rows, step = tensor.shape[0], -(-tensor.shape[0] // int(ranks))
            start, stop = min(rank * step, rows), min((rank + 1) * step, rows)
            rest = [0] * (tensor.ndim - 1)
            chunk = ChunkStorageMetadata(
                torch.Size([start, *rest]), torch.Size([stop - start, *tensor.shape[1:]])
            )
            data = TensorWriteData(
                chunk, TensorProperties.create_from_tensor(tensor), tensor.size()
            )
            made.append(
                WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, None, data)
            )
        return made

    worker, writer = Planner(), FileSystemWriter(target)
    worker.set_up_planner(state, is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = [
        writer.prepare_local_plan(SavePlan(items(rank), planner_data=metadata.planner_data))
        for rank in range(int(ranks))
    ]
    plans, made = worker.create_global_plan(local)
    results = [
        writer.write_data(worker.finish_plan(plan), worker).value()
        for plan in writer.prepare_global_plan(plans)
    ]
    writer.finish(made, results)


WORKERS = {"resave": resave, "load": load, "planner": planner}

if __name__ == "__main__":
    main()
