"""Random bits for stochastic rounding that depend on seed, call and an element's place in the
global tensor only.

Philox-4x32-10 with the seed as key and (place, place, call, tensor) as counter: any layout, world
size or engine draws the same bits for the same element.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from zlib import crc32

import torch

from ema_ckpt.core.box import Box

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Position:
    """Where the elements of a local tensor lie: element i at base + (j // run) · stride + j % run,
    j = first + i.
    """

    base: int
    run: int
    stride: int
    tensor: int  # a number for the tensor's name
    first: int = 0

    def after(self, numel: int) -> Position:
        """The position of what follows `numel` elements."""
        return replace(self, first=self.first + numel)


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """What stochastic rounding draws from: one position per average, and the number of the present
    call.
    """

    seed: int
    call: Callable[[], int]
    positions: Sequence[Position]


def positions(fqn: str, boxes: Sequence[Box], shape: Sequence[int]) -> list[tuple[int, Position]]:
    """(number of elements, position) of the pieces that `boxes` of a tensor of global `shape`
    consist of, in order.
    """
    tensor = crc32(fqn.encode())
    return [piece for box in boxes for piece in _pieces(box, tuple(shape), tensor)]


def _pieces(box: Box, shape: tuple[int, ...], tensor: int) -> Iterator[tuple[int, Position]]:
    """A box as few pieces, each of runs at one distance."""
    cut = [axis for axis in range(len(shape)) if box.sizes[axis] < shape[axis]]
    last = cut[-1] if cut else 0
    outermost = next((axis for axis in range(last) if box.sizes[axis] > 1), last)
    if any(outermost < axis < last for axis in cut):
        for index in range(box.sizes[outermost]):
            offsets = (
                *box.offsets[:outermost],
                box.offsets[outermost] + index,
                *box.offsets[outermost + 1 :],
            )
            sizes = (*box.sizes[:outermost], 1, *box.sizes[outermost + 1 :])
            yield from _pieces(Box(offsets, sizes), shape, tensor)
        return
    base = sum(offset * prod(shape[axis + 1 :]) for axis, offset in enumerate(box.offsets))
    run, stride = max(1, prod(box.sizes[last:])), prod(shape[last:])
    yield box.numel, Position(base, run, stride, tensor)


def random_bits(
    position: Position, start: int, numel: int, seed: int, call: int, device: torch.device
) -> torch.Tensor:
    """16 random bits, as int32, for each of `numel` elements from element `start` on."""
    along = torch.arange(position.first + start, position.first + start + numel, device=device)
    place = position.base + along // position.run * position.stride + along % position.run
    counter = [place & _WORD, place >> 32 & _WORD, torch.full_like(place, call & _WORD)]
    counter.append(torch.full_like(place, position.tensor))
    return (_philox(counter, seed) & 0xFFFF).to(torch.int32)


def _philox(counter: list[torch.Tensor], seed: int) -> torch.Tensor:
    """The first 32-bit word of each block, in int64."""
    c0, c1, c2, c3 = counter
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(_ROUNDS):
        # Products wrap at 64 bits; masked they are the unsigned ones.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = second >> 32 & _WORD ^ c1 ^ key[0], first >> 32 & _WORD ^ c3 ^ key[1]
        c1, c3 = second & _WORD, first & _WORD
        key = [(k + step) & _WORD for k, step in zip(key, _KEY_STEPS, strict=True)]
    return c0
