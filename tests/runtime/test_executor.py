"""The executor in threads: every job once, the first error raised, progress that only grows."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from ema_ckpt.runtime import executor
from ema_ckpt.runtime.executor import Workers, interleave
from ema_ckpt.runtime.thread_pool import run_threads
from tests.runtime.fork_programs import Number, Numbers


@pytest.mark.parametrize("threads", [1, 3])
def test_every_job_is_done_once(threads: int) -> None:
    work, reported = Numbers(), list[int]()
    streams = ([Number(number) for number in range(first, 100, 5)] for first in range(5))
    executor.run(work, streams, Workers(threads), reported.append)
    assert sorted(work.seen) == list(range(100))
    assert sum(reported) == sum(range(100)) and min(reported) > 0


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_is_raised_and_ends_the_others(threads: int) -> None:
    def fail(number: int) -> None:
        if number == 7:
            raise OSError("the disk does not answer")
        time.sleep(0.001)

    work = Numbers(fail)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="does not answer"):
        executor.run(work, [map(Number, range(5000))], Workers(threads))
    assert len(work.seen) < 1000
    assert set(threading.enumerate()) <= before


def test_an_error_of_the_next_job_is_raised() -> None:
    def jobs() -> object:
        yield Number(1)
        raise ValueError("a broken header")

    with pytest.raises(ValueError, match="header"):
        executor.run(Numbers(), [jobs()], Workers(2))


def test_an_error_of_the_callback_is_raised() -> None:
    def on_progress(_nbytes: int) -> None:
        raise KeyError("progress")

    with pytest.raises(KeyError, match="progress"):
        executor.run(Numbers(), [[Number(1)] * 9], Workers(2), on_progress)


def test_workers_keep_to_different_streams_while_there_are_any() -> None:
    """Jobs of one stream hinder each other: two workers begin with two streams."""
    barrier = threading.Barrier(2, timeout=20)
    first: list[int] = []

    def meet(number: int) -> None:
        if len(first) < 2:
            first.append(number)
            barrier.wait()

    streams = [[Number(1)] * 5, [Number(2)] * 5]
    executor.run(Numbers(meet), streams, Workers(2))
    assert sorted(first) == [1, 2]


def test_jobs_in_a_row_are_of_different_streams_and_the_last_by_size() -> None:
    streams = [[Number(100 * stream + n) for n in range(50)] for stream in range(1, 4)]
    jobs = interleave(streams, 2)
    assert sorted(jobs) == sorted(job for stream in streams for job in stream)
    assert [job.nbytes for job in jobs[:4]] == [100, 200, 101, 201]
    last = [job.nbytes for job in jobs[-16:]]
    assert last == sorted(last, reverse=True)
    assert interleave([], 3) == []


def test_an_interruption_leaves_no_worker_behind() -> None:
    """The caller may close what workers write to as soon as the pool has ended, however it ends."""
    running: list[str] = []

    def slow(_job: int) -> None:
        running.append("in")
        time.sleep(0.3)
        running.append("out")

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    threads = set(threading.enumerate())
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            run_threads(lambda: slow, [[1, 2]], 2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert running.count("in") - running.count("out") <= 1  # the caller's own job was cut short
    assert set(threading.enumerate()) <= threads
