"""bfloat16 averages with stochastic rounding in torch's operations; the oracle of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ema_ckpt.ema.engines.noise import Noise, Position, random_bits
from ema_ckpt.ema.engines.update_batch import Step, UpdateBatch

_BLOCK_NUMEL = 1 << 18


def prepare(batch: UpdateBatch, noise: Noise) -> Step:
    """Return a step that rounds up or down with the probability of the distance."""
    count = batch.nonfinite_count
    kept = None if count is None else torch.zeros_like(count)

    def step(weight: float) -> None:
        key = (noise.seed, noise.call())
        if kept is not None:
            kept.zero_()
        for average, param, position in zip(
            batch.averages, batch.params, noise.positions, strict=True
        ):
            flat, live = average.view(-1), param.detach().reshape(-1)
            for start in range(0, flat.numel(), _BLOCK_NUMEL):
                piece, value = (t[start : start + _BLOCK_NUMEL] for t in (flat, live))
                _move(piece, value, weight, position.after(start), key, kept)
        if count is not None and kept is not None:
            count.add_(kept.clamp_(max=1))

    return step


def _move(
    average: Tensor,
    param: Tensor,
    weight: float,
    position: Position,
    key: tuple[int, int],
    kept: Tensor | None,
) -> None:
    new = torch.lerp(average.float(), param.float(), weight)
    bits = random_bits(position, 0, new.numel(), *key, new.device)
    result = round_stochastically(new, bits).to(average.dtype)
    if kept is not None:
        good = torch.isfinite(result)
        kept.add_(good.logical_not().any())
        result = torch.where(good, result, average)
    average.copy_(result)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to what bfloat16 holds: up if `bits` exceed the gap to the next, else down."""
    cut = ((values.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(values), cut, values)
