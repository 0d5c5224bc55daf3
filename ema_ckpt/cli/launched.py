"""A command that `torchrun` started several times: writers share the work, anything else is done by
the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ema_ckpt.comm.launched import is_launched, process_group, rank_here

_SHARED = ("consolidate", "reshard", "convert")


def run_launched(argv: list[str], run: Callable[[list[str]], int]) -> int:
    """Run a command line alone, or as one of several processes.

    Raises:
        CollectiveError: `rank-failed` if another process failed.
    """
    if not is_launched():
        return run(argv)
    if not argv or argv[0] not in _SHARED:
        return 0 if rank_here() else run(argv)
    with process_group():
        return run(argv)


def silenced(argv: Sequence[str]) -> list[str]:
    """The arguments of this process: only the first one of several prints what a command says."""
    if not rank_here():
        return list(argv)
    quiet = [argument for argument in argv if argument != "--json"]
    return [*quiet[:1], "--quiet", *quiet[1:]] if quiet[:1] and quiet[0] in _SHARED else quiet
