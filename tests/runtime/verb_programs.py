"""Programs that run verbs which read, by one worker, by threads and by child processes; see `fork_programs`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator

os.environ["OPENBLAS_NUM_THREADS"] = "1"

from ema_ckpt.cli.main import main
from ema_ckpt.runtime import executor
from ema_ckpt.runtime.fork_pool import can_fork
from tests.runtime.fork_programs import count_processes, harm_children, no_child_is_left

MOST = 3


@contextlib.contextmanager
def threads_only() -> Iterator[None]:
    """Forbid children, as another thread does."""
    executor.can_fork = lambda: False
    try:
        yield
    finally:
        executor.can_fork = can_fork


def document(*words: object) -> tuple[int, str]:
    """Run a command line; return its exit code and its JSON document."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            main([*map(str, words), "--json"])
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue()
    raise RuntimeError("a command line always exits")


def compare_ways(*words: str) -> None:
    """Print the exit code, how many children of how many ended well, and whether all ways agree."""
    runs = count_processes()
    one = document(*words, "--threads", 1)
    assert not runs, "one worker forks no children"
    with threads_only():
        by_threads = document(*words, "--threads", MOST)
    assert not runs
    while not can_fork():  # the system still counts a thread that has just ended
        time.sleep(0.01)
    by_processes = document(*words, "--threads", MOST)
    assert no_child_is_left()
    same = one == by_threads == by_processes
    if not same:
        print(one, by_threads, by_processes, sep="\n", file=sys.stderr)
    print(one[0], runs, same)


def compare_harmed(how: str, *words: str) -> None:
    """Print whether the result is the same though children fail, and how many runs lost some."""
    one = document(*words, "--threads", 1)
    runs = count_processes()
    harm_children(how)
    harmed = document(*words, "--threads", MOST)
    assert no_child_is_left()
    print(one == harmed, sum(asked > ended for asked, ended in runs))
