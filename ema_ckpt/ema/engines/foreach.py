"""The engine for accelerators: torch's multi-tensor kernels over cached lists of local tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch

from ema_ckpt.ema.engines import cpu as blocked
from ema_ckpt.ema.engines.lists import Step, UpdateBatch

# Of float32: 32 MiB. On an accelerator a launch costs more than a trip to memory.
_SCRATCH_NUMEL = 1 << 23

_Chunk: TypeAlias = tuple[
    list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]
]  # shadows, params, scratch


def prepare(lists: UpdateBatch) -> Step:
    """A step over `lists`; parameters of another dtype are widened through at most 32 MiB of
    scratch.
    """
    if not lists.is_plain or any(
        p.numel() > _SCRATCH_NUMEL and not p.is_contiguous() for p in lists.params
    ):
        return blocked.prepare(lists)
    if lists.params[0].dtype is lists.wide:
        shadows, params = list(lists.shadows), [param.detach() for param in lists.params]

        def step(weight: float) -> None:
            torch._foreach_lerp_(shadows, params, weight)

        return step
    chunks = list(_chunks(lists))

    def widening_step(weight: float) -> None:
        for shadows, params, scratch in chunks:
            torch._foreach_copy_(scratch, params)
            torch._foreach_lerp_(shadows, scratch, weight)

    return widening_step


def _chunks(lists: UpdateBatch) -> Iterator[_Chunk]:
    """The lists cut so that each chunk's parameters fit into one scratch, which all chunks
    share.
    """
    scratch = torch.empty(_SCRATCH_NUMEL, dtype=lists.wide, device=lists.shadows[0].device)
    chunk: _Chunk = ([], [], [])
    used = 0
    for shadow, param in _fitting(lists):
        if used + shadow.numel() > _SCRATCH_NUMEL:
            yield chunk
            chunk, used = ([], [], []), 0
        for tensors, tensor in zip(
            chunk, (shadow, param, scratch[used : used + shadow.numel()]), strict=True
        ):
            tensors.append(tensor.view(shadow.shape))
        used += shadow.numel()
    if used:
        yield chunk


def _fitting(lists: UpdateBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for shadow, param in zip(lists.shadows, lists.params, strict=True):
        live = param.detach()
        if shadow.numel() <= _SCRATCH_NUMEL:
            yield shadow, live
        else:
            cut = [torch.split(tensor.view(-1), _SCRATCH_NUMEL) for tensor in (shadow, live)]
            yield from zip(*cut, strict=True)
