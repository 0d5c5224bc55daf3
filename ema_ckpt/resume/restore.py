"""`restore`: everything is compared and read on all ranks before the first value is written on
any.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ema_ckpt.comm.channel import Channel, open_channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.comm.rendezvous import meet
from ema_ckpt.core.errors import UsageError, shown
from ema_ckpt.ema.model.live import tensor_names
from ema_ckpt.ema.model.scan import reshard, scan_model
from ema_ckpt.ema.swap import refuse_inside
from ema_ckpt.resume.optimizer_state import Optimizers
from ema_ckpt.resume.report import RestoreReport
from ema_ckpt.resume.restore_ema import EmaRestorer
from ema_ckpt.resume.restore_extra import ExtraRestorer
from ema_ckpt.resume.restore_model import ModelRestorer, Restorer
from ema_ckpt.resume.restore_optimizer import OptimizerRestorer
from ema_ckpt.resume.save_async import settle
from ema_ckpt.resume.sources import Checkpoint

if TYPE_CHECKING:
    from ema_ckpt.ema.manager import ShardedEMA

_CALL = "restore"


def restore(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    ema: ShardedEMA | Mapping[str, ShardedEMA] | None = None,
    optimizer: Optimizers | None = None,
    extra: Mapping[str, Any] | None = None,
    ema_path: str | os.PathLike[str] | None = None,
    strict: bool = True,
    missing_ema: Literal["error", "seed"] = "error",
    timeout: float = 300,
) -> RestoreReport:
    """Continue from a checkpoint, whatever layout and world size wrote it; collective.

    All names, shapes and dtypes are compared and all data is read on every rank before anything is
    written; a failure leaves every value as it was. Then averages are written from their own
    weights, then live weights, then optimizers. Host memory for what this rank restores is needed
    meanwhile.

    Args:
        path: a checkpoint of any format, or a directory of steps, of which the newest complete one
            is taken.
        model, ema, optimizer, extra: what to restore, as given to `save`. Of `extra`, objects with
            `load_state_dict` are restored in place; the values of the others are in the report.
        ema_path: a separate file or directory to take the averages from.
        strict: refuse missing and unexpected names and casts that lose values. Without it they are
            reported, and averages that are missing become the restored live weights, or what their
            manager's `source` gives; those that `ema_path` lacks, the live weights beside them
            there, if it has them.
        missing_ema: `"seed"`: where there are no averages at all, they become the restored live
            weights and the counter 0.
        timeout: seconds to wait for the other ranks to call `restore` too.

    Raises:
        CollectiveError: `rank-failed`: a rank did not come or died.
        SourceError, UsageError: on every rank: what is missing, unexpected, misfit or damaged in
            the checkpoint.
        StateError: inside `swap()`.
    """
    if missing_ema not in ("error", "seed"):
        raise UsageError("usage", f"missing_ema is 'error' or 'seed'; found {missing_ema!r}")
    meet(_CALL, timeout)
    settle()
    ours = open_channel("save")
    opened = run_on_all_ranks(ours, _CALL, lambda: _opened(path, ema_path))
    try:
        _check_same(opened, ours)
        elsewhere = _names_elsewhere(
            run_on_all_ranks(ours, _CALL, lambda: tensor_names(scan_model(model))), ours
        )
        wanted = _Wanted(model, ema, optimizer, extra, strict, missing_ema, elsewhere)
        parts = run_on_all_ranks(ours, _CALL, lambda: _parts(opened, wanted))
        run_on_all_ranks(ours, _CALL, lambda: _read(parts))
    finally:
        for checkpoint in opened:
            checkpoint.close()
    try:
        run_on_all_ranks(ours, _CALL, lambda: _hand_over(parts))
    except BaseException:
        for part in parts:
            part.take_back()
        raise
    with torch.inference_mode(False):  # what is made here is trained with
        run_on_all_ranks(ours, _CALL, lambda: _write(model, parts))
    return _report(opened[0], parts)


def _opened(
    path: str | os.PathLike[str], ema_path: str | os.PathLike[str] | None
) -> list[Checkpoint]:
    opened = [Checkpoint(os.fspath(path))]
    if ema_path is not None:
        try:
            opened.append(Checkpoint(os.fspath(ema_path)))
        except BaseException:
            opened[0].close()
            raise
    return opened


def _check_same(opened: list[Checkpoint], ours: Channel) -> None:
    """All ranks must read one checkpoint: a parent directory may have got a new step in between."""
    mine = [
        [checkpoint.where, len(checkpoint.catalog.tensors), checkpoint.catalog.files]
        for checkpoint in opened
    ]
    everyone = ours.exchange(mine)
    names = sorted({" and ".join(place for place, _, _ in one) for one in everyone})
    if len(names) > 1:
        raise UsageError("usage", f"restore: the ranks name different checkpoints: {shown(names)}")
    if any(one != everyone[0] for one in everyone):
        raise UsageError("usage", f"restore: the ranks find different content under {names[0]}")


def _names_elsewhere(mine: frozenset[str], ours: Channel) -> frozenset[str]:
    """Names of tensors that only other ranks have, as the stages of a pipeline do."""
    everyone = ours.exchange_if_different(sorted(mine))
    return frozenset(name for names in everyone for name in names) - mine


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """What this rank restores, and how; see `restore`."""

    model: nn.Module
    ema: ShardedEMA | Mapping[str, ShardedEMA] | None
    optimizer: Optimizers | None
    extra: Mapping[str, Any] | None
    strict: bool
    missing_ema: str
    elsewhere: frozenset[str]


def _parts(opened: list[Checkpoint], wanted: _Wanted) -> list[Restorer]:
    """What is to be restored, compared with what there is; in the order of writing."""
    model, ema, strict, elsewhere = wanted.model, wanted.ema, wanted.strict, wanted.elsewhere
    refuse_inside(model, "restore()")
    reshard(model)
    managers = ema if isinstance(ema, Mapping) else {} if ema is None else {"": ema}
    seed, foreign = wanted.missing_ema == "seed", len(opened) > 1
    parts: list[Restorer] = [
        EmaRestorer(
            opened[-1],
            manager,
            name,
            foreign=foreign,
            strict=strict,
            seed=seed,
            elsewhere=elsewhere,
        )
        for name, manager in managers.items()
    ]
    parts.append(ModelRestorer(opened[0], model, strict=strict, elsewhere=elsewhere))
    if wanted.optimizer is not None:
        parts.append(
            OptimizerRestorer(
                opened[0], model, wanted.optimizer, strict=strict, elsewhere=elsewhere
            )
        )
    if wanted.extra is not None:
        parts.append(ExtraRestorer(opened[0], wanted.extra, strict=strict))
    return parts


def _read(parts: list[Restorer]) -> None:
    for part in parts:
        part.read()


def _hand_over(parts: list[Restorer]) -> None:
    for part in parts:
        part.hand_over()


def _write(model: nn.Module, parts: list[Restorer]) -> None:
    reshard(model)
    for part in parts:
        part.write()
    # Averages without a source of their own come last, from live weights that are in place by then.
    for part in parts:
        part.finish()


def _report(checkpoint: Checkpoint, parts: list[Restorer]) -> RestoreReport:
    report = RestoreReport(Path(checkpoint.where), checkpoint.catalog.world_size)
    restored = {tree for part in parts for tree in part.trees}
    notes = [note for part in parts for note in part.warnings]
    for note in notes:
        warnings.warn(note, stacklevel=3)
    notes += [note for part in parts for note in part.notes]
    return replace(
        report,
        trees={
            tree.name: "restored" if tree.name in restored else "ignored"
            for tree in checkpoint.trees
        },
        loaded=tuple(name for part in parts for name in part.loaded),
        missing=tuple(name for part in parts for name in part.missing),
        unexpected=tuple(name for part in parts for name in part.unexpected),
        seeded=tuple(name for part in parts for name in part.seeded),
        filled=tuple(name for part in parts for name in part.filled),
        renamed={old: new for part in parts for old, new in part.renamed.items()},
        changed_settings={
            name: change for part in parts for name, change in part.changed_settings.items()
        },
        extra={name: value for part in parts for name, value in part.extra.items()},
        warnings=tuple(notes),
    )
