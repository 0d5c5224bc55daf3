"""Consolidation against `cp` and against the tools that torch and accelerate bring.

    python tests/bench/consolidate.py                       # everything: 2 GB a layout, 7 runs, an hour or so
    python tests/bench/consolidate.py --layout row --size 4GB --runs 9
    python tests/bench/consolidate.py --quick               # 0.2 GB, 3 runs: does it work at all

For each layout (row, column, 2d, small) the script saves a checkpoint from eight gloo processes into a
temporary directory (--dir to choose the disk, --keep to keep and reuse it), checks once that what ema-ckpt
wrote is right element by element, and then times, in random order with the disk at rest before each run:

    cp -r, and cp -r followed by an fsync of every file
    ema-ckpt consolidate --no-fsync, as it comes (synced), to bfloat16, and into a torch file
    dcp_to_torch_save, torch's Hugging Face consolidator, accelerate's merge_fsdp_weights

Source checksums are verified, digests written and process start included. The Hugging Face consolidator reads
only its own format, so the same tensors are saved a second time for it. `start` times the short commands:
--help, inspect of a small checkpoint, and inspect of 20 000 tensors in 160 000 chunks.

Needs 4 times --size of disk, and --size of memory for the rivals.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
import tempfile
from pathlib import Path

import checkpoints
from measure import (
    Contender,
    Settler,
    file_system,
    machine,
    race,
    remove,
    run_once,
    save_json,
    table,
)

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = ("row", "column", "2d", "small")
RIVALS = {
    "dcp_to_torch_save": (
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save\n"
        "import sys; dcp_to_torch_save(sys.argv[1], sys.argv[3])"
    ),
    "HF consolidator": (
        "from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files\n"
        "import sys, os, glob; from safetensors import safe_open\n"
        "names = safe_open(sorted(glob.glob(sys.argv[2] + '/*.safetensors'))[0], 'pt').keys()\n"
        "os.makedirs(sys.argv[3]); consolidate_safetensors_files(sys.argv[2], sys.argv[3], dict.fromkeys(names, 1), 2)"
    ),
    "accelerate merge": (
        "from accelerate.utils import merge_fsdp_weights\n"
        "import sys; merge_fsdp_weights(sys.argv[1], sys.argv[3], safe_serialization=True)"
    ),
}


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="ema-ckpt-bench-") as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(_headline(folder))
        settle = Settler(folder)
        print(f"probe: 64 MB written and fsynced in {settle.usual * 1000:.0f} ms\n")
        for layout in options.layout:
            _one_layout(layout, folder, settle, options)
        if settle.gave_up:
            print(
                f"the disk did not come to rest before {settle.gave_up} runs: take the numbers with care"
            )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", action="append", choices=(*LAYOUTS, "start"))
    parser.add_argument(
        "--size", type=size_of, default="2GB", help="bytes a layout (not of `small`)"
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument(
        "--rival-runs", type=int, help="runs of the three slow rivals; --runs if not given"
    )
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument("--dir", help="where to put the temporary directory")
    parser.add_argument(
        "--keep", help="build here, keep the checkpoints, and reuse those that are there"
    )
    parser.add_argument("--json", type=Path, help="write every single result to this directory")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.layout = options.layout or [*LAYOUTS, "start"]
    if options.quick:
        options.size, options.runs = 200_000_000, 3
    options.rival_runs = 0 if options.no_rivals else options.rival_runs or options.runs
    return options


def size_of(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)\s*([kMG]?B)", text).groups()
    return int(float(number) * {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}[unit])


def _headline(folder: Path) -> str:
    facts = {**machine(), "file system": file_system(folder)}
    facts |= {
        name: importlib.metadata.version(name) for name in ("torch", "accelerate", "safetensors")
    }
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def ours(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ema_ckpt", *map(str, arguments)]


ENV = {"PYTHONPATH": str(ROOT)}


def _one_layout(layout: str, folder: Path, settle: Settler, options: argparse.Namespace) -> None:
    source = folder / f"{'small' if layout == 'start' else layout}.dcp"
    hugging_face = folder / f"{layout}.hf"
    _build(source, layout, options.size, hugging_face=False)
    if layout == "start":
        contenders = _start(source, options)
    else:
        if options.rival_runs:
            _build(hugging_face, layout, options.size, hugging_face=True)
        _check(layout, options.size, source, folder)
        contenders = _contenders(source, hugging_face, folder, options)
    race(contenders, settle, folder / "log")
    _print(layout, source, contenders)
    if options.json:
        options.json.mkdir(parents=True, exist_ok=True)
        save_json(options.json / f"{layout}.json", contenders, {"size": options.size, **machine()})
    if not options.keep and layout not in ("small", "start"):
        for path in (source, hugging_face):
            remove(path)


def _build(target: Path, layout: str, nbytes: int, *, hugging_face: bool) -> None:
    if not target.exists():
        checkpoints.build("small" if layout == "start" else layout, nbytes, target, hugging_face)


def _contenders(
    source: Path, hugging_face: Path, folder: Path, options: argparse.Namespace
) -> list[Contender]:
    copy, file, torch_file = folder / "copy", folder / "out.safetensors", folder / "out.pt"
    rival_out = folder / "rival"
    runs = options.runs
    synced = f"cp -r '{source}' '{copy}' && sync '{copy}'/.metadata '{copy}'/*"
    out = [
        Contender("cp -r", ["cp", "-r", str(source), str(copy)], [copy], runs),
        Contender("cp -r, fsync", ["/bin/sh", "-c", synced], [copy], runs),
        Contender("ours --no-fsync", ours("consolidate", source, file, "--no-fsync", "-q"), [file], runs, ENV),
        Contender("ours", ours("consolidate", source, file, "-q"), [file], runs, ENV),
        Contender(
            "ours --dtype bf16", ours("consolidate", source, file, "--dtype", "bf16", "--no-fsync", "-q"), [file], runs, ENV
        ),
        Contender("ours to .pt", ours("consolidate", source, torch_file, "--no-fsync", "-q"), [torch_file], runs, ENV),
    ]  # fmt: skip
    for name, code in RIVALS.items():
        if options.rival_runs:
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                code,
                str(source),
                str(hugging_face),
                str(rival_out),
            ]
            out.append(Contender(name, command, [rival_out], options.rival_runs))
    return out


def _start(small: Path, options: argparse.Namespace) -> list[Contender]:
    fixture = ROOT / "fixtures/dcp/fsdp2-w8"
    read = "import sys, torch.distributed.checkpoint as d; d.FileSystemReader(sys.argv[1]).read_metadata()"
    return [
        Contender("python -c pass", [sys.executable, "-c", "pass"], [], options.runs),
        Contender("--help", ours("--help"), [], options.runs, ENV),
        Contender("inspect, 8 ranks of a few kB", ours("inspect", fixture), [], options.runs, ENV),
        Contender("inspect, 160 000 chunks", ours("inspect", small), [], options.runs, ENV),
        Contender("inspect --json, 160 000 chunks", ours("inspect", small, "--json"), [], options.runs, ENV),
        Contender("torch's read_metadata, 160 000 chunks", [sys.executable, "-W", "ignore", "-c", read, str(small)], [],
                  options.rival_runs or 1),
    ]  # fmt: skip


def _check(layout: str, nbytes: int, source: Path, folder: Path) -> None:
    """Consolidate once and compare every element with what was saved."""
    import torch
    from safetensors import safe_open

    out = folder / "out.safetensors"
    remove(out)
    run_once(ours("consolidate", source, out, "--no-fsync", "-q"), folder / "log", ENV)
    base = checkpoints.block()
    wanted = checkpoints.shapes(layout, nbytes)
    with safe_open(out, "pt") as file:
        if set(file.keys()) != set(wanted):
            raise SystemExit(f"{layout}: names differ")
        for k, (name, shape) in enumerate(wanted.items()):
            if not torch.equal(file.get_tensor(name), checkpoints.whole(base, k, shape)):
                raise SystemExit(f"{layout}: {name} is wrong")
    out.unlink()


def _print(layout: str, source: Path, contenders: list[Contender]) -> None:
    by_name = {contender.name: contender for contender in contenders}
    cp, synced, quick = (by_name.get(name) for name in ("cp -r", "cp -r, fsync", "ours --no-fsync"))
    rows = [["", "seconds (min-max)", "CPU s", "peak RSS MB", "x cp -r", "x cp+fsync", "x ours"]]
    for c in contenders:
        seconds = sorted(run.seconds for run in c.results)
        ratios = [
            f"{c.seconds / other.seconds:.2f}" if other else "" for other in (cp, synced, quick)
        ]
        rows.append(
            [
                c.name,
                f"{c.seconds:.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f})",
                f"{c.cpu_seconds:.2f}",
                f"{c.peak_mb:.0f}",
                *ratios,
            ]
        )
    nbytes = sum(file.stat().st_size for file in source.iterdir())
    print(
        f"{layout}: {nbytes / 1e9:.2f} GB in {len(list(source.iterdir()))} files, medians of {contenders[0].runs}\n"
    )
    print(table(rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
