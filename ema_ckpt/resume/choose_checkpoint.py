"""Which checkpoint a path stands for, the same on all ranks: a run may get a new step meanwhile."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from ema_ckpt.comm.channel import Channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.core.display import displayed
from ema_ckpt.core.text import path_text
from ema_ckpt.discovery.locate import locate_checkpoint


def choose_checkpoints(
    paths: Iterable[str | os.PathLike[str] | None], ranks: Channel, call: str
) -> tuple[list[str], list[str]]:
    """Return the checkpoints that `paths` stand for, and what is to be said of them; collective.

    A path that is None is left away.

    Where all ranks were given one path, rank 0 decides what it stands for. Otherwise each opens
    its own, which have to be the same.

    Raises:
        SourceError, UsageError: on every rank, as locating a checkpoint raises.
    """
    chosen, said = [], []
    for path in paths:
        if path is None:
            continue
        resolved, remarks = _choose(path_text(path), ranks, call)
        chosen.append(resolved)
        said += remarks
    return chosen, said


def _choose(path: str, ranks: Channel, call: str) -> tuple[str, list[str]]:
    if set(ranks.exchange(path)) != {path}:
        return path, []
    location = run_on_all_ranks(
        ranks, call, lambda: locate_checkpoint(path) if ranks.rank == 0 else None
    )
    chosen = None
    if location is not None:
        # State beside the weights, an optimizer's for one, is looked for where it is asked for.
        beside = [item.diagnostic() for item in location.left_out if item.is_weights]
        said = [warning.message for warning in (*location.warnings, *beside)]
        chosen = [location.resolved, location.note, said]
    resolved, note, said = ranks.exchange(chosen)[0]
    if ranks.rank == 0 and note:
        logging.getLogger("ema_ckpt").info(displayed(note))
    log_warnings(said, ranks)
    return resolved, said


def log_warnings(texts: Iterable[str], ranks: Channel) -> None:
    """Log warnings to `ema_ckpt` once, on rank 0."""
    for text in texts if ranks.rank == 0 else ():
        logging.getLogger("ema_ckpt").warning(displayed(text))
