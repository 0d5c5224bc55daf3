"""The CPU engine: blocks small enough for the cache, so that what is converted or gathered does not
go to memory.

Neighbours in memory are moved as one block: their parameters are gathered with one `torch.cat`, the
average is moved by one `lerp_`. Where dtypes differ the parameters are widened through a scratch of
one block.
torch's `lerp` gives the same bits for any cut, so blocks change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ema_ckpt.ema.engines.lists import Step, UpdateBatch

# 8 MiB of float32. From 2^16 to 2^22 elements bfloat16 averages go equally fast; the larger the
# block, the less often threads wait for each other, which on a busy machine costs more than all the
# rest.
BLOCK_NUMEL = 1 << 21
# Of what is gathered from many tensors: 512 KiB of float32 stay in a second-level cache until they
# are read again.
_GATHERED_NUMEL = 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Part of the averages in one piece, and what it follows; all tensors are views, made once."""

    shadow: torch.Tensor
    residual: torch.Tensor | None
    sources: tuple[torch.Tensor, ...]  # concatenated, they have the shadow's elements
    gathered: torch.Tensor | None  # where to concatenate them, in their own dtype
    widened: torch.Tensor | None  # where to convert them to the dtype of the arithmetic

    def value(self) -> torch.Tensor:
        """The sources as one tensor in the dtype of the arithmetic."""
        value = self.sources[0]
        if self.gathered is not None:
            value = torch.cat(self.sources, out=self.gathered)
        return value if self.widened is None else self.widened.copy_(value)


def prepare(lists: UpdateBatch) -> Step:
    """A step over `lists` with all views and scratch made beforehand: at most 41 MiB in float32."""
    blocks = list(_blocks(lists))
    if lists.is_plain:
        direct = [block for block in blocks if block.gathered is None and block.widened is None]
        blocks = [
            block for block in blocks if block.gathered is not None or block.widened is not None
        ]
        shadows, params = [block.shadow for block in direct], [block.sources[0] for block in direct]

        def step(weight: float) -> None:
            for block in blocks:
                block.shadow.lerp_(block.value(), weight)
            if shadows:
                torch._foreach_lerp_(shadows, params, weight)

        return step
    scratch = [
        torch.empty(BLOCK_NUMEL, dtype=lists.wide, device=lists.shadows[0].device) for _ in range(4)
    ]
    events = lists.events

    def careful_step(weight: float) -> None:
        kept = [_move(block, weight, scratch, skip=events is not None) for block in blocks]
        if events is not None and kept:
            events.add_(torch.stack(kept).any())

    return careful_step


def _move(
    block: _Block, weight: float, scratch: Sequence[torch.Tensor], *, skip: bool
) -> torch.Tensor:
    """Move one block through scratch; with `skip`, whether an element was kept, as a 0-dim
    tensor.
    """
    old, new, step, rest = (s[: block.shadow.numel()].view(block.shadow.shape) for s in scratch)
    value, residual = block.value(), block.residual
    old = block.shadow if block.shadow.dtype is new.dtype else old.copy_(block.shadow)
    if residual is None:
        torch.lerp(old, value, weight, out=new)
    else:  # the equations are those of `reference.compensated`
        torch.sub(value, old, out=step).sub_(residual).mul_(weight).add_(residual)
        torch.add(old, step, out=new)
        torch.sub(step, torch.sub(new, old, out=rest), out=rest)
    if not skip:
        block.shadow.copy_(new)
        return new if residual is None else residual.copy_(rest)
    good = torch.isfinite(new if block.shadow.dtype is new.dtype else new.to(block.shadow.dtype))
    if residual is not None:
        residual.copy_(torch.where(good, rest, residual.to(rest.dtype)))
    block.shadow.copy_(torch.where(good, new, old))
    return good.logical_not_().any()


