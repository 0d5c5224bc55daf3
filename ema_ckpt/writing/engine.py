"""Writes the files of a plan: schedules jobs, runs workers under a byte budget, joins checksums."""

from __future__ import annotations

from pathlib import Path

from ema_ckpt.comm.launched import CommandGroup
from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.write_plan import WritePlan, coalesce_headers
from ema_ckpt.runtime import executor
from ema_ckpt.writing.journal import Journal
from ema_ckpt.writing.options import WriteOptions
from ema_ckpt.writing.output_files import OutputFiles
from ema_ckpt.writing.run_state import Outcome, RunState
from ema_ckpt.writing.schedule import Schedule
from ema_ckpt.writing.worker import WriteContext


def run(
    catalog: Catalog,
    plan: WritePlan,
    root: Path,
    options: WriteOptions,
    journal: Journal | None = None,
    group: CommandGroup | None = None,
) -> Outcome | None:
    """Write a plan below `root`, or to the file `root` itself.

    Args:
        catalog: where the bytes come from; all tensors of the plan are from it.
        journal: ranges that an earlier run finished, and where this one records its own.
        group: the ranks that write this plan together, each its share.

    Returns:
        The checksums; None on ranks other than the first.

    Raises:
        SourceError: `checksum truncated-file missing-file unsupported …`, naming file and tensor.
        OSError: from writing; the staging turns it into a `TargetError`.
    """
    rank, ranks = (group.rank, group.size) if group is not None else (0, 1)
    outputs = OutputFiles(root, plan.files)
    try:
        schedule = Schedule(catalog, plan, options)
        state = RunState(catalog, plan.items, options.verify)
        finished = journal.completed() if journal is not None else {}
        work = WriteContext(catalog, schedule, outputs, state, journal, finished, options.fsync)
        executor.expect(options.progress, schedule.nbytes(ranks, finished))
        executor.run(work, schedule.streams(rank, ranks), schedule.workers, options.progress)
        if rank:
            outputs.close()  # on a network file system this is what lets the first rank see it
        if group is not None:
            for dumped in group.gather(state.dump() if rank else b"")[1:]:
                if not rank:
                    state.merge(dumped)
        if rank:
            return None
        outcome = state.finish()
        for header in coalesce_headers(plan.header_bytes(outcome.crcs, outcome.digests)):
            outputs.write(header.file, header.offset, header.data)
        return outcome
    finally:
        outputs.close()
