"""A rank that cannot take part in a collective call: all ranks raise its error at once, and nothing is left hanging."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ema_ckpt.core.errors import StateError
from ema_ckpt.ema.manager import ShardedEMA
from tests.distributed.launcher import run


def _raises_at_once(call: Callable[[], object], match: str) -> None:
    begun = time.monotonic()
    with pytest.raises(StateError, match=match):
        call()
    assert time.monotonic() - begun < 10


def _evaluated(ema: ShardedEMA) -> None:
    with ema.swap(timeout=30):
        pass


def _non_finite() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8)
    ema = ShardedEMA(DistributedDataParallel(module), 0.9, nonfinite="raise")
    other = nn.Linear(8, 8)
    calls: list[Callable[[], object]] = [
        lambda: _evaluated(ema),
        lambda: ema.copy_to(DistributedDataParallel(other), timeout=30),
        lambda: ema.full_state_dict(timeout=30),
    ]
    for call in calls:
        with torch.no_grad():
            module.weight[7, 7] = torch.nan  # averaged on the last rank alone
        ema.update()
        with torch.no_grad():
            module.weight[7, 7] = 0.0
        assert ema.nonfinite_events == (dist.get_rank() + 1 == dist.get_world_size()) * (
            calls.index(call) + 1
        )
        before = [p.clone() for p in module.parameters()]
        _raises_at_once(call, "not finite in 1 updates")
        assert all(map(torch.equal, before, module.parameters()))
        call()  # told once; the group is as usable as before


def test_a_value_that_is_not_finite_on_one_replica() -> None:
    run(2, _non_finite, timeout=60)


def _inside() -> None:
    """One rank calls from inside a block that only it has entered."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8))
    ema = ShardedEMA(model, 0.9)
    ema.update()
    if dist.get_rank() == 1:
        with ema.swap():
            _raises_at_once(lambda: ema.full_state_dict(timeout=30), "inside swap")
    else:
        _raises_at_once(
            lambda: ema.full_state_dict(timeout=30), r"rank 1: full_state_dict\(\) inside swap"
        )
    assert bool(ema.full_state_dict(timeout=30)) == (dist.get_rank() == 0)


def test_full_state_dict_inside_a_block_of_one_rank() -> None:
    run(2, _inside, timeout=60)
