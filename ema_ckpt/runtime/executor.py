"""The one executor behind all verbs: runs jobs in threads or in forked child processes.

A verb describes its jobs as plain data and hands in a `Work` that knows what they mean. Each worker
has buffers of its own; what a child process found travels back as bytes and is merged here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import sqrt
from typing import Any, NamedTuple, Protocol, TypeVar

from ema_ckpt.runtime.fork_pool import OnBytes, can_fork, jobs_per_batch, memory_nbytes, run_forked
from ema_ckpt.runtime.thread_pool import run_threads

LEAST_SECONDS = 0.03  # of work for each worker
# What another child costs all of them: its fork, and the pages that it copies because it counts
# references on them. A catalog of 160 000 chunks has 300 MB of such pages; on 16 cores 4 workers
# took 3.9 s for it, and 16 took 5.3 s.
FORK_SECONDS = 0.004
_USUAL_NBYTES, _NBYTES_PER_FORK_SECONDS = 50 << 20, 13 << 20
_LAST_JOBS = 8  # of each worker, which are ordered by size

on_job: Callable[[Any], None] | None = None
"""Called with each job, in the worker that begins it: how tests slow, stop or kill a worker."""


class Job(Protocol):
    """Plain data that describes a piece of work of so many bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes that the job reads or writes."""
        ...


JobT = TypeVar("JobT", bound=Job)
JobT_contra = TypeVar("JobT_contra", bound=Job, contravariant=True)


class Work(Protocol[JobT_contra]):
    """What jobs mean, and what they found. Workers of one process share it: it locks."""

    def start_worker(self) -> Callable[[JobT_contra], int]:
        """Make one worker's buffers; return what does a job and returns the bytes finished."""
        ...

    def dump(self) -> bytes:
        """Return what was found in this process since the start or the last `reset`."""
        ...

    def merge(self, dumped: bytes) -> None:
        """Add what another process dumped."""
        ...

    def reset(self) -> None:
        """Forget what was found: all jobs are done again."""
        ...


class Workers(NamedTuple):
    """How many workers there are, and whether they are child processes instead of threads."""

    number: int
    processes: bool = False

    @classmethod
    def fit(cls, most: int, free_seconds: float, locked_seconds: float = 0.0) -> Workers:
        """Choose as many workers as have enough to do: processes where they can be forked.

        Args:
            most: the largest number.
            free_seconds: what one worker would take to read, compute checksums and write, which
                threads do side by side.
            locked_seconds: what it would take in the interpreter, whose lock threads wait for.
        """
        seconds = free_seconds + locked_seconds
        number = max(1, min(most, int(seconds / max(LEAST_SECONDS, 1e-9))))
        if number == 1 or can_fork():
            more_nbytes = max(0, memory_nbytes() - _USUAL_NBYTES)
            fork_seconds = FORK_SECONDS * (1 + more_nbytes / _NBYTES_PER_FORK_SECONDS)
            # With n of them it takes seconds / n + n forks, which is least at this number.
            best = int(sqrt(seconds / max(fork_seconds, 1e-9)))
            number = max(1, min(number, best))
            return cls(number, number > 1)
        return cls(min(number, 1 + int(2 * free_seconds / max(locked_seconds, 1e-9))))


def dump_json(value: object) -> bytes:
    """Encode numbers, strings and lists of them for `Work.dump`; `json.loads` decodes them."""
    return json.dumps(value, separators=(",", ":")).encode()


def expect(on_progress: OnBytes | None, nbytes: int) -> None:
    """Tell who shows progress how many bytes are to come, if `on_progress` has such a method."""
    tell = getattr(on_progress, "expect", None)
    if tell is not None:
        tell(nbytes)


def run(
    work: Work[JobT],
    streams: Iterable[Iterable[JobT]],
    workers: Workers,
    on_progress: OnBytes | None = None,
) -> None:
    """Do all jobs.

    Args:
        streams: jobs that hinder each other, as writes to one file do, share a stream.
        on_progress: called with the bytes finished since the last call, by one worker at a time.

    Raises:
        BaseException: the first that a job raised; the other workers stop after their job.
    """
    progress = _Progress(on_progress)

    def start_worker(on_finished: OnBytes) -> Callable[[JobT], None]:
        run_job = work.start_worker()

        def run_and_report(job: JobT) -> None:
            if on_job is not None:
                on_job(job)
            on_finished(run_job(job))

        return run_and_report

    if workers.processes:
        jobs = interleave([list(stream) for stream in streams], workers.number)

        def run_jobs(numbers: Iterator[int], on_finished: OnBytes) -> None:
            run_job = start_worker(on_finished)
            for number in numbers:
                run_job(jobs[number])

        results = run_forked(run_jobs, work.dump, len(jobs), workers.number, progress.add)
        if results is not None:
            for dumped in results:
                work.merge(dumped)
            return
        work.reset()
        progress.restart()
        streams = [jobs]
    run_threads(lambda: start_worker(progress.add), streams, workers.number)


def interleave(streams: Sequence[Sequence[JobT]], workers: int) -> list[JobT]:
    """Order jobs so that those taken at once are of different streams, and the last are small."""
    batch = jobs_per_batch(sum(map(len, streams)))
    jobs: list[JobT] = []
    for first in range(0, len(streams), workers):
        abreast = streams[first : first + workers]
        for start in range(0, max(map(len, abreast)), batch):
            for stream in abreast:
                jobs += stream[start : start + batch]
    last = slice(-_LAST_JOBS * workers * batch, None)
    jobs[last] = sorted(jobs[last], key=lambda job: job.nbytes, reverse=True)
    return jobs


class _Progress:
    """Reports finished bytes; after a restart only those beyond what was reported before."""

    def __init__(self, on_progress: OnBytes | None) -> None:
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._finished = 0
        self._reported = 0

    def restart(self) -> None:
        self._finished = 0

    def add(self, nbytes: int) -> None:
        if self._on_progress is None:
            return
        with self._lock:
            self._finished += nbytes
            news = self._finished - self._reported
            if news > 0:
                self._reported = self._finished
                self._on_progress(news)
