"""Child processes: every job is done once, whatever becomes of a child, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import save_dcp
from tests.runtime import fork_programs as programs
from tests.runtime.fork_programs import alive, gone, run, start

NBYTES = 40 << 20  # of each tree


@pytest.mark.parametrize("jobs", [0, 1, 7, 4096, 10_000])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_job_is_done_once(jobs: int, count: int) -> None:
    run(programs.every_job_once, jobs, count)


@pytest.mark.parametrize("how", ["raises", "killed", "exits"])
def test_a_child_that_fails_is_noticed_at_once(how: str) -> None:
    run(programs.failing_at_once, how)


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_where_children_fail_all_is_done_again_and_progress_never_runs_backwards(how: str) -> None:
    run(programs.failing_children, how)


@pytest.mark.parametrize(
    "program",
    [
        programs.failing_at_the_end,
        programs.many_open_files,
        programs.nobody_waits_for_children,
        programs.large_results,
        programs.raising_here,
        programs.forbidden,
        programs.ignored_signal,
        programs.signals_while_forking,
    ],
)
def test_program(program: Any) -> None:
    run(program)


@pytest.mark.parametrize("room", range(8))
def test_without_room_for_pipes_no_child_is_forked(room: int) -> None:
    run(programs.little_room, room)


def test_a_signal_while_children_are_ended_leaves_none() -> None:
    assert run(programs.a_signal_while_ending)[0] == "interrupted\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["while they work", "while they send"])
def test_no_child_outlives_the_process(signum: signal.Signals, moment: str) -> None:
    with start(programs.outlived, moment, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            pids = {int(process.stdout.readline()) for _ in range(3)}
            time.sleep(0.3)
            assert all(map(alive, pids))
            process.send_signal(signum)
            process.wait(timeout=30)
        finally:
            process.kill()
    assert process.returncode in ((9,) if signum == signal.SIGTERM else (1, -signum))
    assert gone(pids)


# ---------------------------------------------------------------- diff


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its average, large enough for children, with a small tensor and an empty one."""
    torch.manual_seed(0)
    model = {f"layer{i}.weight": torch.randn(NBYTES // 16, 1).reshape(1024, -1) for i in range(4)}
    model |= {
        "narrow": torch.randn(4000, 384),
        "bias": torch.randn(13),
        "none": torch.zeros(0, 3),
        "same": torch.ones(300_000),
    }
    ema = {
        name: value * 0.999 if name != "same" else value.clone() for name, value in model.items()
    }
    folder = tmp_path_factory.mktemp("forked") / "step_1"
    return save_dcp(folder, {"model": model, "ema": {"weights": ema}})


def numbers_of(text: str) -> dict[str, Any]:
    document = json.loads(text)
    return {key: document[key] for key in ("compared", "tensors", "summary", "findings")}


def test_diff_by_children_equals_diff_by_one_to_the_last_bit(source: Path) -> None:
    text, processes = run(programs.diff, source, "--json", "--threads", 3)
    assert processes == "3 of 3\n"
    one = numbers_of(run(programs.diff, source, "--json", "--threads", 1)[0])
    assert numbers_of(text) == one
    for threads, budget in ((2, "4MiB"), (8, "4MiB"), (40, "16MiB")):
        options = ("--json", "--threads", threads, "--max-memory", budget)
        assert numbers_of(run(programs.diff, source, *options)[0]) == one
    weights = {entry["name"]: entry for entry in one["tensors"]}
    assert weights["layer0.weight"]["rel_l2"] == pytest.approx(0.001, rel=1e-3)
    assert weights["same"]["changed"] == 0
    assert one["compared"] == 8


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_diff_is_right_when_a_child_fails(source: Path, how: str) -> None:
    text, processes = run(programs.harmed_diff, how, source, "--json", "--threads", 3)
    assert processes == "0 of 3\n"
    assert numbers_of(text) == numbers_of(run(programs.diff, source, "--json", "--threads", 1)[0])


def test_an_error_that_lasts_is_reported_as_any_other(source: Path) -> None:
    text, shown = run(programs.unreadable_diff, source, "--threads", 3, code=2)
    assert text == ""
    assert "Error: layer2.weight: the disk does not answer" in shown.splitlines()


def test_a_terminal_shows_progress_of_children_all_the_same(source: Path) -> None:
    import pty

    near, far = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    options = {"stdout": subprocess.DEVNULL, "stderr": far, "env": environment}
    with start(programs.slow_diff, source, "--threads", 2, **options) as process:
        os.close(far)
        shown = b""
        while True:
            try:
                shown += os.read(near, 4096)
            except OSError:  # the other end was closed
                break
        process.wait(timeout=60)
    os.close(near)
    assert process.returncode == 0
    assert b"2 of 2" in shown
    assert b"comparing" in shown
