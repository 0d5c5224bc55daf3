"""Values of quantised weights, written with --dequantize bf16, against `cp` of the quantised source.

    python tests/bench/dequantize.py                    # 1 GB of codes a kind, 5 runs
    python tests/bench/dequantize.py --kind fp8 --size 200MB --runs 3

What is written has two times (fp8) or four times (four bits) the bytes of what is read; `cp` writes as many as it
reads. `written` is therefore `cp` of the result, the least that writing so many bytes takes. Two threads, no fsync.
Times are taken with the disk at rest, in random order; CPU seconds are user and system of all threads.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

from measure import Contender, Settler, file_system, machine, race, remove, run_once, table

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": str(ROOT)}
ROWS, COLUMNS = 4096, 4096
KINDS = ("fp8", "int4", "mxfp4")


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="ema-ckpt-bench-") as scratch:
        folder = Path(scratch)
        print(", ".join(f"{k} {v}" for k, v in {**machine(), "fs": file_system(folder)}.items()))
        settle = Settler(folder)
        for kind in options.kind:
            _one_kind(kind, folder, settle, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--size", type=_size, default="1GB", help="bytes of codes")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", help="where to put the temporary directory")
    options = parser.parse_args()
    options.kind = options.kind or list(KINDS)
    return options


def _size(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)\s*([kMG]?B)", text).groups()
    return int(float(number) * {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}[unit])


def _one_kind(kind: str, folder: Path, settle: Settler, options: argparse.Namespace) -> None:
    source, result, out = folder / kind, folder / "result", folder / "out"
    _build(kind, options.size, source)
    ours = [sys.executable, "-m", "ema_ckpt", "convert", str(source), "--to", "safetensors"]
    ours += ["--dequantize", "bf16", "--threads", "2", "--no-fsync", "-q"]
    run_once([*ours, str(result)], folder / "log", ENV)
    contenders = [
        Contender("cp", ["cp", "-r", str(source), str(out)], [out], options.runs),
        Contender("cp of the result", ["cp", "-r", str(result), str(out)], [out], options.runs),
        Contender("--dequantize bf16", [*ours, str(out)], [out], options.runs, ENV),
    ]
    race(contenders, settle, folder / "log")
    base = contenders[0].seconds
    rows = [[f"{kind}, {options.size / 1e9:g} GB", "wall s", "times cp", "CPU s", "peak MB"]]
    for one in contenders:
        figures = (one.seconds, one.seconds / base, one.cpu_seconds, one.peak_mb)
        rows.append([one.name, *(f"{figure:.2f}" for figure in figures)])
    print(table(rows) + "\n")
    remove(source)
    remove(result)


def _build(kind: str, nbytes: int, target: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    per_tensor = ROWS * COLUMNS // (1 if kind == "fp8" else 2)
    for index in range(max(nbytes // per_tensor, 1)):
        tensors |= _weight(kind, f"layers.{index}.weight")
    save_file(tensors, target / "model.safetensors")
    methods = {"fp8": "fp8", "int4": "compressed-tensors", "mxfp4": "mxfp4"}
    settings = {"quant_method": methods[kind]}
    if kind == "fp8":
        settings["weight_block_size"] = [128, 128]
    (target / "config.json").write_text(json.dumps({"quantization_config": settings}))


def _weight(kind: str, name: str) -> dict[str, object]:
    import torch

    if kind == "fp8":
        codes = torch.randn(ROWS, COLUMNS).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale_inv": torch.rand(ROWS // 128, COLUMNS // 128)}
    if kind == "int4":
        words = torch.randint(-(2**31), 2**31, (ROWS, COLUMNS // 8), dtype=torch.int32)
        scales = torch.rand(ROWS, COLUMNS // 128).to(torch.bfloat16)
        shape = torch.tensor([ROWS, COLUMNS])
        return {f"{name}_packed": words, f"{name}_scale": scales, f"{name}_shape": shape}
    blocks = torch.randint(0, 256, (4, ROWS // 4, COLUMNS // 32, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (4, ROWS // 4, COLUMNS // 32), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


if __name__ == "__main__":
    main()
