"""The benchmark of scaling works at all: tiny checkpoints, one run, a table, a drawing and every result."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import torch

from tests.checkpoints import save_dcp

SCRIPT = Path(__file__).parent / "scaling.py"


def test_table_and_drawing(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.randn(64, 32) for i in range(6)}
    average = {"weights": {name: value * 0.9 for name, value in weights.items()}}
    for name in ("rows", "columns", "small"):
        save_dcp(tmp_path / f"{name}.dcp", {"model": weights})
    save_dcp(tmp_path / "two-trees.dcp", {"model": weights, "ema": average})
    results, drawing = tmp_path / "results.json", tmp_path / "scaling.svg"
    command = [sys.executable, SCRIPT, "--keep", tmp_path, "--runs", 1, "--workers", 1, 2]
    command += ["--no-rivals", "--only", "verify", "rows, one file", "diff"]
    command += ["--svg", drawing, "--json", results]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line[:1] == "|"]
    works = ["verify", "consolidate rows, one file", "diff"]
    assert rows[2:] == [*works, "cp -r", "cat", "bare loop"]
    seconds = json.loads(results.read_text())["results"]
    assert set(seconds) == {f"{work} {n}" for work in [*works, "bare loop"] for n in (1, 2)} | {
        "cp -r 0",
        "cat 0",
    }
    assert all(len(runs) == 1 and runs[0][0] > 0 for runs in seconds.values())
    shown = "".join(ET.parse(drawing).getroot().itertext())
    assert all(name in shown for name in [*works, "bare loop", "cp -r", "limit"])
