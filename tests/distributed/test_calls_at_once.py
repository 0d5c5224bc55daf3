"""Calls of two threads, or of a signal handler and what it interrupts, take turns or fail, and never hang."""

from __future__ import annotations

import os
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

from ema_ckpt import ShardedEMA, StateError, save
from ema_ckpt.comm import rendezvous
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


def _save_in_a_child(root: str) -> int:
    """Fork while another thread is in the midst of a call, as one that waits for a lock is."""
    is_inside, may_end = threading.Event(), threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, int]:
            is_inside.set()
            may_end.wait()
            return {}

    model = nn.Linear(3, 3)
    call = {"model": model, "extra": {"part": Slow()}}
    thread = threading.Thread(target=save, args=(Path(root) / "parent",), kwargs=call)
    thread.start()
    is_inside.wait()
    child = os.fork()
    if not child:
        signal.alarm(20)
        save(Path(root) / "child", model=model)
        os._exit(0)
    may_end.set()
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore")
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(tmp_path: Path) -> None:
    assert run(1, _save_without_ranks, str(tmp_path)) == [0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child", "parent"]


def _save_without_ranks(root: str) -> int:
    dist.destroy_process_group()
    return _save_in_a_child(root)


class _Clock:
    """The clock of a rank that waits, and is interrupted a second later by a signal."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.is_due = True

    def sleep(self, seconds: float) -> None:
        time.sleep(max(seconds, 1.0 if self.is_due else 0.0))
        if self.is_due:
            self.is_due = False
            signal.raise_signal(signal.SIGUSR1)


def _save_in_a_handler_once_all_have_come(root: str) -> list[str]:
    model = _sharded(1)
    ema = ShardedEMA(model, 0.5)
    outcomes: list[str] = []

    def call_at_signal(*_: object) -> None:
        for call in (lambda: save(Path(root) / "in_handler", model=model), ema.full_state_dict):
            with pytest.raises(StateError) as caught:
                call()
            outcomes.append(f"{caught.value.code}: {caught.value}")

    signal.signal(signal.SIGUSR1, call_at_signal)
    for name in ("first", "second"):  # before and after the ranks have connected
        dist.barrier()
        if dist.get_rank() == 0:
            rendezvous.time = _Clock()  # type: ignore[assignment]
        else:
            time.sleep(0.3)
        save(Path(root) / name, model=model, timeout=20)
    return outcomes


def test_a_handler_does_not_wait_for_ranks_that_have_come_to_the_call_it_interrupts(
    tmp_path: Path,
) -> None:
    began = time.monotonic()
    own, other = run(2, _save_in_a_handler_once_all_have_come, str(tmp_path))
    assert time.monotonic() - began < 20
    assert (len(own), other) == (4, [])
    calls = ("save", "full_state_dict")
    assert [text.partition(" in the midst")[0] for text in own] == [
        f"usage: {c}" for c in calls * 2
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
