"""Commands under small limits of the process: one line and exit code 2, or the right result; nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ema_ckpt import verify
from tests.stories.commands import environment

SOURCE = "dcp/fsdp2-w4"
WORDS = {
    "verify": ("verify", "{source}"),
    "values": ("verify", "--values", "{source}"),
    "diff": ("diff", "{source}"),
    "cast": ("consolidate", "{source}", "{folder}/one.safetensors", "--dtype", "bf16"),
    "shards": ("consolidate", "{source}", "{folder}/hf", "--max-shard-size", "1KB"),
    "reshard": ("reshard", "{source}", "{folder}/out", "--world-size", "9"),
}


def run(
    verb: str, source: Path, folder: Path, limit: str, most: int
) -> subprocess.CompletedProcess[str]:
    words = [word.format(source=source, folder=folder) for word in WORDS[verb]]
    return subprocess.run(
        ["bash", "-c", f"ulimit {limit} {most}; exec \"$@\"", "-", sys.executable, "-m", "ema_ckpt", *words, "--quiet"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip


def assert_refused_or_done(result: subprocess.CompletedProcess[str], folder: Path) -> bool:
    """Whether it is done; a target is whole, and after an error there is none."""
    if result.returncode == 0:
        assert all(verify(target).status == "sound" for target in folder.iterdir())
        return True
    assert result.returncode == 2, result
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1, result.stderr
    assert os.listdir(folder) == []
    return False


@pytest.mark.parametrize("verb", ["values", "diff", "cast"])
def test_little_memory(verb: str, fixtures: Path, tmp_path: Path) -> None:
    """numpy's OpenBLAS would end the process with 1, as if the checkpoint were damaged."""
    done = []
    for megabytes in (85, 115, 400):
        result = run(verb, fixtures / SOURCE, tmp_path, "-v", megabytes << 10)
        done.append(assert_refused_or_done(result, tmp_path))
        assert done[-1] or "not enough memory" in result.stderr
    assert not done[0], "numpy gets no memory there"
    assert done[-1]


@pytest.mark.parametrize("verb", ["verify", "cast", "shards", "reshard"])
def test_few_open_files(verb: str, fixtures: Path, tmp_path: Path) -> None:
    done = []
    for most in (6, 9, 16):
        result = run(verb, fixtures / SOURCE, tmp_path, "-n", most)
        done.append(assert_refused_or_done(result, tmp_path))
        assert done[-1] or "raise `ulimit -n`" in result.stderr
    assert done[-1]
    assert all(done) == (verb == "verify")


@pytest.mark.parametrize("verb", ["cast", "shards", "reshard"])
def test_short_files(verb: str, fixtures: Path, tmp_path: Path) -> None:
    result = run(verb, fixtures / SOURCE, tmp_path, "-f", 0)
    assert not assert_refused_or_done(result, tmp_path)
    assert "raise `ulimit -f`" in result.stderr
