"""Meeting of ranks before a collective call, and exchange of small values between them.

Ranks meet in the store of the process group, not in a collective: a barrier that times out leaves its group
unusable, a store does not mind. What they exchange then travels over a gloo group of our own, so that it neither
needs NCCL nor gets in the way of the training's collectives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ema_ckpt.errors import CollectiveError

__all__ = ["control_group", "exchange", "exchange_bytes", "meet", "named_ranks"]

# A rank that dies is noticed at once by its closed connection; this bounds only one that hangs while writing.
_GROUP_TIMEOUT = timedelta(hours=2)

_attempts: dict[tuple[int, ...], int] = {}
_attempts_of: object = None  # the default group that `_attempts` counts for
_control: tuple[object, dist.ProcessGroup] | None = None


def meet(call: str, timeout: float, group: dist.ProcessGroup | None = None) -> None:
    """Return once every rank of `group` (default: all) has come to `call`; a no-op without a process group.

    A meeting that fails is over for those who came; whoever comes later takes part in the next one, so the group
    stays usable.

    Args:
        call: what the user called, as messages name it.
        timeout: seconds.

    Raises:
        CollectiveError: `rank-failed`: some ranks did not come within `timeout`, or came to another call.
    """
    if not dist.is_initialized():
        return
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    deadline = time.monotonic() + timeout
    while not _met(call, timeout, deadline, ranks):
        pass


def _met(call: str, timeout: float, deadline: float, ranks: tuple[int, ...]) -> bool:
    """Take part in one meeting; False if it had already failed without us."""
    meeting = _Meeting(ranks, _next_attempt(ranks))
    meeting.arrive(call)
    outcome = meeting.outcome(deadline)
    absent = outcome.get("absent", [])
    if dist.get_rank() in absent:
        return False
    if absent:
        given = outcome.get("timeout", timeout)
        raise CollectiveError(
            "rank-failed", f"{call} is collective: {named_ranks(absent)} did not call it within {given:g} s"
        )
    if "calls" in outcome:
        others = "; ".join(f"{named_ranks(came)} called {name}" for name, came in outcome["calls"].items())
        raise CollectiveError("rank-failed", f"{call} is collective: the ranks met in different calls: {others}")
    meeting.leave()
    return True


class _Meeting:
    """One attempt of some ranks to meet: a key per rank, a count, and an outcome that is written once."""

    def __init__(self, ranks: tuple[int, ...], attempt: int) -> None:
        name = "all" if len(ranks) == dist.get_world_size() else "-".join(map(str, ranks))
        self._ranks = ranks
        self._previous = f"ema_ckpt/{name}/{attempt - 1}"
        self._name = f"ema_ckpt/{name}/{attempt}"
        self._store = dist.distributed_c10d._get_default_store()

    def arrive(self, call: str) -> None:
        self._store.set(f"{self._name}/{dist.get_rank()}", call)
        if self._store.add(f"{self._name}/count", 1) == len(self._ranks):
            self._decide({"calls": calls} if len(calls := self._calls()) > 1 else {})
            self._forget(f"{self._previous}/count", f"{self._previous}/outcome")

    def outcome(self, deadline: float) -> dict[str, Any]:
        started = time.monotonic()
        try:
            left = max(deadline - started, 0.001)
            self._store.wait([f"{self._name}/outcome"], timedelta(seconds=left))
        except dist.DistStoreError:
            absent = [rank for rank in self._ranks if not self._store.check([f"{self._name}/{rank}"])]
            if absent:
                self._decide({"absent": absent, "timeout": round(time.monotonic() - started, 1)})
        return dict(json.loads(self._store.get(f"{self._name}/outcome")))

    def leave(self) -> None:
        self._forget(f"{self._name}/{dist.get_rank()}")

    def _calls(self) -> dict[str, list[int]]:
        calls: dict[str, list[int]] = {}
        for rank in self._ranks:
            calls.setdefault(self._store.get(f"{self._name}/{rank}").decode(), []).append(rank)
        return calls

    def _decide(self, outcome: dict[str, Any]) -> None:
        # Compare-and-set: the last to arrive and one whose time is over may both want to decide.
        self._store.compare_set(f"{self._name}/outcome", "", json.dumps(outcome))

    def _forget(self, *keys: str) -> None:
        for key in keys:
            try:
                self._store.delete_key(key)
            except (NotImplementedError, RuntimeError):
                return  # a store without deletion keeps a few bytes more


def _next_attempt(ranks: tuple[int, ...]) -> int:
    global _attempts_of
    if _attempts_of is not dist.group.WORLD:
        _attempts.clear()
        _attempts_of = dist.group.WORLD
    _attempts[ranks] = _attempts.get(ranks, 0) + 1
    return _attempts[ranks]


def control_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks that only this package uses; None without a process group.

    Made at the first call, which is collective: `meet` first.
    """
    global _control
    if not dist.is_initialized():
        return None
    if _control is None or _control[0] is not dist.group.WORLD:
        _control = (dist.group.WORLD, dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT))
    return _control[1]


def exchange(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank of `group` passed, in rank order; values must survive JSON.

    Raises:
        CollectiveError: `rank-failed`: another rank died.
    """
    return [json.loads(data) for data in exchange_bytes(json.dumps(value).encode(), group)]


def exchange_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """The bytes every rank of `group` passed, in rank order; only our own without a group.

    Raises:
        CollectiveError: `rank-failed`: another rank died.
    """
    if group is None:
        return [data]
    try:
        return _gathered(data, group)
    except RuntimeError as error:
        raise CollectiveError(
            "rank-failed", f"another rank died or hung during a collective call: {str(error).splitlines()[0]}"
        ) from error


def _gathered(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    count = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(int(size) for size in sizes)
    if not longest:
        return [b""] * count
    mine = torch.zeros(longest, dtype=torch.uint8)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(count)]
    dist.all_gather(parts, mine, group=group)
    return [part.numpy().tobytes()[: int(size)] for part, size in zip(parts, sizes, strict=True)]


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
