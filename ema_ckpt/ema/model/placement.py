"""Which elements of a global tensor a rank holds: pure geometry, no process group, no
communication.

Sizes and offsets are in elements. The boxes of a local tensor are in global coordinates; read
row-major one after the other they are the local tensor's row-major flattening.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from torch.distributed.tensor.placement_types import Partial, Placement, Shard, _StridedShard

from ema_ckpt.core.box import Box, row_major_strides
from ema_ckpt.core.errors import StateError

Run = tuple[int, int]  # (start, length) along one dimension
Cut = tuple[int, int, int]  # (parts, index, split factor) of one mesh dimension


def dtensor_boxes(
    shape: Sequence[int],
    mesh_sizes: Sequence[int],
    mesh_coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[Box, ...]:
    """Boxes that the rank at `mesh_coordinate` holds of a DTensor of global `shape`; () if it holds
    no element.

    Cuts are applied in their true order, outermost first: a `_StridedShard` comes inside the
    `split_factor` shards that mesh dimensions to its right made before it, which is how FSDP2 cuts
    what tensor parallelism has
    cut. A strided shard for which the mesh has no such dimensions is what
    `torch.distributed.tensor` makes of it: one piece of each of `split_factor` chunks, so several
    boxes. `compute_local_shape_and_global_offset` replays placements from left to right instead and
    is wrong where a strided dimension does not divide evenly (torch 2.13).

    Raises:
        StateError: a placement is `Partial`: its local tensor holds summands, not elements.
    """
    if any(isinstance(placement, Partial) for placement in placements):
        raise StateError(
            "unsupported",
            f"placements {tuple(placements)}: a partial tensor has no elements to locate yet",
        )
    runs = [
        _runs(size, _cuts_of(axis, len(shape), mesh_sizes, mesh_coordinate, placements))
        for axis, size in enumerate(shape)
    ]
    return tuple(_cells(runs))


def flat_boxes(shape: Sequence[int], start: int, numel: int) -> tuple[Box, ...]:
    """Elements [start, start + numel) of the row-major flattening of `shape`, as at most 2 * ndim -
    1 boxes.

    The boxes come in flat order and each is contiguous in the flattening. () if `numel` is 0.
    """
    if numel == 0:
        return ()
    if not shape:
        return (Box((), ()),)
    strides = row_major_strides(shape)
    boxes: list[Box] = []
    position, stop = start, start + numel
    while position < stop:
        axis = _widest_axis(strides, position, stop)
        count = min(
            (stop - position) // strides[axis],
            shape[axis] - position // strides[axis] % shape[axis],
        )
        offsets = tuple(
            position // stride % size for stride, size in zip(strides, shape, strict=True)
        )
        boxes.append(Box(offsets, (*(1,) * axis, count, *shape[axis + 1 :])))
        position += count * strides[axis]
    return tuple(boxes)


def replica_part(shape: Sequence[int], count: int, index: int) -> Run:
    """(start, numel) in the flattening of a local shard of `shape` that replica `index` of `count`
    averages.

    Near even, as ZeRO stage 1 divides optimizer state (arXiv:1910.02054): whole rows where there
    are at least as many rows as replicas, single elements otherwise. The parts of all replicas tile
    the flattening in order.
    """
    rows = shape[0] if shape else 1
    unit = prod(shape[1:]) if rows >= count else 1
    first, size = _even_part(rows if rows >= count else prod(shape), count, index)
    return first * unit, size * unit


def torch_computes_offsets(
    shape: Sequence[int], mesh_sizes: Sequence[int], placements: Sequence[Placement]
) -> bool:
    """Whether torch's own offsets of a DTensor are right on every rank, so that `dcp.save` may take
    it as it is.

    Plain shards always are. Strided ones are where the dimension divides evenly over all its
    shards, as long as each rank holds one box.
    """
    for axis, size in enumerate(shape):
        cuts = _cuts_of(axis, len(shape), mesh_sizes, [0] * len(mesh_sizes), placements)
        strided = any(factor > 1 for _, _, factor in cuts)
        if strided and (size % prod(parts for parts, _, _ in cuts) or _order(cuts) is None):
            return False
    return True


def _cuts_of(
    axis: int,
    ndim: int,
    mesh_sizes: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[Cut]:
    """Cuts of one tensor dimension, in the order of the mesh dimensions that make them."""
    cuts: list[Cut] = []
    for parts, index, placement in zip(mesh_sizes, coordinate, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard) and placement.dim % ndim == axis:
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            cuts.append((parts, index, factor))
    return cuts


def _order(cuts: Sequence[Cut]) -> list[Cut] | None:
    """Cuts from the outermost to the innermost; None if some split factor counts shards that do not
    exist.
    """
    order: list[Cut] = []
    for cut in reversed(cuts):
        place = _prefix_of_size(order, cut[2])
        if place is None:
            return None
        order.insert(place, cut)
    return order


def _prefix_of_size(order: Sequence[Cut], shards: int) -> int | None:
    """How many of the outermost cuts make `shards` shards together."""
    made = 1
    for place, (parts, _, _) in enumerate(order):
        if made == shards:
            return place
        made *= parts
    return len(order) if made == shards else None


def _runs(size: int, cuts: Sequence[Cut]) -> list[Run]:
    order = _order(cuts)
    runs = [(0, size)] if size else []
    if order is not None:
        for parts, index, _ in order:
            runs = _chunk(runs, parts, index)
        return runs
    for parts, index, factor in cuts:
        runs = _joined(
            [
                run
                for chunk in range(factor)
                for run in _chunk(_chunk(runs, factor, chunk), parts, index)
            ]
        )
    return runs


def _chunk(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """The part of a concatenation of runs that `torch.chunk` would give to `index`."""
    total = sum(length for _, length in runs)
    step = -(-total // parts)
    low, high = min(index * step, total), min((index + 1) * step, total)
    found: list[Run] = []
    position = 0
    for start, length in runs:
        a, b = max(low, position), min(high, position + length)
        if a < b:
            found.append((start + a - position, b - a))
        position += length
    return found


def _joined(runs: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _widest_axis(strides: Sequence[int], position: int, stop: int) -> int:
    """The outermost axis along which a box can begin at `position` and end no later than `stop`."""
    return next(
        axis
        for axis, stride in enumerate(strides)
        if position % stride == 0 and position + stride <= stop
    )


def _even_part(total: int, count: int, index: int) -> Run:
    base, extra = divmod(total, count)
    return index * base + min(index, extra), base + (index < extra)


def _cells(runs: Sequence[Sequence[Run]]) -> list[Box]:
    """The product of the runs of every dimension, as boxes that are contiguous in the local
    flattening.

    Where a dimension other than the first has several runs, the dimensions outside it are taken
    index by index.
    """
    inner = max((axis for axis, found in enumerate(runs) if len(found) > 1), default=0)
    single = [
        [(start + i, 1) for start, length in found for i in range(length)] for found in runs[:inner]
    ]
    return [
        Box(tuple(r[0] for r in cell), tuple(r[1] for r in cell))
        for cell in product(*single, *runs[inner:])
    ]
