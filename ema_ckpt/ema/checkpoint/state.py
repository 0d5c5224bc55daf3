"""The manager's state as a tree of tensors of global shape, and back into the averages in place.

`{"weights": {fqn: tensor}, "num_updates": int64, "samples_seen": int64, "config": str}`, and with
`compensate` `"residual": {fqn: tensor}`. `config` is one JSON document, so that a new field breaks
no older file.
"""

from __future__ import annotations

import contextlib
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ema_ckpt.core.box import intersect
from ema_ckpt.core.errors import StateError
from ema_ckpt.core.text import shown
from ema_ckpt.ema.checkpoint.local_shards_tensor import as_global_tensor, box_of, pieces_of
from ema_ckpt.ema.model.shards import Shadow
from ema_ckpt.ema.schedules import Constant, Warmup, to_json
from ema_ckpt.ema.settings import Settings, UpdateCounter
from ema_ckpt.ema.shadows import Averages
from ema_ckpt.runtime.held_signals import HeldSignals

_VERSION = 1


def tree(
    averages: Averages,
    counter: UpdateCounter,
    settings: Settings,
    as_tensor: Callable[..., Any] = as_global_tensor,
    attached: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state; averages are aliased, buffers that are not averaged are copied.

    `as_tensor` makes its tensors, as `as_global_tensor` does; `attached` is the round of attached
    optimizers that goes on.
    """
    weights = {
        shadow.shard.fqn: _as_global(shadow, shadow.average, settings, as_tensor)
        for shadow in _saved(averages)
    }
    for tracked in averages.live_buffers:
        if tracked.persistent:
            shard = tracked.shard
            weights[shard.fqn] = as_tensor(
                shard.boxes, shard.shape, shard.local.detach().clone(), shard.layout
            )
    config = _config(averages, counter, settings)
    if attached is not None:
        config["attached"] = attached
    state: dict[str, Any] = {
        "weights": weights,
        "num_updates": torch.tensor(counter.num_updates, dtype=torch.int64),
        "samples_seen": torch.tensor(counter.samples_seen, dtype=torch.int64),
        "config": json.dumps(config),
    }
    if settings.compensate:
        state["residual"] = {
            shadow.shard.fqn: _as_global(shadow, shadow.residual, settings, as_tensor)
            for shadow in averages.shadows
            if shadow.residual is not None
        }
    return state


def _require_dict(state: object) -> None:
    if not isinstance(state, Mapping):
        message = f"the state to load is a {type(state).__name__}: give what state_dict() returned"
        raise StateError("usage", message)


def load(state: Mapping[str, Any], averages: Averages, counter: UpdateCounter) -> None:
    """Load a state: averages in place unless `state` aliases them, and the counter.

    A tied tensor is found under any of its names, those of this model or those that the state's
    `config` records.

    Raises:
        StateError: a name is missing, a tensor has another shape or lacks elements of this rank, or
            the counter is none of a run; nothing changed.
    """
    _require_dict(state)
    absent = sorted({"weights", "num_updates"} - state.keys())
    if absent:
        raise StateError(
            "usage", f"the state to load lacks {shown(absent)}: give what state_dict() returned"
        )
    config = parse_config(state.get("config"))
    copies, restarted = _plan(_saved(averages), state, ties_of(config))
    updates, samples = _count_of(state, "num_updates"), _count_of(state, "samples_seen")
    saved = config.get("counter", {})
    replace(counter).resume(updates, samples, saved)  # refused before anything is changed
    with HeldSignals():  # else Ctrl-C would leave averages of two states
        for target, source in copies:
            target.copy_(source)
        for residual in restarted:
            residual.zero_()
        counter.resume(updates, samples, saved)


def _count_of(state: Mapping[str, Any], name: str) -> Any:
    """Return a counter of a state: a number, numpy's too, or the one element of a tensor."""
    value = state.get(name, 0)
    if isinstance(value, Tensor) and not value.is_meta and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    return value


def _require_tensors(part: str, tensors: object) -> None:
    kinds = [type(tensors).__name__]
    if isinstance(tensors, Mapping):
        odd = [value for value in tensors.values() if not isinstance(value, Tensor)]
        kinds = [type(value).__name__ for value in odd]
    if kinds:
        message = f"{part!r} of the state to load are tensors by name; found {kinds[0]}"
        raise StateError("usage", message)


def _plan(
    shadows: Sequence[Shadow], state: Mapping[str, Any], tied: Mapping[str, Sequence[str]]
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Return what to copy, as (target, source), and the residuals that the state lacks."""
    for part in ("weights", "residual"):
        _require_tensors(part, state.get(part, {}))
    weights = _values_of(shadows, state["weights"], tied)
    residuals = _values_of(shadows, state.get("residual", {}), tied)
    missing = [shadow.shard.fqn for shadow in shadows if shadow not in weights]
    if missing:
        raise StateError("usage", f"the state to load lacks averages: {shown(missing)}")
    copies, restarted = [], []
    for shadow in shadows:
        copies += _copies(shadow, shadow.average, weights[shadow])
        if shadow.residual is not None and shadow in residuals:
            copies += _copies(shadow, shadow.residual, residuals[shadow])
        elif shadow.residual is not None:
            restarted.append(shadow.residual)
    return copies, restarted


def _values_of(
    shadows: Iterable[Shadow], tensors: Mapping[str, Tensor], tied: Mapping[str, Sequence[str]]
) -> dict[Shadow, Tensor]:
    """Return each shadow's tensor of a state, under whichever of its names it is there."""
    named: dict[str, Tensor] = {}
    for name, aliases in tied.items():
        if name in tensors:
            named.update(dict.fromkeys(aliases, tensors[name]))
    named.update(tensors)
    values = {}
    for shadow in shadows:
        names = [name for name in shadow.shard.names if name in named]
        if names:
            values[shadow] = named[names[0]]
    return values


def parse_config(config: object) -> dict[str, Any]:
    """Return the settings of a state from its JSON document, or a dict as older files have it."""
    if isinstance(config, (str, bytes)):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError) as error:
            raise StateError(
                "usage", f"the config of the averages is no JSON document: {error}"
            ) from None
    return dict(config) if isinstance(config, Mapping) else {}


def ties_of(config: Mapping[Any, Any]) -> dict[str, list[str]]:
    """Return the names that settings record as tied to a name; what has another form ties none."""
    tied = config.get("tied")
    ties = {}
    for name, aliases in tied.items() if isinstance(tied, Mapping) else ():
        if isinstance(aliases, list | tuple):
            ties[name] = [alias for alias in aliases if isinstance(alias, str)]
    return ties


def _config(averages: Averages, counter: UpdateCounter, settings: Settings) -> dict[str, Any]:
    schedule = settings.schedule
    shards = [shadow.shard for shadow in averages.shadows]
    shards += [tracked.shard for tracked in averages.live_buffers]
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
        "tied": {shard.fqn: list(shard.aliases) for shard in shards if shard.aliases},
        "counter": {name: getattr(counter, name) for name in ("moved_at", "pending", "applied")},
    }


