"""The tables of `fixtures/README.md`: how each odd, damaged or hostile checkpoint ends under each verb.

Each run is a process of its own with a limit on memory and time, forked from one that has loaded the command
but no checkpoint. Besides the table it has to hold that nothing was executed, nothing left behind, and that
the user got one line.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
MEMORY_LIMIT = 1 << 30
SECONDS_LIMIT = 20

# Reads one JSON list of arguments a line, runs the command in a forked child, answers with one JSON line.
_DRIVER = f"""
import gc, json, os, resource, signal, sys, tempfile
import ema_ckpt.cli.commands
import ema_ckpt.ops.consolidate, ema_ckpt.ops.inspect, ema_ckpt.ops.convert, ema_ckpt.ops.verify
import ema_ckpt.formats.dcp.reader, ema_ckpt.formats.torch_file.writer, ema_ckpt.formats.safetensors.reader, ema_ckpt.writing.engine
gc.freeze()
from ema_ckpt.cli.main import main
for line in sys.stdin:
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_LIMIT}, {MEMORY_LIMIT}))
        signal.alarm({SECONDS_LIMIT})
        os.dup2(out.fileno(), 1); os.dup2(err.fileno(), 2)
        try:
            main(json.loads(line))
        except SystemExit as ended:
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(ended.code)
        finally:
            os._exit(99)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for file in (out, err):
        file.seek(0)
    print(json.dumps([code, out.read().decode(), err.read().decode()]), flush=True)
"""


@dataclass(frozen=True)
class Row:
    """One row: the fixture, {verb: (exit code, codes)}, and what an error of consolidate has to name."""

    fixture: str
    cells: dict[str, tuple[int, list[str]]]
    names: str

    def __str__(self) -> str:
        return self.fixture


@dataclass(frozen=True)
class Ended:
    """A finished command."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict:
        return json.loads(
            self.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no strict JSON")
        )


def _rows() -> list[Row]:
    rows, verbs = [], []
    for line in (FIXTURES / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0] == "fixture":
            verbs = cells[1 : cells.index("names")]
        elif verbs and len(cells) == len(verbs) + 3 and cells[1][:1].isdigit():
            outcomes = {
                verb: (int(text.split()[0]), text.split()[1:])
                for verb, text in zip(verbs, cells[1:], strict=False)
            }
            rows.append(Row(cells[0].strip("`"), outcomes, cells[-2].strip("`")))
    return rows


ROWS = _rows()
RUNS = [(row, verb) for row in ROWS for verb in row.cells]


class Commands:
    """The command line, served by one process that forks for each call."""

    def __init__(self, marker: Path) -> None:
        env = {**os.environ, "EMA_CKPT_MARKER": str(marker), "PYTHONPATH": str(FIXTURES.parent)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER], stdin=pipe, stdout=pipe, text=True, env=env
        )

    def run(self, *arguments: object) -> Ended:
        self.process.stdin.write(json.dumps([str(a) for a in arguments]) + "\n")
        self.process.stdin.flush()
        return Ended(*json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=SECONDS_LIMIT)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marker") / "marker"


@pytest.fixture(scope="module")
def commands(marker: Path):
    served = Commands(marker)
    yield served
    served.close()


def _listing(path: Path) -> list[tuple[str, int]]:
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    return sorted((str(entry), entry.lstat().st_size) for entry in found)


# What a verb needs besides PATH: a target, and its options.
_TARGETS = {
    "consolidate": ("out.pt",),
    "convert": ("out.pt",),
    "reshard": ("out", "--world-size", "2"),
}


@pytest.mark.parametrize(("row", "verb"), RUNS, ids=str)
def test_it_ends_as_the_table_says(
    row: Row, verb: str, commands: Commands, marker: Path, tmp_path: Path
) -> None:
    source, target = FIXTURES / row.fixture, _TARGETS.get(verb, ())
    out = [tmp_path / target[0], *target[1:]] if target else []
    code, codes = row.cells[verb]
    before = _listing(source)

    ended = commands.run(verb, source, *out, "--json")

    assert not marker.exists(), "something in the checkpoint was executed"
    assert (ended.code, _codes(ended.document)) == (code, codes), ended.stderr
    assert _listing(source) == before
    if code == 2:
        assert list(ended.document) == ["error"]
        _one_line(ended.stderr)
        assert not list(tmp_path.iterdir()), "a failure leaves nothing"
    if verb == "consolidate":
        assert row.names in ended.stderr
    if out:
        assert out[0].exists() == (code == 0)


def _codes(document: dict) -> list[str]:
    if "error" in document:
        return [document["error"]["code"]]
    told = (
        item for part in ("problems", "warnings", "findings") for item in document.get(part, ())
    )
    return sorted({item["code"] for item in told})


def _one_line(stderr: str) -> None:
    assert stderr.startswith("Error: ")
    assert stderr.count("\n") == 1
    assert stderr.endswith("\n")
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.fixture.startswith("nasty/") and row.cells["consolidate"][0] == 0],
    ids=str,
)
def test_what_is_converted_in_spite_of_all_is_right(
    row: Row, commands: Commands, tmp_path: Path
) -> None:
    """A harmless oddity, or hostility in a part that nobody asked for, does not change a bit of the weights."""
    ended = commands.run("consolidate", FIXTURES / row.fixture, tmp_path / "out.pt", "-q")
    assert ended.code == 0
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    if row.fixture.endswith(".pt"):
        assert torch.equal(loaded["a"], torch.arange(6.0).reshape(2, 3))
        return
    truth = EXPECTED["nasty/base"]["tensors"]
    assert {name: _digest(tensor) for name, tensor in loaded.items()} == {
        name: truth[f"ema.weights.{name}"]["sha256"] for name in ("w", "b")
    }


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(
        ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    ).hexdigest()


def test_every_odd_and_nasty_fixture_has_a_row() -> None:
    there = {f"{d}/{path.name}" for d in ("odd", "nasty") for path in (FIXTURES / d).iterdir()}
    assert sorted(there) == sorted(row.fixture for row in ROWS)


@pytest.mark.parametrize("name", ["hostile-metadata", "hostile-object-item", "hostile.pt"])
def test_the_installed_command_executes_nothing(name: str, tmp_path: Path) -> None:
    """The whole process as a user starts it."""
    marker = tmp_path / "marker"
    env = {**os.environ, "EMA_CKPT_MARKER": str(marker), "PYTHONPATH": str(FIXTURES.parent)}
    for arguments in (
        ["inspect", FIXTURES / "nasty" / name],
        ["consolidate", FIXTURES / "nasty" / name, tmp_path / "o.pt"],
    ):
        command = [sys.executable, "-m", "ema_ckpt", *map(str, arguments)]
        subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
    assert not marker.exists()


def test_committed_fixtures_stay_small() -> None:
    sizes = {
        path: path.lstat().st_size
        for path in FIXTURES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sum(sizes.values()) < 8_000_000
    assert max(sizes.values()) < 1_400_000
