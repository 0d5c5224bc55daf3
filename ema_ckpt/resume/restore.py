"""Restore a training state: everything is compared and read on all ranks before any is written."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ema_ckpt.comm.channel import Channel, leaving_together
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.comm.rendezvous import failure_of, meet_and_connect, one_call_at_a_time
from ema_ckpt.core.display import displayed
from ema_ckpt.core.errors import SourceError, UsageError
from ema_ckpt.core.text import path_text, shown
from ema_ckpt.ema.manager import managers_by_label
from ema_ckpt.ema.model.scan import reshard
from ema_ckpt.ema.optimizers import Optimizers, as_list, state_keepers
from ema_ckpt.reading.unchanged import FileStates
from ema_ckpt.resume.agreed_options import agree_on_options
from ema_ckpt.resume.checkpoint_reader import CheckpointReader
from ema_ckpt.resume.choose_checkpoint import choose_checkpoints, log_warnings
from ema_ckpt.resume.flatten import refuse_unnamed
from ema_ckpt.resume.restore_ema import EmaRestorer
from ema_ckpt.resume.restore_extra import ExtraRestorer
from ema_ckpt.resume.restore_model import ModelRestorer
from ema_ckpt.resume.restore_optimizer import OptimizerRestorer
from ema_ckpt.resume.restore_phases import Findings, RestoreContext, Restorer, RestoreReport
from ema_ckpt.resume.save_async import after_background_save, wait_for_background_save
from ema_ckpt.runtime.held_signals import HeldSignals
from ema_ckpt.state_dicts.hidden_averages import find_hidden
from ema_ckpt.state_dicts.rules.chosen import chosen_rules

if TYPE_CHECKING:
    from ema_ckpt.ema.manager import ShardedEMA
    from ema_ckpt.state_dicts.rules.rules import Rules

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
    rules: str | os.PathLike[str] | Rules | None = None,
) -> RestoreReport:
    """Continue from a checkpoint of any layout and world size; collective.

    All names, shapes and dtypes are compared and all data is read on every rank before anything is
    written; a failure changes no value. Then averages are written, then live weights, then
    optimizers. This needs host memory for all that this rank restores.

    Args:
        path: a checkpoint of any format, or a directory of steps, of which the newest complete one
            is taken; rank 0 decides which. What lies beside it and is not read, such as a newer
            step that is not complete, is in the report's warnings, and is logged to `ema_ckpt`.
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
        rules: a file of rules for the names and layouts in the checkpoint,
            the name of one that comes with the package, or what `load_rules` returned. Optimizer
            state goes through them too, if it is stored under names of parameters.

    Raises:
        CollectiveError: `rank-failed`: a rank did not come or died.
        SourceError, UsageError: on every rank: what is missing, unexpected, misfit or damaged in
            the checkpoint.
        StateError: inside `swap()`.
    """
    with (
        one_call_at_a_time(_CALL, "save"),
        leaving_together("save", after_background_save),
    ):
        failure = failure_of(lambda: _check_arguments(path, ema_path, missing_ema))
        ranks = meet_and_connect(_CALL, "save", timeout, failure, wait_for_background_save)
        options = {
            "ema_path": "None" if ema_path is None else "a path",
            "strict": bool(strict),
            "missing_ema": missing_ema,
            "rules": "None" if rules is None else "rules",
        }
        agree_on_options(options, ranks, _CALL)
        restorers: list[Restorer] = []
        with ExitStack() as stack:
            chosen, said = choose_checkpoints((path, ema_path), ranks, _CALL)

            carries = optimizer is not None
            opening = partial(_open_readers, stack, chosen, rules, carries)
            readers = run_on_all_ranks(ranks, _CALL, opening)
            check_same_content(readers, ranks)
            said += hidden_averages(readers, ranks)
            context = RestoreContext.scan(model, strict, ranks, _CALL)
            run_on_all_ranks(ranks, _CALL, lambda: refuse_unnamed(extra, _CALL))
            managers = run_on_all_ranks(ranks, _CALL, lambda: managers_by_label(ema, _CALL))
            for label, manager in managers.items():
                seed = missing_ema == "seed"
                restorers.append(
                    EmaRestorer(readers[-1], context, manager, label, ema_path is not None, seed)
                )
            restorers.append(ModelRestorer(readers[0], context))
            given = [] if optimizer is None else optimizer
            keepers = run_on_all_ranks(ranks, _CALL, lambda: state_keepers(as_list(given, _CALL)))
            if optimizer is not None:
                restorers.append(OptimizerRestorer(readers[0], context, keepers))
            if extra is not None:
                restorers.append(ExtraRestorer(readers[0], context, extra))
            _read_all(readers, restorers, ranks)
        _write_all(model, restorers, ranks)
        findings = Findings(notes=[*said, *readers[0].rule_notes])
        for restorer in restorers:
            findings.merge(restorer.findings)
        _warn(findings.warnings, ranks)
        return findings.report(readers[0])


def _warn(found: Sequence[str], ranks: Channel) -> None:
    """Issue each warning once: on the lowest rank that found it."""
    said: set[str] = set()
    for lower in ranks.exchange(list(found))[: ranks.rank]:
        said.update(lower)
    for warning in found:
        if warning not in said:
            warnings.warn(warning, stacklevel=3)


def _check_arguments(path: object, ema_path: object, missing_ema: str) -> None:
    path_text(path)
    if ema_path is not None:
        path_text(ema_path)
    if missing_ema not in ("error", "seed"):
        raise UsageError("usage", f"missing_ema is 'error' or 'seed'; found {missing_ema!r}")


def _open_readers(
    stack: ExitStack,
    paths: Sequence[str],
    rules: str | os.PathLike[str] | Rules | None,
    optimizers: bool,
) -> list[CheckpointReader]:
    """Open checkpoints, to be closed with `stack`; rules are read once, before any of them.

    `optimizers`: whether optimizer state is read from the first of them.
    """
    chosen = chosen_rules(rules)
    readers = []
    for number, path in enumerate(paths):
        reader = CheckpointReader(path, chosen, optimizers=optimizers and number == 0)
        readers.append(stack.enter_context(closing(reader)))
    return readers


def hidden_averages(readers: list[CheckpointReader], ranks: Channel) -> list[str]:
    """Log, and return, what is to be said of averages that are no tree and are not restored."""
    hidden = [warning.message for reader in readers for warning in find_hidden(reader.trees)]
    log_warnings(hidden, ranks)
    return hidden


def check_same_content(readers: list[CheckpointReader], ranks: Channel) -> None:
    """Refuse ranks that read different checkpoints: a new step may have come in between."""
    mine = []
    for reader in readers:
        catalog = reader.catalog
        mine.append([reader.path, len(catalog.tensors), catalog.files, catalog.made_by])
    everyone = ranks.exchange(mine)
    names = sorted({" and ".join(path for path, *_ in one) for one in everyone})
    if len(names) > 1:
        raise UsageError("usage", f"restore: the ranks name different checkpoints: {shown(names)}")
    if any(one != everyone[0] for one in everyone):
        raise UsageError("usage", f"restore: the ranks find different content under {names[0]}")


def _read_all(
    readers: Sequence[CheckpointReader], restorers: Sequence[Restorer], ranks: Channel
) -> None:
    """Compare and read on all ranks; rank 0 tells whether something wrote there meanwhile."""
    checked = () if ranks.rank else readers
    before = run_on_all_ranks(
        ranks, _CALL, lambda: [FileStates.opened(reader.catalog) for reader in checked]
    )

    def refuse_changes(*, suspicious: bool = False) -> None:
        for states in before:
            states.refuse_changes(suspicious=suspicious)

    try:
        _run_phase(restorers, ranks, lambda restorer: restorer.compare())
        _run_phase(restorers, ranks, lambda restorer: restorer.read())
    except SourceError:
        run_on_all_ranks(ranks, _CALL, lambda: refuse_changes(suspicious=True))
        raise
    run_on_all_ranks(ranks, _CALL, refuse_changes)


def _write_all(model: nn.Module, restorers: Sequence[Restorer], ranks: Channel) -> None:
    """Write what was read: the user's objects first, as their code may fail and is undone then."""
    try:
        _run_phase(restorers, ranks, lambda restorer: restorer.apply_user_state())
    except BaseException:
        for restorer in restorers:
            _roll_back(restorer)
        raise
    # Signals wait: what Ctrl-C left halfway could be saved afterwards. And what is made here is
    # trained with.
    with HeldSignals(), torch.inference_mode(False):
        run_on_all_ranks(ranks, _CALL, lambda: reshard(model))
        _run_phase(restorers, ranks, lambda restorer: restorer.write())
        _run_phase(restorers, ranks, lambda restorer: restorer.finish())


def _roll_back(restorer: Restorer) -> None:
    """Give user code its former values; that it refuses these too keeps no other from them."""
    for name, step in restorer.rollback_user_state():
        try:
            step()
        except Exception as error:  # noqa: BLE001  # what failed first is raised
            what = f"{name}: did not take its former values back: {type(error).__name__}: {error}"
            logging.getLogger("ema_ckpt").warning(displayed(what))


def _run_phase(
    restorers: Sequence[Restorer], ranks: Channel, phase: Callable[[Restorer], None]
) -> None:
    """Run one step of all restorers, and fail on all ranks if it fails on one."""

    def run() -> None:
        for restorer in restorers:
            phase(restorer)

    run_on_all_ranks(ranks, _CALL, run)
