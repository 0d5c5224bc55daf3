"""The CPU engine: moves blocks that fit into the cache, so that scratch never goes to memory.

Neighbours in memory are one block: one `torch.cat` gathers their parameters, one `lerp_` moves the
average. torch's `lerp` gives the same bits for any cut, so blocks change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ema_ckpt.ema.engines.update_batch import Step, UpdateBatch

# 8 MiB of float32. From 2^16 to 2^22 elements bfloat16 averages go equally fast; the larger the
# block, the less often threads wait for each other, which on a busy machine costs most.
BLOCK_NUMEL = 1 << 21
# Of what is gathered from many tensors: 512 KiB of float32 stay in a second-level cache until they
# are read again.
_GATHERED_NUMEL = 1 << 17


class _Block(NamedTuple):
    """A contiguous part of the averages and its parameters; all tensors are views, made once."""

    average: Tensor
    residual: Tensor | None
    params: tuple[Tensor, ...]  # concatenated, they have the average's elements
    gathered: Tensor | None  # scratch to concatenate them, in their own dtype
    widened: Tensor | None  # scratch to convert them to the dtype of the arithmetic

    def value(self) -> Tensor:
        """Return the parameters as one tensor in the dtype of the arithmetic."""
        value = self.params[0]
        if self.gathered is not None:
            value = torch.cat(self.params, out=self.gathered)
        return value if self.widened is None else self.widened.copy_(value)


def prepare(batch: UpdateBatch) -> Step:
    """Return a step with all views and scratch made beforehand: at most 41 MiB in float32."""
    if not batch.is_plain_lerp:
        return _prepare_careful(batch)
    blocks, averages, params = [], [], []
    for block in _blocks(batch):
        if block.gathered is None and block.widened is None:
            averages.append(block.average)
            params.append(block.params[0])
        else:
            blocks.append(block)

    def step(weight: float) -> None:
        for block in blocks:
            block.average.lerp_(block.value(), weight)
        if averages:
            torch._foreach_lerp_(averages, params, weight)

    return step


def _prepare_careful(batch: UpdateBatch) -> Step:
    """Return a step that widens averages, compensates, or keeps elements."""
    blocks = list(_blocks(batch))
    device, count = batch.averages[0].device, batch.nonfinite_count
    scratch = [torch.empty(BLOCK_NUMEL, dtype=batch.compute_dtype, device=device) for _ in range(4)]

    def careful_step(weight: float) -> None:
        kept = [_move(block, weight, scratch, skip=count is not None) for block in blocks]
        if count is not None and kept:
            count.add_(torch.stack(kept).any())

    return careful_step


def _move(block: _Block, weight: float, scratch: Sequence[Tensor], *, skip: bool) -> Tensor:
    """Move one block through scratch; with `skip`, return whether an element was kept, 0-dim."""
    average, residual, value = block.average, block.residual, block.value()
    old, new, step, rest = (s[: average.numel()].view(average.shape) for s in scratch)
    old = average if average.dtype is new.dtype else old.copy_(average)
    if residual is None:
        torch.lerp(old, value, weight, out=new)
    else:  # step = weight·(value − old − residual) + residual; rest = step − (new − old)
        torch.sub(value, old, out=step).sub_(residual).mul_(weight).add_(residual)
        torch.add(old, step, out=new)
        torch.sub(step, torch.sub(new, old, out=rest), out=rest)
    if not skip:
        average.copy_(new)
        return new if residual is None else residual.copy_(rest)
    good = torch.isfinite(new if average.dtype is new.dtype else new.to(average.dtype))
    if residual is not None:
        residual.copy_(torch.where(good, rest, residual.to(rest.dtype)))
    average.copy_(torch.where(good, new, old))
    return good.logical_not_().any()


class _Tensors(NamedTuple):
    """One average with its residual and parameter."""

    average: Tensor
    residual: Tensor | None
    param: Tensor

    def flat(self) -> _Tensors:
        residual = None if self.residual is None else self.residual.view(-1)
        return _Tensors(self.average.view(-1), residual, self.param.detach().view(-1))

    def narrow(self, dim: int, start: int, length: int) -> _Tensors:
        residual = None if self.residual is None else self.residual.narrow(dim, start, length)
        param = self.param.detach().narrow(dim, start, length)
        return _Tensors(self.average.narrow(dim, start, length), residual, param)

    def follows(self, other: _Tensors) -> bool:
        """Return whether average and residual lie in memory right after those of `other`."""
        return all(map(_is_adjacent, other[:2], self[:2]))


def _is_adjacent(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    same_storage = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return same_storage and b.storage_offset() == a.storage_offset() + a.numel()


def _blocks(batch: UpdateBatch) -> list[_Block]:
    """Return blocks of at most `BLOCK_NUMEL` elements; large tensors without scratch stay whole."""
    dtype, device = batch.params[0].dtype, batch.params[0].device
    gathered = torch.empty(_GATHERED_NUMEL, dtype=dtype, device=device)
    widened = None
    if dtype is not batch.compute_dtype:
        widened = torch.empty(BLOCK_NUMEL, dtype=batch.compute_dtype, device=device)
    runs = _runs(batch, keep_large=batch.is_plain_lerp and widened is None)
    return [_block(run, gathered, widened) for run in runs]


def _runs(batch: UpdateBatch, *, keep_large: bool) -> list[list[_Tensors]]:
    residuals: Sequence[Tensor | None] = batch.residuals or [None] * len(batch.averages)
    small: list[_Tensors] = []
    runs: list[list[_Tensors]] = []
    for tensors in map(_Tensors, batch.averages, residuals, batch.params):
        if tensors.average.numel() <= BLOCK_NUMEL and tensors.param.is_contiguous():
            small.append(tensors)
        elif keep_large:
            runs.append([tensors])
        else:
            runs += [[piece] for piece in _split(tensors)]
    return runs + _adjacent_runs(small)


def _block(run: Sequence[_Tensors], gathered: Tensor, widened: Tensor | None) -> _Block:
    average, residual, _ = run[0]
    params = tuple(tensors.param for tensors in run)
    scratch = None
    if len(run) > 1:
        numel = sum(param.numel() for param in params)
        average, scratch = average.as_strided((numel,), (1,)), gathered[:numel]
        residual = None if residual is None else residual.as_strided((numel,), (1,))
    if widened is not None:
        widened = widened[: average.numel()].view(average.shape)
    return _Block(average, residual, params, scratch, widened)


def _split(tensors: _Tensors) -> Iterator[_Tensors]:
    """Cut a large or strided tensor into pieces of at most `BLOCK_NUMEL` elements."""
    average, _, param = tensors
    if param.is_contiguous():
        flat = tensors.flat()
        for start in range(0, average.numel(), BLOCK_NUMEL):
            yield flat.narrow(0, start, min(BLOCK_NUMEL, average.numel() - start))
    elif average.numel() <= BLOCK_NUMEL:
        yield tensors._replace(param=param.detach())
    else:
        dim = next(dim for dim, size in enumerate(average.shape) if size > 1)
        middle = average.shape[dim] // 2
        yield from _split(tensors.narrow(dim, 0, middle))
        yield from _split(tensors.narrow(dim, middle, average.shape[dim] - middle))


def _adjacent_runs(small: Sequence[_Tensors]) -> list[list[_Tensors]]:
    """Group flat tensors whose averages and residuals follow each other in memory."""
    runs: list[list[_Tensors]] = []
    numel = 0
    for tensors in small:
        size = tensors.average.numel()
        if runs and numel + size <= _GATHERED_NUMEL and tensors.follows(runs[-1][-1]):
            runs[-1].append(tensors.flat())
            numel += size
        elif size:
            runs.append([tensors.flat()])
            numel = size
    return runs
