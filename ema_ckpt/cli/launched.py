"""`--distributed`: a command as one of several processes that a launcher started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ema_ckpt.comm.launched import command_group, is_launched, launched_rank

_VERBS = ("consolidate", "reshard", "convert")


def is_distributed(argv: Sequence[str]) -> bool:
    """Check whether a command line shares its work with other processes."""
    return "--distributed" in argv and argv[0] in _VERBS


def is_first(argv: Sequence[str]) -> bool:
    """Check whether this process reports what the command did."""
    return not is_distributed(argv) or launched_rank() == 0


def run_distributed(argv: list[str], run: Callable[[list[str]], int]) -> int:
    """Run a command line alone, or together with the other processes.

    Raises:
        CollectiveError: `rank-failed` if another process failed.
    """
    if not is_distributed(argv):
        return run(argv)
    if not is_first(argv):
        argv[:] = [argv[0], "--quiet", *[word for word in argv[1:] if word != "--json"]]
    with command_group(lambda text: print(text, file=sys.stderr, flush=True)):
        return run(argv)


def distributed_hint(argv: Sequence[str], code: str) -> str:
    """Return what to add to an error that processes cause which do not know of one another."""
    if is_distributed(argv) or not argv:
        return ""
    if code in ("busy", "target-exists") and argv[0] in _VERBS and is_launched():
        return "; where a launcher started several processes, pass --distributed"
    return ""
