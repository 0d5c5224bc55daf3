"""Averages and the values they follow, as the lists that engines work on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ema_ckpt.core.errors import UsageError
from ema_ckpt.ema.engines.lists import UpdateBatch
from ema_ckpt.ema.engines.noise import Noise, Position, positions
from ema_ckpt.ema.model.shards import Shadow
from ema_ckpt.ema.settings import Settings
from ema_ckpt.ema.shadows import live_part

Events = Mapping[
    torch.device, torch.Tensor
]  # where each device counts the updates that kept an element


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    shadow: torch.Tensor
    residual: torch.Tensor | None
    value: torch.Tensor
    position: Position | None = None


def batches_of(
    slots: Sequence[Shadow],
    values: Sequence[torch.Tensor],
    settings: Settings,
    events: Events,
    call: Callable[[], int],
) -> list[UpdateBatch]:
    """Pairs of average and value, sorted by device and dtypes; `call` gives the number of the
    present call.
    """
    kinds: dict[tuple[Any, ...], list[_Pair]] = {}
    for slot, value in zip(slots, values, strict=True):
        if slot.numel:
            kind = (slot.average.device, slot.average.dtype, value.device, value.dtype)
            pair = _Pair(slot.average, slot.residual, live_part(slot, value))
            kinds.setdefault(kind, []).extend(
                _placed(slot, pair) if _is_noisy(slot, settings) else [pair]
            )
    return [_list(pairs, settings, events, call) for pairs in kinds.values()]


def _is_noisy(slot: Shadow, settings: Settings) -> bool:
    return settings.rounding == "stochastic" and slot.average.dtype is torch.bfloat16


def _list(
    pairs: Sequence[_Pair], settings: Settings, events: Events, call: Callable[[], int]
) -> UpdateBatch:
    places = [pair.position for pair in pairs if pair.position is not None]
    return UpdateBatch(
        [pair.shadow for pair in pairs],
        [pair.value for pair in pairs],
        [pair.residual for pair in pairs if pair.residual is not None] or None,
        events.get(pairs[0].value.device),
        Noise(settings.seed, call, places) if places else None,
    )


def _placed(slot: Shadow, pair: _Pair) -> Iterator[_Pair]:
    """The pair in pieces whose elements have a position in the global tensor."""
    pieces = positions(slot.shard.fqn, slot.boxes, slot.shard.shape)
    if len(pieces) == 1:
        yield _Pair(pair.shadow, None, pair.value, pieces[0][1])
        return
    if not pair.value.is_contiguous():
        raise UsageError(
            "unsupported",
            f"rounding='stochastic' needs {slot.shard.fqn!r} to be contiguous on this rank",
        )
    numels = [numel for numel, _ in pieces]
    shadows, values = (torch.split(tensor.view(-1), numels) for tensor in (pair.shadow, pair.value))
    for shadow, value, (_, position) in zip(shadows, values, pieces, strict=True):
        yield _Pair(shadow, None, value, position)
