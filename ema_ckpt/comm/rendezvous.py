"""Meeting of ranks before a collective call.

Ranks meet in the store of the process group, not in a collective: a barrier that times out leaves
its group unusable, a store does not.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import isnan
from numbers import Real
from typing import Any

import torch.distributed as dist

from ema_ckpt.comm.channel import (
    Channel,
    is_told,
    leave_before_connecting,
    mark_told,
    open_channel,
    pause_after,
)
from ema_ckpt.comm.collective import describe_error, merge_errors
from ema_ckpt.core.errors import CollectiveError, StateError, UsageError
from ema_ckpt.core.text import format_ranks

_LONGEST_WAIT = 10**7  # seconds
_LONGEST_PAUSE = 1.0  # before a rank asks again whether a meeting is over

_SUCCESS: dict[str, Any] = {}  # the outcome of a meeting to which all have come

_attempts: dict[tuple[int, ...], int] = {}
_attempts_of: object = None  # the default group that `_attempts` counts for


class _Waiting(threading.local):
    """The meetings in which this thread waits: several if a signal handler calls in between."""

    def __init__(self) -> None:
        self.meetings: list[_Meeting] = []


_waiting = _Waiting()

_turn = threading.RLock()
_under_way: list[str] = []  # the purposes of the collective calls of the thread that has the turn


def _forget_turn_of_parent() -> None:
    """In a forked child: the thread that had the turn is the parent's."""
    global _turn
    _turn = threading.RLock()
    _under_way.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_turn_of_parent)


@contextmanager
def one_call_at_a_time(call: str, purpose: str) -> Iterator[None]:
    """Hold the turn for a collective call of all ranks, which uses the channel for `purpose`.

    Of two that threads make at once the second waits for the first: each would take messages meant
    for the other, and wait for ever.

    Raises:
        StateError: `usage`: this thread is in the midst of such a call already, which a signal
            handler has interrupted. One that still waits for the other ranks gives up instead.
    """
    is_outermost = not _turn._is_owned()  # type: ignore[attr-defined]
    with _turn:
        if is_outermost:
            _forget_ended_calls()
        waiting = {meeting.depth for meeting in _waiting.meetings}
        is_shared = dist.is_initialized() and dist.get_world_size() > 1
        for depth, other in enumerate(_under_way, 1):
            if other == purpose and depth not in waiting and is_shared:
                raise _in_the_midst(call)
        depth = len(_under_way)
        try:
            _under_way.append(purpose)
            yield
        finally:
            del _under_way[depth:]


def _forget_ended_calls() -> None:
    """Forget what an error left that came while a call was ending, such as one of memory."""
    _under_way.clear()
    _waiting.meetings[:] = [meeting for meeting in _waiting.meetings if not meeting.depth]


def _in_the_midst(call: str) -> StateError:
    reason = "a signal handler sets a flag, and the training loop saves"
    error = StateError("usage", f"{call} in the midst of a collective call: {reason}")
    mark_told(error, is_told=False)
    return error


