"""Programs for tests that need a process of their own, in which nothing forbids child processes.

No torch here: where it is imported, nothing is forked. `start` runs one of them.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ema_ckpt.runtime import executor
from ema_ckpt.runtime.executor import Workers, dump_json
from ema_ckpt.runtime.fork_pool import OnBytes, can_fork, run_forked

REPO = Path(__file__).parents[2]
HERE = os.getpid()
executor.LEAST_SECONDS = executor.FORK_SECONDS = 0


def start(
    program: Callable[..., None], *arguments: object, **options: Any
) -> subprocess.Popen[str]:
    """Start a program with its arguments as strings; its output is piped unless `options` differ."""
    code = f"import sys; from {program.__module__} import {program.__name__} as program; "
    command = [sys.executable, "-c", code + "program(*sys.argv[1:])", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=REPO, **{**pipes, **options})


def run(program: Callable[..., None], *arguments: object, code: int = 0) -> tuple[str, str]:
    """Run a program; return what it printed on stdout and stderr."""
    with start(program, *arguments) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return out, err


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: set[int], seconds: float = 20) -> bool:
    """Wait until none of these processes is alive."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def harm(how: str) -> None:
    """End this process, a child, in one of the ways in which children end."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exits":
        sys.exit(3)
    raise OSError("the disk does not answer")


def wait_for_a_death() -> None:
    """Return once a child has ended, so that one takes part whatever the scheduler does."""
    while True:
        try:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
        except ChildProcessError:  # there is none, or none any more
            return
        time.sleep(0.01)


def harm_children(how: str) -> None:
    """Have the first job of each child end it, and the first one here wait for that."""
    waited = False

    def on_job(_job: object) -> None:
        nonlocal waited
        if os.getpid() != HERE:
            harm(how)
        if not waited:
            wait_for_a_death()
        waited = True

    executor.on_job = on_job


def count_processes() -> list[tuple[int, int]]:
    """Have every forked run append the processes asked for, and those whose results came."""
    runs: list[tuple[int, int]] = []

    def counting(
        run_jobs: Callable[[Iterator[int], OnBytes], None],
        dump: Callable[[], bytes],
        jobs: int,
        processes: int,
        on_progress: OnBytes,
    ) -> list[bytes] | None:
        results = run_forked(run_jobs, dump, jobs, processes, on_progress)
        runs.append((min(processes, jobs), 0 if results is None else len(results) + 1))
        return results

    executor.run_forked = counting
    return runs


def no_child_is_left() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


class Number(NamedTuple):
    """A job of as many bytes."""

    nbytes: int


class Numbers:
    """Work that notes the numbers it has seen."""

    def __init__(self, act: Callable[[int], None] | None = None) -> None:
        self.seen: list[int] = []
        self._act = act

    def start_worker(self) -> Callable[[Number], int]:
        def see(job: Number) -> int:
            if self._act is not None:
                self._act(job.nbytes)
            self.seen.append(job.nbytes)
            return job.nbytes

        return see

    def dump(self) -> bytes:
        return dump_json(self.seen)

    def merge(self, dumped: bytes) -> None:
        import json

        self.seen += json.loads(dumped)

    def reset(self) -> None:
        self.seen.clear()


def run_numbers(jobs: int, work: Numbers, count: int = 3) -> list[int]:
    """Run so many jobs in `count` processes; return what progress was reported."""
    reported: list[int] = []
    streams = [[Number(number) for number in range(first, jobs, 2)] for first in (0, 1)]
    executor.run(work, streams, Workers(count, processes=True), reported.append)
    return reported


# Programs.


def every_job_once(jobs: str, count: str) -> None:
    work = Numbers()
    assert can_fork()
    reported = run_numbers(int(jobs), work, int(count))
    assert sorted(work.seen) == list(range(int(jobs)))
    assert sum(reported) == sum(range(int(jobs)))
    assert no_child_is_left()


def failing_children(how: str) -> None:
    """All is done again, here; progress reaches the total, and never runs backwards."""
    runs = count_processes()
    harm_children(how)
    work = Numbers(lambda _number: time.sleep(0.001))
    reported = run_numbers(500, work)
    assert runs == [(3, 0)]
    assert sorted(work.seen) == list(range(500))
    assert min(reported) > 0 and sum(reported) == sum(range(500))


def failing_at_once(how: str) -> None:
    """A child that fails is noticed after the job at hand."""
    done = 0

    def run_jobs(numbers: Iterator[int], on_finished: OnBytes) -> None:
        nonlocal done
        if os.getpid() != HERE:
            harm(how)
        for number in numbers:
            done += 1
            on_finished(number)
            time.sleep(0.05)

    assert run_forked(run_jobs, bytes, 1000, 3, lambda _nbytes: None) is None
    assert done < 500


def failing_at_the_end() -> None:
    def dump() -> bytes:
        raise RuntimeError

    assert run_forked(exhaust, dump, 100, 3, print) is None


def exhaust(numbers: Iterator[int], _on_finished: OnBytes) -> None:
    for _ in numbers:
        pass


def ignore(_nbytes: int) -> None:
    pass


def many_open_files() -> None:
    """Descriptors above 1023, which `select` would not take."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))
    for _ in range(1100):
        os.open("/dev/null", os.O_RDONLY)
    assert run_forked(exhaust, bytes, 10, 3, ignore) == [b"", b""]


