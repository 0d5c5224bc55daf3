"""Writes the files of a plan: schedules jobs, runs workers under a byte budget, joins checksums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.write_plan import WritePlan, coalesce_headers
from ema_ckpt.runtime import executor
from ema_ckpt.writing.journal import Journal
from ema_ckpt.writing.options import WriteOptions
from ema_ckpt.writing.output_files import OutputFiles
from ema_ckpt.writing.run_state import Outcome, RunState
from ema_ckpt.writing.schedule import Schedule, WriteJob
from ema_ckpt.writing.worker import WriteContext, WriteWorker


class WriterGroup(Protocol):
    """Ranks that write one plan together; the first one stages and publishes."""

    @property
    def rank(self) -> int:
        """Number of this process among them."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes on rank 0, an empty list elsewhere; waits for all."""
        ...


def run(
    catalog: Catalog,
    plan: WritePlan,
    root: Path,
    options: WriteOptions,
    journal: Journal | None = None,
    group: WriterGroup | None = None,
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
    outputs = OutputFiles(root, plan.files)
    try:
        work = _Writing(catalog, plan, outputs, options, journal)
        rank, ranks = (group.rank, group.size) if group is not None else (0, 1)
        schedule = work.schedule
        executor.run(work, schedule.streams(rank, ranks), schedule.workers(), options.progress)
        if rank:
            outputs.close()  # on a network file system this is what lets the first rank see it
        if group is not None:
            for dumped in group.gather(work.dump() if rank else b"")[1:]:
                work.merge(dumped)
        if rank:
            return None
        outcome = work.state.finish()
        for header in coalesce_headers(plan.header_bytes(outcome.crcs, outcome.digests)):
            outputs.write(header.file, header.offset, header.data)
        return outcome
    finally:
        outputs.close()


class _Writing:
    """The work of writing a plan."""

    def __init__(
        self,
        catalog: Catalog,
        plan: WritePlan,
        outputs: OutputFiles,
        options: WriteOptions,
        journal: Journal | None,
    ) -> None:
        self.schedule = Schedule(catalog, plan, options)
        self.state = RunState(catalog, plan.items, options.verify)
        self.dump, self.merge, self.reset = self.state.dump, self.state.merge, self.state.reset
        self._context = WriteContext(
            source=catalog.source,
            schedule=self.schedule,
            outputs=outputs,
            state=self.state,
            digests=catalog.digests,
            journal=journal,
            finished=journal.completed() if journal else {},
            durable=options.fsync,
        )

    def start_worker(self) -> Callable[[WriteJob], int]:
        return WriteWorker(self._context).write
