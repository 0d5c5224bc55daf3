"""bfloat16 averages with stochastic rounding in torch's own operations: for CPU, and what other
engines must equal.
"""

from __future__ import annotations

import torch

from ema_ckpt.ema.engines.lists import Step, UpdateBatch
from ema_ckpt.ema.engines.noise import Noise, Position, random_bits

_BLOCK_NUMEL = 1 << 18


def prepare(lists: UpdateBatch, noise: Noise) -> Step:
    """A step over `lists` that rounds up or down with the probability of the distance."""
    kept = None if lists.events is None else torch.zeros_like(lists.events)

    def step(weight: float) -> None:
        call = noise.call()
        if kept is not None:
            kept.zero_()
        for shadow, param, position in zip(
            lists.shadows, lists.params, noise.positions, strict=True
        ):
            flat, live = shadow.view(-1), param.detach().reshape(-1)
            for start in range(0, flat.numel(), _BLOCK_NUMEL):
                piece = slice(start, start + _BLOCK_NUMEL)
                _move(
                    flat[piece],
                    live[piece],
                    weight,
                    position.after(start),
                    (noise.seed, call),
                    kept,
                )
        if lists.events is not None and kept is not None:
            lists.events.add_(kept.clamp_(max=1))

    return step


def _move(
    shadow: torch.Tensor,
    param: torch.Tensor,
    weight: float,
    position: Position,
    key: tuple[int, int],
    kept: torch.Tensor | None,
) -> None:
    new = torch.lerp(shadow.float(), param.float(), weight)
    result = rounded(new, random_bits(position, 0, new.numel(), *key, new.device)).to(shadow.dtype)
    if kept is not None:
        good = torch.isfinite(result)
        kept.add_(good.logical_not().any())
        result = torch.where(good, result, shadow)
    shadow.copy_(result)


def rounded(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """float32 values that bfloat16 holds: up if `bits` exceed what is missing to the next one, else
    down.
    """
    cut = ((values.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(values), cut, values)
