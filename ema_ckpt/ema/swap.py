"""The averaged weights in the model's place, for a while (`swapped`) or for good (`copy_to`)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from ema_ckpt.core.errors import StateError
from ema_ckpt.core.text import shown
from ema_ckpt.ema.checkpoint.replicas import gather, meet_replicas
from ema_ckpt.ema.model.scan import reshard, scan_model
from ema_ckpt.ema.model.shards import Shadow, Shard
from ema_ckpt.ema.modes import PlainMode
from ema_ckpt.ema.shadows import live_part

if TYPE_CHECKING:
    from ema_ckpt.ema.manager import ShardedEMA

_SCRATCH_NBYTES = 16 << 20
_MANY_UPDATES = 100

# Ids of the parameters that hold averages at the moment, and of the modules' dicts in which they
# are. The managers inside their blocks keep them alive.
_swapped: set[int] = set()

Backups = dict[
    str, torch.Tensor | None
]  # the live values by name; None where the shadow holds them meanwhile


def refuse_inside(model: nn.Module, call: str) -> None:
    """Raise if a model holds averages instead of its own weights.

    Raises:
        StateError: inside `swap()` of any manager.
    """
    if _holds_averages(model):
        raise StateError(
            "usage",
            f"{call} inside swap(): the model holds averaged weights; leave the block first",
        )


def _holds_averages(model: nn.Module) -> bool:
    """Whether tensors of a model hold averages at the moment, whatever a forward inside the block
    has gathered.
    """
    return bool(_swapped) and not _swapped.isdisjoint(_places(model))


def _places(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        yield id(module._parameters)
    found = scan_model(model)
    for held in (*found.parameters, *found.buffers):
        yield id(held.container)
        yield id(held.owner)


@contextmanager
def swapped(ema: ShardedEMA, timeout: float) -> Iterator[None]:
    """See `ShardedEMA.swap`."""
    with PlainMode():
        failure = _failure(lambda: _ready(ema, "swap()"))
        meet_replicas(ema.averages.shadows, "swap()", timeout, failure)
        _warn(ema)
        reshard(ema.model)
        ema.follow()
        places = {id(held.container) for held in ema.averages.tracked} | {
            id(held.owner) for held in ema.averages.tracked
        }
        backups = _enter(ema)
        _swapped.update(places)
    try:
        yield
    finally:
        with PlainMode():
            _swapped.difference_update(places)
            # What the last forward gathered are averages; and a first forward inside may have moved
            # the shards.
            reshard(ema.model)
            try:
                ema.follow()
            # where that fails, the averages at least come back from the memory that the model has
            # left
            finally:
                _leave(ema, backups)
            torch.clear_autocast_cache()


def copy_to(ema: ShardedEMA, module: nn.Module, timeout: float) -> None:
    """See `ShardedEMA.copy_to`."""
    targets: dict[Shadow, list[Shard]] = {}
    with PlainMode():
        failure = _failure(lambda: targets.update(_targets(ema, module)))
        meet_replicas(ema.averages.shadows, "copy_to()", timeout, failure)
        for place in range(max(map(len, targets.values()))):
            _fill(
                {
                    slot: shards[place].local
                    for slot, shards in targets.items()
                    if len(shards) > place
                }
            )
        torch.clear_autocast_cache()


def _fill(targets: Mapping[Shadow, torch.Tensor]) -> None:
    """Write averages whole into local tensors. Collective over the replicas that divide them."""
    gather(list(targets), targets.__getitem__)
    for slot, local in targets.items():
        if not slot.is_split:
            local.copy_(slot.average.view(local.shape))


def _ready(ema: ShardedEMA, call: str) -> None:
    refuse_inside(ema.model, call)
    ema.synchronise()


def _targets(ema: ShardedEMA, module: nn.Module) -> dict[Shadow, list[Shard]]:
    """The shards to copy to: of a tensor that is tied here there may be one for each of its
    names.
    """
    _ready(ema, "copy_to()")
    if _holds_averages(module):
        raise StateError(
            "usage", "copy_to(): the module to copy to is inside a swap() of its own manager"
        )
    reshard(module)
    found = scan_model(module)
    named = {name: h.shard for h in (*found.parameters, *found.buffers) for name in h.shard.names}
    targets = {
        slot: list(dict.fromkeys(named[name] for name in slot.shard.names if name in named))
        for slot in ema.averages.shadows
    }
    missing = [slot.shard.fqn for slot, shards in targets.items() if not shards]
    if missing:
        raise StateError("usage", f"the module to copy to lacks {shown(missing)}")
    other = [
        s.shard.fqn
        for s, shards in targets.items()
        if any(t.boxes != s.shard.boxes for t in shards)
    ]
    if other:
        raise StateError(
            "usage",
            f"the module to copy to is cut in another way: {shown(other)}; load full_state_dict() there",
        )
    writers = Counter(shard for shards in targets.values() for shard in shards)
    tied = [
        slot.shard.fqn
        for slot, shards in targets.items()
        if any(writers[shard] > 1 for shard in shards)
    ]
    if tied:
        raise StateError(
            "usage",
            f"in the module to copy to one tensor has names that are separate here: {shown(tied)}",
        )
    return targets


def _failure(step: Callable[[], None]) -> Exception | None:
    """What `step` raised: whoever waits for this rank must hear of it first."""
    try:
        step()
    except Exception as error:  # noqa: BLE001  # raised by the caller
        return error
    return None


def _enter(ema: ShardedEMA) -> Backups:
    """Put the averages into the local shards, all or none of them."""
    backups: Backups = {}
    try:
        for slot in ema.averages.shadows:
            live, shadow = slot.shard.local, slot.average
            if slot.is_split:
                backups[slot.shard.fqn] = live.clone()
            elif (
                slot.shard.is_parameter
                and live.dtype is shadow.dtype
                and live.device == shadow.device
            ):
                _exchange(live, shadow)
                backups[slot.shard.fqn] = None
            # an exchange would round the average, or let a forward in training mode move that of a
            # buffer
            else:
                backups[slot.shard.fqn] = live.clone()
                live.copy_(shadow)
        gather(ema.averages.shadows, lambda slot: slot.shard.local)
    except BaseException:
        _leave(ema, backups)
        raise
    return backups


def _leave(ema: ShardedEMA, backups: Backups) -> None:
    for slot in reversed(
        ema.averages.shadows
    ):  # where two share memory, the first still has its values
        if slot.shard.fqn in backups:
            backup = backups[slot.shard.fqn]
            if backup is None:
                _exchange(slot.shard.local, slot.average)
            else:
                slot.shard.local.copy_(backup)


def _exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchange the values of two tensors of one dtype and shape, through a bounded scratch."""
    step = _SCRATCH_NBYTES // a.element_size()
    pairs = [(a, b)]
    if a.numel() > step and a.is_contiguous() and b.is_contiguous():
        pairs = list(zip(torch.split(a.view(-1), step), torch.split(b.view(-1), step), strict=True))
    for x, y in pairs:
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)


def _warn(ema: ShardedEMA) -> None:
    if ema.num_updates == 0:
        warnings.warn(
            "swap() before the first update: the average is still the weights it began with",
            stacklevel=5,
        )
    elif (
        ema.num_updates >= _MANY_UPDATES
        and ema.current_decay > 0
        and _equals_live(ema.averages.shadows)
    ):
        warnings.warn(
            f"after {ema.num_updates} updates the average equals the live weights in every element: do the weights"
            " that the optimizer steps reach it?",
            stacklevel=5,
        )


def _equals_live(slots: tuple[Shadow, ...]) -> bool:
    pairs = [
        (s.average, live_part(s, s.shard.local)) for s in slots if s.numel and s.shard.is_parameter
    ]
    return bool(pairs) and all(
        torch.equal(shadow.to(live.device), live.to(shadow.dtype)) for shadow, live in pairs
    )
