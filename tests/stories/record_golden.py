"""Take the golden record anew, or show one entry whole.

python -m tests.stories.record_golden             runs all twice, and writes golden.json if both agree
python -m tests.stories.record_golden only KEY…   takes these cells anew, and leaves all others
python -m tests.stories.record_golden show KEY    prints the document of a cell and leaves its files in place
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.stories import golden
from tests.stories.cells import CELLS, Runs


def taken(root: Path, keys: Sequence[str]) -> dict[str, object]:
    runs = Runs(root)
    entries = {
        str(cell): golden.entry(runs.of(cell), runs)
        for cell in CELLS
        if not keys or str(cell) in keys
    }
    runs.commands.close()
    return entries


def record(*keys: str) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        first, second = taken(Path(one), keys), taken(Path(two), keys)
    for key, found in second.items():
        print(golden.complaint(key, first[key], found), end="")
    if first != second:
        sys.exit("Two runs of the same code differ: mask what differs, or make it the same.")
    others = golden.load() if keys else {}
    golden.save({**others, **first, **golden.public_names()})


def show(key: str) -> None:
    runs = Runs(Path(tempfile.mkdtemp(prefix="golden-")))
    run = runs.of(next(cell for cell in CELLS if str(cell) == key))
    print(json.dumps(golden.document(run, runs.root), indent=2, sort_keys=True))
    print(run.ended.stderr, *run.files(), f"in {run.place}", sep="\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["show", key]:
            show(key)
        case ["only", *keys] if keys:
            record(*keys)
        case []:
            record()
        case _:
            sys.exit(__doc__)
