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

REPO = Path(__file__).parents[2]
NBYTES = 40 << 20  # of each tree

HEAD = """
import os, signal, sys, time
from ema_ckpt.runtime.fork_pool import can_fork, run_forked
assert can_fork()
"""


def ran(body: str, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + body, *map(str, arguments)]
    result = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == code, result.stderr
    return result


def script(body: str, *arguments: object) -> str:
    return ran(body, *arguments).stdout


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
assert len(results) == max(1, min(count, jobs)), "no more processes than jobs"
done = [int(word) for result in results for word in result.split(b",") if word]
assert sorted(done) == list(range(jobs)), "each once"
assert sum(told) == sum(range(jobs)), "and all its bytes are told here"
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child is left")
"""
    assert script(body, jobs, count) == "no child is left\n"


@pytest.mark.parametrize(
    "harm", ["raise RuntimeError", "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"]
)
def test_a_copy_that_fails_is_noticed_at_once(harm: str) -> None:
    body = f"""
here, done = os.getpid(), 0
def work(numbers, tell):
    global done
    if os.getpid() != here:
        {harm}
    for number in numbers:
        done += 1
        time.sleep(0.05)
    return b"done"
print(run_forked(work, 1000, 3), done < 500)
"""
    assert script(body) == "None True\n"


def test_a_copy_that_fails_at_the_end_is_noticed() -> None:
    body = """
here = os.getpid()
def work(numbers, tell):
    for number in numbers:
        pass
    if os.getpid() != here:
        raise RuntimeError
    return b"done"
print(run_forked(work, 100, 3))
"""
    assert script(body) == "None\n"


def test_many_open_files() -> None:
    """Descriptors above 1023, which `select` would not take."""
    body = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
print(run_forked(lambda numbers, tell: b"" if list(numbers) is not None else b"x", 10, 3))
"""
    assert script(body) == "[b'', b'', b'']\n"


@pytest.mark.parametrize("room", range(8))
def test_without_room_for_pipes_no_copy_is_made(room: int) -> None:
    body = """
import resource
last = os.open("/dev/null", os.O_RDONLY)
soft = last + 1 + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, 2000))
result = run_forked(lambda numbers, tell: b"%d" % len(list(numbers)), 10, 3)
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))
print(result is None or sum(map(int, result)))
print(len(os.listdir("/proc/self/fd")) - last)
"""
    enough, descriptors = script(body, room).split()
    assert enough in ("True", "10")
    assert enough == ("10" if room >= 4 else "True")
    assert descriptors == script(body, 7).split()[1], "none is left open"


def test_results_come_back_where_nobody_waits_for_children() -> None:
    body = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(run_forked(lambda numbers, tell: b"%d" % (len(list(numbers)) > -1), 10, 3))
