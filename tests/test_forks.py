"""Copies of a process: every job is done once, whatever becomes of a copy, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoints import save_dcp

REPO = Path(__file__).parents[1]
NBYTES = 40 << 20  # of each tree

HEAD = """
import os, signal, sys, time
from ema_ckpt.forks import can_fork, run_forked
assert can_fork()
"""


def script(body: str, *arguments: object, code: int = 0) -> str:
    command = [sys.executable, "-c", HEAD + body, *map(str, arguments)]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == code, result.stderr
    return result.stdout


@pytest.mark.parametrize("jobs", [0, 1, 7, 4096, 10_000])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_job_is_done_once(jobs: int, count: int) -> None:
    body = """
jobs, count = int(sys.argv[1]), int(sys.argv[2])
told = []
def work(numbers, tell):
    done = []
    for number in numbers:
        done.append(number)
        tell(number)
    return ",".join(map(str, done)).encode()
results = run_forked(work, jobs, count, told.append)
assert len(results) == count
done = [int(word) for result in results for word in result.split(b",") if word]
assert sorted(done) == list(range(jobs)), "each once"
assert sum(told) == sum(range(jobs)), "and all its bytes are told here"
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child is left")
"""
    assert script(body, jobs, count) == "no child is left\n"


@pytest.mark.parametrize("harm", ["raise RuntimeError", "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"])
def test_a_copy_that_fails_is_noticed(harm: str) -> None:
    body = f"""
here = os.getpid()
def work(numbers, tell):
    if os.getpid() != here:
        {harm}
    return b"done"
print(run_forked(work, 100, 3))
"""
    assert script(body) == "None\n"


def test_results_larger_than_a_pipe_come_back_whole() -> None:
    body = """
def work(numbers, tell):
    return bytes([len(list(numbers)) % 251]) * (3 << 20)
print([len(result) == 3 << 20 and len(set(result)) == 1 for result in run_forked(work, 10, 3)])
"""
    assert script(body) == "[True, True, True]\n"


def test_what_is_raised_here_ends_the_copies() -> None:
    body = """
here = os.getpid()
def work(numbers, tell):
    if os.getpid() != here:
        time.sleep(600)
    raise OSError("full")
begin = time.monotonic()
try:
    run_forked(work, 100, 3)
except OSError as error:
    print(error, time.monotonic() - begin < 30)
"""
    assert script(body) == "full True\n"


def test_other_threads_and_torch_forbid_copies() -> None:
    body = """
import threading
event = threading.Event()
thread = threading.Thread(target=event.wait)
thread.start()
print(can_fork())
event.set(); thread.join()
print(can_fork())
sys.modules["torch"] = sys
print(can_fork())
"""
    assert script(body) == "False\nTrue\nFalse\n"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_copy_outlives_the_process(signum: signal.Signals) -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background makes children deaf to it
def work(numbers, tell):
    os.write(1, b"%d\\n" % os.getpid())
    for number in numbers:
        time.sleep(0.05)
        tell(1)
    return b""
run_forked(work, 100_000, 3)
"""
    command = [sys.executable, "-c", HEAD + body]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            pids = [int(process.stdout.readline()) for _ in range(3)]
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
    """A model and its average, large enough for copies, with a small tensor and one of zero size."""
    torch.manual_seed(0)
    model = {f"layer{i}.weight": torch.randn(NBYTES // 16, 1).reshape(1024, -1) for i in range(4)}
    model |= {"bias": torch.randn(13), "none": torch.zeros(0, 3), "same": torch.ones(300_000)}
    ema = {name: value * 0.999 if name != "same" else value.clone() for name, value in model.items()}
    folder = tmp_path_factory.mktemp("forked") / "step_1"
    return save_dcp(folder, {"model": model, "ema": {"weights": ema}})


def diffed(source: Path, *options: object, before: str = "") -> dict[str, object]:
    body = f"""
import ema_ckpt.ops.diff as verb
from ema_ckpt.cli.entry import main
{before}
main(["diff", *sys.argv[1:], "--json"])
"""
    return dict(json.loads(script(body, source, *options)))


SEEN = """
usual = verb.run_forked
def seen(work, jobs, count, progress=None):
    result = usual(work, jobs, count, progress)
    print(f"{len(result or ())} processes", file=sys.stderr)
    return result
verb.run_forked = seen
"""


def close(a: dict[str, object], b: dict[str, object]) -> None:
    assert a["compared"] == b["compared"] == 7
    for x, y in zip(a["tensors"], b["tensors"], strict=True):
        assert x["name"] == y["name"]
        assert {**x, "name": 0} == pytest.approx({**y, "name": 0}, rel=1e-9)
    assert a["summary"] == pytest.approx(b["summary"], rel=1e-9)
    assert a["findings"] == b["findings"]


def test_diff_by_copies_equals_diff_by_one(source: Path) -> None:
    body = (
        HEAD
        + f"""
import ema_ckpt.ops.diff as verb
from ema_ckpt.cli.entry import main
{SEEN}
main(["diff", sys.argv[1], "--json", "--threads", "3"])
"""
    )
    command = [sys.executable, "-c", body, str(source)]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
    assert "3 processes" in result.stderr
    one = diffed(source, "--threads", 1)
    close(json.loads(result.stdout), one)
    weights = {entry["name"]: entry for entry in one["tensors"]}
    assert weights["layer0.weight"]["rel_l2"] == pytest.approx(0.001, rel=1e-3)
    assert weights["same"]["changed"] == 0


def test_diff_is_right_when_a_copy_is_killed(source: Path) -> None:
    killed = """
here = os.getpid()
usual = verb._Pairs._segment
def segment(*arguments):
    if os.getpid() != here:
        os.kill(os.getpid(), signal.SIGKILL)
    return usual(*arguments)
verb._Pairs._segment = segment
"""
    close(diffed(source, "--threads", 3, before=killed), diffed(source, "--threads", 1))


def test_an_error_met_by_a_copy_is_told_as_any_other(source: Path) -> None:
    body = """
import ema_ckpt.ops.diff as verb
from ema_ckpt import SourceError
from ema_ckpt.cli.entry import main
here = os.getpid()
usual = verb._Pairs._segment
def segment(self, name, *rest):
    if name == "layer2.weight" and (os.getpid() != here or sys.argv[2] == "here"):
        raise SourceError("unreadable", f"{name}: the disk does not answer")
    return usual(self, name, *rest)
verb._Pairs._segment = segment
main(["diff", sys.argv[1], "--threads", "3"])
"""
    assert "layer2" in script(body, source, "there")  # done again here, where it works
    command = [sys.executable, "-c", HEAD + body, str(source), "here"]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "Error: layer2.weight: the disk does not answer\n"


def test_a_terminal_sees_progress_and_copies_all_the_same(source: Path) -> None:
    import pty

    near, far = pty.openpty()
    body = (
        HEAD
        + f"""
import ema_ckpt.ops.diff as verb
from ema_ckpt.cli.entry import main
{SEEN}
main(["diff", sys.argv[1], "--threads", "2"])
"""
    )
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", body, str(source)]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.DEVNULL, stderr=far, env=environment) as process:
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
    assert b"2 processes" in shown
    assert b"comparing" in shown