def meet(
    call: str,
    timeout: float,
    group: dist.ProcessGroup | None = None,
    failure: Exception | None = None,
) -> int:
    """Wait until every rank of `group` (default: all) has come to `call`.

    A no-op without a process group. A meeting that fails is over for those who came; whoever comes
    later takes part in the next one, so the group stays usable.

    Args:
        call: what the user called, as messages name it.
        timeout: seconds.
        failure: why this rank cannot go on: every rank raises it, instead of waiting for this one
            later.

    Returns:
        The number of the meeting, the same on all ranks.

    Raises:
        CollectiveError: `rank-failed`: some ranks did not come within `timeout`, or came to another
            call.
        UsageError: `timeout` is no number.
        EmaCkptError: of the class and code of a rank's failure.
    """
    if not dist.is_initialized():
        if failure is not None:
            raise failure
        return 0
    seconds = _seconds(call, timeout)
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    try:
        outcome = _meet(call, seconds, ranks, failure)
    except RuntimeError as error:  # torch has several classes for it
        keeper = "the process that keeps the ranks' store (rank 0, or the launcher) has ended"
        first = next(iter(str(error).splitlines()), "")
        raise CollectiveError("rank-failed", f"{call}: {keeper}: {first}") from error
    absent = outcome.get("absent")
    if absent:
        waited = outcome.get("timeout", seconds)
        raise CollectiveError(
            "rank-failed",
            f"{call} is collective: {format_ranks(absent)} did not call it within {waited:g} s",
        )
    if "interrupted" in outcome:
        ranks_text = format_ranks([outcome["interrupted"]])
        raise CollectiveError(
            "rank-failed", f"{call}: {ranks_text} was interrupted while it waited for the others"
        )
    if "calls" in outcome:
        calls = [f"{format_ranks(came)} called {name}" for name, came in outcome["calls"].items()]
        raise CollectiveError(
            "rank-failed",
            f"{call} is collective: the ranks met in different calls: {'; '.join(calls)}",
        )
    if "failed" in outcome:
        reports = {int(rank): report for rank, report in outcome["failed"].items()}
        raise merge_errors(call, reports, len(ranks)) from failure
    return _attempts[ranks]


def meet_and_connect(
    call: str,
    purpose: str,
    timeout: float,
    failure: Exception | None = None,
    before_connecting: Callable[[], object] = lambda: None,
) -> Channel:
    """Meet all ranks, and return the channel for `purpose` that connects them.

    A rank that an interrupt takes away in between keeps nobody waiting. `before_connecting` is
    called once all have met.

    Raises:
        EmaCkptError: as `meet` and `open_channel`.
    """
    before = _last_meeting_of_all()
    try:
        meeting = meet(call, timeout, failure=failure)
        before_connecting()
        return open_channel(purpose, meeting, timeout)
    except BaseException as error:
        meeting = _last_meeting_of_all()
        if not is_told(error) and meeting > before:  # else a call within another one was refused
            leave_before_connecting(purpose, meeting)
        raise


def failure_of(step: Callable[[], object]) -> Exception | None:
    """Return the exception of `step`: the other ranks must hear of it before it is raised."""
    try:
        step()
    except Exception as error:  # noqa: BLE001  # raised by the caller
        return error
    return None


def _seconds(call: str, timeout: object) -> float:
    if not isinstance(timeout, Real) or isnan(timeout):
        raise UsageError("usage", f"{call}: timeout is a number of seconds; found {timeout!r}")
    return float(timeout) if timeout < _LONGEST_WAIT else float(_LONGEST_WAIT)


def _meet(
    call: str, timeout: float, ranks: tuple[int, ...], failure: Exception | None
) -> dict[str, Any]:
    """Return the outcome of the first meeting that has not already failed without this rank."""
    deadline = time.monotonic() + timeout
    for outer in _waiting.meetings:
        # A signal handler calls: those who have not come yet shall meet it here instead.
        if outer.give_up() == _SUCCESS:  # all have come, and wait for this rank in the next step
            raise _in_the_midst(call)
    while True:
        meeting = _Meeting(ranks, _attempts_at(ranks) + 1)
        try:
            _attempts[ranks] += 1
            meeting.arrive(call, failure)
            outcome = meeting.outcome(timeout, deadline)
        except BaseException:
            with suppress(RuntimeError):  # the store may be what has failed
                meeting.end_as_interrupted()
            raise
        # Without this rank, or by its own interrupt before it was counted.
        own = dist.get_rank()
        if own not in outcome.get("absent", []) and own != outcome.get("interrupted"):
            return outcome


