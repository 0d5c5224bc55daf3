"""Random bits for stochastic rounding, from seed, call and an element's global position alone.

Philox-4x32-10 with the seed as key and (position, position, call, tensor) as counter: any layout,
world size or engine draws the same bits for the same element.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from zlib import crc32

import torch

from ema_ckpt.core.box import Box, linear

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Position:
    """Positions of a local tensor's elements in the flattened global tensor.

    Element i is at base + (j // run) · stride + j % run, with j = first + i.
    """

    base: int
    run: int
    stride: int
    tensor: int  # a number for the tensor's name
    first: int = 0

    def after(self, numel: int) -> Position:
        """Return the position of the elements after the first `numel`."""
        return replace(self, first=self.first + numel)


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """The arguments of `random_bits` for a batch of averages."""

    seed: int
    call: Callable[[], int]  # gives the number of the present call
    positions: Sequence[Position]  # one for each average

    def at(self, positions: Sequence[Position]) -> Noise:
        """Return the noise at other positions."""
        return Noise(self.seed, self.call, positions)


def positions(fqn: str, boxes: Sequence[Box], shape: Sequence[int]) -> list[tuple[int, Position]]:
    """Return (numel, position) of the pieces of `boxes` of a tensor of global `shape`, in order."""
    tensor = crc32(fqn.encode())
    pieces: list[tuple[int, Position]] = []
    for box in boxes:
        pieces += _pieces(box, tuple(shape), tensor)
    return pieces


def _pieces(box: Box, shape: tuple[int, ...], tensor: int) -> Iterator[tuple[int, Position]]:
    """Cut a box into as few pieces as have all their runs at one distance."""
    cut_dims = [dim for dim in range(len(shape)) if box.sizes[dim] < shape[dim]]
    last = max(cut_dims, default=0)
    outermost = next((dim for dim in range(last) if box.sizes[dim] > 1), last)
    if any(outermost < dim < last for dim in cut_dims):
        offsets, sizes = list(box.offsets), list(box.sizes)
        sizes[outermost] = 1
        for index in range(box.sizes[outermost]):
            offsets[outermost] = box.offsets[outermost] + index
            yield from _pieces(Box(tuple(offsets), tuple(sizes)), shape, tensor)
        return
    base = linear(box.offsets, shape)
    run, stride = max(1, prod(box.sizes[last:])), prod(shape[last:])
    yield box.numel, Position(base, run, stride, tensor)


def random_bits(
    position: Position, start: int, numel: int, seed: int, call: int, device: torch.device
) -> torch.Tensor:
    """Return 16 random bits, as int32, for each of `numel` elements from element `start` on."""
    first = position.first + start
    along = torch.arange(first, first + numel, device=device)
    index = position.base + along // position.run * position.stride + along % position.run
    c0, c1 = index & _WORD, index >> 32 & _WORD
    c2, c3 = torch.full_like(index, call & _WORD), torch.full_like(index, position.tensor)
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(_ROUNDS):
        # Products wrap at 64 bits; masked they are the unsigned ones.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = product1 >> 32 & _WORD ^ c1 ^ key[0], product0 >> 32 & _WORD ^ c3 ^ key[1]
        c1, c3 = product1 & _WORD, product0 & _WORD
        key = [(k + step) & _WORD for k, step in zip(key, _KEY_STEPS, strict=True)]
    # the first 32-bit word of each block
    return (c0 & 0xFFFF).to(torch.int32)
