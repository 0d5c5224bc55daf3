"""Averaged weights in the model's place, for a while (`swapped`) or for good (`copy_to`)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import torch
from torch import nn

from ema_ckpt.comm.rendezvous import failure_of
from ema_ckpt.core.box import intersect
from ema_ckpt.core.errors import EmaCkptError, StateError, about
from ema_ckpt.core.text import shown
from ema_ckpt.ema.attach import Attachment
from ema_ckpt.ema.checkpoint.local_shards_tensor import box_of, box_views
from ema_ckpt.ema.checkpoint.replicas import ReplicaGather, meet_replicas
from ema_ckpt.ema.model.scan import keep_after_summon, reshard, scan_model
from ema_ckpt.ema.model.shards import ModelShards, Shadow, Shard, TrackedShard
from ema_ckpt.ema.plain_mode import PlainMode
from ema_ckpt.ema.schedules import NEVER_MOVES, Constant
from ema_ckpt.ema.settings import Settings, UpdateCounter
from ema_ckpt.ema.shadows import Averages, live_part, not_followed
from ema_ckpt.ema.swap_state import holds_averages, mark_swapped, refuse_inside, unmark
from ema_ckpt.runtime.held_signals import HeldSignals

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
    """Put the averages into the model for a block; see `ShardedEMA.swap`.

    Signals wait while weights are exchanged: what Ctrl-C left halfway could be saved afterwards,
    and a handler that saves would save it at once.
    """
    with PlainMode():
        failure = failure_of(lambda: _synchronise(ema, "swap()"))
        meet_replicas(ema._averages.shadows, "swap()", timeout, failure)
    exchanged = _Exchanged()
    try:
        with HeldSignals(), PlainMode():
            failure = failure_of(lambda: _enter(ema, exchanged))
            # What one rank has no memory for, say: the others would wait in the exchange.
            meet_replicas(ema._averages.shadows, "swap()", timeout, failure)
            if exchanged.gather is not None:
                exchanged.gather.run()
        yield
    finally:
        try:
            _leave(ema, exchanged)
        finally:  # where an interrupt came before signals waited
            _leave(ema, exchanged)


@dataclass(slots=True)
class _Exchanged:
    """What a block has put into the model, and has to take out of it again."""

    marks: set[int] = field(default_factory=set)
    backups: Backups = field(default_factory=dict)
    gather: ReplicaGather | None = None
    versions: dict[str, int] = field(default_factory=dict)  # of what shows averages in place


def _enter(ema: AveragedModel, exchanged: _Exchanged) -> None:
    """Put what this rank has of the averages into the model."""
    _warn(ema)
    reshard(ema.model)
    ema._follow()
    shadows = ema._averages.shadows
    exchanged.gather = ReplicaGather({shadow: shadow.shard.local for shadow in shadows})
    exchanged.marks = mark_swapped(ema.model, ema._averages.tracked, "swap()")
    _put_averages(ema._averages, exchanged.backups)
    exchanged.versions = _versions(ema._averages, exchanged.backups)


def _leave(ema: AveragedModel, exchanged: _Exchanged) -> None:
    """Put the live weights back, as far as the averages are in the model."""
    if not exchanged.marks:
        return
    with HeldSignals(), PlainMode():
        backups = exchanged.backups
        inside = {shadow.shard.fqn: shadow.shard for shadow in ema._averages.shadows}
        written = _written(ema._averages, exchanged)
        try:
            # What the last forward gathered are averages; and a first forward inside may have moved
            # the shards.
            try:
                reshard(ema.model)
            finally:
                ema._follow()
        except BaseException as error:
            # The averages come back from the memory that the model has left, and the live weights
            # go where it has its weights now, in whatever dtype.
            _put_back(ema._averages, backups, {})
            state = _describe_model(_hand_over(ema))
            keep_after_summon(ema.model)
            if isinstance(error, EmaCkptError):
                raise about(error, remedy=state) from None
            error.add_note(state)
            raise
        else:
            _put_back(ema._averages, backups, inside)
            torch.clear_autocast_cache()
        finally:
            unmark(exchanged.marks)
            exchanged.marks.clear()
    if written:
        warnings.warn(
            f"swap(): the block wrote to {shown(written)}, where averages were: the averages have"
            " changed, and the live weights are as they were before; train outside of the block",
            stacklevel=4,
        )


def _versions(averages: Averages, backups: Backups) -> dict[str, int]:
    """Return how often each shard has been written to that shows its average in place."""
    versions = {}
    for shadow in averages.shadows:
        fqn, local = shadow.shard.fqn, shadow.shard.local
        if backups.get(fqn, local) is None and not local.is_inference():
            versions[fqn] = local._version
    return versions


def _written(averages: Averages, exchanged: _Exchanged) -> list[str]:
    """Name the averages that writes of the block have changed, as far as torch counts them."""
    present = _versions(averages, exchanged.backups)
    return [fqn for fqn, number in exchanged.versions.items() if present.get(fqn, number) != number]


def _describe_model(lost: list[str]) -> str:
    """Say what the model holds after a block that changed it; `lost` are names without a place."""
    if not lost:
        return "swap(): the live weights are back in the model"
    return (
        f"swap(): the live weights of {shown(lost)} have no place any more: what the model has in"
        " their stead comes from averages; restore a checkpoint"
    )


def copy_to(ema: AveragedModel, module: nn.Module, timeout: float) -> None:
    """Write the averages into another module; see `ShardedEMA.copy_to`."""
    copies: list[tuple[ReplicaGather, dict[Shadow, torch.Tensor]]] = []

    def prepare() -> None:
        targets = _targets(ema, module)
        warn_of_stalled(ema, "copy_to()", 5)
        for number in range(max(map(len, targets.values()))):
            locals_ = {
                shadow: shards[number].local
                for shadow, shards in targets.items()
                if number < len(shards)
            }
            copies.append((ReplicaGather(locals_), locals_))

    with PlainMode():
        failure = failure_of(prepare)
        meet_replicas(ema._averages.shadows, "copy_to()", timeout, failure)
        for gather, locals_ in copies:
            gather.run()
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


def _put_averages(averages: Averages, backups: Backups) -> None:
    """Put the averages that no replicas divide into the local shards, and note what was there."""
    for shadow in averages.shadows:
        live, average = shadow.shard.local, shadow.average
        same_kind = live.dtype is average.dtype and live.device == average.device
        if shadow.is_split:
            backups[shadow.shard.fqn] = live.clone()
        elif shadow.shard.is_parameter and same_kind:
            _exchange(live, average)
            backups[shadow.shard.fqn] = None
        else:
            # An exchange would round the average, or let a forward in training mode move that of a
            # buffer.
            backups[shadow.shard.fqn] = live.clone()
            live.copy_(average)


def _put_back(averages: Averages, backups: Backups, inside: Mapping[str, Shard]) -> None:
    """Put the live values back; `inside` is where the averages were put, by name."""
    # Reversed: where two share memory, the first still has its values.
    for shadow in reversed(averages.shadows):
        fqn, local = shadow.shard.fqn, shadow.shard.local
        if fqn not in backups:
            continue
        backup, former = backups.pop(fqn), inside.get(fqn, shadow.shard)
        if backup is not None:
            _fill(shadow.shard, replace(former, local=backup))
        elif _has_left(local, former.local):
            # What came from there may be rounded: `.half()` and `.float()` inside.
            local.copy_(shadow.average)
            shadow.average.copy_(former.local)
        else:
            _exchange(local, shadow.average)


def _hand_over(ema: AveragedModel) -> list[str]:
    """Write the live values in averages' shards into the model's; name those that do not fit."""
    present: Mapping[str, TrackedShard] = {}
    with suppress(EmaCkptError):
        present = scan_model(ema.model).by_name()
    lost = []
    for shadow in ema._averages.shadows:
        tracked = present.get(shadow.shard.fqn)
        if tracked is None or not _fill(tracked.shard, shadow.shard):
            lost.append(shadow.shard.fqn)
    return lost


def _fill(target: Shard, source: Shard) -> bool:
    """Write a shard's values into one that may be cut in another way; False if some are lacking."""
    if target.shape != source.shape:
        return False
    if target.boxes == source.boxes:
        target.local.copy_(source.local.view(target.local.shape))
        return True
    pieces = list(zip(source.boxes, box_views(source.boxes, source.local), strict=True))
    copies = []
    for box, view in zip(target.boxes, box_views(target.boxes, target.local), strict=True):
        for other, values in pieces:
            common = intersect(box, other)
            if common is not None:
                part = box_of(view, common.within(box))
                copies.append((part, box_of(values, common.within(other))))
    if sum(part.numel() for part, _ in copies) < target.local.numel():
        return False
    for part, values in copies:
        part.copy_(values)
    return True


def _has_left(local: torch.Tensor, former: torch.Tensor) -> bool:
    """Return whether a shard lies in other memory than before, which is still there."""
    is_other = local.shape == former.shape and local.data_ptr() != former.data_ptr()
    return is_other and former.untyped_storage().nbytes() > 0


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
    warn_of_stalled(ema, "swap()", 7)
    updates = ema._counter.num_updates
    has_moved = ema._counter.has_moved and ema._counter.applied > 0
    if updates >= _MANY_UPDATES and has_moved and _equals_live(ema._averages):
        warnings.warn(
            f"after {updates} updates the average equals the live weights in every element: do the"
            " weights that the optimizer steps reach it?",
            stacklevel=7,
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
