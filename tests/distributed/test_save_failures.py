"""Failures of one rank reach all, with their cause; nothing half-written is ever taken for a checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ema_ckpt import latest, restore, rng_state, save
from ema_ckpt.core.errors import (
    CollectiveError,
    EmaCkptError,
    SourceError,
    StateError,
    TargetError,
    UsageError,
)
from ema_ckpt.discovery.completeness import check_complete
from ema_ckpt.discovery.locate import locate_checkpoint
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.model.live_tree import live_tree
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.resume.flatten import local_shards
from ema_ckpt.resume.optimizer_state import optimizer_tree
from tests.distributed.launcher import run


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, ShardedEMA]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = ShardedEMA(model, 0.9)
    model(torch.ones(4, 7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.update()
    return model, optimizer, ema


def bits(model: nn.Module, optimizer: torch.optim.Optimizer, ema: ShardedEMA) -> list[Any]:
    trees = [
        live_tree(scan_model(model)),
        ema.state_dict()["weights"],
        *optimizer_tree(scan_model(model), [optimizer])["state"].values(),
    ]
    found = [
        view.tolist()
        for tree in trees
        for value in tree.values()
        for _, view in local_shards(value).shards
    ]
    return [*found, ema.num_updates, ema.current_decay]


def message_of(kind: type[EmaCkptError], call: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    return f"{caught.value.code}: {caught.value}"


def _failures(parent: str) -> dict[str, Any]:
    rank, root = dist.get_rank(), Path(parent)
    model, optimizer, ema = make()
    everything = {"model": model, "ema": ema, "optimizer": optimizer}
    found: dict[str, Any] = {}
    # One rank cannot write its file: first it may write only short ones, then none at all.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    found["unwritable"] = message_of(CollectiveError, lambda: save(root / "a", **everything))
    # In the midst of a tensor torch ends its archive all the same, and raises an error of its own.
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    large = {"zeros": torch.zeros(100_000)} if rank == 1 else {}
    found["full"] = message_of(CollectiveError, lambda: save(root / "a", model=model, extra=large))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if rank == 1 and os.geteuid() == 0:
        os.seteuid(65534)
    elif rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    future = save(root / "a", **everything, async_save=True)
    found["unwritable, later"] = message_of(CollectiveError, lambda: future.result(30))
    if os.getuid() == 0:
        os.seteuid(0)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found["left"] = sorted(path.name for path in root.iterdir())

    # Ranks that do not agree.
    found["targets"] = message_of(UsageError, lambda: save(root / f"b{rank}", **everything))
    held = model[0].weight
    save(root / "step_1", **everything)
    found["exists"] = message_of(TargetError, lambda: save(root / "step_1", **everything))
    found["pickle"] = message_of(
        UsageError,
        lambda: save(root / "c", model=model, extra={"f": (lambda: 0) if rank == 2 else 0}),
    )
    found["shapes"] = message_of(
        StateError, lambda: save(root / "c", model=model, extra={"t": torch.ones(2 + (rank == 1))})
    )
    dist.barrier()

    # Failed restores change nothing, on any rank.
    before = bits(model, optimizer, ema)
    if rank == 2:
        model.register_buffer("only_here", torch.ones(1))
    found["one rank differs"] = message_of(
        SourceError, lambda: restore(root / "step_1", **everything)
    )
    if rank == 2:
        del model.only_here
    dist.barrier()
    if rank == 0:
        file = root / "step_1" / "__1_0.distcp"
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
    dist.barrier()
    found["truncated"] = message_of(SourceError, lambda: restore(root / "step_1", **everything))
    dist.barrier()
    if rank == 0:
        file.write_bytes(data)
    dist.barrier()
    assert bits(model, optimizer, ema) == before
    assert held is model[0].weight

    # The group is as usable as before.
    save(root / "step_2", **everything)
    assert restore(root, **everything).path == root / "step_2"
    assert bits(model, optimizer, ema) == before
    return found


def test_failures_reach_all_ranks_with_their_cause(tmp_path: Path) -> None:
    everyone = run(3, _failures, str(tmp_path))
    for found in everyone:
        assert found["unwritable"].startswith(
            "rank-failed: save: rank 1: OSError: [Errno 27] File too large"
        )
        assert found["full"].startswith("rank-failed: save: rank 1: OSError: [Errno 27] File too")
        assert "__1_0.distcp" in found["full"]
        later = (
            "PermissionError: [Errno 13] Permission denied"
            if os.getuid() == 0
            else "OSError: [Errno 27]"
        )
        assert found["unwritable, later"].startswith(f"rank-failed: save: rank 1: {later}")
        assert found["left"] == []
        assert "the ranks name different targets" in found["targets"]
        assert found["exists"].startswith("target-exists: rank 0: ")
        assert found["pickle"].startswith(
            "usage: rank 2: 'extra.f' of type function cannot be pickled"
        )
        assert found["shapes"].startswith(
            "index-mismatch: rank 0: 'extra.t' is float32 [3] on rank 1"
        )
        assert found["one rank differs"].startswith("incomplete: rank 2: ")
        assert "it lacks 'model.only_here'" in found["one rank differs"]
        assert found["truncated"].startswith("truncated-file: ")
        assert "__1_0.distcp" in found["truncated"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


def _only_rank_zero(parent: str) -> list[str]:
    model, optimizer, ema = make()
    messages = []
    if dist.get_rank() == 0:
        for call in (
            lambda: save(Path(parent, "a"), model=model, ema=ema, timeout=1),
            lambda: restore(parent, model=model, timeout=1),
            lambda: ema.full_state_dict(timeout=1),
        ):
            messages.append(message_of(CollectiveError, call))
    dist.barrier()
    path = save(Path(parent, "step_1"), model=model, ema=ema, optimizer=optimizer)
    assert path.is_dir()
    full = ema.full_state_dict()
    assert bool(full) == (dist.get_rank() == 0)
    return messages


def test_a_call_on_rank_zero_alone_ends_within_its_timeout(tmp_path: Path) -> None:
    started = time.monotonic()
    messages = run(3, _only_rank_zero, str(tmp_path))[0]
    assert [m.partition(" is collective")[0] for m in messages] == [
        f"rank-failed: {call}" for call in ("save", "restore", "full_state_dict")
    ]
    assert all(m.endswith("ranks 1–2 did not call it within 1 s") for m in messages)
    assert time.monotonic() - started < 40


def _asynchronous(parent: str) -> None:
    model, optimizer, ema = make()
    everything = {"model": model, "ema": ema, "optimizer": optimizer}
    first_bits = bits(model, optimizer, ema)
    first = save(Path(parent, "a"), **everything, async_save=True)
    total = torch.ones(1)
    for step in range(3):
        for _ in range(70):
            dist.all_reduce(total)
            total.fill_(1.0)
        model(torch.full((4, 7), float(step))).sum().backward()
        optimizer.step()
        ema.update()
    second_bits = bits(model, optimizer, ema)
    second = save(Path(parent, "b"), **everything, async_save=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    for future, name, expected in ((first, "a", first_bits), (second, "b", second_bits)):
        assert future.result(60) == Path(parent, name)
        fresh = make(seed=3)
        restore(Path(parent, name), model=fresh[0], ema=fresh[2], optimizer=fresh[1])
        assert bits(*fresh) == expected
    save(Path(parent, "c"), **everything, async_save=True)
    # Nobody waits for this one, and the script tears the default group down as scripts do.
    dist.destroy_process_group()


def test_training_goes_on_beside_a_save(tmp_path: Path) -> None:
    run(3, _asynchronous, str(tmp_path))
    assert is_whole(tmp_path / "c")


def is_whole(path: Path) -> bool:
    """Whether every file is there as the metadata says, and torch reads the whole."""
    check_complete(locate_checkpoint(str(path)))
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return set(state) == {"model", "ema", "optimizer"}


def _drifting(parent: str) -> tuple[list[str], list[str], float]:
    model, _, ema = make()
    rank = dist.get_rank()
    model[1].running_mean.fill_(float(rank + 1))
    replicas = DistributedDataParallel(nn.Linear(2, 2))
    with torch.no_grad():
        replicas.module.weight.fill_(float(rank))
    with warnings.catch_warnings(record=True) as first:
        warnings.simplefilter("always")
        save(
            Path(parent, "a"),
            model=model,
            ema=ema,
            extra={"seen": rank, "same": {"a": 1.5}, "t": torch.tensor(rank)},
        )
    with warnings.catch_warnings(record=True) as second:
        warnings.simplefilter("always")
        save(Path(parent, "b"), model=replicas, check_replicas=True)
    extra = restore(Path(parent, "a"), model=model, ema=ema, extra={"seen": None, "t": None}).extra
    assert extra["seen"] == extra["t"] == 0
    return (
        [str(w.message) for w in first],
        [str(w.message) for w in second],
        float(model[1].running_mean[0]),
    )


def test_values_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    everyone = run(2, _drifting, str(tmp_path))
    buffers, replicas, _ = everyone[0]
    assert len(buffers) == 1
    assert buffers[0].startswith("replicas-differ: ")
    assert "'model.1.running_mean'" in buffers[0]
    assert "'extra.seen', 'extra.t'" in buffers[0]
    assert "running_var" not in buffers[0]
    assert "same" not in buffers[0]
    assert "'model.weight' (ranks 0–1)" in replicas[0]
    assert everyone[1][:2] == ([], [])
    assert [mean for *_, mean in everyone] == [1.0, 1.0]


def _generators(path: str, saving: bool) -> Any:
    model = nn.Linear(1, 1)
    torch.manual_seed(10 + dist.get_rank() if saving else 99)
    if saving:
        save(path, model=model, extra={"rng": rng_state()})
        return torch.rand(1).item()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = restore(path, model=model, extra={"rng": rng_state()})
    return torch.rand(1).item(), report.unexpected, report.warnings, len(caught)


def test_every_rank_gets_its_own_generators_back(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    drawn = run(3, _generators, path, True)
    again = run(3, _generators, path, False)
    assert [value for value, *_ in again] == drawn
    assert all(notes == () for *_, notes, _ in again)
    (value, unexpected, notes, _), _ = run(2, _generators, path, False)
    assert value == drawn[0]
    assert unexpected == ("extra.rng.rank_2",)
    assert notes == ("rank-keyed: extra.rng of rank 2 is dropped: there is no such rank now",)


def _endless(rank: int, port: int, parent: str, started: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model, optimizer, ema = make()
    for step in range(100_000):
        save(Path(parent, f"step_{step}"), model=model, ema=ema, optimizer=optimizer, timeout=10)
        if not step:
            started.set()


@pytest.mark.parametrize(
    "victims",
    [
        (0, 1),
        pytest.param((0,), marks=pytest.mark.slow),
        pytest.param((1,), marks=pytest.mark.slow),
    ],
)
def test_a_killed_save_leaves_only_whole_checkpoints(
    tmp_path: Path, victims: tuple[int, ...]
) -> None:
    """Processes are killed at odd moments; whatever bears a step's name is complete and loads."""
    generator = random.Random(str(victims))
    context = multiprocessing.get_context("forkserver")
    for attempt in range(4):
        parent = tmp_path / str(attempt)
        parent.mkdir()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        started = context.Event()
        ranks = [
            context.Process(target=_endless, args=(r, store.port, str(parent), started))
            for r in range(2)
        ]
        try:
            for process in ranks:
                process.start()
            assert started.wait(60)
            time.sleep(generator.uniform(0.0, 0.3))
            for victim in victims:
                ranks[victim].kill()
            for process in ranks:
                process.join(30)  # a survivor must notice, not hang
                assert process.exitcode is not None
        finally:
            for process in ranks:
                process.kill()
                process.join()
        steps = [path for path in parent.iterdir() if not path.name.startswith(".")]
        assert all(is_whole(path) for path in steps)
        assert latest(parent) == max(steps, key=lambda path: int(path.name.removeprefix("step_")))
