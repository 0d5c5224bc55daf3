"""Commands killed at random moments: the target is absent or complete, and `--resume` ends where one run would."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoints import save_dcp
from tests.staged_writer import REPO

NBYTES = 48 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 48 MiB: big enough to be caught while it is written."""
    import torch

    tree = {f"layer{i}": torch.randn(NBYTES // 8 // 4 // 1024, 1024) for i in range(8)}
    return save_dcp(tmp_path_factory.mktemp("source") / "step_1", {"model": tree})


def started(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ema_ckpt", *map(str, arguments)],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(*arguments: object) -> tuple[int, str, str]:
    with started(*arguments) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def seconds_of(*arguments: object) -> float:
    begin = time.perf_counter()
    code, _, err = ended(*arguments)
    assert code == 0, err
    return time.perf_counter() - begin


def contents(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


def test_killed(source: Path, tmp_path: Path) -> None:
    rng, whole = random.Random(3), tmp_path / "whole"
    usual = seconds_of("reshard", source, whole, "--world-size", 3, "--no-fsync")
    expected, runs = contents(whole), tmp_path / "runs"
    runs.mkdir()
    caught = 0
    for step in range(1, 21):
        target = runs / f"step_{step}"
        with started("reshard", source, target, "--world-size", 3, "--no-fsync") as process:
            time.sleep(rng.uniform(0.5, 1.1) * usual)
            process.kill()
        left = [entry.name for entry in runs.iterdir()]
        caught += any(name.startswith(".step_") for name in left)
        if target.exists():
            assert contents(target) == expected
        code, out, err = ended("inspect", runs, "--json")
        published = [name for name in left if name.startswith("step_")]
        if published:
            assert code == 0, err
            assert Path(json.loads(out)["resolved"]).name in published
        else:
            assert code == 2
        if not target.exists():
            code, _, err = ended("reshard", source, target, "--world-size", 3, "--resume", "--no-fsync")
            assert code == 0, err
            assert contents(target) == expected
        assert not [name for name in os.listdir(runs) if name.startswith(".")]
        for file in target.iterdir():
            file.unlink()
        target.rmdir()
    assert caught


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_terminated(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    rng = random.Random(5)
    out = tmp_path / "out.safetensors"
    usual = seconds_of("consolidate", source, out, "--no-fsync")
    expected = out.read_bytes()
    out.unlink()
    codes = set()
    for _ in range(12):
        with started("consolidate", source, out, "--no-fsync") as process:
            time.sleep(rng.uniform(0.5, 1.1) * usual)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        codes.add(process.returncode)
        assert "Traceback" not in err
        assert os.listdir(tmp_path) in ([], [out.name])
        if out.exists():
            assert out.read_bytes() == expected
            out.unlink()
    assert codes <= {0, 128 + number, -number}, codes
    assert 128 + number in codes


def test_terminated_under_resume_goes_on(source: Path, tmp_path: Path) -> None:
    out, expected = tmp_path / "out.safetensors", tmp_path / "whole.safetensors"
    usual = seconds_of("consolidate", source, expected, "--no-fsync")
    for attempt in range(20):
        with started("consolidate", source, out, "--resume", "--no-fsync") as process:
            time.sleep((0.6 + attempt * 0.02) * usual)
            process.send_signal(signal.SIGTERM)
        if [name for name in os.listdir(tmp_path) if name.startswith(".out")]:
            break
        out.unlink(missing_ok=True)
    else:
        pytest.fail("never caught between its first and its last byte")
    code, printed, _ = ended("consolidate", source, out, "--resume", "--dtype", "bf16", "--json")
    assert code == 2
    assert json.loads(printed)["error"]["code"] == "resume-mismatch"
    code, _, err = ended("consolidate", source, out, "--resume")
    assert code == 0, err
    assert out.read_bytes() == expected.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["out.safetensors", "whole.safetensors"]
