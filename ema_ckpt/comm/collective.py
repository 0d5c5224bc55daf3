"""Steps that succeed on all ranks or fail on all of them, with the cause from the rank that had
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ema_ckpt.comm.failures import described, joined
from ema_ckpt.comm.rendezvous import Channel

T = TypeVar("T")


def agreed(ours: Channel, call: str, step: Callable[[], T]) -> T:
    """Run `step` on every rank; where one rank's step raises, all ranks raise, and none before all
    are done.

    Raises:
        EmaCkptError: of the class and code that a step raised.
        CollectiveError: `rank-failed`: a step raised anything else, or a rank died.
    """
    failure: Exception | None = None
    result: T
    try:
        result = step()
    except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
        failure = error
    reports = ours.exchange(None if failure is None else described(failure))
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if failed:
        if failure is not None and ours.gloo is None:
            raise failure
        raise joined(call, failed, ours.size) from failure
    return result
