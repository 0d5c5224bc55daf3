"""The manager's state as a tree of tensors of global shape, and back into the averages in place.

`{"weights": {fqn: tensor}, "num_updates": int64, "samples_seen": int64, "config": str}`, and with
`compensate` `"residual": {fqn: tensor}`. `config` is one JSON document, so that a new field breaks
no older file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ema_ckpt.core.box import Box, intersect
from ema_ckpt.core.errors import StateError
from ema_ckpt.core.text import shown
from ema_ckpt.ema.checkpoint.local_shards_tensor import as_global_tensor, box_of, pieces_of
from ema_ckpt.ema.model.shards import Shadow, TrackedShard
from ema_ckpt.ema.schedules import Constant, Warmup, to_json
from ema_ckpt.ema.settings import Counter, Settings
from ema_ckpt.ema.shadows import Averages

_VERSION = 1


def tree(averages: Averages, counter: Counter, settings: Settings) -> dict[str, Any]:
    """The state, its averages aliased; buffers that are not averaged are copies of the live
    ones.
    """
    weights = {
        slot.shard.fqn: _published(slot, slot.average, settings)
        for slot in averages.shadows
        if _is_saved(averages, slot)
    }
    weights.update((h.shard.fqn, _live_copy(h)) for h in averages.live_buffers if h.persistent)
    state: dict[str, Any] = {
        "weights": weights,
        "num_updates": torch.tensor(counter.num_updates, dtype=torch.int64),
        "samples_seen": torch.tensor(counter.samples_seen, dtype=torch.int64),
        "config": json.dumps(_config(averages, counter, settings)),
    }
    if settings.compensate:
        state["residual"] = {
            slot.shard.fqn: _published(slot, slot.residual, settings)
            for slot in averages.shadows
            if slot.residual is not None
        }
    return state


def load(state: Mapping[str, Any], averages: Averages, counter: Counter) -> None:
    """Take over a state: averages are written in place unless `state` aliases them, and the counter
    goes on from it.

    A tied tensor is taken under any of its names, those of this model or those that the state's
    `config` records.

    Raises:
        StateError: a name is missing, or a tensor has another shape or lacks elements of this rank;
            nothing changed.
    """
    absent = [name for name in ("weights", "num_updates") if name not in state]
    if absent:
        raise StateError(
            "usage", f"the state to load lacks {shown(absent)}: give what state_dict() returned"
        )
    config = parse_config(state.get("config"))
    slots = [slot for slot in averages.shadows if _is_saved(averages, slot)]
    weights = _found(slots, state["weights"], config)
    residuals = _found(slots, state.get("residual", {}), config)
    missing = [slot.shard.fqn for slot in slots if slot not in weights]
    if missing:
        raise StateError("usage", f"the state to load lacks averages: {shown(missing)}")
    pairs = [(slot, slot.average, value) for slot, value in weights.items()]
    pairs += [
        (slot, slot.residual, value)
        for slot, value in residuals.items()
        if slot.residual is not None
    ]
    copies = [copy for slot, into, value in pairs for copy in _copies(slot, into, value)]
    updates, samples = int(state["num_updates"]), int(state.get("samples_seen", 0))
    if min(updates, samples) < 0:
        raise StateError(
            "usage", f"the state to load counts {updates} updates and {samples} samples"
        )
    for into, value in copies:
        into.copy_(value)
    for slot in slots:
        if slot.residual is not None and slot not in residuals:
            slot.residual.zero_()
    counter.resume(updates, samples, config.get("counter", {}))


def _found(
    slots: Iterable[Shadow], tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[Shadow, torch.Tensor]:
    """What a state holds for each slot, under whichever of its names."""
    ties = {
        alias: name
        for name, aliases in config.get("tied", {}).items()
        for alias in aliases
        if name in tensors
    }
    named = {**{alias: tensors[name] for alias, name in ties.items()}, **tensors}
    names = {
        slot: next((name for name in slot.shard.names if name in named), None) for slot in slots
    }
    return {slot: named[name] for slot, name in names.items() if name is not None}


def parse_config(config: object) -> dict[str, Any]:
    """The settings of a state: from its JSON document, or a dict as older files have it."""
    if isinstance(config, (str, bytes)):
        try:
            config = json.loads(config)
        except ValueError as error:
            raise StateError(
                "usage", f"the config of the averages is no JSON document: {error}"
            ) from None
    return dict(config) if isinstance(config, Mapping) else {}


def _config(averages: Averages, counter: Counter, settings: Settings) -> dict[str, Any]:
    schedule = settings.schedule
    everything = [slot.shard for slot in averages.shadows] + [
        h.shard for h in averages.live_buffers
    ]
    return {
        "version": _VERSION,
        "decay": schedule.decay if isinstance(schedule, (Constant, Warmup)) else None,
        "schedule": to_json(schedule),
        "every": settings.every,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "compensate": settings.compensate,
        "rounding": settings.rounding,
        "seed": settings.seed,
        "nonfinite": settings.nonfinite,
        "buffers": settings.buffers,
        "tied": {shard.fqn: list(shard.aliases) for shard in everything if shard.aliases},
        "counter": {
            "moved_at": counter.moved_at,
            "pending": counter.pending,
            "applied": counter.applied,
        },
    }


def _is_saved(averages: Averages, slot: Shadow) -> bool:
    return slot.shard.is_parameter or averages.tracked[averages.shadows.index(slot)].persistent


def _published(slot: Shadow, local: torch.Tensor, settings: Settings) -> torch.Tensor:
    shard = slot.shard
    layout = (
        None if shard.mesh is None or shard.placements is None else (shard.mesh, shard.placements)
    )
    splits = (
        settings.shard_replicas is not False and shard.replica is not None and bool(shard.shape)
    )
    return as_global_tensor(
        slot.boxes,
        shard.shape,
        local,
        layout,
        shard.replica.count if splits and shard.replica else 1,
    )


def _live_copy(held: TrackedShard) -> torch.Tensor:
    shard = held.shard
    layout = (
        None if shard.mesh is None or shard.placements is None else (shard.mesh, shard.placements)
    )
    return as_global_tensor(shard.boxes, shard.shape, shard.local.detach().clone(), layout)


def _copies(
    slot: Shadow, into: torch.Tensor, value: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(target view, source view) pairs that bring `value` into `into`, the slot's memory; none if
    it is that memory.
    """
    if tuple(value.shape) != slot.shard.shape:
        raise StateError(
            "usage",
            f"{slot.shard.fqn!r} has shape {slot.shard.shape}; the state to load has {tuple(value.shape)}",
        )
    targets = pieces_of(as_global_tensor(slot.boxes, slot.shard.shape, into)) if slot.numel else ()
    sources = pieces_of(value)
    copies = [copy for box, view in targets for copy in _overlaps(box, view, sources)]
    if sum(target.numel() for target, _ in copies) < slot.numel:
        raise StateError(
            "usage",
            f"{slot.shard.fqn!r}: the state to load holds other elements than this rank averages; give whole tensors,"
            " or restore the checkpoint with ema_ckpt.restore",
        )
    return [(target, source) for target, source in copies if target.data_ptr() != source.data_ptr()]


def _overlaps(
    box: Box, view: torch.Tensor, sources: Iterable[tuple[Box, torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    copies = []
    for other, tensor in sources:
        common = intersect(box, other)
        if common is not None:
            copies.append((box_of(view, common.within(box)), box_of(tensor, common.within(other))))
    return copies
