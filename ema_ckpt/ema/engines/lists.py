"""What an engine works on: parallel lists of local tensors, and how it is to treat them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ema_ckpt.ema.engines.noise import Noise

# Moves all averages of a list by one weight, 1 - β; made once, called every update.
Step = Callable[[float], None]


@dataclass(frozen=True, slots=True, eq=False)
class UpdateBatch:
    """Averages and what they follow: one shadow dtype, one parameter dtype; shapes equal pairwise.

    All on one device, or the averages and residuals in pinned host memory and the rest on one
    device. `events`, a 0-dim int64 tensor on the parameters' device, counts updates in which an
    element was kept because its new value was not finite; None takes such values as they come.
    `residuals` are bfloat16, or complex64 as their shadows, one for each. With `noise` the new
    averages are rounded stochastically.
    """

    shadows: Sequence[torch.Tensor]
    params: Sequence[torch.Tensor]
    residuals: Sequence[torch.Tensor] | None = None
    events: torch.Tensor | None = field(default=None)
    noise: Noise | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the update is a bare lerp in the shadow's own dtype."""
        return self.residuals is None and self.events is None and self.wide is self.shadows[0].dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the arithmetic: the shadow's, but at least float32."""
        dtype = self.shadows[0].dtype
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    def subset(self, indices: Sequence[int]) -> UpdateBatch:
        """Some of the pairs."""
        noise = self.noise
        return UpdateBatch(
            [self.shadows[i] for i in indices],
            [self.params[i] for i in indices],
            None if self.residuals is None else [self.residuals[i] for i in indices],
            self.events,
            None
            if noise is None
            else Noise(noise.seed, noise.call, [noise.positions[i] for i in indices]),
        )
