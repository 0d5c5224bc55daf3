"""`convert --rules` against plain `convert` of the same checkpoint.

    python tests/bench/rules.py                       # 1 GB of bfloat16, 7 runs, a few minutes
    python tests/bench/rules.py --size 0.3GB --runs 3

A mixture of experts in one safetensors file, a tensor for each expert, read from the page cache; targets are not synced,
so that the disk does not count. Timed in random order, process start included:

    plain          convert to another safetensors file
    rename         every name
    fuse           w1 and w3 stacked over experts and concatenated, w2 stacked: chunk lists, bytes move as they are
    apart          the inverse of that, from its result
    groups         queries, keys and values interleaved by groups
    columns        w1 and w3 concatenated on the inner axis: rows are assembled
    transpose      every matrix: elements are gathered
    numpy          every matrix read whole, `numpy.ascontiguousarray(a.T)`, and written: what the bare copy costs

`names` times 100 000 empty tensors, renamed: what names and plans cost.

The bars: each within 1.3 times plain, which transposing misses, and at most 64 MiB above it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from measure import Contender, machine, race, run_once, table

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": str(ROOT)}
EXPERTS, HIDDEN, INNER, HEAD = 8, 2048, 3584, 128

FUSE = """
[[rule]]
from = ["{layer:.*}.experts.{expert}.w1", "{layer:.*}.experts.{expert}.w3"]
to = "{layer}.gate_up"
steps = [{ stack = "expert" }, { concatenate = 1 }]
[[rule]]
from = "{layer:.*}.experts.{expert}.w2"
to = "{layer}.down"
steps = [{ stack = "expert" }]
"""
RULES = {
    "rename": "[[rule]]\nfrom = 'layers.{rest:.*}'\nto = 'blocks.{rest}'\n",
    "fuse": FUSE,
    "groups": """
[[rule]]
from = ["{layer:.*}.q", "{layer:.*}.k", "{layer:.*}.v"]
to = "{layer}.qkv"
steps = [{ concatenate = 0, sizes = [4, 1, 1], groups = 4 }]
""",
    "columns": """
[[rule]]
from = ["{layer:.*}.experts.{expert}.w1", "{layer:.*}.experts.{expert}.w3"]
to = "{layer}.experts.{expert}.w13"
steps = [{ concatenate = 1 }]
""",
    "transpose": "[[rule]]\nfrom = 'layers.{rest:.*}'\nto = 'layers.{rest}'\nsteps = [{ transpose = [0, 1] }]\n",
}

NUMPY = """
import json, sys
import numpy
with open(sys.argv[1], "rb") as source, open(sys.argv[2], "wb") as target:
    size = int.from_bytes(source.read(8), "little")
    header = json.loads(source.read(size))
    for entry in header.values():
        entry["shape"].reverse()
    text = json.dumps(header).encode()
    target.write(len(text).to_bytes(8, "little") + text)
    for entry in header.values():
        start, end = entry["data_offsets"]
        stored = numpy.frombuffer(source.read(end - start), "<u2").reshape(entry["shape"][::-1])
        target.write(numpy.ascontiguousarray(stored.T).data)
"""


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """A file of random bytes, written without any package; return its bytes of payload."""
    import os

    header, end = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(block)):
            file.write(block[: end - start])
    return end


def mixture(nbytes: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    layer, total = 0, 0
    while total < nbytes:
        for expert in range(EXPERTS):
            for name, shape in (
                ("w1", (INNER, HIDDEN)),
                ("w3", (INNER, HIDDEN)),
                ("w2", (HIDDEN, INNER)),
            ):
                shapes[f"layers.{layer}.experts.{expert}.{name}"] = shape
        for name, heads in (("q", 16), ("k", 4), ("v", 4)):
            shapes[f"layers.{layer}.{name}"] = (heads * HEAD, HIDDEN)
        total = sum(2 * a * b for a, b in shapes.values())
        layer += 1
    return shapes


def convert(source: Path, target: Path, *options: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "ema_ckpt",
        "convert",
        str(source),
        str(target),
        "--no-fsync",
        "-q",
        *options,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as made:
        folder = Path(made)
        log, source, fused = (
            folder / "log",
            folder / "source.safetensors",
            folder / "fused.safetensors",
        )
        payload = write_safetensors(source, mixture(int(float(args.size.removesuffix("GB")) * 1e9)))
        many = folder / "many.safetensors"
        write_safetensors(many, {f"layers.{i}.w": (0, 0) for i in range(100_000)})
        for name, text in RULES.items():
            (folder / f"{name}.toml").write_text(text)
        run_once(convert(source, fused, "--rules", str(folder / "fuse.toml")), log, ENV)
        contenders = []

        def add(name: str, path: Path, *options: str) -> None:
            target = folder / f"out-{name}.safetensors"
            contenders.append(
                Contender(name, convert(path, target, *options), [target], args.runs, ENV)
            )

        add("plain", source)
        for name in RULES:
            add(name, source, "--rules", str(folder / f"{name}.toml"))
        copied = folder / "out-numpy.safetensors"
        bare = [sys.executable, "-c", NUMPY, str(source), str(copied)]
        contenders.append(Contender("numpy", bare, [copied], args.runs, ENV))
        add("apart", fused, "--rules", str(folder / "fuse.toml"), "--inverse")
        add("names, plain", many)
        add("names, renamed", many, "--rules", str(folder / "rename.toml"))
        race(contenders, lambda: None, log)
        plain = contenders[0]
        rows = [["", "CPU s", "x plain", "seconds", "peak RSS MB"]]
        for one in contenders:
            base = contenders[-2] if one.name.startswith("names") else plain
            rows.append(
                [one.name, f"{one.cpu_seconds:.2f}", f"{one.cpu_seconds / base.cpu_seconds:.2f}",
                 f"{one.seconds:.2f}", f"{one.peak_mb:.0f}"]
            )  # fmt: skip
        print(f"{payload / 1e9:.2f} GB; {machine()}\n")
        print(table(rows))


if __name__ == "__main__":
    main()
