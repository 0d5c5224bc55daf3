"""Steps that succeed on all ranks or fail on all of them, with the cause from the rank that had it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ema_ckpt import errors
from ema_ckpt.ema.rendezvous import Channel, named_ranks
from ema_ckpt.errors import CollectiveError, EmaCkptError

__all__ = ["agreed"]

T = TypeVar("T")


def agreed(ours: Channel, call: str, step: Callable[[], T]) -> T:
    """Run `step` on every rank; where one rank's step raises, all ranks raise, and none before all are done.

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
    reports = ours.exchange(None if failure is None else _described(failure))
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if failed:
        if failure is not None and ours.gloo is None:
            raise failure
        raise _shared(call, failed, ours.size) from failure
    return result


def _described(failure: Exception) -> dict[str, str]:
    if isinstance(failure, EmaCkptError):
        return {"kind": type(failure).__name__, "code": failure.code, "message": str(failure)}
    return {"kind": "", "code": "rank-failed", "message": f"{type(failure).__name__}: {failure}"}


def _shared(call: str, failed: dict[int, dict[str, str]], size: int) -> EmaCkptError:
    by_message: dict[str, list[int]] = {}
    for rank, report in failed.items():
        by_message.setdefault(report["message"], []).append(rank)
    first = next(iter(failed.values()))
    kind: Any = getattr(errors, first["kind"], CollectiveError)
    message = "; ".join(
        text if len(ranks) == size else f"{named_ranks(ranks)}: {text}" for text, ranks in by_message.items()
    )
    return kind(first["code"], message if kind is not CollectiveError else f"{call}: {message}")  # type: ignore[no-any-return]
