"""Limits on workers and memory, as the command line's `--threads` and `--max-memory` give them."""

from __future__ import annotations

import os

from ema_ckpt.core.arguments import whole_number
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.text import parse_size

MIN_BUDGET_NBYTES = 4 << 20
MAX_RANKS = 1 << 20
_MAX_WORKERS = 8
_LOCAL_BUDGET_NBYTES = 16 << 20
_REMOTE_BUDGET_NBYTES = 256 << 20


def parse_workers(threads: int | None) -> int:
    """Return the number of workers, by default one for each usable processor, at most eight.

    Raises:
        UsageError: `usage` below 1, and for what is no whole number.
    """
    if threads is not None and whole_number(threads, "--threads") < 1:
        raise UsageError("usage", f"--threads {threads}: expected 1 or more")
    return threads or min(_usable_processors(), _MAX_WORKERS)


def _usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_ranks(count: int, what: str) -> int:
    """Return a number of ranks, given or derived, if a checkpoint can have so many.

    Raises:
        UsageError: `usage` below 1 and above 2^20, and for what is no whole number.
    """
    count = whole_number(count, what)
    if not 1 <= count <= MAX_RANKS:
        raise UsageError("usage", f"{what} {count}: expected 1 to {MAX_RANKS} ranks")
    return count


def parse_budget(max_memory: int | str | None) -> int | None:
    """Parse `--max-memory` into bytes. Raises UsageError `usage` below 4 MiB."""
    budget = None if max_memory is None else parse_size(max_memory)
    if budget is not None and budget < MIN_BUDGET_NBYTES:
        raise UsageError("usage", f"--max-memory {max_memory}: expected 4MiB or more")
    return budget


def default_budget(remote: bool) -> int:
    """Bytes of buffers in flight by default; requests to a URL take longer and so need more."""
    return _REMOTE_BUDGET_NBYTES if remote else _LOCAL_BUDGET_NBYTES
