from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launcher import WorkersFailed, run


def _sum_of_ranks() -> torch.Tensor:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return total


def _one_raises_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def _sleeps() -> None:
    time.sleep(60)


def test_results_come_back_in_rank_order() -> None:
    assert [int(total) for total in run(3, _sum_of_ranks)] == [3, 3, 3]


def test_the_failing_ranks_traceback_is_shown() -> None:
    with pytest.raises(WorkersFailed, match=r"rank 1:[\s\S]*rank one says no"):
        run(2, _one_raises_others_wait, timeout=20)


def test_the_watchdog_kills() -> None:
    with pytest.raises(WorkersFailed, match=r"ranks \[0\] had not ended within 3 s"):
        run(1, _sleeps, timeout=3)
