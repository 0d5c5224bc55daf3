"""Numbered jobs, done by copies of this process.

For work of many short calls of numpy: threads wait for one another's lock at each of them, which took a third of
the time of two threads.
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
from collections.abc import Callable, Iterator
from typing import NoReturn

__all__ = ["can_fork", "run_forked"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_S = 0.1
_TURN = struct.Struct("<i")
_MOST_TURNS = 4096  # a pipe of the least capacity, 64 KiB, holds four times as many

Progress = Callable[[int], None]
Work = Callable[[Iterator[int], Progress], bytes]


def can_fork() -> bool:
    """Whether copies of this process can work: none of its locks may be held, and torch keeps threads of its own."""
    return hasattr(os, "fork") and threading.active_count() == 1 and "torch" not in sys.modules


def run_forked(work: Work, jobs: int, count: int, progress: Progress | None = None) -> list[bytes] | None:
    """What `work(numbers, tell)` gives here and in `count` − 1 copies; None if a copy failed.

    Args:
        work: does the jobs whose numbers it is given, and tells the bytes of each when it is finished. What it
            raises in a copy is lost.
        progress: is told the bytes that any of them finished, here.

    Raises:
        BaseException: what `work` raises here.
    """
    board, turns = _Board(count), _Turns(jobs)
    copies: list[_Copy] = []

    def tell(nbytes: int) -> None:
        board.add(0, nbytes)
        if progress is not None:
            progress(board.news())

    try:
        copies.extend(_Copy(work, turns, board, index) for index in range(1, count))
        results = [work(iter(turns), tell)]
        results += [result for copy in copies if (result := copy.result(tell)) is not None]
        tell(0)
        return results if len(results) == count else None
    finally:
        for copy in copies:
            copy.end()
        turns.close()


class _Turns:
    """Numbers that whoever is free takes next, through a pipe that all copies read."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._step = -(-jobs // _MOST_TURNS) or 1
        self._near, far = os.pipe()
        with open(far, "wb") as pipe:
            pipe.write(b"".join(map(_TURN.pack, range(0, jobs, self._step))))

    def __iter__(self) -> Iterator[int]:
        while turn := os.read(self._near, _TURN.size):
            (first,) = _TURN.unpack(turn)
            yield from range(first, min(first + self._step, self._jobs))

    def close(self) -> None:
        os.close(self._near)


class _Board:
    """Bytes that each process has finished, in memory that all see."""

    def __init__(self, count: int) -> None:
        self._counts = memoryview(mmap.mmap(-1, 8 * count)).cast("q")
        self._told = 0

    def add(self, index: int, nbytes: int) -> None:
        self._counts[index] += nbytes

    def news(self) -> int:
        """Bytes finished since the last call."""
        total = sum(self._counts)
        news, self._told = total - self._told, total
        return news


class _Copy:
    """A copy of this process that works until no turn is left, and ends."""

    def __init__(self, work: Work, turns: _Turns, board: _Board, index: int) -> None:
        self._is_gone = False
        parent = os.getpid()
        self._pipe, far = os.pipe()
        with _blocked():  # a signal must not unwind the copy, which has the caller's stack
            self._pid = os.fork()
            if not self._pid:
                _do(work, turns, board, index, parent, far)
        os.close(far)

    def result(self, tell: Progress) -> bytes | None:
        """What it sent; None where it failed."""
        parts = []
        while True:
            if not select.select([self._pipe], [], [], _PATIENCE_S)[0]:
                tell(0)
            elif part := os.read(self._pipe, 1 << 20):
                parts.append(part)
            else:
                return b"".join(parts) if self._ended_well() else None

    def end(self) -> None:
        """Stop it if it still works."""
        os.close(self._pipe)
        if not self._is_gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._ended_well()

    def _ended_well(self) -> bool:
        self._is_gone = True
        with contextlib.suppress(ChildProcessError):  # someone else collects this process' children
            return os.waitpid(self._pid, 0)[1] == 0
        return False


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _do(work: Work, turns: _Turns, board: _Board, index: int, parent: int, far: int) -> NoReturn:
    """Be the copy."""
    code = 1
    try:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

        def tell(nbytes: int) -> None:
            board.add(index, nbytes)
            if os.getppid() != parent:
                os._exit(1)

        result = work(iter(turns), tell)
        with open(far, "wb") as pipe:
            pipe.write(result)
        code = 0
    finally:
        os._exit(code)
