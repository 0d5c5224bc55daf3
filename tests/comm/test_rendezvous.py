from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Timer
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ema_ckpt.comm import channel, rendezvous
from ema_ckpt.comm.channel import leaving_together, open_channel
from ema_ckpt.comm.rendezvous import meet, meet_and_connect, one_call_at_a_time
from ema_ckpt.core.errors import CollectiveError
from ema_ckpt.core.text import format_ranks
from tests.distributed.launcher import WorkersFailed, run
from tests.local_ports import free_port


def _refused(call: str, timeout: float) -> str:
    with pytest.raises(CollectiveError) as caught:
        meet(call, timeout)
    assert caught.value.code == "rank-failed"
    return str(caught.value)


def _meetings() -> list[str]:
    rank = dist.get_rank()
    messages = []
    meet("save", 20)
    if rank == 0:
        messages.append(_refused("save", 1))  # nobody else comes
    time.sleep(2 if rank else 0)
    meet("save", 20)  # rank 0 comes first, the others find its failed meeting and go on to the next
    if rank != 2:
        messages.append(_refused("restore", 1))
    dist.barrier()  # the default group is as usable as before
    messages.append(_refused("save" if rank == 1 else "restore", 20))
    time.sleep(0.6 * rank)
    meet("restore", 20)
    pair = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    if rank < 2:
        meet("swap", 20, pair[0])
    if rank > 0:
        meet("swap", 20, pair[1])
    for _ in range(50):
        meet("swap", 20)
    return messages


def test_ranks_meet_again_after_meetings_that_failed() -> None:
    zero, one, two = run(3, _meetings)
    assert zero[0] == "save is collective: ranks 1–2 did not call it within 1 s"
    assert zero[1] == one[0] == "restore is collective: rank 2 did not call it within 1 s"
    assert (
        zero[-1]
        == "restore is collective: the ranks met in different calls: ranks 0, 2 called restore; rank 1 called save"
    )
    assert two[-1] == zero[-1]
    assert one[-1].startswith("save is collective: the ranks met in different calls")


def _interrupted() -> tuple[str, float]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    message, began = "", time.monotonic()
    if dist.get_rank() == 0:
        Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            meet("save", 40)
    else:
        time.sleep(3)
        message = _refused("save", 40)
    waited = time.monotonic() - began
    meet("save", 20)
    return message, waited


def test_ctrl_c_ends_the_waiting_and_the_others_hear_of_it() -> None:
    (_, waited), (message, waited_too) = run(2, _interrupted)
    assert waited < 3
    assert waited_too < 20
    assert message == "save: rank 0 was interrupted while it waited for the others"


def _called_by_a_handler() -> tuple[str, float]:
    began, message = time.monotonic(), ""
    signal.signal(signal.SIGUSR1, lambda *_: meet("save", 30))
    if dist.get_rank() == 0:
        Timer(1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        message = _refused("save", 30)
    else:
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGUSR1)
    waited = time.monotonic() - began
    meet("restore", 20)
    return message, waited


def test_a_handler_that_calls_while_its_rank_waits_meets_the_handlers_of_the_others() -> None:
    (message, waited), (_, waited_too) = run(2, _called_by_a_handler)
    assert message.startswith("save is collective: rank 1 did not call it within")
    assert max(waited, waited_too) < 20


def _exchanges() -> tuple[object, ...]:
    meet("exchange", 20)
    ours = open_channel("test", 1)
    assert ours is open_channel("test", 1)
    rank = dist.get_rank()
    values = ours.exchange({"rank": rank, "names": ["ä"] * rank})
    dist.all_reduce(torch.ones(1))
    gathered = ours.gather(b"x" * rank * 1000)
    scattered = ours.scatter([bytes([r]) * r for r in range(3)] if rank == 0 else [])
    told = ours.broadcast_json({"from": rank})
    tensor = torch.full((5,), float(rank))
    if rank == 1:
        ours.send(tensor, 2)
    if rank == 2:
        ours.receive(tensor, 1)
    dist.destroy_process_group()
    return values, gathered, scattered, told, tensor.tolist(), ours.exchange(rank), ours.gather(b"")


def _call_that_fails_at_its_last_line() -> None:
    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        code = frame.f_code
        if code.co_name != "one_call_at_a_time":
            return None
        if event == "line" and frame.f_lineno == max(line for *_, line in code.co_lines() if line):
            sys.settrace(None)
            raise MemoryError
        return trace

    sys.settrace(trace)
    with pytest.raises(MemoryError), one_call_at_a_time("save", "save"):
        pass
    with one_call_at_a_time("save", "save"):
        meet("save", 20)


def test_an_error_as_a_call_ends_leaves_nothing_to_the_next() -> None:
    run(2, _call_that_fails_at_its_last_line)