"""
    assert script(body) == "[b'1', b'1', b'1']\n"


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
deadline = time.monotonic() + 10  # joined is not yet gone: the kernel takes its own time
while not can_fork() and time.monotonic() < deadline:
    time.sleep(0.01)
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
@pytest.mark.parametrize("moment", ["while they work", "while they send"])
def test_no_copy_outlives_the_process(signum: signal.Signals, moment: str) -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background makes children deaf to it
here = os.getpid()
def work(numbers, tell):
    os.write(1, b"%d\\n" % os.getpid())
    while os.getpid() == here or sys.argv[1] == "while they work":
        time.sleep(0.05)
        tell(1)
    return bytes(1 << 20)
run_forked(work, 100_000, 3)
"""
    command = [sys.executable, "-c", HEAD + body, moment]
    with subprocess.Popen(
        command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            pids = [int(process.stdout.readline()) for _ in range(3)]
            time.sleep(0.3)
            assert all(map(alive, pids))
            process.send_signal(signum)
            process.wait(timeout=30)
        finally:
            process.kill()
    assert process.returncode in ((9,) if signum == signal.SIGTERM else (1, -signum))
    assert gone(pids)


def test_copies_hear_no_signal_that_the_process_ignores() -> None:
    body = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
here = os.getpid()
def work(numbers, tell):
    if os.getpid() != here:
        os.kill(os.getpid(), signal.SIGINT)
    return b"%d" % (len(list(numbers)) > -1)
print(run_forked(work, 10, 3))
"""
    assert script(body) == "[b'1', b'1', b'1']\n"


def test_signals_while_copies_are_made_leave_none() -> None:
    body = """
import threading
class Stop(BaseException): pass
def stop(*_):
    raise Stop
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
signal.signal(signal.SIGTERM, stop)
stopped = 0
for trial in range(60):
    signal.setitimer(signal.ITIMER_REAL, 0.0002 + trial * 0.0001)
    try:
        run_forked(lambda numbers, tell: time.sleep(0.02) or b"", 100, 4)
    except Stop:
        stopped += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        os.waitpid(-1, os.WNOHANG)
        raise SystemExit("a child is left")
    except ChildProcessError:
        pass
print(stopped > 10, len(os.listdir("/proc/self/fd")) < 10)
"""
    assert script(body) == "True True\n"


def test_a_signal_while_copies_are_ended_leaves_none() -> None:
    body = """
signal.signal(signal.SIGINT, signal.default_int_handler)
usual, here, signalled = os.waitpid, os.getpid(), []
def waitpid(*arguments):
    if not signalled:
        signalled.append(True)
        signal.raise_signal(signal.SIGINT)
    return usual(*arguments)
os.waitpid = waitpid
def work(numbers, tell):
    if os.getpid() == here:
        raise SystemExit(4)
    time.sleep(60)
try:
    run_forked(work, 100, 4)
except BaseException as error:
    print(type(error).__name__)
try:
    usual(-1, os.WNOHANG)
except ChildProcessError:
    print("none")
"""
    assert script(body) == "KeyboardInterrupt\nnone\n"


# ---------------------------------------------------------------- diff


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its average, large enough for copies, with a small tensor and one of zero size."""
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


def diffed(source: Path, *options: object, before: str = "") -> dict[str, object]:
    body = f"""
import ema_ckpt.ops.diff as verb
from ema_ckpt.cli.main import main
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


def numbers_of(document: dict[str, object]) -> dict[str, object]:
    return {key: document[key] for key in ("compared", "tensors", "summary", "findings")}


def seen(source: Path, *options: object, before: str = "", code: int = 0) -> tuple[str, str]:
    body = f"""
import ema_ckpt.ops.diff as verb
from ema_ckpt.cli.main import main
{before}
{SEEN}
main(["diff", *sys.argv[1:]])
"""
    result = ran(body, source, *options, code=code)
    return result.stdout, result.stderr


def test_diff_by_copies_equals_diff_by_one_to_the_last_bit(source: Path) -> None:
    text, shown = seen(source, "--json", "--threads", 3)
    assert shown == "3 processes\n"
    one = diffed(source, "--threads", 1)
    assert numbers_of(json.loads(text)) == numbers_of(one)
    for threads, budget in ((2, "4MiB"), (8, "4MiB"), (40, "16MiB")):
        assert numbers_of(
            diffed(source, "--threads", threads, "--max-memory", budget)
        ) == numbers_of(one)
    weights = {entry["name"]: entry for entry in one["tensors"]}
    assert weights["layer0.weight"]["rel_l2"] == pytest.approx(0.001, rel=1e-3)
    assert weights["same"]["changed"] == 0
    assert one["compared"] == 8


# The first job here waits until a copy has died, so that one takes part whatever the scheduler does.
DYING = """
here, waited = os.getpid(), False
usual_segment = verb._Pairs._segment
def segment(self, name, *rest):
    global waited
    if os.getpid() != here:
        {harm}
    while not waited and not os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.01)
    waited = True
    return usual_segment(self, name, *rest)
verb._Pairs._segment = segment
"""


@pytest.mark.parametrize(
    "harm", ["os.kill(os.getpid(), signal.SIGKILL)", "raise OSError('the disk does not answer')"]
)
def test_diff_is_right_when_a_copy_fails(source: Path, harm: str) -> None:
    text, shown = seen(source, "--json", "--threads", 3, before=DYING.format(harm=harm))
    assert shown == "0 processes\n"
    assert numbers_of(json.loads(text)) == numbers_of(diffed(source, "--threads", 1))


def test_an_error_that_lasts_is_told_as_any_other(source: Path) -> None:
    broken = """
from ema_ckpt import SourceError
usual_segment = verb._Pairs._segment
def segment(self, name, *rest):
    if name == "layer2.weight":
        raise SourceError("unreadable", f"{name}: the disk does not answer")
    return usual_segment(self, name, *rest)
verb._Pairs._segment = segment
"""
    text, shown = seen(source, "--threads", 3, before=broken, code=2)
    assert (text, shown.splitlines()[-1]) == ("", "Error: layer2.weight: the disk does not answer")


def test_a_terminal_sees_progress_and_copies_all_the_same(source: Path) -> None:
    import pty

    near, far = pty.openpty()
    body = (
        HEAD
        + f"""
import ema_ckpt.ops.diff as verb
from ema_ckpt.cli.main import main
{SEEN}
main(["diff", sys.argv[1], "--threads", "2"])
"""
    )
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", body, str(source)]
    with subprocess.Popen(
        command, cwd=REPO, stdout=subprocess.DEVNULL, stderr=far, env=environment
    ) as process:
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
