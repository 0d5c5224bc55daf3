"""Worker threads that take jobs from shared streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

JobT = TypeVar("JobT")


def run_threads(
    start_worker: Callable[[], Callable[[JobT], None]],
    streams: Iterable[Iterable[JobT]],
    threads: int,
) -> None:
    """Do all jobs in `threads` workers, the caller's thread being one of them.

    Args:
        start_worker: called once in each worker; returns what does one job with its buffers.
        streams: jobs that hinder each other, as writes to one file do, share a stream: workers keep
            to different streams as long as there are any. Taking the next job may read headers.

    Raises:
        BaseException: the first that a job raised; the others stop after the job they are at.
    """
    _Pool(start_worker, streams).run(threads)


class _Pool(Generic[JobT]):
    def __init__(
        self, start_worker: Callable[[], Callable[[JobT], None]], streams: Iterable[Iterable[JobT]]
    ) -> None:
        self._start_worker = start_worker
        self._fresh = iter(streams)
        self._begun: list[Iterator[JobT]] = []
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, threads: int) -> None:
        others = [threading.Thread(target=self.serve, daemon=True) for _ in range(threads - 1)]
        try:
            # If no more threads are allowed, those that started do the work.
            with contextlib.suppress(RuntimeError):
                for thread in others:
                    thread.start()
            self.serve()
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            # Join all threads, whatever interrupts: the files they write to will be closed.
            interruption: BaseException | None = None
            while any(thread.is_alive() for thread in others):
                try:
                    for thread in others:
                        if thread.is_alive():
                            thread.join()
                except BaseException as error:  # noqa: BLE001 - raised below
                    interruption = self._error = error
            if interruption is not None:
                raise interruption
        if self._error is not None:
            raise self._error

    def serve(self) -> None:
        """Do jobs until none is left or one has failed, in one worker."""
        try:
            run_job = self._start_worker()
            while self._error is None and (stream := self.next_stream()) is not None:
                while self._error is None:
                    with self._lock:
                        job = next(stream, None)
                    if job is None:
                        break
                    run_job(job)
                with self._lock:
                    if stream in self._begun:
                        self._begun.remove(stream)
        except BaseException as error:  # noqa: BLE001 - raised by `run`, in the calling thread
            if self._error is None:
                self._error = error

    def next_stream(self) -> Iterator[JobT] | None:
        """Return a stream that nobody works on, or else the one begun last."""
        with self._lock:
            fresh = next(self._fresh, None)
            if fresh is None:
                return self._begun[-1] if self._begun else None
            stream = iter(fresh)
            self._begun.append(stream)
            return stream