def test_values_of_any_length_travel_also_after_the_default_group() -> None:
    for rank, (values, gathered, scattered, told, tensor, again, nothing) in enumerate(
        run(3, _exchanges)
    ):
        assert values == [
            {"rank": 0, "names": []},
            {"rank": 1, "names": ["ä"]},
            {"rank": 2, "names": ["ä", "ä"]},
        ]
        assert gathered == ([b"", b"x" * 1000, b"x" * 2000] if rank == 0 else [])
        assert scattered == bytes([rank]) * rank
        assert told == {"from": 0}
        assert tensor == [1.0 if rank == 2 else float(rank)] * 5
        assert again == [0, 1, 2]
        assert nothing == ([b""] * 3 if rank == 0 else [])


def _one_dies() -> str:
    meet("exchange", 20)
    ours = open_channel("test", 1)
    ours.exchange(0)
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(CollectiveError, match="another rank ended"):
        ours.exchange(1)
    return "survived"


def test_a_rank_that_dies_is_noticed_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(WorkersFailed, match="rank 1: died without a word"):
        run(2, _one_dies)
    assert time.monotonic() - started < 20


def _one_is_lost_after_the_meeting() -> float:
    channel._RETURN_SECONDS = 2.0
    ours = open_channel("test", meet("exchange", 20))
    ours.exchange(0)
    meeting = meet("exchange", 20)
    if dist.get_rank() == 1:
        ours.close()  # as its end would
        return 0.0
    started = time.monotonic()
    with pytest.raises(CollectiveError, match="another rank ended"):
        open_channel("test", meeting)
    return time.monotonic() - started


def test_a_rank_that_is_lost_between_meeting_and_exchange_is_not_waited_for_long() -> None:
    seconds, _ = run(2, _one_is_lost_after_the_meeting, timeout=60)
    assert 1 < seconds < 20


def _interrupt_at(function: str, event: str) -> None:
    """Raise KeyboardInterrupt where a function of the package is called or returns."""

    def profile(frame: FrameType, what: str, _: object) -> None:
        if what == event and frame.f_code.co_name == function:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)


def _exchange() -> tuple[str, list[BaseException]]:
    """Meet, connect and exchange; return what it raised, as a text and to be kept."""
    try:
        with leaving_together("save"):
            meet_and_connect("save", "save", 60).exchange(0)
    except (KeyboardInterrupt, CollectiveError) as error:
        return f"{type(error).__name__}: {error}", [error]
    return "", []


def _one_leaves_as_it_connects(function: str, event: str) -> tuple[str, float]:
    began = time.monotonic()
    if dist.get_rank() == 2:
        time.sleep(1)  # it comes last, and so decides that all have come
        _interrupt_at(function, event)
    message, kept = _exchange()  # with the traceback, whatever has a name there
    waited = time.monotonic() - began
    assert meet_and_connect("save", "save", 60).exchange(dist.get_rank()) == [0, 1, 2]
    del kept
    return message, waited


@pytest.mark.parametrize(
    ("function", "event"),
    [
        ("arrive", "call"),
        ("_outcome_of_all", "return"),
        ("arrive", "return"),
        ("meet", "return"),
        ("open_channel", "call"),
        ("_await_all", "call"),
        ("_await_all", "return"),
        ("_connect", "call"),
        ("_connect", "return"),
    ],
)
def test_a_rank_that_is_interrupted_before_it_connects_keeps_nobody_waiting(
    function: str, event: str
) -> None:
    *others, (message, _) = run(3, _one_leaves_as_it_connects, function, event, timeout=60)
    assert message == "KeyboardInterrupt: "
    for message, waited in others:
        assert message.startswith("CollectiveError: ")
        assert waited < 10


def _slow_to_connect(*options: Any) -> dist.ProcessGroupGloo:
    time.sleep(1)
    group = dist.ProcessGroupGloo(*options)
    time.sleep(2)
    return group


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _one_is_interrupted_as_all_connect() -> tuple[str, float]:
    if dist.get_rank() == 1:
        channel.dist = SimpleNamespace(**{**vars(dist), "ProcessGroupGloo": _slow_to_connect})
    meet("save", 20)
    began = time.monotonic()
    if dist.get_rank() == 2:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)  # comes in the constructor of its gloo group
    message = _exchange()[0]
    return message, time.monotonic() - began


def test_a_rank_that_is_interrupted_as_all_connect_stays_until_all_are_connected() -> None:
    *others, (message, waited) = run(3, _one_is_interrupted_as_all_connect, timeout=60)
    assert message == "KeyboardInterrupt: "
    assert waited > 2.5
    for message, waited in others:
        assert message.startswith("CollectiveError: ")
        assert 2.5 < waited < 10


