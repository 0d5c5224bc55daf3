"""Which engine moves which lists."""

from __future__ import annotations

from ema_ckpt.ema.engines import cpu as blocked
from ema_ckpt.ema.engines import stochastic
from ema_ckpt.ema.engines.lists import Step, UpdateBatch


def prepare(lists: UpdateBatch) -> Step:
    """The step of the fastest engine for where `lists` are."""
    device = lists.params[0].device.type
    if device == "cuda":
        from ema_ckpt.ema.engines import cuda as triton
        from ema_ckpt.ema.engines import offload

        return triton.prepare(lists) if lists.shadows[0].is_cuda else offload.OffloadStep(lists)
    return blocked.prepare(lists) if lists.noise is None else stochastic.prepare(lists, lists.noise)