class _Meeting:
    """One attempt of some ranks to meet: a key per rank, a count, an outcome written once."""

    def __init__(self, ranks: tuple[int, ...], attempt: int) -> None:
        name = "all" if len(ranks) == dist.get_world_size() else "-".join(map(str, ranks))
        self._ranks = ranks
        self._name, self._previous, self._over = (
            f"ema_ckpt/{name}/{attempt - back}" for back in range(3)
        )
        self._store = dist.distributed_c10d._get_default_store()
        self._began = time.monotonic()
        self.depth = len(_under_way)
        self._known: dict[str, Any] | None = None

    def arrive(self, call: str, failure: Exception | None) -> None:
        arrival = {"call": call, "failure": None if failure is None else describe_error(failure)}
        self._delete(f"{self._over}/{dist.get_rank()}")  # nobody decides there any more
        self._store.set(f"{self._name}/{dist.get_rank()}", json.dumps(arrival))
        if self._store.add(f"{self._name}/count", 1) == len(self._ranks):
            if not self._store.check([f"{self._name}/outcome"]):  # else it failed without us
                self._decide(self._outcome_of_all())
            self._delete(f"{self._previous}/count", f"{self._previous}/outcome")

    def outcome(self, timeout: float, deadline: float) -> dict[str, Any]:
        if not self._wait(deadline):
            return self.give_up(timeout)
        return self._read() if self._known is None else self._known

    def give_up(self, timeout: float | None = None) -> dict[str, Any]:
        """Decide that the meeting is over without those who have not come in `timeout` seconds.

        By default in the time until now. Returns what was decided, here or before.
        """
        if self._known is not None:
            return self._known
        waited = round(time.monotonic() - self._began, 1) if timeout is None else timeout
        absent = [rank for rank in self._ranks if not self._store.check([f"{self._name}/{rank}"])]
        # All came, yet nobody decided: one was killed after it arrived. What follows the meeting
        # will miss it.
        self._decide({"absent": absent, "timeout": waited} if absent else self._outcome_of_all())
        self._known = self._read()  # the next meeting deletes it
        return self._known

    def end_as_interrupted(self) -> None:
        """Decide that the meeting is over because this rank leaves it, unless it is over."""
        self._decide({"interrupted": dist.get_rank()})

    def _read(self) -> dict[str, Any]:
        return dict(json.loads(self._store.get(f"{self._name}/outcome")))

    def _wait(self, deadline: float) -> bool:
        """Wait for the outcome; False if there is none in time.

        The store's own `wait` would keep Ctrl-C waiting too, and write to stderr as it ends.
        """
        _waiting.meetings.append(self)
        try:
            while self._known is None and not self._store.check([f"{self._name}/outcome"]):
                now = time.monotonic()
                if now >= deadline:
                    return False
                pause = pause_after(now - self._began, _LONGEST_PAUSE)
                time.sleep(min(pause, deadline - now))
        finally:
            _waiting.meetings.remove(self)
        return True

    def _outcome_of_all(self) -> dict[str, Any]:
        calls: dict[str, list[int]] = {}
        failed: dict[int, Any] = {}
        for rank in self._ranks:
            arrival = json.loads(self._store.get(f"{self._name}/{rank}"))
            calls.setdefault(arrival["call"], []).append(rank)
            if arrival["failure"]:
                failed[rank] = arrival["failure"]
        if len(calls) > 1:
            return {"calls": calls}
        return {"failed": failed} if failed else _SUCCESS

    def _decide(self, outcome: dict[str, Any]) -> None:
        # Compare-and-set: the last to arrive and one whose time is over may both want to decide.
        self._store.compare_set(f"{self._name}/outcome", "", json.dumps(outcome))

    def _delete(self, *keys: str) -> None:
        for key in keys:
            try:
                self._store.delete_key(key)
            except (NotImplementedError, RuntimeError):
                return  # a store without deletion keeps a few bytes more


def _attempts_at(ranks: tuple[int, ...]) -> int:
    """Return how many meetings these ranks have come to, or tried."""
    global _attempts_of
    if _attempts_of is not dist.group.WORLD:
        _attempts.clear()
        _attempts_of = dist.group.WORLD
    return _attempts.setdefault(ranks, 0)


def _last_meeting_of_all() -> int:
    if not dist.is_initialized():
        return 0
    return _attempts_at(tuple(range(dist.get_world_size())))
