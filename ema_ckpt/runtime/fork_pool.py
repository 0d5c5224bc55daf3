"""Forked child processes that take numbered jobs from one pipe and send their results back.

For work of many short numpy calls, where threads would wait for the interpreter's lock: two
processes take two thirds of the time of two threads.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_MS = 100
_NUMBER = struct.Struct("<i")
_MAX_BATCHES = 1024  # fit into the one page that a pipe has at least
# Ends what a child sends: neither its exit status nor the end of the pipe can be relied on.
_END = b"."
_THREADS = "/proc/self/task"
_MEMORY = "/proc/self/statm"  # in pages: size, resident, ...
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

OnBytes = Callable[[int], None]


class _LostError(Exception):
    """A child ended without its result."""


def can_fork() -> bool:
    """Check that no other thread may hold a lock in a child; torch starts threads of its own."""
    if not hasattr(os, "fork") or threading.active_count() > 1 or "torch" in sys.modules:
        return False
    return not os.path.isdir(_THREADS) or len(os.listdir(_THREADS)) == 1


def memory_nbytes() -> int:
    """Return the bytes of this process that are in memory; 0 where the system does not tell."""
    try:
        with open(_MEMORY) as file:
            pages = int(file.read().split()[1])
    except OSError:
        return 0
    return pages * mmap.PAGESIZE


def jobs_per_batch(jobs: int) -> int:
    """Count the consecutive jobs that a process takes at once."""
    return -(-jobs // _MAX_BATCHES) or 1


def run_forked(
    run_jobs: Callable[[Iterator[int], OnBytes], None],
    dump: Callable[[], bytes],
    jobs: int,
    processes: int,
    on_progress: OnBytes,
) -> list[bytes] | None:
    """Run `jobs` jobs here and in up to `processes` − 1 children.

    Args:
        run_jobs: does the jobs whose numbers it iterates over and reports the bytes of each. What
            it raises in a child is lost.
        dump: called in each child at its end, for its result.
        on_progress: called here with the bytes that any process finished since the last call.

    Returns:
        The children's results; None if one failed or none can be forked: then the jobs are undone.

    Raises:
        BaseException: what `run_jobs` raises here.
    """
    counters = _ProgressCounters(processes)
    parent = os.getpid()

    def on_finished(nbytes: int) -> None:
        counters.add(0, nbytes)
        on_progress(counters.news())

    def work_in_child(index: int) -> bytes:
        def on_finished_there(nbytes: int) -> None:
            counters.add(index, nbytes)
            if os.getppid() != parent:
                os._exit(1)

        run_jobs(queue.numbers(), on_finished_there)
        return dump()

    with _Children() as children:
        try:
            queue = children.open_queue(jobs)
            for index in range(1, min(processes, jobs)):
                children.fork(partial(work_in_child, index))
        except OSError:  # no memory, too many processes or files
            return None
        try:
            run_jobs(queue.numbers(children), on_finished)
            results = [child.result(on_finished) for child in children]
        except _LostError:
            return None
        on_finished(0)
        return results


class _Children(list["_Child"]):
    """The child processes of a run; those that still work at its end are killed."""

    def __enter__(self) -> _Children:
        self._queue: _JobQueue | None = None
        return self

    def open_queue(self, jobs: int) -> _JobQueue:
        self._queue = _JobQueue(jobs)
        return self._queue

    def fork(self, work: Callable[[], bytes]) -> None:
        """Fork one child, with signals blocked until it is in the list; it sends its result."""
        parent = os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            near, far = os.pipe()
            try:
                pid = os.fork()
            except OSError:
                os.close(near)
                os.close(far)
                raise
            if not pid:
                for other in self:
                    os.close(other.pipe)
                os.close(near)
                run_as_child(work, parent, far, mask)
            os.close(far)
            self.append(_Child(pid, near))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def __exit__(self, *_: object) -> None:
        """Kill the children that still work, then reap all; signals wait until that is done."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            for child in self:
                os.close(child.pipe)
                if not child.has_ended:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)
            for child in self:
                with contextlib.suppress(ChildProcessError):  # somebody else reaped it
                    os.waitpid(child.pid, 0)
            if self._queue is not None:
                self._queue.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_as_child(
    work: Callable[[], bytes], parent: int, pipe: int, mask: set[signal.Signals | int]
) -> NoReturn:
    """Send what `work` returns, and end without unwinding the stack of the parent's callers."""
    try:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if sys.platform == "linux":
            # Die with the parent, whose locks this process would go on to hold; elsewhere it is
            # noticed after the job at hand.
            with contextlib.suppress(ImportError, OSError, AttributeError):
                import ctypes

                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        result = work()
        with open(pipe, "wb") as stream:
            stream.write(result + _END)
    finally:
        os._exit(0)


class _JobQueue:
    """Job numbers in a pipe that all processes read."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._step = jobs_per_batch(jobs)
        self._pipe, far = os.pipe()
        with open(far, "wb") as stream:
            stream.write(b"".join(map(_NUMBER.pack, range(0, jobs, self._step))))

    def numbers(self, children: Sequence[_Child] = ()) -> Iterator[int]:
        """Take numbers until none is left. Raises `_LostError` if a child ended before that."""
        poll = select.poll()
        for child in children:
            poll.register(child.pipe, 0)  # reports only that the other end was closed
        while True:
            ended = poll.poll(0)
            number = os.read(self._pipe, _NUMBER.size)
            if not number:
                return
            if ended:
                raise _LostError
            (first,) = _NUMBER.unpack(number)
            yield from range(first, min(first + self._step, self._jobs))

    def close(self) -> None:
        os.close(self._pipe)


class _ProgressCounters:
    """Bytes that each process has finished, in shared memory."""

    def __init__(self, count: int) -> None:
        self._counts = memoryview(mmap.mmap(-1, 8 * count)).cast("q")
        self._reported = 0

    def add(self, index: int, nbytes: int) -> None:
        self._counts[index] += nbytes

    def news(self) -> int:
        """Return the bytes finished since the last call."""
        total = sum(self._counts)
        news, self._reported = total - self._reported, total
        return news


class _Child:
    """A child process, seen from the parent."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self.pipe = pipe
        self.has_ended = False

    def result(self, on_finished: OnBytes) -> bytes:
        """Wait for the child's result, reporting progress. Raises `_LostError` if it failed."""
        poll = select.poll()
        poll.register(self.pipe, select.POLLIN)
        parts = []
        while True:
            if not poll.poll(_POLL_MS):
                on_finished(0)
                continue
            part = os.read(self.pipe, 1 << 20)
            if part:
                parts.append(part)
                continue
            self.has_ended = True
            sent = b"".join(parts)
            if not sent.endswith(_END):
                raise _LostError
            return sent.removesuffix(_END)
