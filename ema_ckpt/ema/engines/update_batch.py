"""`UpdateBatch`, the parallel lists of local tensors that an engine moves in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ema_ckpt.ema.engines.noise import Noise

# Moves all averages of a batch by one weight, 1 - β; made once, called every update.
Step = Callable[[float], None]

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, eq=False)
class UpdateBatch:
    """Averages and the parameters they follow: one dtype of each, shapes equal pairwise.

    All on one device, or the averages and residuals in pinned host memory and the rest on one
    device.
    """

    averages: Sequence[Tensor]
    params: Sequence[Tensor]
    # one for each average: bfloat16, or complex64 as their averages
    residuals: Sequence[Tensor] | None = None
    # 0-dim int64 on the parameters' device: counts updates in which an element was kept because its
    # new value was not finite; None takes such values as they come
    nonfinite_count: Tensor | None = None
    noise: Noise | None = None  # with it new averages are rounded stochastically

    @property
    def is_plain_lerp(self) -> bool:
        """Whether the update is a bare lerp in the averages' own dtype."""
        has_extras = self.residuals is not None or self.nonfinite_count is not None
        return not has_extras and self.compute_dtype is self.averages[0].dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the arithmetic: the averages', but at least float32."""
        dtype = self.averages[0].dtype
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    def subset(self, indices: Sequence[int]) -> UpdateBatch:
        """Return a batch of some of the pairs."""
        residuals, noise = self.residuals, self.noise
        if residuals is not None:
            residuals = _take(residuals, indices)
        if noise is not None:
            noise = noise.at(_take(noise.positions, indices))
        return UpdateBatch(
            _take(self.averages, indices),
            _take(self.params, indices),
            residuals,
            self.nonfinite_count,
            noise,
        )


def _take(items: Sequence[_Item], indices: Sequence[int]) -> list[_Item]:
    return [items[index] for index in indices]
