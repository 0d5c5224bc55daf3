from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from ema_ckpt.ema.rendezvous import control_group, exchange, exchange_bytes, meet, named_ranks
from ema_ckpt.errors import CollectiveError
from tests.distributed.launcher import run


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
    assert zero[-1] == "restore is collective: the ranks met in different calls: ranks 0, 2 called restore; rank 1 called save"
    assert two[-1] == zero[-1]
    assert one[-1].startswith("save is collective: the ranks met in different calls")


def _exchanges() -> tuple[list[object], list[bytes], list[bytes]]:
    meet("exchange", 20)
    group = control_group()
    assert group is control_group()
    rank = dist.get_rank()
    values = exchange({"rank": rank, "names": ["ä"] * rank}, group)
    dist.all_reduce(torch.ones(1))
    return values, exchange_bytes(b"x" * rank * 1000, group), exchange_bytes(b"", group)


def test_values_of_any_length_are_exchanged() -> None:
    for values, data, nothing in run(3, _exchanges):
        assert values == [{"rank": 0, "names": []}, {"rank": 1, "names": ["ä"]}, {"rank": 2, "names": ["ä", "ä"]}]
        assert data == [b"", b"x" * 1000, b"x" * 2000]
        assert nothing == [b""] * 3


def test_alone_there_is_nobody_to_wait_for() -> None:
    meet("save", 0.001)
    assert control_group() is None
    assert exchange({"a": 1}, None) == [{"a": 1}]


def test_ranks_by_name() -> None:
    assert named_ranks([1]) == "rank 1"
    assert named_ranks([3, 1, 2]) == "ranks 1–3"
    assert named_ranks([0, 2, 3, 7]) == "ranks 0, 2–3, 7"
