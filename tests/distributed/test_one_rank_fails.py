"""A rank that cannot take part in a collective call: all ranks raise its error at once, and nothing is left hanging."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ema_ckpt import restore, save
from ema_ckpt.core.errors import CollectiveError, StateError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.resume.restore_model import ModelRestorer
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


def _raises_on_entry() -> None:
    module = DistributedDataParallel(nn.Linear(8, 8))
    ema, other = ShardedEMA(module, 0.9), DistributedDataParallel(nn.Linear(8, 8))
    before = [parameter.clone() for parameter in module.parameters()]
    for call in (lambda: _evaluated(ema), lambda: ema.copy_to(other, timeout=30)):
        with warnings.catch_warnings():
            # The average has never moved; on rank 1 this warning is an error.
            warnings.simplefilter("error" if dist.get_rank() else "ignore")
            begun = time.monotonic()
            with pytest.raises(CollectiveError, match="rank 1: UserWarning: ema-stalled"):
                call()
        assert time.monotonic() - begun < 10
        assert all(map(torch.equal, before, module.parameters()))
    ema.update()
    _evaluated(ema)


def test_a_rank_that_fails_after_it_has_met_the_others() -> None:
    run(2, _raises_on_entry, timeout=60)


def _swap_for_ever(rank: int, port: int, ready: Any, ended: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(1024, 1024))
    ema = ShardedEMA(model, 0.9)
    ema.update()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ready.set()
    try:
        while True:
            with ema.swap(timeout=10):
                pass
    except BaseException as error:
        kept = all(map(torch.equal, before, model.parameters()))
        ended.put((type(error).__name__, str(error), kept))


@pytest.mark.slow
def test_a_replica_that_is_killed_during_a_swap() -> None:
    """Killed at odd moments: the other raises our error, with the live weights in the model."""
    context = multiprocessing.get_context("forkserver")
    for attempt in range(3):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ready, ended = context.Event(), context.Queue()
        ranks = [
            context.Process(target=_swap_for_ever, args=(rank, store.port, ready, ended))
            for rank in range(2)
        ]
        try:
            for process in ranks:
                process.start()
            assert ready.wait(60)
            time.sleep(1 + 0.07 * attempt)
            ranks[1].kill()
            kind, message, kept = ended.get(timeout=40)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        assert kind == "CollectiveError", message
        assert kept
        assert "\n" not in message


class _Interrupted:
    """State under `extra` that is interrupted on the last rank when it is saved or loaded."""

    def __init__(self, at: str, error: BaseException) -> None:
        self.at, self.error, self.value = at, error, 0

    def _come_to(self, at: str) -> None:
        if at == self.at and dist.get_rank() == dist.get_world_size() - 1:
            raise self.error

    def state_dict(self) -> dict[str, int]:
        self._come_to("save")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._come_to("load")
        self.value = state["value"]


def _interrupted(parent: str) -> None:
    is_last = dist.get_rank() == dist.get_world_size() - 1
    model = fully_shard(nn.Linear(4, 4))
    save(Path(parent, "step_1"), model=model, extra={"a": _Interrupted("", ValueError())})
    for error in (KeyboardInterrupt(), SystemExit(3), MemoryError()):
        kind = type(error) if is_last and not isinstance(error, Exception) else CollectiveError
        name = f"{type(error).__name__}: {error}".removesuffix(": ")
        extra = {"a": _Interrupted("save", error)}
        match = None if kind is not CollectiveError else rf"^save: rank 1: {name}$"
        with pytest.raises(kind, match=match):
            save(Path(parent, "step_2"), model=model, extra=extra)
        others = _Interrupted("", ValueError())
        others.value = 5
        extra = {"first": others, "a": _Interrupted("load", error)}
        with pytest.raises(kind):
            restore(Path(parent, "step_1"), model=model, extra=extra, strict=False)
        assert others.value == 5
    path = save(Path(parent, "step_2"), model=model)
    assert restore(parent, model=model).path == path


def test_an_interrupt_of_one_rank_is_told_to_the_others(tmp_path: Path) -> None:
    run(2, _interrupted, str(tmp_path), timeout=60)


def _interrupted_beside_an_error(parent: str) -> None:
    rank = dist.get_rank()
    path = save(Path(parent, "step_1"), model=nn.Linear(3, 3))
    others = nn.Linear(3, 3) if rank else nn.Linear(4, 4)

    def trace(frame: FrameType, *_: object) -> None:
        if frame.f_code is ModelRestorer.compare.__code__:
            signal.raise_signal(signal.SIGINT)

    if rank:
        sys.settrace(trace)
    begun = time.monotonic()
    try:
        with pytest.raises(
            KeyboardInterrupt if rank else CollectiveError, match=None if rank else "has shape"
        ):
            restore(path, model=others)
    finally:
        sys.settrace(None)
    assert time.monotonic() - begun < 5
    if rank:
        time.sleep(5)  # its connections are open: nobody notices its end
    assert restore(path, model=nn.Linear(3, 3)).path == path


def test_an_interrupt_of_one_rank_beside_an_error_of_another(tmp_path: Path) -> None:
    run(2, _interrupted_beside_an_error, str(tmp_path), timeout=60)


def _without_memory() -> None:
    model = fully_shard(nn.Sequential(*[nn.Linear(2000, 2000, bias=False) for _ in range(8)]))
    ema = ShardedEMA(model, 0.5)
    ema.update()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if dist.get_rank() == 0:  # which is to have 128 MB more
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(
            resource.RLIMIT_AS, (pages * resource.getpagesize() + (60 << 20), limits[1])
        )
    begun = time.monotonic()
    with pytest.raises(CollectiveError, match=r"rank 0: RuntimeError: .*allocate memory"):
        ema.full_state_dict(timeout=30)
    assert time.monotonic() - begun < 10
    resource.setrlimit(resource.RLIMIT_AS, limits)
    assert len(ema.full_state_dict(timeout=30)) == 8 * (dist.get_rank() == 0)


def test_rank_0_without_memory_for_whole_tensors() -> None:
    run(2, _without_memory, timeout=60)


class _Refusing:
    """Takes no values, not even its own."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("never")


class _Kept:
    value = 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def _refusing(parent: str) -> None:
    model, kept, path = fully_shard(nn.Linear(4, 4)), _Kept(), Path(parent, "step_1")
    extra = {"refusing": _Refusing(), "kept": kept, "refusing_too": _Refusing()}
    save(path, model=model, extra=extra)
    kept.value = 5
    extra = {"kept": kept, "refusing": _Refusing()}
    for order in (extra, dict(reversed(extra.items()))):
        with pytest.raises(CollectiveError, match=r"^restore: ValueError: never$"):
            restore(path, model=model, extra=order, strict=False)
        assert kept.value == 5


def test_what_refuses_its_former_values_keeps_no_other_from_them(tmp_path: Path) -> None:
    run(2, _refusing, str(tmp_path), timeout=60)


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
