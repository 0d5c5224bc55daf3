"""Numbered jobs, done by copies of this process.

For work of many short calls of numpy: threads wait for one another's lock at each of them, which
took a third of the time of two threads.
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
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_MS = 100
_TURN = struct.Struct("<i")
_MOST_TURNS = 1024  # fit into the one page that a pipe has at least
_WHOLE = (
    b"."  # ends what a copy sends: neither its exit status nor the end of the pipe can be relied on
)
_TASKS = "/proc/self/task"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Progress = Callable[[int], None]
Work = Callable[[Iterator[int], Progress], bytes]


class _LostError(Exception):
    """A copy has ended while there was work."""


def can_fork() -> bool:
    """Whether copies of this process can work: no other thread may hold a lock, and torch starts
    some of its own.
    """
    if not hasattr(os, "fork") or threading.active_count() > 1 or "torch" in sys.modules:
        return False
    return not os.path.isdir(_TASKS) or len(os.listdir(_TASKS)) == 1


def run_forked(
    work: Work, jobs: int, count: int, progress: Progress | None = None
) -> list[bytes] | None:
    """What `work(numbers, tell)` gives here and in up to `count` − 1 copies; None if a copy failed
    or none can be made.

    Args:
        work: does the jobs whose numbers it is given, and tells the bytes of each when it is
            finished. What it raises in a copy is lost.
        progress: is told the bytes that any of them finished, here; with None as the result, that
            they are not.

    Raises:
        BaseException: what `work` raises here.
    """
    board = _ProgressCounters(count)

    def tell(nbytes: int) -> None:
        board.add(0, nbytes)
        if progress is not None:
            progress(board.news())

    results = _results(work, jobs, count, board, tell)
    if results is None and progress is not None:
        progress(-board.told)
    return results


def _results(
    work: Work, jobs: int, count: int, board: _ProgressCounters, tell: Progress
) -> list[bytes] | None:
    copies: list[_Child] = []
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(_end, copies)
        try:
            turns = cleanup.enter_context(contextlib.closing(_JobQueue(jobs)))
            _make(copies, work, turns, board, min(count, jobs) - 1)
        except OSError:  # no memory, too many processes or files
            return None
        try:
            results = [work(turns.taken(copies), tell)]
        except _LostError:
            return None
        for copy in copies:
            result = copy.result(tell)
            if result is None:
                return None
            results.append(result)
        tell(0)
        return results


def _make(
    copies: list[_Child], work: Work, turns: _JobQueue, board: _ProgressCounters, count: int
) -> None:
    """Append as many copies; no signal comes between one's beginning and its place in the list."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for index in range(1, count + 1):
            near, far = os.pipe()
            parent = os.getpid()
            try:
                pid = os.fork()
            except OSError:
                os.close(near)
                os.close(far)
                raise
            if not pid:
                for copy in copies:
                    os.close(copy.pipe)
                os.close(near)
                _do(work, turns, board, index, parent, far, before)
            os.close(far)
            copies.append(_Child(pid, near))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(copies: Sequence[_Child]) -> None:
    """Stop those that still work, all before any is waited for, and forget them, whatever signal
    comes meanwhile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        for copy in copies:
            copy.stop()
        for copy in copies:
            copy.forget()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def jobs_per_batch(jobs: int) -> int:
    """How many jobs that follow one another are taken at once."""
    return -(-jobs // _MOST_TURNS) or 1


class _JobQueue:
    """Numbers that whoever is free takes next, through a pipe that all copies read."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._step = jobs_per_batch(jobs)
        self._near, far = os.pipe()
        with open(far, "wb") as pipe:
            pipe.write(b"".join(map(_TURN.pack, range(0, jobs, self._step))))

    def taken(self, copies: Sequence[_Child] = ()) -> Iterator[int]:
        """Those that this process takes. Raises `_LostError` if one of `copies` ends before all are
        taken.
        """
        poll = select.poll()
        for copy in copies:
            poll.register(copy.pipe, 0)  # tells when the other end is closed
        while True:
            ended = poll.poll(0)
            turn = self._take()
            if not turn:
                return
            if ended:
                raise _LostError
            yield from turn

    def _take(self) -> range:
        turn = os.read(self._near, _TURN.size)
        if not turn:
            return range(0)
        (first,) = _TURN.unpack(turn)
        return range(first, min(first + self._step, self._jobs))

    def close(self) -> None:
        os.close(self._near)


class _ProgressCounters:
    """Bytes that each process has finished, in memory that all see."""

    def __init__(self, count: int) -> None:
        self._counts = memoryview(mmap.mmap(-1, 8 * count)).cast("q")
        self.told = 0

    def add(self, index: int, nbytes: int) -> None:
        self._counts[index] += nbytes

    def news(self) -> int:
        """Bytes finished since the last call."""
        total = sum(self._counts)
        news, self.told = total - self.told, total
        return news


class _Child:
    """A copy of this process that works until no turn is left, sends what it found, and ends."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pipe = pipe
        self._pid = pid
        self._has_ended = False

    def result(self, tell: Progress) -> bytes | None:
        """What it sent; None where it failed. Tells progress meanwhile."""
        poll = select.poll()
        poll.register(self.pipe, select.POLLIN)
        parts = []
        while True:
            if not poll.poll(_PATIENCE_MS):
                tell(0)
            elif part := os.read(self.pipe, 1 << 20):
                parts.append(part)
            else:
                sent, self._has_ended = b"".join(parts), True
                return sent.removesuffix(_WHOLE) if sent.endswith(_WHOLE) else None

    def stop(self) -> None:
        """Stop it, if it still works."""
        os.close(self.pipe)
        if not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def forget(self) -> None:
        """Wait until it is gone."""
        with contextlib.suppress(ChildProcessError):  # someone else collects this process' children
            os.waitpid(self._pid, 0)


def _do(
    work: Work,
    turns: _JobQueue,
    board: _ProgressCounters,
    index: int,
    parent: int,
    far: int,
    mask: set[signal.Signals | int],
) -> NoReturn:
    """Be the copy."""
    try:
        for number in _SIGNALS:
            if (
                signal.getsignal(number) is not signal.SIG_IGN
            ):  # a signal must not unwind the caller's stack in here
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _end_with_parent()
        if os.getppid() != parent:
            os._exit(1)

        def tell(nbytes: int) -> None:
            board.add(index, nbytes)
            if os.getppid() != parent:
                os._exit(1)

        result = work(turns.taken(), tell)
        with open(far, "wb") as pipe:
            pipe.write(result + _WHOLE)
    finally:
        os._exit(0)


def _end_with_parent() -> None:
    """Have Linux kill this process when the one that made it ends, whose locks it would go on to
    hold.

    Elsewhere `tell` notices it after the job at hand.
    """
    if sys.platform == "linux":
        with contextlib.suppress(ImportError, OSError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
