"""Runs a module-level function in N real processes joined by gloo, under a watchdog."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import pickle
import time
import traceback
from collections.abc import Callable
from typing import Any

# Imported once in the fork server: a spawn then costs milliseconds and not the seconds that torch takes.
_PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
]
# After one rank has failed the others get this long to end by themselves, so that their own errors are seen.
_GRACE_SECONDS = 5.0


class WorkersFailed(AssertionError):
    """At least one process raised, died or outlived the watchdog."""


def run(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks and return what each returned, in rank order.

    `function` must be importable (module level); arguments and results must be picklable. Inside, the default
    gloo group is up: use `torch.distributed.get_rank()`. One intra-op thread per process.

    Raises:
        WorkersFailed: with the traceback of each rank that raised, and the ranks that were killed.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ends, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        call = (theirs, rank, world_size, store.port, timeout, function, args)
        process = context.Process(target=_work, args=call, name=f"rank-{rank}")
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        outcomes = _collect(ends, timeout)
    finally:
        for process in processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
    return _results(outcomes, [process.exitcode for process in processes], timeout)


def _work(
    end: Any,
    rank: int,
    world_size: int,
    port: int,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout)
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        # Plain pickle: multiprocessing's own would pass tensors through files that die with this process.
        message = pickle.dumps((True, function(*args)))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    end.send_bytes(message)
    end.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _collect(ends: list[Any], timeout: float) -> dict[int, tuple[bool, Any]]:
    deadline = time.monotonic() + timeout
    outcomes: dict[int, tuple[bool, Any]] = {}
    waiting = dict(enumerate(ends))
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready = multiprocessing.connection.wait(list(waiting.values()), left)
        for rank in [rank for rank, end in waiting.items() if end in ready]:
            try:
                outcomes[rank] = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                outcomes[rank] = (False, "died without a word")
            if not outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return outcomes


def _results(
    outcomes: dict[int, tuple[bool, Any]], exitcodes: list[int | None], timeout: float
) -> list[Any]:
    world = range(len(exitcodes))
    failed = [
        f"rank {rank}: {outcomes[rank][1]}"
        for rank in world
        if rank in outcomes and not outcomes[rank][0]
    ]
    killed = [rank for rank in world if rank not in outcomes]
    if killed:
        failed.append(f"ranks {killed} had not ended within {timeout:g} s and were killed")
    if failed:
        raise WorkersFailed("\n".join([*failed, f"exit codes {exitcodes}"]))
    return [outcomes[rank][1] for rank in world]
