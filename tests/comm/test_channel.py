"""Calls that one rank leaves alone, at whatever point: the others hear of it, and the next call works."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ema_ckpt import CollectiveError, EmaCkptError, ShardedEMA, restore, save, verify
from ema_ckpt.comm import channel
from tests.distributed.launcher import run


class _Interrupts:
    """Raises KeyboardInterrupt at the n-th call of, or return from, a function of the package."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __enter__(self) -> _Interrupts:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, result: object) -> None:
        del result  # the traceback would hold it
        if event in ("call", "return") and "/ema_ckpt/" in frame.f_code.co_filename:
            self._left -= 1
            if not self._left:
                sys.setprofile(None)
                raise KeyboardInterrupt

    @property
    def is_over(self) -> bool:
        """Whether the call ended before."""
        return self._left > 0


def _sweep(kind: str, victim: int, parent: str, step: int, overwrite: bool) -> list[str]:
    """Interrupt every `step`-th event of a call on one rank, each time with a save of all after it."""
    channel._CONNECT_TIMEOUT = timedelta(seconds=5)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    fully_shard(model)
    ema = ShardedEMA(model, decay=0.9)
    root, found = Path(parent), []
    last = root / "last"
    save(last, model=model, ema=ema)
    number, is_over = 1 + step // 2, False
    while not is_over:
        target = last if overwrite else root / str(number)
        what = kept = ""
        interrupts = _Interrupts(number if dist.get_rank() == victim else sys.maxsize)
        try:
            with interrupts:
                if kind == "save":
                    save(target, model=model, ema=ema, overwrite=overwrite, timeout=20)
                elif kind == "restore":
                    restore(last, model=model, ema=ema, timeout=20)
                else:
                    ema.full_state_dict(timeout=20)
        except (KeyboardInterrupt, EmaCkptError) as error:
            kept, what = (
                error,
                type(error).__name__,
            )  # its traceback must not keep the others waiting
        found.append(what)
        try:
            save(last, model=model, ema=ema, overwrite=True, timeout=20)
        except CollectiveError as error:  # interrupted before it met the others, who find it here
            assert "different calls" in str(error)
            save(last, model=model, ema=ema, overwrite=True, timeout=20)
        if dist.get_rank() == 0:
            for path in [last, *({target} if target.exists() else ())]:
                assert verify(path).status == "sound", (number, path, what)
        flags = [False] * dist.get_world_size()
        dist.all_gather_object(flags, dist.get_rank() == victim and interrupts.is_over)
        is_over = any(flags)
        number += step
        del kept
    return found


@pytest.mark.parametrize(
    ("kind", "victim", "size", "overwrite"),
    [
        ("save", 0, 2, False),
        ("save", 1, 2, True),
        ("save", 1, 3, False),
        ("restore", 1, 2, False),
        ("full_state_dict", 0, 2, False),
    ],
)
def test_a_call_that_one_rank_leaves_at_any_point_ends_on_all_and_the_next_one_works(
    tmp_path: Path, kind: str, victim: int, size: int, overwrite: bool
) -> None:
    step = {"save": 197, "restore": 499, "full_state_dict": 23}[kind]
    found = run(size, _sweep, kind, victim, str(tmp_path), step, overwrite, timeout=150)
    assert found[victim].count("KeyboardInterrupt") > 8
    assert found[victim][-1] == "", "the sweep has reached the end"
    assert all(what in ("", "CollectiveError", "UsageError") for what in found[1 - victim])
