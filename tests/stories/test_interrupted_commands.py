"""Commands killed at random moments: the target is absent or complete, and `--resume` ends where one run would."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ema_ckpt.storage.stage_names import JOURNAL, stages_of
from tests.checkpoints import save_dcp
from tests.staged_writer import spawn

NBYTES = 48 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 48 MiB: big enough to be caught while it is written."""
    import torch

    tree = {f"layer{i}": torch.randn(NBYTES // 8 // 4 // 1024, 1024) for i in range(8)}
    return save_dcp(tmp_path_factory.mktemp("source") / "step_1", {"model": tree})


def started(*arguments: object) -> subprocess.Popen[str]:
    return spawn("import sys; from ema_ckpt.cli.main import main; main(sys.argv[1:])", *arguments)


def ended(*arguments: object) -> tuple[int, str, str]:
    with started(*arguments) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def seconds_of(*arguments: object) -> float:
    begin = time.perf_counter()
    code, _, err = ended(*arguments)
    assert code == 0, err
    return time.perf_counter() - begin


def contents(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


def begun(target: Path) -> bool:
    """Whether files of `target` are being written."""
    return bool(stages_of(target))


def journalled(target: Path) -> bool:
    """Whether the journal of `target` already names a finished range, below its first line."""
    try:
        return any((stage / JOURNAL).read_bytes().count(b"\n") >= 2 for stage in stages_of(target))
    except OSError:
        return False


def interrupt(
    process: subprocess.Popen[str], number: signal.Signals, moment: float | Callable[[], bool]
) -> None:
    """Send a signal `moment` seconds after the start, or as soon as `moment()` is true."""
    if callable(moment):
        while process.poll() is None and not moment():
            time.sleep(0.0005)
    else:
        time.sleep(moment)
    process.send_signal(number)


def test_killed(source: Path, tmp_path: Path) -> None:
    rng, whole = random.Random(3), tmp_path / "whole"
    usual = seconds_of("reshard", source, whole, "--world-size", 3, "--no-fsync")
    expected, runs = contents(whole), tmp_path / "runs"
    runs.mkdir()
    caught = 0
    for step in range(1, 21):
        target = runs / f"step_{step}"
        with started("reshard", source, target, "--world-size", 3, "--no-fsync") as process:
            moment = rng.uniform(0.4, 1.1) * usual if step % 2 else partial(begun, target)
            interrupt(process, signal.SIGKILL, moment)
        caught += bool(stages_of(target))
        code, out, err = ended("inspect", runs, "--json")
        if target.exists():
            assert code == 0, err
            assert Path(json.loads(out)["resolved"]).name == target.name
        else:
            assert code == 2
            code, _, err = ended(
                "reshard", source, target, "--world-size", 3, "--resume", "--no-fsync"
            )
            assert code == 0, err
        assert contents(target) == expected
        target.rename(tmp_path / "done")
        for file in (tmp_path / "done").iterdir():
            file.unlink()
        (tmp_path / "done").rmdir()
        for stage in stages_of(
            target
        ):  # killed after the switch: the next writer of this name would delete it
            assert not (stage / JOURNAL).exists()
            stage.rename(tmp_path / f"left{step}")
        assert os.listdir(runs) == []
    assert caught


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_terminated(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    rng = random.Random(5)
    out = tmp_path / "out.safetensors"
    usual = seconds_of("consolidate", source, out, "--no-fsync")
    expected = out.read_bytes()
    out.unlink()
    codes = set()
    for attempt in range(60):
        if attempt >= 12 and 128 + number in codes:
            break
        with started("consolidate", source, out, "--no-fsync") as process:
            interrupt(
                process,
                number,
                rng.uniform(0.4, 1.1) * usual if attempt % 2 else partial(begun, out),
            )
            _, err = process.communicate(timeout=120)
        codes.add(process.returncode)
        if process.returncode >= 0:
            assert "Traceback" not in err
        assert os.listdir(tmp_path) in ([], [out.name])
        if out.exists():
            assert out.read_bytes() == expected
            out.unlink()
    # Minus the number: before the command had set its handlers, or after Python had let go of them.
    assert codes <= {0, 128 + number, -number}, codes
    assert 128 + number in codes


def test_a_closed_terminal_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """SIGHUP; `nohup` has it ignored."""
    rng, out = random.Random(7), tmp_path / "out.safetensors"
    usual = seconds_of("consolidate", source, out, "--no-fsync")
    out.unlink()
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, too
    try:
        for attempt in range(60):
            moment = rng.uniform(0.4, 1.1) * usual if attempt % 2 else partial(begun, out)
            with started("consolidate", source, out, "--no-fsync") as process:
                interrupt(process, signal.SIGHUP, moment)
                _, err = process.communicate(timeout=120)
            if process.returncode == 129:
                break
            out.unlink(missing_ok=True)
        assert (process.returncode, err) == (129, "Error: hung-up\n")
        assert os.listdir(tmp_path) == []
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with started("consolidate", source, out, "--no-fsync") as process:
            interrupt(process, signal.SIGHUP, partial(begun, out))
            process.communicate(timeout=120)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.returncode == 0
    assert os.listdir(tmp_path) == [out.name]


def test_terminated_under_resume_goes_on(source: Path, tmp_path: Path) -> None:
    out, expected = tmp_path / "out.safetensors", tmp_path / "whole.safetensors"
    assert ended("consolidate", source, expected, "--no-fsync")[0] == 0
    for _ in range(20):
        with started("consolidate", source, out, "--resume", "--no-fsync") as process:
            interrupt(process, signal.SIGTERM, partial(journalled, out))
        if stages_of(out):
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
