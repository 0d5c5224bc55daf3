"""Axis-aligned boxes in element coordinates: the geometry of shards.

A box is `(offsets, sizes)`, both in elements, one number per dimension; a 0-dim box holds one
element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

Ints = tuple[int, ...]


class Box(NamedTuple):
    """A box of elements inside a tensor: where it begins and how far it reaches, per dimension."""

    offsets: Ints
    sizes: Ints

    @property
    def numel(self) -> int:
        """Number of elements inside."""
        return prod(self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of `shape`."""
        return len(self.sizes) == len(self.offsets) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= d
            for o, s, d in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def within(self, outer: Box) -> Box:
        """The same box in coordinates relative to `outer`'s corner."""
        return Box(
            tuple([o - p for o, p in zip(self.offsets, outer.offsets, strict=True)]), self.sizes
        )


def whole(shape: Sequence[int]) -> Box:
    """The box that covers a tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one rank, or None if no element is in both."""
    offsets, sizes = [], []
    for p, s, q, t in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        start, stop = max(p, q), min(p + s, q + t)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes))


def row_major_strides(shape: Sequence[int]) -> Ints:
    """Strides, in elements, of a contiguous tensor of `shape` (C order)."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def split_rows(shape: Sequence[int], parts: int) -> Iterator[Box]:
    """Cut a tensor of one dim or more into `parts` boxes on dim 0, as `torch.chunk` does.

    Each box has ceil(rows / parts) rows, the last non-empty one fewer; boxes after it are empty at
    offset `rows`.
    """
    rows = shape[0]
    step = -(-rows // parts)
    for part in range(parts):
        start = min(part * step, rows)
        stop = min(start + step, rows)
        yield Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two different boxes that share an element, or None.

    Sweeps along the axis on which the boxes begin at most places, so that row, column and grid
    shards all cost about n log n.
    """
    live = [index for index, box in enumerate(boxes) if box.numel]
    if len(live) < 2 or not boxes[live[0]].sizes:
        return (live[0], live[1]) if len(live) > 1 else None
    axis = max(
        range(len(boxes[live[0]].sizes)), key=lambda d: len({boxes[i].offsets[d] for i in live})
    )
    live.sort(key=lambda i: boxes[i].offsets[axis])
    active: list[int] = []
    for index in live:
        start = boxes[index].offsets[axis]
        active = [i for i in active if boxes[i].offsets[axis] + boxes[i].sizes[axis] > start]
        for other in active:
            if intersect(boxes[other], boxes[index]):
                return (other, index)
        active.append(index)
    return None


def linear(offsets: Sequence[int], sizes: Sequence[int]) -> int:
    """Row-major index of the element at `offsets` in an array of `sizes`."""
    index = 0
    for offset, size in zip(offsets, sizes, strict=True):
        index = index * size + offset
    return index


def is_contiguous_in(inner: Box, outer: Box) -> bool:
    """Whether the elements of `inner`, a box inside `outer`, follow one another in `outer`'s
    row-major order.
    """
    axis, ndim = 0, len(inner.sizes)
    while axis < ndim and inner.sizes[axis] == 1:
        axis += 1
    return inner.sizes[axis + 1 :] == outer.sizes[axis + 1 :]
