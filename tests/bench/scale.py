"""How time and memory of planning grow with the number of stored pieces.

    python tests/bench/scale.py                    # 1 000 ranks: 25, 100 and 400 tensors
    python tests/bench/scale.py --largest          # and 2 900 tensors, 2.9 million pieces
    python tests/bench/scale.py --ranks 100

Makes a `.metadata` as torch writes it and sparse data files of the sizes that it names: what is planned needs
nothing else. Each command is a process of its own; CPU time and peak memory are those of the whole process. The last
columns are CPU time a piece, which does not grow where the work is linear.

The bars, for 2.9 million pieces: `inspect` and `consolidate --dry-run` in 20 s, `reshard` and `convert --dry-run` to 1 000
ranks in 40 s, at most 1.2 GB; for 400 000 pieces in 1 000 files `reshard --dry-run` in 15 s.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from measure import Contender, machine, race, table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
ENV = {"PYTHONPATH": str(ROOT)}
ITEM_NBYTES = 4096
ROWS, COLUMNS = 2, 16  # of a piece


def make(path: Path, tensors: int, ranks: int) -> Path:
    """A checkpoint of `tensors` tensors, each in rows on all of `ranks` ranks, without payload."""
    from ema_ckpt.core.dtypes import by_name
    from ema_ckpt.formats.dcp.metadata_writer import MetadataPickle, StoredItem, StoredTensor

    path.mkdir(parents=True)
    shape = (ROWS * ranks, COLUMNS)
    names = [f"model.layers.{i // 10}.block.{i % 10}.weight" for i in range(tensors)]
    entries = {name: StoredTensor(by_name("float32"), shape) for name in names}
    paths = {name: ("model", name.removeprefix("model.")) for name in names}
    items = {}
    for index, name in enumerate(names):
        places = []
        for rank in range(ranks):
            corner = (ROWS * rank, 0)
            file, offset = f"__{rank}_0.distcp", index * ITEM_NBYTES
            places.append(StoredItem(corner, (ROWS, COLUMNS), file, offset, ITEM_NBYTES))
        items[name] = places
    with open(path / ".metadata", "wb") as file:
        file.writelines(MetadataPickle(entries, items, paths).pieces())
    for rank in range(ranks):
        file = path / f"__{rank}_0.distcp"
        file.touch()
        os.truncate(file, tensors * ITEM_NBYTES)
    return path


def _commands(path: Path, ranks: int) -> dict[str, list[str]]:
    ours, out = [sys.executable, "-m", "ema_ckpt"], str(path.with_name("out"))
    return {
        "inspect": [*ours, "inspect", str(path), "-q"],
        "consolidate --dry-run": [*ours, "consolidate", str(path), out, "--dry-run", "-q"],
        f"reshard --world-size {ranks} --dry-run": [
            *ours, "reshard", str(path), out, "--world-size", str(ranks), "--dry-run", "-q",
        ],
        "convert --to dcp --dry-run": [*ours, "convert", str(path), out, "--to", "dcp", "--dry-run", "-q"],
    }  # fmt: skip


def main() -> None:
    options = _options()
    sizes = [25, 100, 400] + [2900] * options.largest
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(f"load {os.getloadavg()[0]:.1f}; {options.ranks} ranks\n")
    measured: dict[str, list[Contender]] = {}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="ema-ckpt-bench-") as scratch:
        for tensors in sizes:
            path = make(Path(scratch, f"{tensors}"), tensors, options.ranks)
            named = _commands(path, options.ranks)
            contenders = [
                Contender(name, command, [], options.runs, ENV) for name, command in named.items()
            ]
            race(contenders, lambda: None, Path(scratch, "log"))
            for contender in contenders:
                measured.setdefault(contender.name, []).append(contender)
    pieces = [tensors * options.ranks for tensors in sizes]
    rows = [["pieces", *(f"{count:,}".replace(",", " ") for count in pieces), "µs a piece, each"]]
    for name, results in measured.items():
        cells = [f"{c.cpu_seconds:.1f} s, {c.peak_mb:.0f} MB" for c in results]
        each = [c.cpu_seconds / n * 1e6 for c, n in zip(results, pieces, strict=True)]
        rows.append([name, *cells, ", ".join(f"{value:.1f}" for value in each)])
    print(table(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--largest", action="store_true", help="2 900 tensors too")
    parser.add_argument("--dir", help="where to put the temporary directory")
    return parser.parse_args()


if __name__ == "__main__":
    main()
