"""Engines that move averages: CPU, torch._foreach, Triton kernels, pinned host memory."""

from __future__ import annotations

from ema_ckpt.ema.engines import cpu, stochastic
from ema_ckpt.ema.engines.update_batch import Step, UpdateBatch


def prepare(batch: UpdateBatch) -> Step:
    """Return the step of the fastest engine for where the averages and parameters are."""
    if batch.params[0].device.type == "cuda":
        from ema_ckpt.ema.engines import cuda, offload

        return cuda.prepare(batch) if batch.averages[0].is_cuda else offload.OffloadStep(batch)
    if batch.noise is None:
        return cpu.prepare(batch)
    return stochastic.prepare(batch, batch.noise)
