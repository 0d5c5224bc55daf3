"""The engine for accelerators: torch's multi-tensor kernels over cached lists of local tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from ema_ckpt.ema.engines import cpu
from ema_ckpt.ema.engines.update_batch import Step, UpdateBatch

# Of float32: 32 MiB. On an accelerator a launch costs more than a trip to memory.
_SCRATCH_NUMEL = 1 << 23

_Chunk: TypeAlias = tuple[list[Tensor], list[Tensor], list[Tensor]]  # averages, params, scratch


def prepare(batch: UpdateBatch) -> Step:
    """Return a step; params of another dtype are widened through at most 32 MiB of scratch."""
    large = [param for param in batch.params if param.numel() > _SCRATCH_NUMEL]
    if not batch.is_plain_lerp or not all(param.is_contiguous() for param in large):
        return cpu.prepare(batch)
    if batch.params[0].dtype is batch.compute_dtype:
        averages, params = list(batch.averages), [param.detach() for param in batch.params]

        def step(weight: float) -> None:
            torch._foreach_lerp_(averages, params, weight)

        return step
    chunks = list(_chunks(batch))

    def widening_step(weight: float) -> None:
        for averages, params, scratch in chunks:
            torch._foreach_copy_(scratch, params)
            torch._foreach_lerp_(averages, scratch, weight)

    return widening_step


def _chunks(batch: UpdateBatch) -> Iterator[_Chunk]:
    """Cut the lists so that each chunk's parameters fit into one scratch, which all share."""
    device = batch.averages[0].device
    scratch = torch.empty(_SCRATCH_NUMEL, dtype=batch.compute_dtype, device=device)
    chunk: _Chunk = ([], [], [])
    used = 0
    for average, param in _pieces(batch):
        if used + average.numel() > _SCRATCH_NUMEL:
            yield chunk
            chunk, used = ([], [], []), 0
        chunk[0].append(average)
        chunk[1].append(param)
        chunk[2].append(scratch[used : used + average.numel()].view(average.shape))
        used += average.numel()
    if used:
        yield chunk


def _pieces(batch: UpdateBatch) -> Iterator[tuple[Tensor, Tensor]]:
    for average, param in zip(batch.averages, batch.params, strict=True):
        pair = (average, param.detach())
        if average.numel() <= _SCRATCH_NUMEL:
            yield pair
        else:
            pieces = [torch.split(tensor.view(-1), _SCRATCH_NUMEL) for tensor in pair]
            yield from zip(*pieces, strict=True)
