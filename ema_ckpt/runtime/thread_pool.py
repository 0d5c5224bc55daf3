"""A pool of workers that take jobs from shared streams, each with buffers of its own."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Generic, TypeVar

Hand = TypeVar("Hand")
Job = TypeVar("Job")
_MOST = 8


def usable_cpus() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(threads: int | None) -> int:
    """Workers to start: what was asked for, else one for each usable processor, at most eight."""
    return threads or min(usable_cpus(), _MOST)


def run_jobs(
    jobs: Iterator[Callable[[Hand], None]], threads: int, make: Callable[[], Hand]
) -> None:
    """Do all jobs, the caller's thread being one of the workers.

    Args:
        jobs: taken one at a time by whoever is free; making the next one may read headers.
        make: called once in each worker, for what its jobs work with.

    Raises:
        BaseException: the first that a job raised; the others stop after the job they are at.
    """
    run_streams(iter((jobs,)), threads, make)


def run_streams(
    streams: Iterator[Iterator[Callable[[Hand], None]]], threads: int, make: Callable[[], Hand]
) -> None:
    """As `run_jobs`; workers keep to different streams as long as there are any, then share what is
    left.

    For jobs that hinder each other, as those that write to one file do: the kernel lets one thread
        do so at a time.
    """
    _Pool(streams, make).run(threads)


def interleaved(streams: Sequence[Sequence[Job]], abreast: int, length: int) -> list[Job]:
    """The same for jobs in a list, of which whoever is free takes `length` in a row: in turn from
    so many streams.
    """
    out: list[Job] = []
    for first in range(0, len(streams), abreast):
        group = streams[first : first + abreast]
        rows = zip_longest(
            *([jobs[at : at + length] for at in range(0, len(jobs), length)] for jobs in group)
        )
        out += [job for row in rows for turn in row for job in turn or ()]
    return out


class _Pool(Generic[Hand]):
    def __init__(
        self, streams: Iterator[Iterator[Callable[[Hand], None]]], make: Callable[[], Hand]
    ) -> None:
        self._fresh = streams
        self._begun: list[Iterator[Callable[[Hand], None]]] = []
        self._make = make
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, threads: int) -> None:
        others = [threading.Thread(target=self._serve, daemon=True) for _ in range(threads - 1)]
        try:
            with contextlib.suppress(
                RuntimeError
            ):  # no more threads are allowed: those that are do the work
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
        """Wait until nobody works any more, whatever interrupts: what they write to will be closed
        and deleted.
        """
        interruption: BaseException | None = None
        for thread in others:
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException as error:  # noqa: BLE001 - raised below
                    interruption = self._error = error
        if interruption is not None:
            raise interruption

    def _next_stream(self) -> Iterator[Callable[[Hand], None]] | None:
        with self._lock:
            fresh = next(self._fresh, None)
            if fresh is None:
                return self._begun[-1] if self._begun else None
            self._begun.append(fresh)
            return fresh

    def _end(self, stream: Iterator[Callable[[Hand], None]]) -> None:
        with self._lock:
            if stream in self._begun:
                self._begun.remove(stream)

    def _serve(self) -> None:
        try:
            hand = self._make()
            while self._error is None and (stream := self._next_stream()) is not None:
                while self._error is None:
                    with self._lock:
                        job = next(stream, None)
                    if job is None:
                        break
                    job(hand)
                self._end(stream)
        except BaseException as error:  # noqa: BLE001 - raised by `run`, in the thread that called it
            if self._error is None:
                self._error = error
