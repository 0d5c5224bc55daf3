"""The update in its plainest form, one tensor after the other: what every other engine must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ema_ckpt.ema.engines.update_batch import UpdateBatch

__all__ = ["compensated", "update"]


def update(batch: UpdateBatch, weight: float) -> None:
    """shadow := lerp(shadow, float(param), weight) for each pair; `weight` = 1 - β, in float64.

    Two ways round losses: with residuals the update is compensated, with `nonfinite_count` an element whose new value is
    not finite keeps its average.
    """
    kept = torch.zeros((), dtype=torch.bool)
    residuals: Sequence[torch.Tensor | None] = batch.residuals or [None] * len(batch.averages)
    for shadow, param, residual in zip(batch.averages, batch.params, residuals, strict=True):
        old, new_value = shadow.to(batch.compute_dtype), param.to(batch.compute_dtype)
        if residual is None:
            new = torch.lerp(old, new_value, weight)
        else:
            new, rest = compensated(old, residual, new_value, weight)
        good = (
            torch.isfinite(new.to(shadow.dtype))
            if batch.nonfinite_count is not None
            else torch.ones_like(new, dtype=torch.bool)
        )
        kept = kept.to(good.device) | ~good.all()
        shadow.copy_(torch.where(good, new, old))
        if residual is not None:
            residual.copy_(torch.where(good, rest, residual.to(rest.dtype)))
    if batch.nonfinite_count is not None:
        batch.nonfinite_count.add_(kept.to(batch.nonfinite_count.device))


def compensated(
    old: torch.Tensor, residual: torch.Tensor, value: torch.Tensor, weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(new average, new residual): what rounding took from the average is carried along and given back.

    y = weight·(value − old − residual) + residual; new = old + y; residual = y − (new − old).

    Source: Kahan 1965, "Further remarks on reducing truncation errors"; the residual is minus his, so that the
    average is old + residual.
    """
    carried = residual.to(value.dtype)
    step = (value - old - carried).mul_(weight).add_(carried)
    new = old + step
    return new, step - (new - old)
