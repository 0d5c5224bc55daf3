"""A program that reads rank files in one process and in several, in a process without torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.formats.rank_files import reading
from ema_ckpt.formats.rank_files.reader import open_rankfiles
from ema_ckpt.runtime import executor
from ema_ckpt.storage.files import LocalFiles

HERE = os.getpid()
executor.LEAST_SECONDS = executor.FORK_SECONDS = 0


def found(folder: str, lenient: bool, workers: int) -> str:
    """All that a catalog says of the files, or the error."""
    names = tuple(sorted(os.listdir(folder)))
    try:
        c = open_rankfiles(
            LocalFiles(folder), names, "run", folder, lenient=lenient, workers=workers
        )
    except EmaCkptError as error:
        return f"{type(error).__name__} {error.code} {error.file} {error}"
    payloads = [c.reader.payloads(t) for t in c.tensors if t.refusal is None]
    told = (c.tensors, c.objects, c.files, c.warnings, c.problems, c.rank_private, payloads)
    return repr((*told, c.nested, c.world_size, sorted(c.archives), c.nesting.keys)) + repr(
        sorted(c.nesting.tuples)
    )


def compare(folder: str) -> None:
    """Print how many files children read, and what is the same for any number of processes."""
    one = [found(folder, lenient, 1) for lenient in (False, True)]
    received = []
    from_json = reading.from_json

    def counted(*sent):
        received.append(1)
        return from_json(*sent)

    reading.from_json = counted
    executor.on_job = lambda _job: time.sleep(0.03 * (os.getpid() == HERE))
    for workers in (2, 3):
        assert [found(folder, lenient, workers) for lenient in (False, True)] == one
    print(len(received))
    print(Path(folder).name, one[1])
