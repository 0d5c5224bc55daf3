"""The models that hold averages instead of their own weights at the moment."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torch import nn

from ema_ckpt.core.errors import StateError
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.ema.model.shards import TrackedShard

# Ids of the tensors that hold averages, and of the dictionaries in which they are registered. The
# managers inside their blocks keep them alive.
_swapped: set[int] = set()
_marking = threading.RLock()  # a signal handler may ask while it is held


def refuse_inside(model: nn.Module, call: str) -> None:
    """Raise StateError if a model holds averages instead of its own weights."""
    if holds_averages(model):
        raise StateError(
            "usage",
            f"{call} inside swap(): the model holds averaged weights; leave the block first",
        )


def holds_averages(model: nn.Module) -> bool:
    """Return whether tensors of a model hold averages, whatever a forward has gathered."""
    if not _swapped:
        return False
    scanned = scan_model(model)
    ids = {id(module._parameters) for _, module in scanned.modules}
    return not _swapped.isdisjoint(ids | _ids(scanned.tensors))


def mark_swapped(model: nn.Module, tracked_shards: Iterable[TrackedShard], call: str) -> set[int]:
    """Mark tensors as holding averages; returns the marks for `unmark`.

    Raises:
        StateError: they are marked already, by another thread perhaps.
    """
    marks = _ids(tracked_shards)
    with _marking:
        refuse_inside(model, call)
        _swapped.update(marks)
    return set(marks)


def unmark(marks: Iterable[int]) -> None:
    """Mark tensors as holding their own values again."""
    _swapped.difference_update(marks)


def _ids(tracked_shards: Iterable[TrackedShard]) -> frozenset[int]:
    ids: set[int] = set()
    for tracked in tracked_shards:
        ids |= {id(tracked.container), id(tracked.owner)}
    return frozenset(ids)
