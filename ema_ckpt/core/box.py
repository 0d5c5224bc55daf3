"""Boxes of elements inside a tensor: the geometry of shards.

A box is `(offsets, sizes)`, both in elements, one number per dimension; a 0-dim box holds one
element.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

Ints = tuple[int, ...]
_MAX_CORNERS = 1 << 18
_MAX_COMPARISONS = 16  # a box
MeshCut = tuple[int | None, int]
"""How one mesh dimension cuts a tensor: (tensor dimension or None, split factor), as in torch's
`Replicate()` (None, 1), `Shard(dim)` (dim, 1) and `_StridedShard(dim, split_factor)`."""


class Box(NamedTuple):
    """A box of elements inside a tensor: first element and length in each dimension."""

    offsets: Ints
    sizes: Ints

    @property
    def numel(self) -> int:
        """Number of elements inside."""
        return prod(self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of `shape`."""
        if not len(self.sizes) == len(self.offsets) == len(shape):
            return False
        for offset, size, length in zip(self.offsets, self.sizes, shape, strict=True):
            if not 0 <= offset <= offset + size <= length:
                return False
        return True

    def within(self, outer: Box) -> Box:
        """The same box in coordinates relative to `outer`'s corner."""
        offsets = [o - p for o, p in zip(self.offsets, outer.offsets, strict=True)]
        return Box(tuple(offsets), self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """Index of the box in an array of its tensor."""
        return tuple([slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True)])


def whole(shape: Sequence[int]) -> Box:
    """The box that covers a tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None if they share no element."""
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


def linear(offsets: Sequence[int], sizes: Sequence[int]) -> int:
    """Row-major index of the element at `offsets` in an array of `sizes`."""
    index = 0
    for offset, size in zip(offsets, sizes, strict=True):
        index = index * size + offset
    return index


def unravel(index: int, sizes: Sequence[int]) -> Ints:
    """Offsets of the element at a row-major `index` of an array of `sizes`: inverse of `linear`."""
    offsets = []
    for size in reversed(sizes):
        index, offset = divmod(index, size)
        offsets.append(offset)
    return tuple(reversed(offsets))


def is_contiguous_in(inner: Box, outer: Box) -> bool:
    """Whether elements of `inner`, inside `outer`, follow one another in its row-major order."""
    axis, ndim = 0, len(inner.sizes)
    while axis < ndim and inner.sizes[axis] == 1:
        axis += 1
    return inner.sizes[axis + 1 :] == outer.sizes[axis + 1 :]


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Cut elements [start, stop) of a row-major tensor of `shape` into boxes, in row-major order.

    There are at most 2 * ndim - 1 boxes, and each is contiguous in the tensor.
    """
    if start >= stop:
        return ()
    if not shape:
        return (Box((), ()),)
    strides = row_major_strides(shape)
    boxes = []
    while start < stop:
        # The outermost axis with a whole step that begins at `start` and ends before `stop`.
        axis = 0
        while start % strides[axis] or start + strides[axis] > stop:
            axis += 1
        stride = strides[axis]
        count = min((stop - start) // stride, shape[axis] - start // stride % shape[axis])
        offsets = [start // step % size for step, size in zip(strides, shape, strict=True)]
        boxes.append(Box(tuple(offsets), (*(1,) * axis, count, *shape[axis + 1 :])))
        start += count * stride
    return tuple(boxes)


def split_rows(shape: Sequence[int], parts: int) -> Iterator[Box]:
    """Cut a tensor of one dim or more into `parts` boxes on dim 0, as `torch.chunk` does.

    Each box has ceil(rows / parts) rows, the last non-empty one fewer; boxes after it are empty at
    offset `rows`.
    """
    return (row_box(shape, parts, part) for part in range(parts))


def row_box(shape: Sequence[int], parts: int, part: int) -> Box:
    """Return one of the boxes that `split_rows` gives."""
    start, count = _chunk_rows(shape[0], parts, part)
    return Box((start, *(0,) * (len(shape) - 1)), (count, *shape[1:]))


def _chunk_rows(rows: int, parts: int, index: int) -> tuple[int, int]:
    """First row and number of rows of chunk `index` of `torch.chunk(rows, parts)`."""
    step = -(-rows // parts)
    start = min(index * step, rows)
    return start, min(step, rows - start)


def placement_box(
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[MeshCut],
    order: Mapping[int, Sequence[int]] | None = None,
) -> Box | None:
    """Box that the rank at `coordinate` of a device mesh holds of a tensor of `shape`.

    `order` may give the mesh dimensions that cut a tensor dimension, outermost first (torch's
    `shard_order`). Returns None if a split factor counts shards that do not exist.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim in range(len(shape)):
        nested = nested_cuts(dim, mesh, placements)
        recorded = (order or {}).get(dim)
        cutting = [axis for axis, (cut_dim, _) in enumerate(placements) if cut_dim == dim]
        if recorded is not None and sorted(recorded) == cutting:
            nested = list(recorded)
        if nested is None:
            return None
        for axis in nested:
            start, sizes[dim] = _chunk_rows(sizes[dim], mesh[axis], coordinate[axis])
            offsets[dim] += start
    return Box(tuple(offsets), tuple(sizes))


