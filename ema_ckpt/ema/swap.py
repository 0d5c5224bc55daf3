"""Averaged weights in the model's place, for a while (`swapped`) or for good (`copy_to`)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Protocol

import torch
from torch import nn

from ema_ckpt.comm.rendezvous import failure_of
from ema_ckpt.core.errors import StateError
from ema_ckpt.core.text import shown
from ema_ckpt.ema.attach import Attachment
from ema_ckpt.ema.checkpoint.replicas import gather_replicas, meet_replicas
from ema_ckpt.ema.model.scan import reshard, scan_model
from ema_ckpt.ema.model.shards import ModelShards, Shadow, Shard
from ema_ckpt.ema.plain_mode import PlainMode
from ema_ckpt.ema.schedules import NEVER_MOVES, Constant
from ema_ckpt.ema.settings import Settings, UpdateCounter
from ema_ckpt.ema.shadows import Averages, live_part, not_followed
from ema_ckpt.ema.swap_state import holds_averages, mark_swapped, refuse_inside, unmark

_SCRATCH_NBYTES = 16 << 20
_MANY_UPDATES = 100

# Live values by name; None where the shadow holds them meanwhile
Backups = dict[str, torch.Tensor | None]


class AveragedModel(Protocol):
    """A model and its averages, as `ShardedEMA` has them."""

    model: nn.Module
    _averages: Averages
    _counter: UpdateCounter
    _attachment: Attachment | None
    _settings: Settings

    def _follow(self) -> None:
        """Fit `averages` to the model's present tensors."""

    def _synchronise(self) -> None:
        """Follow the model thoroughly, and raise what was noticed on the device."""


@contextmanager
def swapped(ema: AveragedModel, timeout: float) -> Iterator[None]:
    """Put the averages into the model for a block; see `ShardedEMA.swap`."""
    with PlainMode():
        failure = failure_of(lambda: _synchronise(ema, "swap()"))
        meet_replicas(ema._averages.shadows, "swap()", timeout, failure)
        _warn(ema)
        reshard(ema.model)
        ema._follow()
        backups = _put_averages(ema._averages)
        marks = mark_swapped(ema._averages.tracked)
    try:
        yield
    finally:
        with PlainMode():
            unmark(marks)
            # What the last forward gathered are averages; and a first forward inside may have moved
            # the shards.
            reshard(ema.model)
            try:
                ema._follow()
            finally:
                # Where that fails, the averages at least come back from the memory that the model
                # has left.
                _put_back(ema._averages, backups)
            torch.clear_autocast_cache()


def copy_to(ema: AveragedModel, module: nn.Module, timeout: float) -> None:
    """Write the averages into another module; see `ShardedEMA.copy_to`."""
    targets: dict[Shadow, list[Shard]] = {}
    with PlainMode():
        failure = failure_of(lambda: targets.update(_targets(ema, module)))
        meet_replicas(ema._averages.shadows, "copy_to()", timeout, failure)
        warn_of_stalled(ema, "copy_to()", 3)
        for number in range(max(map(len, targets.values()))):
            locals_ = {
                shadow: shards[number].local
                for shadow, shards in targets.items()
                if number < len(shards)
            }
            gather_replicas(locals_)
            for shadow, local in locals_.items():
                if not shadow.is_split:
                    local.copy_(shadow.average.view(local.shape))
        torch.clear_autocast_cache()


def _synchronise(ema: AveragedModel, call: str) -> None:
    refuse_inside(ema.model, call)
    ema._synchronise()


def _targets(ema: AveragedModel, module: nn.Module) -> Mapping[Shadow, list[Shard]]:
    """Return the shards to write; a tensor that is tied here may have one for each of its names."""
    _synchronise(ema, "copy_to()")
    if holds_averages(module):
        raise StateError(
            "usage", "copy_to(): the module to copy to is inside a swap() of its own manager"
        )
    reshard(module)
    tracked = scan_model(module).by_name()
    targets: dict[Shadow, list[Shard]] = {}
    for shadow in ema._averages.shadows:
        shards = [tracked[name].shard for name in shadow.shard.names if name in tracked]
        targets[shadow] = list(dict.fromkeys(shards))
    _refuse_targets(targets)
    return targets


