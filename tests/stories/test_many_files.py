"""A checkpoint may have more files than a process may open: one a rank on a thousand ranks, or one a tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

ROOT = Path(__file__).parents[2]
MODEL = {f"l{index}.w": torch.full((2, 2), float(index)) for index in range(150)}
OPEN_FILES = 60


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 tensors, each in a file of its own."""
    path = tmp_path_factory.mktemp("many") / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it saves without a process group
        save(
            {"model": MODEL},
            storage_writer=FileSystemWriter(path, single_file_per_rank=False),
            no_dist=True,
        )
    assert len(list(path.glob("*.distcp"))) > 2 * OPEN_FILES
    return path


def _limited(*words: object, most: int = OPEN_FILES) -> dict[str, object]:
    """Run a command that may open few files; its document."""
    script = f'ulimit -n {most}; exec "$@"'
    command = [
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        "-m",
        "ema_ckpt",
        *map(str, words),
        "--json",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    document: dict[str, object] = json.loads(done.stdout)
    assert "error" not in document, document
    assert done.returncode == 0
    return document


def test_reading_from_many_files_and_writing_to_many(source: Path, tmp_path: Path) -> None:
    assert _limited("inspect", source)["warnings"] == []
    _limited("consolidate", source, tmp_path / "hf", "--max-shard-size", "16B", "--threads", 4)
    shards = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(shards) == len(MODEL)
    found = {name: value for shard in shards for name, value in load_file(shard).items()}
    assert found.keys() == MODEL.keys()
    assert all(torch.equal(found[name], value) for name, value in MODEL.items())
    assert _limited("verify", tmp_path / "hf")["status"] == "sound"
    _limited("consolidate", tmp_path / "hf", tmp_path / "one.safetensors", "--threads", 4)
    again = load_file(tmp_path / "one.safetensors")
    assert all(torch.equal(again[name], value) for name, value in MODEL.items())


def test_more_ranks_than_files_that_may_be_open(source: Path, tmp_path: Path) -> None:
    _limited("reshard", source, tmp_path / "wide", "--world-size", 2 * OPEN_FILES)
    assert sum(name.endswith(".distcp") for name in os.listdir(tmp_path / "wide")) == 2 * OPEN_FILES
    assert _limited("verify", tmp_path / "wide")["status"] == "sound"
    _limited("consolidate", tmp_path / "wide", tmp_path / "one.safetensors")
    found = load_file(tmp_path / "one.safetensors")
    assert all(torch.equal(found[name], value) for name, value in MODEL.items())


@pytest.mark.parametrize("threads", [1, 8])
def test_twenty_files_that_may_be_open_are_no_verdict(
    source: Path, tmp_path: Path, threads: int
) -> None:
    """Of 150; the limit is the machine's, and says nothing of the data."""
    found = _limited("verify", source, "--threads", threads, most=20)
    assert (found["status"], found["problems"]) == ("sound", [])
    _limited("consolidate", source, tmp_path / "one.safetensors", "--threads", threads, most=20)
    weights = load_file(tmp_path / "one.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in MODEL.items())