def nested_cuts(dim: int, mesh: Sequence[int], placements: Sequence[MeshCut]) -> list[int] | None:
    """Mesh dimensions that cut tensor dimension `dim`, outermost first; None if impossible.

    FSDP2 cuts what tensor parallelism left, yet stands before it in the mesh: the split factor of
    its `_StridedShard` is the number of shards that mesh dimensions to its right made before.
    """
    nested: list[int] = []
    for axis in range(len(placements) - 1, -1, -1):
        cut_dim, factor = placements[axis]
        if cut_dim != dim:
            continue
        place, shards = 0, 1
        while shards < factor and place < len(nested):
            shards *= mesh[nested[place]]
            place += 1
        if shards != factor:
            return None
        nested.insert(place, axis)
    return nested


def tiles_once(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes inside a tensor of `shape` hold each of its elements exactly once.

    The boxes, each counting 1, and the whole, counting -1, have to cancel everywhere. Differences
    along one axis after the other leave a signed count at each corner, and nothing is left if and
    only if they do. Takes time in proportion to the boxes for the cuts that occur.

    Raises:
        OverflowError: the boxes are cut on so many axes that their corners cannot be counted.
    """
    counts = Counter([_packed(box) for box in boxes])
    counts[_packed(whole(shape))] -= 1
    cells = {key: count for key, count in counts.items() if count}
    limit = _MAX_CORNERS + 16 * len(boxes)
    for _ in shape:
        cells = _differences(cells)
        if len(cells) > limit:
            raise OverflowError(f"more than {limit} corners of boxes")
    return not cells


def _packed(box: Box) -> bytes:
    # Text and bytes have a hash with a secret; nobody can choose many that collide.
    spans: list[int] = []
    for offset, size in zip(box.offsets, box.sizes, strict=True):
        spans += (offset, offset + size)
    return struct.pack(f"<{len(spans)}q", *spans)


def _differences(cells: dict[bytes, int]) -> dict[bytes, int]:
    """Replace the first axis of each cell by its two ends, of which the second counts negative."""
    ends: dict[bytes, int] = {}
    for key, count in cells.items():
        rest = key[16:]
        for end, signed in ((key[:8], count), (key[8:16], -count)):
            corner = rest + end
            total = ends.pop(corner, 0) + signed
            if total:
                ends[corner] = total
    return ends


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two different boxes that share an element, or None.

    Sweeps along the axis on which the boxes begin at most places, so that row, column and grid
    shards all cost about n log n. Gives up with None after 16 comparisons a box.
    """
    filled = [index for index, box in enumerate(boxes) if box.numel]
    if len(filled) < 2:
        return None
    ndim = len(boxes[filled[0]].sizes)
    if ndim == 0:
        return filled[0], filled[1]
    axis = max(range(ndim), key=lambda dim: len({boxes[i].offsets[dim] for i in filled}))
    filled.sort(key=lambda i: boxes[i].offsets[axis])
    active: list[tuple[int, int]] = []  # where a box ends along the axis, and its index
    comparisons = 0
    for index in filled:
        offsets, sizes = boxes[index]
        active = [(end, other) for end, other in active if end > offsets[axis]]
        comparisons += len(active)
        if comparisons > _MAX_COMPARISONS * len(boxes):
            return None
        for _, other in active:
            if intersect(boxes[other], boxes[index]):
                return other, index
        active.append((offsets[axis] + sizes[axis], index))
    return None


def are_int64(values: Iterable[object]) -> bool:
    """Whether all are whole numbers that torch can have as a size; a bool is none.

    Python does not print integers of more than 4300 digits.
    """
    return all(type(value) is int and -(2**63) <= value < 2**63 for value in values)


def are_sizes(values: Iterable[object], limit: int = 2**63) -> bool:
    """Whether all are whole numbers from 0 to below `limit`, as in a shape; a bool is none."""
    return all(type(value) is int and 0 <= value < limit for value in values)
