"""Writes the files of a plan: schedules jobs, runs workers under a byte budget, joins checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

from ema_ckpt.comm.launched import CommandGroup
from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.write_plan import HeaderBytes, WritePlan, all_header_bytes
from ema_ckpt.runtime import executor
from ema_ckpt.runtime.executor import Workers
from ema_ckpt.writing.in_order import (
    NoFiles,
    headers_in_order,
    needs_checksums_first,
    recorded_outcome,
)
from ema_ckpt.writing.journal import Journal
from ema_ckpt.writing.options import WriteOptions
from ema_ckpt.writing.output_files import OutputFiles, Outputs
from ema_ckpt.writing.run_state import Outcome, RunState
from ema_ckpt.writing.schedule import Schedule
from ema_ckpt.writing.streamed_files import StreamedFiles
from ema_ckpt.writing.worker import WriteContext


def run(
    catalog: Catalog,
    plan: WritePlan,
    outputs: Outputs,
    options: WriteOptions,
    journal: Journal | None = None,
    group: CommandGroup | None = None,
) -> Outcome | None:
    """Write a plan.

    Args:
        catalog: where the bytes come from; all tensors of the plan are from it.
        outputs: where they go.
        journal: ranges that an earlier run finished, and where this one records its own.
        group: the ranks that write this plan together, each its share.

    Returns:
        The checksums; None on ranks other than the first.

    Raises:
        SourceError: `checksum truncated-file missing-file unsupported …`, naming file and tensor.
        OSError: from writing; the staging turns it into a `TargetError`.
    """
    if isinstance(outputs, StreamedFiles):
        return _write_in_order(catalog, plan, outputs, options)
    rank, ranks = (group.rank, group.size) if group is not None else (0, 1)
    state = RunState(catalog, plan.items, options.verify, _header_writer(plan, outputs))
    schedule = Schedule(catalog, plan, options)
    finished = journal.completed() if journal is not None else {}
    work = WriteContext(catalog, schedule, outputs, state, journal, finished, options.fsync)
    executor.expect(options.progress, schedule.nbytes(ranks, finished))
    executor.run(work, schedule.streams(rank, ranks), schedule.workers, options.progress)
    if rank:
        with journal.ends_on_failure() if journal is not None else nullcontext():
            _hand_over(outputs, options)
    if group is not None:
        for dumped in group.gather(state.dump() if rank else b"")[1:]:
            if not rank:
                state.merge(dumped)
    if rank:
        return None
    outcome = state.finish()
    left = plan.header_bytes if outputs.headers == "early" else partial(all_header_bytes, plan)
    _write_headers(outputs, left(outcome.crcs, outcome.digests))
    return outcome


def _hand_over(outputs: Outputs, options: WriteOptions) -> None:
    """End a share: on a network file system it is closing that lets the first rank see it."""
    if options.fsync and isinstance(outputs, OutputFiles):
        outputs.sync()
    outputs.close()


def _header_writer(plan: WritePlan, outputs: Outputs) -> Callable[[int, int], None] | None:
    """Return what writes the bytes around a finished item; None where all come at the end.

    What depends on no item is written here.
    """
    if outputs.headers != "early":
        return None
    _write_headers(outputs, plan.fixed_bytes())
    return lambda index, crc: _write_headers(outputs, plan.item_bytes(index, crc))


def _write_headers(outputs: Outputs, headers: Iterable[HeaderBytes]) -> None:
    for header in headers:
        outputs.write(header.file, header.offset, header.data)


def _write_in_order(
    catalog: Catalog, plan: WritePlan, outputs: StreamedFiles, options: WriteOptions
) -> Outcome:
    """Write every file from its start to its end, once the checksums that need it are known."""
    known: Outcome | None = None
    if needs_checksums_first(plan):
        known = recorded_outcome(catalog, plan) if options.verify else None
        known = known or _pass(catalog, plan, NoFiles(), options)
    outputs.follow(headers_in_order(plan, known))
    outcome = _pass(catalog, plan, outputs, options, Workers(1))
    if known is None:
        outputs.follow(plan.header_bytes(outcome.crcs, outcome.digests))
    elif list(known.crcs) != list(outcome.crcs):
        message = f"{catalog.resolved}: changed while being read; let the writer finish"
        raise SourceError("source-changed", f"{message} and try again")
    outputs.catch_up()
    return outcome


def _pass(
    catalog: Catalog,
    plan: WritePlan,
    outputs: Outputs,
    options: WriteOptions,
    workers: Workers | None = None,
) -> Outcome:
    """Read everything once, in the order of the plan where there is one worker."""
    schedule = Schedule(catalog, plan, options)
    state = RunState(catalog, plan.items, options.verify)
    work = WriteContext(catalog, schedule, outputs, state, None, {}, durable=False)
    executor.expect(options.progress, schedule.nbytes(1, {}))
    executor.run(work, schedule.streams(), workers or schedule.workers, options.progress)
    return state.finish()