def _interrupted_starmap(*args: Any) -> None:
    channel.starmap = itertools.starmap
    raise KeyboardInterrupt


def _one_is_interrupted_between_calls() -> tuple[str, float]:
    if dist.get_rank() == 2:
        channel.starmap = _interrupted_starmap
    began = time.monotonic()
    message = _exchange()[0]
    return message, time.monotonic() - began


def test_an_interrupt_that_comes_between_the_calls_that_connect_keeps_nobody_waiting() -> None:
    *others, (message, _) = run(3, _one_is_interrupted_between_calls, timeout=60)
    assert message == "KeyboardInterrupt: "
    for message, waited in others:
        assert message.startswith("CollectiveError: ")
        assert waited < 10


class _Interrupted(dict[tuple[int, ...], int]):
    """Counts of meetings; the first that is noted is interrupted instead."""

    def __setitem__(self, ranks: tuple[int, ...], count: int) -> None:
        rendezvous._attempts = dict(self)
        raise KeyboardInterrupt


def _one_leaves_as_it_counts() -> str:
    message = ""
    meet("save", 20)
    if dist.get_rank() == 1:
        rendezvous._attempts = _Interrupted(rendezvous._attempts)
    try:
        meet("save", 20)
    except (KeyboardInterrupt, CollectiveError) as error:
        message = f"{type(error).__name__}: {error}"
    meet("save", 5)
    return message


def test_a_rank_that_is_interrupted_as_it_comes_meets_the_others_in_their_next_call() -> None:
    waiting = "CollectiveError: save: rank 1 was interrupted while it waited for the others"
    assert run(2, _one_leaves_as_it_counts, timeout=60) == [waiting, "KeyboardInterrupt: "]


def _one_comes_late_to_connect() -> float:
    channel._RETURN_SECONDS = 1.0
    if dist.get_rank() == 1:
        time.sleep(3)
    started = time.monotonic()
    with pytest.raises(CollectiveError, match="another rank ended"):
        open_channel("test", 1)
    return time.monotonic() - started


def test_who_comes_when_the_others_have_given_up_does_not_wait() -> None:
    waited, late = run(2, _one_comes_late_to_connect, timeout=60)
    assert waited >= 1
    assert late < 5


def _one_dies_at_the_door() -> float:
    meet("save", 20)
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_store().set(
            "ema_ckpt/all/2/1", json.dumps({"call": "save", "failure": None})
        )
        os._exit(3)  # arrived, but not counted
    started = time.monotonic()
    meet("save", 2)
    assert time.monotonic() - started < 10
    channel._CONNECT_TIMEOUT = timedelta(seconds=2)
    with pytest.raises(CollectiveError, match="another rank ended"):
        open_channel("test", 1)
    raise RuntimeError("the survivor ended")


def test_a_rank_that_dies_as_it_arrives_leaves_nobody_waiting() -> None:
    with pytest.raises(WorkersFailed, match="the survivor ended"):
        run(2, _one_dies_at_the_door, timeout=30)


def test_alone_there_is_nobody_to_wait_for() -> None:
    meet("save", 0.001)
    alone = open_channel("test", 1)
    assert alone.exchange({"a": 1}) == [{"a": 1}]
    assert alone.gather(b"a") == [b"a"]
    assert alone.scatter([b"a"]) == b"a"
    assert alone.broadcast_json([1]) == [1]


def test_ranks_by_name() -> None:
    assert format_ranks([1]) == "rank 1"
    assert format_ranks([3, 1, 2]) == "ranks 1–3"
    assert format_ranks([0, 2, 3, 7]) == "ranks 0, 2–3, 7"


_WORKER = """
import os, sys, time
import torch.distributed as dist
from ema_ckpt.comm.channel import open_channel
from ema_ckpt.comm.rendezvous import meet, one_call_at_a_time
from ema_ckpt.core.errors import EmaCkptError
rank, port, when = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
meet("save", 20)
channel = open_channel("save", 1) if when == "connected" else None
dist.barrier()
if rank == 0:
    os._exit(9)
time.sleep(1)
for attempt in range(2):
    try:
        channel.exchange(1) if channel else meet("save", 5)
    except EmaCkptError as error:
        print(error.code, error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("when", ["meeting", "connected"])
def test_a_rank_that_keeps_the_store_and_dies_is_named(when: str) -> None:
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _WORKER, str(rank), port, when],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    out, _ = workers[1].communicate(timeout=90)
    workers[0].communicate(timeout=10)
    assert [worker.returncode for worker in workers] == [9, 0]
    lines = out.splitlines()
    assert len(lines) == 2 and all(line.startswith("rank-failed ") for line in lines)
    if when == "meeting":
        assert all("save" in line and "rank 0" in line for line in lines)