def _refuse_targets(targets: Mapping[Shadow, list[Shard]]) -> None:
    writers = Counter(chain.from_iterable(targets.values()))

    def is_recut(shadow: Shadow, shards: list[Shard]) -> bool:
        return any(shard.boxes != shadow.shard.boxes for shard in shards)

    def is_tied(_: Shadow, shards: list[Shard]) -> bool:
        return any(writers[shard] > 1 for shard in shards)

    for message, applies in (
        ("the module to copy to lacks {}", lambda _, shards: not shards),
        ("the module to copy to is cut in another way: {}; load full_state_dict() there", is_recut),
        ("in the module to copy to one tensor has names that are separate here: {}", is_tied),
    ):
        fqns = [shadow.shard.fqn for shadow, shards in targets.items() if applies(shadow, shards)]
        if fqns:
            raise StateError("usage", message.format(shown(fqns)))


def _put_averages(averages: Averages) -> Backups:
    """Put the averages into the local shards, all or none of them."""
    backups: Backups = {}
    try:
        for shadow in averages.shadows:
            live, average = shadow.shard.local, shadow.average
            same_kind = live.dtype is average.dtype and live.device == average.device
            if shadow.is_split:
                backups[shadow.shard.fqn] = live.clone()
            elif shadow.shard.is_parameter and same_kind:
                _exchange(live, average)
                backups[shadow.shard.fqn] = None
            else:
                # An exchange would round the average, or let a forward in training mode move that
                # of a buffer.
                backups[shadow.shard.fqn] = live.clone()
                live.copy_(average)
        gather_replicas({shadow: shadow.shard.local for shadow in averages.shadows})
    except BaseException:
        _put_back(averages, backups)
        raise
    return backups


def _put_back(averages: Averages, backups: Backups) -> None:
    # Reversed: where two share memory, the first still has its values.
    for shadow in reversed(averages.shadows):
        if shadow.shard.fqn in backups:
            backup = backups[shadow.shard.fqn]
            if backup is None:
                _exchange(shadow.shard.local, shadow.average)
            else:
                shadow.shard.local.copy_(backup)


def _exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchange the values of two tensors of one dtype and shape, through a bounded scratch."""
    step = _SCRATCH_NBYTES // a.element_size()
    pairs = [(a, b)]
    if a.numel() > step and a.is_contiguous() and b.is_contiguous():
        pairs = list(zip(torch.split(a.view(-1), step), torch.split(b.view(-1), step), strict=True))
    for x, y in pairs:
        scratch = x.clone()
        x.copy_(y)
        y.copy_(scratch)


def warn_of_stalled(ema: AveragedModel, call: str, stacklevel: int, *, fresh: bool = True) -> None:
    """Warn if the average has never moved, or attached optimizers stepped without an update.

    `fresh`: also before the first update.
    """
    counter = ema._counter
    reason = None if ema._attachment is None else ema._attachment.stalled()
    is_due = fresh or counter.num_updates > 0
    if reason is None and is_due and not counter.has_moved:
        reason = counter.stalled()
    if reason is None and counter.num_updates and counter.schedule == Constant(1.0):
        reason = NEVER_MOVES
    if reason is not None:
        warnings.warn(f"ema-stalled: {call}: {reason}", stacklevel=stacklevel + 1)


def warn_of_not_followed(
    ema: AveragedModel, model_shards: ModelShards, call: str, stacklevel: int
) -> None:
    """Warn of parameters that are trained and not averaged: unfrozen, or added, since."""
    names = not_followed(model_shards, ema._settings, ema._averages)
    if names:
        what = f"{shown(names)} {'is' if len(names) == 1 else 'are'} trained and not averaged"
        why = "frozen, or not in the model, when the ShardedEMA was made"
        remedy = "make a new one, and restore it with strict=False, or exclude= the names"
        warnings.warn(f"ema-partial: {call}: {what}: {why}; {remedy}", stacklevel=stacklevel + 1)


def _warn(ema: AveragedModel) -> None:
    warn_of_stalled(ema, "swap()", 5)
    updates = ema._counter.num_updates
    has_moved = ema._counter.has_moved and ema._counter.applied > 0
    if updates >= _MANY_UPDATES and has_moved and _equals_live(ema._averages):
        warnings.warn(
            f"after {updates} updates the average equals the live weights in every element: do the"
            " weights that the optimizer steps reach it?",
            stacklevel=5,
        )


def _equals_live(averages: Averages) -> bool:
    compared = False
    for shadow in averages.shadows:
        if shadow.numel and shadow.shard.is_parameter:
            live = live_part(shadow, shadow.shard.local)
            if not torch.equal(shadow.average.to(live.device), live.to(shadow.average.dtype)):
                return False
            compared = True
    return compared
