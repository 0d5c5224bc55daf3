"""`latest`: the newest checkpoint of a run."""

from __future__ import annotations

import os
from pathlib import Path

from ema_ckpt.discovery.locate import latest_step


def latest(parent: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint with the highest step number in the directory `parent`, or None.

    Complete means that its metadata is readable and every file it names is there with its size;
    numbers compare as integers (`step_2500` is newer than `step_500`). The command line finds the
    newest step in the same way.

    Raises:
        UsageError: `ambiguous-path` if two complete steps have the highest number.
    """
    found = latest_step(os.fspath(parent))
    return None if found is None else Path(found)
