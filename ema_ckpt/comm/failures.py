"""What went wrong on some ranks, as the same error on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ema_ckpt.core import errors
from ema_ckpt.core.errors import CollectiveError, EmaCkptError


def described(failure: Exception) -> dict[str, str]:
    """An error in a form that survives JSON."""
    if isinstance(failure, EmaCkptError):
        return {"kind": type(failure).__name__, "code": failure.code, "message": str(failure)}
    return {"kind": "", "code": "rank-failed", "message": f"{type(failure).__name__}: {failure}"}


def joined(call: str, failed: Mapping[int, Mapping[str, str]], size: int) -> EmaCkptError:
    """One error of what `described` gave on each rank that failed, of the class and code of the
    lowest.

    Args:
        call: what the user called.
        size: how many ranks took part.
    """
    by_message: dict[str, list[int]] = {}
    for rank, report in failed.items():
        by_message.setdefault(report["message"], []).append(rank)
    first = failed[min(failed)]
    kind: Any = getattr(errors, first["kind"], CollectiveError)
    message = "; ".join(
        text if len(ranks) == size else f"{named_ranks(ranks)}: {text}"
        for text, ranks in by_message.items()
    )
    return kind(first["code"], message if kind is not CollectiveError else f"{call}: {message}")  # type: ignore[no-any-return]


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1–3`, `ranks 0, 2–5`: how messages name ranks."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