def little_room(room: str) -> None:
    """With so many descriptors left there are children or none, and no descriptor stays open."""
    last = os.open("/dev/null", os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1 + int(room), 2000))
    work = Numbers()
    runs = count_processes()
    run_numbers(10, work)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))
    assert runs == [(3, 3 if int(room) >= 4 else 0)], runs
    assert sorted(work.seen) == list(range(10))
    assert os.open("/dev/null", os.O_RDONLY) == last + 1


def nobody_waits_for_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    assert run_forked(exhaust, lambda: b"1", 10, 3, ignore) == [b"1", b"1"]


def large_results() -> None:
    results = run_forked(exhaust, lambda: b"7" * (3 << 20), 10, 3, ignore)
    assert results == [b"7" * (3 << 20)] * 2


def raising_here() -> None:
    def run_jobs(_numbers: Iterator[int], _on_finished: OnBytes) -> None:
        if os.getpid() != HERE:
            time.sleep(600)
        raise OSError("full")

    begin = time.monotonic()
    try:
        run_forked(run_jobs, bytes, 100, 3, ignore)
    except OSError as error:
        assert str(error) == "full"
    assert time.monotonic() - begin < 30
    assert no_child_is_left()


def forbidden() -> None:
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    assert not can_fork()
    event.set()
    thread.join()
    deadline = time.monotonic() + 10  # joined is not yet gone: the kernel takes its own time
    while not can_fork() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert can_fork()
    sys.modules["torch"] = sys
    assert not can_fork()


def outlived(moment: str) -> None:
    """Print the pid of each process, and work until a signal comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    # A shell in the background makes its children deaf to SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def run_jobs(_numbers: Iterator[int], on_finished: OnBytes) -> None:
        os.write(1, b"%d\n" % os.getpid())
        while os.getpid() == HERE or moment == "while they work":
            time.sleep(0.05)
            on_finished(1)

    run_forked(run_jobs, lambda: bytes(1 << 20), 100_000, 3, ignore)


def ignored_signal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run_jobs(numbers: Iterator[int], _on_finished: OnBytes) -> None:
        if os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGINT)
        exhaust(numbers, ignore)

    assert run_forked(run_jobs, lambda: b"1", 10, 3, ignore) == [b"1", b"1"]


class Stop(BaseException):
    """What a signal raises."""


def raise_stop(*_: object) -> None:
    raise Stop


def signals_while_forking() -> None:
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.signal(signal.SIGTERM, raise_stop)
    stopped = 0
    for trial in range(60):
        signal.setitimer(signal.ITIMER_REAL, 0.0002 + trial * 0.0001)
        try:
            run_forked(lambda _numbers, _tell: time.sleep(0.02), bytes, 100, 4, ignore)
        except Stop:
            stopped += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert no_child_is_left()
    assert stopped > 10
    assert len(os.listdir("/proc/self/fd")) < 10


def a_signal_while_ending() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    waitpid = os.waitpid
    signalled = False

    def interrupted(pid: int, options: int) -> tuple[int, int]:
        nonlocal signalled
        if not signalled:
            signalled = True
            signal.raise_signal(signal.SIGINT)
        return waitpid(pid, options)

    def run_jobs(_numbers: Iterator[int], _on_finished: OnBytes) -> None:
        if os.getpid() == HERE:
            raise SystemExit(4)
        time.sleep(60)

    os.waitpid = interrupted
    try:
        run_forked(run_jobs, bytes, 100, 4, ignore)
    except KeyboardInterrupt:
        assert no_child_is_left()
        print("interrupted")


# diff


def diff(*arguments: str) -> None:
    """Run `diff`; then say how many processes each forked run had."""
    from ema_ckpt.cli.main import main

    runs = count_processes()
    try:
        main(["diff", *arguments])
    finally:
        print(*[f"{found} of {asked}" for asked, found in runs], file=sys.stderr)


def slow_diff(*arguments: str) -> None:
    """Take over a second, from when a terminal shows progress."""
    executor.on_job = lambda job: time.sleep(job.nbytes / 20e6)
    diff(*arguments)


def harmed_diff(how: str, *arguments: str) -> None:
    harm_children(how)
    diff(*arguments)


def unreadable_diff(*arguments: str) -> None:
    from ema_ckpt.core.errors import SourceError

    def on_job(job: Any) -> None:
        if job.pair == 2:
            raise SourceError("unreadable", "layer2.weight: the disk does not answer")

    executor.on_job = on_job
    diff(*arguments)
