"""Steps that succeed on all ranks or fail on all of them, with the cause from the rank it had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ema_ckpt.comm.channel import Channel, mark_told
from ema_ckpt.core import errors
from ema_ckpt.core.errors import CollectiveError, EmaCkptError
from ema_ckpt.core.text import format_ranks

T = TypeVar("T")
_INTERRUPT = "interrupt"  # instead of a class of errors


def run_on_all_ranks(channel: Channel, call: str, step: Callable[[], T]) -> T:
    """Run `step` on every rank; if it raises on one, raise on all once all are done.

    Raises:
        EmaCkptError: of the class and code that a step raised.
        CollectiveError: `rank-failed`: a step raised anything else, or a rank died. An interrupt or
            an exit is raised as it is where it came, once the others know.
    """
    failure: BaseException | None = None
    result: T
    try:
        result = step()
    except BaseException as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
        failure = error
    reports = channel.exchange(None if failure is None else describe_error(failure))
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if failed:
        is_plain = failure is None or isinstance(failure, Exception)
        if failure is not None and (channel.gloo is None or not is_plain):
            mark_told(failure, is_told=True)
            raise failure
        merged = merge_errors(call, failed, channel.size)
        if any(report["kind"] == _INTERRUPT for report in failed.values()):
            # That rank goes its own way: an error that the others handle together would let them
            # wait for it.
            merged = CollectiveError("rank-failed", str(merged))
        raise merged from failure
    return result


def describe_error(failure: BaseException) -> dict[str, str]:
    """Return an error as plain JSON values."""
    if isinstance(failure, EmaCkptError):
        return {"kind": type(failure).__name__, "code": failure.code, "message": str(failure)}
    message = f"{type(failure).__name__}: {failure}".removesuffix(": ")
    kind = "" if isinstance(failure, Exception) else _INTERRUPT
    return {"kind": kind, "code": "rank-failed", "message": message}


def merge_errors(call: str, reports: Mapping[int, Mapping[str, str]], size: int) -> EmaCkptError:
    """Return one error for `describe_error` reports by rank, of the lowest rank's class and code.

    `call` is what the user called, `size` the number of ranks that took part.
    """
    ranks_by_message: dict[str, list[int]] = {}
    for rank, report in reports.items():
        ranks_by_message.setdefault(report["message"], []).append(rank)
    parts = [
        text if len(ranks) == size else f"{format_ranks(ranks)}: {text}"
        for text, ranks in ranks_by_message.items()
    ]
    message = "; ".join(parts)
    first = reports[min(reports)]
    kind: Any = getattr(errors, first["kind"], CollectiveError)
    if kind is CollectiveError:
        message = f"{call}: {message}"
    return kind(first["code"], message)  # type: ignore[no-any-return]
