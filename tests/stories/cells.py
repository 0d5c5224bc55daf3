"""The matrix: every committed checkpoint under every verb, run once, and held to what no command may do."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.stories.commands import FIXTURES, Commands, Ended
from tests.stories.truth import EXPECTED, REFUSED, trees

_PARTS = ("dcp", "hf", "nasty", "odd", "quantized", "rank-files", "safetensors", "torch")
_FORMATS = {name: entry["format"] for name, entry in EXPECTED.items() if name not in REFUSED}

# form: (verb, name of the target or "", options).
FORMS: dict[str, tuple[str, str, tuple[object, ...]]] = {
    "inspect": ("inspect", "", ()),
    "consolidate-pt": ("consolidate", "out.pt", ()),
    "consolidate-safetensors": ("consolidate", "out.safetensors", ()),
    "consolidate-hf": ("consolidate", "out", ("--max-shard-size", 200, "--expand-ties")),
    "reshard-2": ("reshard", "out", ("--world-size", 2)),
    "reshard-3": ("reshard", "out", ("--world-size", 3)),
    "convert-dcp": ("convert", "out", ("--to", "dcp")),
    "convert-safetensors": ("convert", "out.safetensors", ()),
    "convert-pt": ("convert", "out.pt", ()),
    "convert-bf16": ("convert", "out.pt", ("--dtype", "bf16")),
    "convert-back": ("convert", "out.pt", ()),
    "diff": ("diff", "", ()),
    "verify": ("verify", "", ()),
    "verify-values": ("verify", "", ("--values",)),
    "synthesize": ("synthesize", "out.safetensors", ("--weights", "0.5,0.5")),
    "dequantize": ("consolidate", "out.safetensors", ("--dequantize", "bf16")),
}
_OF_QUANTIZED = ("inspect", "convert-safetensors", "dequantize")
_OF_TREES = ("consolidate-pt", "consolidate-safetensors", "consolidate-hf")


@dataclass(frozen=True)
class Cell:
    """A fixture and a form of a verb; `tree` is named where it is not left to the command."""

    fixture: str
    form: str
    tree: str | None = None

    def __str__(self) -> str:
        return f"{self.fixture} {self.form}" + ("" if self.tree is None else f" --tree={self.tree}")


def fixtures() -> list[str]:
    """Every checkpoint that is committed."""
    return [
        *(f"{part}/{path.name}" for part in _PARTS for path in (FIXTURES / part).iterdir()),
        "tiny-lm",
    ]


def _has(fixture: str, form: str) -> bool:
    """Whether a form is tried on a fixture: some are only for what is known to be readable."""
    if fixture.startswith("quantized/") or form == "dequantize":
        return fixture.startswith("quantized/") and form in _OF_QUANTIZED
    if form == "reshard-3":
        return (EXPECTED.get(fixture, {}).get("world_size") or 1) > 1
    if form == "convert-back":
        return _FORMATS.get(fixture) == "torch"
    return form != "convert-bf16" or _FORMATS.get(fixture) in ("torch", "safetensors")


def _cells() -> Iterator[Cell]:
    for fixture in sorted(fixtures()):
        yield from (Cell(fixture, form) for form in FORMS if _has(fixture, form))
        of_trees = trees(fixture) if fixture in EXPECTED and fixture not in REFUSED else ()
        if len(of_trees) > 1:
            yield from (Cell(fixture, form, tree) for tree in of_trees for form in _OF_TREES)


CELLS = list(_cells())


@dataclass(frozen=True)
class Run:
    """A cell that was carried out: how it ended, and its target if it has one, in a directory of its own."""

    cell: Cell
    ended: Ended
    place: Path
    out: Path

    def files(self) -> dict[str, bytes]:
        """What was written, by name relative to that directory."""
        found = sorted(path for path in self.place.rglob("*") if path.is_file())
        return {str(path.relative_to(self.place)): path.read_bytes() for path in found}


class Runs:
    """Carries out cells, each once, in directories below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.marker = root / "marker"
        self.commands = Commands(self.marker)
        self._numbers = itertools.count()
        self._done: dict[Cell, Run] = {}

    def of(self, cell: Cell) -> Run:
        if cell not in self._done:
            self._done[cell] = self._run(cell)
        return self._done[cell]

    def _run(self, cell: Cell) -> Run:
        verb, target, options = FORMS[cell.form]
        place = self.root / str(next(self._numbers))
        place.mkdir()
        source = FIXTURES / cell.fixture
        if cell.form == "convert-back":
            source = self.of(Cell(cell.fixture, "convert-safetensors")).out
        sources = [source, source] if verb == "synthesize" else [source]
        targets = [place / target] if target else []
        tree = [] if cell.tree is None else [f"--tree={cell.tree}"]
        quick = ["--no-fsync"] if target else []
        before = _listing(source)
        run = Run(
            cell,
            self.commands.run(verb, *sources, *targets, *options, *tree, *quick, "--json"),
            place,
            place / target,
        )
        assert not self.marker.exists(), "something in the checkpoint was executed"
        assert _listing(source) == before, "the checkpoint that was read has changed"
        _check_manners(run.ended, target, sorted(path.name for path in place.iterdir()))
        knowing = [
            name
            for name, data in run.files().items()
            for at in (FIXTURES, self.root)
            if str(at).encode() in data
        ]
        assert not knowing, f"{knowing} tell where they came from"
        return run


def _listing(path: Path) -> list[tuple[str, int]]:
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    return sorted((str(entry), entry.lstat().st_size) for entry in found)


def _check_manners(ended: Ended, target: str, left: list[str]) -> None:
    """One line for an error, nothing left behind by it, and nothing beside the target otherwise."""
    assert ended.code in (0, 1, 2, 3), (ended.code, ended.stderr)
    assert left == ([target] if target and ended.code == 0 else []), f"there is {left}"
    assert "Traceback" not in ended.stderr, ended.stderr
    if ended.code == 2:
        assert ended.stdout and list(ended.document) == ["error"], ended
        assert re.fullmatch("Error: [^\n]+\n", ended.stderr), ended.stderr
