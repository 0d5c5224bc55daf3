"""Averages and the values they follow, grouped into the batches and steps of the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ema_ckpt.core.errors import UsageError
from ema_ckpt.ema.engines import prepare
from ema_ckpt.ema.engines.noise import Noise, Position, positions
from ema_ckpt.ema.engines.update_batch import Step, UpdateBatch
from ema_ckpt.ema.model.shards import Shadow
from ema_ckpt.ema.settings import Settings, UpdateCounter
from ema_ckpt.ema.shadows import Averages, live_part, value_of


class PreparedSteps:
    """The engines' steps over averages, prepared anew where a value lies in other memory."""

    def __init__(self, settings: Settings, counter: UpdateCounter) -> None:
        self.steps: list[Step] | None = None
        # per device: updates in which an element was kept; empty if values are taken as they come
        self.nonfinite_counts: dict[torch.device, Tensor] = {}
        self._settings = settings
        self._counter = counter
        self._values: list[Tensor] = []

    def discard(self) -> None:
        """Forget the steps: the averages are others now."""
        self.steps, self._values = None, []

    def prepare(self, averages: Averages, settle: Callable[[], None]) -> list[Step]:
        """Return the steps; `settle` is called before they are replaced."""
        source = self._settings.source
        if source is not None:
            values = [value_of(tracked, source) for tracked in averages.tracked]
        else:
            values = self._values or [shadow.shard.local for shadow in averages.shadows]
        if self.steps is None or not _is_same_memory(values, self._values):
            settings, counts = self._settings, self.nonfinite_counts
            if settings.nonfinite != "ignore":
                for device in {value.device for value in values} - counts.keys():
                    counts[device] = torch.zeros((), dtype=torch.int64, device=device)
            batches = batches_of(
                averages.shadows, values, settings, counts, lambda: self._counter.num_updates
            )
            settle()
            self.steps, self._values = [prepare(batch) for batch in batches], values
        return self.steps


class _Pair(NamedTuple):
    average: Tensor
    residual: Tensor | None
    value: Tensor
    position: Position | None


def batches_of(
    shadows: Sequence[Shadow],
    values: Sequence[Tensor],
    settings: Settings,
    nonfinite_counts: dict[torch.device, Tensor],
    call: Callable[[], int],
) -> list[UpdateBatch]:
    """Group averages and values by device and dtypes; `call` gives the number of the call."""
    groups: dict[tuple[object, ...], list[_Pair]] = {}
    for shadow, value in zip(shadows, values, strict=True):
        if shadow.numel:
            average = shadow.average
            kind = (average.device, average.dtype, value.device, value.dtype)
            pairs = groups.setdefault(kind, [])
            part = live_part(shadow, value)
            if settings.rounding == "stochastic" and average.dtype is torch.bfloat16:
                pairs += _positioned_pairs(shadow, part)
            else:
                pairs.append(_Pair(average, shadow.residual, part, None))
    batches = []
    for pairs in groups.values():
        averages, residuals, params, places = zip(*pairs, strict=True)
        batches.append(
            UpdateBatch(
                averages,
                params,
                None if residuals[0] is None else residuals,
                nonfinite_counts.get(params[0].device),
                None if places[0] is None else Noise(settings.seed, call, places),
            )
        )
    return batches


def _positioned_pairs(shadow: Shadow, value: Tensor) -> Iterator[_Pair]:
    """Cut a shadow and its value into pieces that have a `Position` in the global tensor."""
    pieces = positions(shadow.shard.fqn, shadow.boxes, shadow.shard.shape)
    if len(pieces) == 1:
        yield _Pair(shadow.average, None, value, pieces[0][1])
        return
    if not value.is_contiguous():
        raise UsageError(
            "unsupported",
            f"rounding='stochastic' needs {shadow.shard.fqn!r} to be contiguous on this rank",
        )
    numels = [numel for numel, _ in pieces]
    averages = torch.split(shadow.average.view(-1), numels)
    values = torch.split(value.view(-1), numels)
    for average, part, (_, position) in zip(averages, values, pieces, strict=True):
        yield _Pair(average, None, part, position)


def _is_same_memory(a: list[Tensor], b: list[Tensor]) -> bool:
    if a is b:
        return True
    if len(a) != len(b):
        return False
    return all(x is y or x.data_ptr() == y.data_ptr() for x, y in zip(a, b, strict=True))
