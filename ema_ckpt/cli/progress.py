"""A bar on the terminal: bytes done and in all, percent, rate, time left; for work over a second.

No thread redraws it: a process that has one cannot be forked safely.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from ema_ckpt.core.text import format_size

_SHOWN_AFTER_SECONDS = 1.0
_REDRAW_SECONDS = 0.1
_MAX_CELLS = 40
_bars: list[Bar] = []  # that are on the terminal: one, or none


class Bar:
    """Callback of a verb: called with finished bytes, and before them with the bytes to come."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._total = 0
        self._done = 0
        self._started = self._drawn = time.monotonic()
        self._width = 0  # of the line on the terminal

    def expect(self, nbytes: int) -> None:
        """Add bytes to those that will be done."""
        self._total += nbytes

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if now - self._started >= _SHOWN_AFTER_SECONDS and now - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            self._draw(self.line(now - self._started, _columns() - 1))

    def line(self, seconds: float, columns: int) -> str:
        """Return what the terminal shows after so many seconds, in so many columns.

        The bar gets the columns that the numbers leave; without a total there is none.
        """
        rate = self._done / max(seconds, 1e-9)
        rate_text = f"{format_size(int(rate))}/s"
        if not self._total:
            return f"{self._task}  {format_size(self._done)}  {rate_text}"[:columns]
        done = min(self._done, self._total)
        left = _duration((self._total - done) / max(rate, 1.0))
        sizes = f"{format_size(done):>7} of {format_size(self._total)}"
        numbers = f"{100 * done // self._total:3d} %  {sizes}  {rate_text:>9}  {left} left"
        cells = min(columns - len(self._task) - len(numbers) - 4, _MAX_CELLS)
        if cells < 5:
            return f"{self._task}  {numbers}"[:columns]
        full = cells * done // self._total
        return f"{self._task}  {'█' * full}{'░' * (cells - full)}  {numbers}"

    def clear(self) -> None:
        """Remove the line from the terminal."""
        self._draw("")
        self._width = 0

    def _draw(self, line: str) -> None:
        if not line and not self._width:
            return
        blank = " " * (self._width - len(line))
        with contextlib.suppress(OSError, UnicodeError):  # what is being done goes on without
            sys.stderr.write(f"\r{line}{blank}" if line else f"\r{blank}\r")
            sys.stderr.flush()
        self._width = len(line)


@contextlib.contextmanager
def progress(talks: bool, task: str) -> Iterator[Bar | None]:
    """Yield the callback that shows progress; None where nobody looks at a terminal."""
    if not talks or not sys.stderr.isatty():
        yield None
        return
    bar = Bar(task)
    _bars.append(bar)
    try:
        yield bar
    finally:
        _bars.remove(bar)
        bar.clear()


def clear_line() -> None:
    """Make room on the terminal for another line; the bar comes again below it."""
    for bar in _bars:
        bar.clear()


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _duration(seconds: float) -> str:
    """Return a duration in its two largest units: `7 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
