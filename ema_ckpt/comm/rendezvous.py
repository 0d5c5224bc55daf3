"""Meeting of ranks before a collective call, and exchange of small values between them.

Ranks meet in the store of the process group, not in a collective: a barrier that times out leaves
its group unusable, a store does not mind. What they exchange then travels over channels of our own,
so that it neither
needs NCCL nor gets in the way of the training's collectives.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ema_ckpt.comm.failures import described, joined, named_ranks
from ema_ckpt.core.errors import CollectiveError

# A rank that dies is noticed at once by its closed connection; this bounds only one that hangs
# while writing.
_GROUP_TIMEOUT = timedelta(hours=2)
# Ranks connect right after they have met: whoever is not there by then has died in between.
_CONNECT_TIMEOUT = timedelta(minutes=2)

_attempts: dict[tuple[int, ...], int] = {}
_attempts_of: object = None  # the default group that `_attempts` counts for
_channels: dict[str, tuple[object, Channel]] = {}
# gloo's threads must have ended before the interpreter goes: one that lets go of a tensor later
# aborts the process. Saves in the background are over by then; threads are joined before this is
# called.
atexit.register(_channels.clear)


def meet(
    call: str,
    timeout: float,
    group: dist.ProcessGroup | None = None,
    failure: Exception | None = None,
) -> None:
    """Return once every rank of `group` (default: all) has come to `call`; a no-op without a
    process group.

    A meeting that fails is over for those who came; whoever comes later takes part in the next one,
    so the group stays usable.

    Args:
        call: what the user called, as messages name it.
        timeout: seconds.
        failure: why this rank cannot go on: every rank raises it, instead of waiting for this one
            later.

    Raises:
        CollectiveError: `rank-failed`: some ranks did not come within `timeout`, or came to another
            call.
        EmaCkptError: of the class and code of a rank's failure.
    """
    if not dist.is_initialized():
        if failure is not None:
            raise failure
        return
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    deadline = time.monotonic() + timeout
    while not _met(call, timeout, deadline, ranks, failure):
        pass


def _met(
    call: str, timeout: float, deadline: float, ranks: tuple[int, ...], failure: Exception | None
) -> bool:
    """Take part in one meeting; False if it had already failed without us."""
    meeting = _Meeting(ranks, _next_attempt(ranks))
    meeting.arrive(call, failure)
    outcome = meeting.outcome(timeout, deadline)
    absent = outcome.get("absent", [])
    if dist.get_rank() in absent:
        return False
    if absent:
        given = outcome.get("timeout", timeout)
        raise CollectiveError(
            "rank-failed",
            f"{call} is collective: {named_ranks(absent)} did not call it within {given:g} s",
        )
    if "calls" in outcome:
        others = "; ".join(
            f"{named_ranks(came)} called {name}" for name, came in outcome["calls"].items()
        )
        raise CollectiveError(
            "rank-failed", f"{call} is collective: the ranks met in different calls: {others}"
        )
    if "failed" in outcome:
        failed = {int(rank): report for rank, report in outcome["failed"].items()}
        raise joined(call, failed, len(ranks)) from failure
    return True


class _Meeting:
    """One attempt of some ranks to meet: a key per rank, a count, and an outcome that is written
    once.
    """

    def __init__(self, ranks: tuple[int, ...], attempt: int) -> None:
        name = "all" if len(ranks) == dist.get_world_size() else "-".join(map(str, ranks))
        self._ranks = ranks
        self._name, self._previous, self._over = (
            f"ema_ckpt/{name}/{attempt - back}" for back in range(3)
        )
        self._store = dist.distributed_c10d._get_default_store()

    def arrive(self, call: str, failure: Exception | None) -> None:
        entry = {"call": call, "failure": None if failure is None else described(failure)}
        self._forget(f"{self._over}/{dist.get_rank()}")  # nobody decides there any more
        self._store.set(f"{self._name}/{dist.get_rank()}", json.dumps(entry))
        if self._store.add(f"{self._name}/count", 1) == len(self._ranks):
            if not self._store.check([f"{self._name}/outcome"]):  # else it failed without us
                self._decide(self._found())
            self._forget(f"{self._previous}/count", f"{self._previous}/outcome")

    def outcome(self, timeout: float, deadline: float) -> dict[str, Any]:
        try:
            left = max(deadline - time.monotonic(), 0.001)
            self._store.wait([f"{self._name}/outcome"], timedelta(seconds=left))
        except RuntimeError:  # the FileStore has no class of its own for it
            absent = [
                rank for rank in self._ranks if not self._store.check([f"{self._name}/{rank}"])
            ]
            # All came, yet nobody decided: one was killed after it arrived. What follows the
            # meeting will miss it.
            self._decide({"absent": absent, "timeout": timeout} if absent else self._found())
        return dict(json.loads(self._store.get(f"{self._name}/outcome")))

    def _found(self) -> dict[str, Any]:
        """The outcome once all have arrived."""
        entries = {
            rank: json.loads(self._store.get(f"{self._name}/{rank}")) for rank in self._ranks
        }
        calls: dict[str, list[int]] = {}
        for rank, entry in entries.items():
            calls.setdefault(entry["call"], []).append(rank)
        if len(calls) > 1:
            return {"calls": calls}
        failed = {rank: entry["failure"] for rank, entry in entries.items() if entry["failure"]}
        return {"failed": failed} if failed else {}

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


@dataclass(frozen=True, slots=True, eq=False)
class Channel:
    """Connections between all ranks that only this package uses, apart from every group the
    training has.

    It is a gloo group made by hand: it works beside NCCL-only groups and outlives
    `destroy_process_group`, which an asynchronous save may still need when a script ends. Calls are
    collective and in one order on all ranks.
    Every method raises CollectiveError `rank-failed` if another rank died.
    """

    gloo: Any  # a ProcessGroupGloo, whose methods torch leaves out of its stubs; None: we are alone
    rank: int = 0
    size: int = 1

    def exchange(self, value: Any) -> list[Any]:
        """What every rank passed, in rank order; values must survive JSON."""
        return [json.loads(data) for data in self._all_gathered(json.dumps(value).encode())]

    def exchange_if_different(self, value: Any) -> list[Any]:
        """As `exchange`, but an empty list if all ranks passed the same: large equal values then do
        not travel.
        """
        marks = self.exchange(hashlib.sha256(json.dumps(value).encode()).hexdigest())
        return self.exchange(value) if len(set(marks)) > 1 else []

    def gather(self, data: bytes) -> list[bytes]:
        """On rank 0 the bytes of every rank, in rank order; elsewhere an empty list."""
        if self.gloo is None:
            return [data]
        sizes = self._sizes(len(data))
        parts = (
            [[torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]] if self.rank == 0 else []
        )
        self._wait(self.gloo.gather(parts, [_padded(data, max(sizes))]))
        return (
            [_bytes_of(part, size) for part, size in zip(parts[0], sizes, strict=True)]
            if parts
            else []
        )

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """On each rank its part of what rank 0 passed; other ranks pass nothing."""
        if self.gloo is None:
            return parts[0]
        sizes = self.broadcast_json([len(part) for part in parts])
        mine = torch.empty(max(sizes), dtype=torch.uint8)
        padded = [[_padded(part, max(sizes)) for part in parts]] if self.rank == 0 else []
        self._wait(self.gloo.scatter([mine], padded))
        return _bytes_of(mine, sizes[self.rank])

    def broadcast_json(self, value: Any) -> Any:
        """What rank 0 passed."""
        if self.gloo is None:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(data)])
        self._wait(self.gloo.broadcast([size]))
        content = _padded(data, int(size))
        self._wait(self.gloo.broadcast([content]))
        return json.loads(_bytes_of(content, int(size)))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Pass a contiguous host tensor to the rank that calls `receive`."""
        if self.gloo is not None:
            self._wait(self.gloo.send([tensor.view(-1).view(torch.uint8)], rank, 0))

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill a contiguous host tensor with what `rank` sends."""
        if self.gloo is not None:
            self._wait(self.gloo.recv([tensor.view(-1).view(torch.uint8)], rank, 0))

    def _all_gathered(self, data: bytes) -> list[bytes]:
        if self.gloo is None:
            return [data]
        sizes = self._sizes(len(data))
        parts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        self._wait(self.gloo.allgather([parts], [_padded(data, max(sizes))]))
        return [_bytes_of(part, size) for part, size in zip(parts, sizes, strict=True)]

    def _sizes(self, nbytes: int) -> list[int]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        if self.gloo is not None:
            self._wait(self.gloo.allgather([sizes], [torch.tensor([nbytes])]))
        return [int(size) for size in sizes]

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            raise CollectiveError(
                "rank-failed", f"another rank ended or hung in a collective call: {cause}"
            ) from error


def channel(purpose: str) -> Channel:
    """The channel of all ranks for `purpose`; calls on different channels may run side by side in
    threads.

    Made at the first call, which is collective: `meet` first.

    Raises:
        CollectiveError: `rank-failed`: another rank died before all were connected.
    """
    if not dist.is_initialized():
        return Channel(None)
    world = dist.group.WORLD
    made = _channels.get(purpose)
    if made is None or made[0] is not world:
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return Channel(None)
        store = PrefixStore(f"ema_ckpt/{purpose}", dist.distributed_c10d._get_default_store())
        try:
            gloo = dist.ProcessGroupGloo(store, rank, size, timeout=_CONNECT_TIMEOUT)
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            raise CollectiveError(
                "rank-failed", f"not all ranks could be connected: {cause}"
            ) from error
        gloo._set_default_timeout(_GROUP_TIMEOUT)
        made = _channels[purpose] = (world, Channel(gloo, rank, size))
    return made[1]


def _padded(data: bytes, nbytes: int) -> torch.Tensor:
    padded = torch.zeros(nbytes, dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return padded


def _bytes_of(tensor: torch.Tensor, nbytes: int) -> bytes:
    return tensor[:nbytes].numpy().tobytes()
