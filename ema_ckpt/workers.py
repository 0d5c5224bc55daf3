"""A pool of workers that take jobs from one list, each with buffers of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["run_jobs", "usable_cpus", "worker_count"]

Hand = TypeVar("Hand")
_MOST = 8


def usable_cpus() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(threads: int | None) -> int:
    """Workers to start: what was asked for, else one for each usable processor, at most eight."""
    return threads or min(usable_cpus(), _MOST)


def run_jobs(jobs: Iterator[Callable[[Hand], None]], threads: int, make: Callable[[], Hand]) -> None:
    """Do all jobs, the caller's thread being one of the workers.

    Args:
        jobs: taken one at a time by whoever is free; making the next one may read headers.
        make: called once in each worker, for what its jobs work with.

    Raises:
        BaseException: the first that a job raised; the others stop after the job they are at.
    """
    _Pool(jobs, make).run(threads)


class _Pool(Generic[Hand]):
    def __init__(self, jobs: Iterator[Callable[[Hand], None]], make: Callable[[], Hand]) -> None:
        self._jobs = jobs
        self._make = make
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, threads: int) -> None:
        others = [threading.Thread(target=self._serve, daemon=True) for _ in range(threads - 1)]
        try:
            for thread in others:
                thread.start()
            self._serve()
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            self._join(others)
        if self._error is not None:
            raise self._error

    def _join(self, others: list[threading.Thread]) -> None:
        """Wait until nobody works any more, whatever interrupts: what they write to will be closed and deleted."""
        interruption: BaseException | None = None
        for thread in others:
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException as error:  # noqa: BLE001 - raised below
                    interruption = self._error = error
        if interruption is not None:
            raise interruption

    def _serve(self) -> None:
        try:
            hand = self._make()
            while self._error is None:
                with self._lock:
                    job = next(self._jobs, None)
                if job is None:
                    return
                job(hand)
        except BaseException as error:  # noqa: BLE001 - raised by `run`, in the thread that called it
            if self._error is None:
                self._error = error