def _blocks(lists: UpdateBatch) -> Iterator[_Block]:
    """The lists as blocks of at most `BLOCK_NUMEL` elements; large tensors that need no scratch
    stay whole.
    """
    same = lists.params[0].dtype is lists.wide
    gathered = torch.empty(
        _GATHERED_NUMEL, dtype=lists.params[0].dtype, device=lists.params[0].device
    )
    widened = None if same else torch.empty(BLOCK_NUMEL, dtype=lists.wide, device=gathered.device)
    residuals: Sequence[torch.Tensor | None] = lists.residuals or [None] * len(lists.shadows)
    bare = lists.is_plain and same
    small: list[_Part] = []
    for part in zip(lists.shadows, residuals, lists.params, strict=True):
        if part[0].numel() <= BLOCK_NUMEL and part[2].is_contiguous():
            small.append(part)
        elif bare:
            yield _Block(*part[:2], part[2:], None, None)
        else:
            for piece in _pieces(part):
                yield _Block(*piece[:2], piece[2:], None, _like(widened, piece[0]))
    for run in _runs(small):
        if len(run) == 1 and bare:
            yield _Block(*run[0][:2], run[0][2:], None, None)
            continue
        flat = [_flat(part) for part in run]
        shadow, residual = _joined([part[0] for part in flat]), None
        if flat[0][1] is not None:
            residual = _joined([part[1] for part in flat if part[1] is not None])
        into = _like(gathered, shadow) if len(run) > 1 else None
        yield _Block(
            shadow, residual, tuple(part[2] for part in flat), into, _like(widened, shadow)
        )


_Part = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]  # shadow, residual, parameter


def _flat(part: _Part) -> _Part:
    shadow, residual, param = part
    return shadow.view(-1), None if residual is None else residual.view(-1), param.detach().view(-1)


def _pieces(part: _Part) -> Iterator[_Part]:
    """A large or strided tensor in pieces of at most `BLOCK_NUMEL` elements."""
    shadow, residual, param = part
    if param.is_contiguous():
        flat = _flat(part)
        for start in range(0, shadow.numel(), BLOCK_NUMEL):
            length = min(BLOCK_NUMEL, shadow.numel() - start)
            yield _narrow(flat, 0, start, length)
    elif shadow.numel() <= BLOCK_NUMEL:
        yield shadow, residual, param.detach()
    else:
        axis = next(axis for axis, size in enumerate(shadow.shape) if size > 1)
        middle = shadow.shape[axis] // 2
        yield from _pieces(_narrow(part, axis, 0, middle))
        yield from _pieces(_narrow(part, axis, middle, shadow.shape[axis] - middle))


def _narrow(part: _Part, axis: int, start: int, length: int) -> _Part:
    shadow, residual, param = part
    rest = None if residual is None else residual.narrow(axis, start, length)
    return shadow.narrow(axis, start, length), rest, param.detach().narrow(axis, start, length)


def _runs(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Group parts whose shadows, and residuals if any, follow each other in memory."""
    run: list[_Part] = []
    numel = 0
    for part in parts:
        if run and numel + part[0].numel() <= _GATHERED_NUMEL and _follows(part, run[-1]):
            run.append(part)
            numel += part[0].numel()
        elif part[0].numel():
            if run:
                yield run
            run, numel = [part], part[0].numel()
    if run:
        yield run


def _follows(part: _Part, before: _Part) -> bool:
    def adjacent(a: torch.Tensor, b: torch.Tensor) -> bool:
        same_storage = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        return same_storage and b.storage_offset() == a.storage_offset() + a.numel()

    follows = adjacent(before[0], part[0])
    return follows and (before[1] is None or part[1] is None or adjacent(before[1], part[1]))


def _joined(views: Sequence[torch.Tensor]) -> torch.Tensor:
    return views[0].as_strided((sum(view.numel() for view in views),), (1,))


def _like(scratch: torch.Tensor | None, shape_of: torch.Tensor) -> torch.Tensor | None:
    return None if scratch is None else scratch[: shape_of.numel()].view(shape_of.shape)
