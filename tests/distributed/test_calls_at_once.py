"""Calls of two threads, or of a signal handler and what it interrupts, take turns or fail, and never hang."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from ema_ckpt import save
from ema_ckpt.core.errors import EmaCkptError
from tests.distributed.launcher import run


def _sharded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Linear(300, 300)
    fully_shard(model)
    return model


def _save_in_threads(root: str, orders: Sequence[str]) -> dict[str, str]:
    """Save two models from two threads, of which this rank starts first what its order names first."""
    models = {"a": _sharded(1), "b": _sharded(2)}
    outcomes: dict[str, str] = {}

    def save_one(name: str) -> None:
        try:
            save(Path(root) / name, model=models[name], timeout=20)
            outcomes[name] = "saved"
        except EmaCkptError as error:
            outcomes[name] = f"{error.code}: {error}"

    threads = [threading.Thread(target=save_one, args=(name,)) for name in orders[dist.get_rank()]]
    if dist.get_rank():
        time.sleep(1.0)  # rank 0 waits for it in the first call, and has the second one waiting
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    # The process groups and the channels stay usable.
    save(Path(root) / "after", model=models["a"])
    return outcomes


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saves_of_two_threads_take_turns(tmp_path: Path) -> None:
    outcomes = run(2, _save_in_threads, str(tmp_path), ["ab", "ab"])
    assert outcomes == [{"a": "saved", "b": "saved"}] * 2
    for seed, name in enumerate("ab", 1):
        torch.manual_seed(seed)
        expected = nn.Linear(300, 300).state_dict()
        loaded = {key: torch.zeros_like(value) for key, value in expected.items()}
        dcp.load({"model": loaded}, checkpoint_id=tmp_path / name)
        for key, value in expected.items():
            assert torch.equal(loaded[key], value)


def test_threads_in_different_orders_fail(tmp_path: Path) -> None:
    outcomes = run(2, _save_in_threads, str(tmp_path), ["ab", "ba"])
    for outcome in outcomes:
        assert "different targets" in outcome["a"]
        assert "different targets" in outcome["b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after"]


class _Interrupted:
    """A part of `extra` that rank 0 is asked for when a signal comes, in the midst of a save."""

    def state_dict(self) -> dict[str, int]:
        if dist.get_rank() == 0:
            signal.raise_signal(signal.SIGUSR1)
        return {"steps": 1}


def _save_in_a_handler(root: str, is_caught: bool) -> list[str]:
    model = _sharded(1)
    outcomes: list[str] = []

    def save_at_signal(*_: object) -> None:
        try:
            save(Path(root) / "in_handler", model=model, timeout=20)
        except EmaCkptError as error:
            outcomes.append(f"{error.code}: {error}")
            if not is_caught:
                raise

    signal.signal(signal.SIGUSR1, save_at_signal)
    try:
        save(Path(root) / "outer", model=model, extra={"part": _Interrupted()}, timeout=20)
        outcomes.append("saved")
    except EmaCkptError as error:
        outcomes.append(f"{error.code}: {error}")
    save(Path(root) / "after", model=model)
    return outcomes


@pytest.mark.parametrize("is_caught", [True, False])
def test_a_handler_in_the_midst_of_a_save_is_refused(is_caught: bool, tmp_path: Path) -> None:
    own, other = run(2, _save_in_a_handler, str(tmp_path), is_caught)
    assert own[0].startswith("usage: save in the midst of a collective call")
    found = sorted(path.name for path in tmp_path.iterdir())
    if is_caught:
        assert (own[1:], other) == (["saved"], ["saved"])
        assert found == ["after", "outer"]
    else:
        assert len(own) == 2
        assert "in the midst" in own[1]
        assert "in the midst" in other[0]
        assert found == ["after"]