def _saved(averages: Averages) -> list[Shadow]:
    """Return the shadows of parameters and persistent buffers."""
    saved = []
    for shadow, tracked in zip(averages.shadows, averages.tracked, strict=True):
        if shadow.shard.is_parameter or tracked.persistent:
            saved.append(shadow)
    return saved


def _as_global(
    shadow: Shadow, local: Tensor, settings: Settings, as_tensor: Callable[..., Any]
) -> Any:
    shard, replicas = shadow.shard, 1
    # On all ranks alike, also where this rank's part is the whole shard.
    if settings.shard_replicas is not False and shard.replica is not None and shard.shape:
        replicas = shard.replica.count
    return as_tensor(shadow.boxes, shard.shape, local, shard.layout, replicas)


def _refuse_source(fqn: str, target: Tensor, source: Tensor) -> None:
    """Refuse what cannot be copied into an average, or not without a loss."""
    kind = None
    if source.is_nested:
        kind = "a nested tensor"
    elif source.layout is not torch.strided:
        kind = f"a tensor of the layout {source.layout}"
    elif source.is_meta:
        kind = "a tensor on meta, without values"
    elif source.is_quantized:
        kind = f"a tensor of {source.dtype}"
    elif source.is_complex() and not target.is_complex():
        kind = "a complex tensor, and the average is real"
    if kind is not None:
        raise StateError("usage", f"{fqn!r}: the state to load has {kind}")


def _copies(shadow: Shadow, target: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return (target view, source view) pairs; none if the target is the source."""
    fqn, shape = shadow.shard.fqn, shadow.shard.shape
    _refuse_source(fqn, target, source)
    if tuple(source.shape) != shape:
        raise StateError(
            "usage", f"{fqn!r} has shape {shape}; the state to load has {tuple(source.shape)}"
        )
    copies: list[tuple[Tensor, Tensor]] = []
    if shadow.numel:
        source_pieces = pieces_of(source)
        for box, view in pieces_of(as_global_tensor(shadow.boxes, shape, target)):
            for other, tensor in source_pieces:
                common = intersect(box, other)
                if common is not None:
                    part = box_of(view, common.within(box))
                    copies.append((part, box_of(tensor, common.within(other))))
    if sum(view.numel() for view, _ in copies) < shadow.numel:
        raise StateError(
            "usage",
            f"{fqn!r}: the state to load holds other elements than this rank averages; give whole"
            " tensors, or restore the checkpoint with ema_ckpt.restore",
        )
    return [(view, other) for view, other in copies if view.data_ptr() != other.data_ptr()]
