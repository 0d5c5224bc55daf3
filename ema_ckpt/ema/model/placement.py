"""Boxes of a DTensor that a rank holds, and parts of replicas; sizes and offsets in elements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

from ema_ckpt.core.box import Box, MeshCut, nested_cuts, placement_box
from ema_ckpt.core.errors import StateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Run = tuple[int, int]  # (start, length) along one dimension

_LOCATED = (Shard, _StridedShard, Replicate)


def dtensor_boxes(
    shape: Sequence[int],
    mesh_sizes: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[Box, ...]:
    """Return the non-empty boxes of a DTensor of global `shape` on the rank at mesh `coordinate`.

    There is one, unless a `_StridedShard` counts shards that no mesh dimension to its right makes:
    then it is as `torch.distributed.tensor` makes it, a piece of each of `split_factor` chunks.
    `compute_local_shape_and_global_offset` replays placements from left to right instead of
    outermost first, and is wrong where a strided dimension does not divide evenly (torch 2.13).

    Raises:
        StateError: `unsupported`: see `refuse_unlocatable`.
    """
    refuse_unlocatable(placements)
    cuts = _mesh_cuts(placements, len(shape))
    box = placement_box(shape, mesh_sizes, coordinate, cuts)
    if box is not None:
        return (box,) if box.numel else ()
    runs = [_runs(dim, size, mesh_sizes, coordinate, cuts) for dim, size in enumerate(shape)]
    return _boxes_of_runs(runs)


def local_boxes(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement], local: Tensor
) -> tuple[Box, ...]:
    """Return the boxes of a DTensor that are this rank's `local` tensor; () outside its mesh.

    Raises:
        StateError: `unsupported`: see `refuse_unlocatable`; or `local` is not cut as `torch.chunk`
            cuts, as Megatron-FSDP's are.
    """
    refuse_unlocatable(placements)
    coordinate, sizes = mesh.get_coordinate(), tuple(mesh.shape)
    boxes = () if coordinate is None else dtensor_boxes(shape, sizes, coordinate, placements)
    numel = sum(box.numel for box in boxes)
    expected = boxes[0].sizes if len(boxes) == 1 else (numel,)
    if numel != local.numel() or (len(boxes) == 1 and tuple(local.shape) != expected):
        raise StateError(
            "unsupported",
            f"this rank holds {list(local.shape)} of {list(shape)}, but {tuple(placements)} on a"
            f" mesh of {sizes} give it {list(expected)}, as torch.chunk cuts: a DTensor does not"
            " tell where other pieces lie; cut it like torch.chunk, or redistribute() it",
        )
    return boxes


def refuse_unlocatable(placements: Sequence[Placement]) -> None:
    """Refuse placements of which it is not known here which elements a rank holds.

    Compared by class, since a subclass of `Shard` cuts in its own way.

    Raises:
        StateError: `unsupported`: `Partial`, whose local tensor holds summands, or a class that is
            none of torch's.
    """
    for placement in placements:
        kind = type(placement)
        if kind in _LOCATED:
            continue
        if isinstance(placement, Partial):
            reason = "its local tensor holds summands and no elements yet"
        else:
            reason = "which elements it gives to a rank is not known here"
        raise StateError(
            "unsupported",
            f"placement {placement!r} of class {kind.__module__}.{kind.__qualname__}: {reason};"
            " redistribute() the tensor to Shard or Replicate first",
        )


def replica_part(shape: Sequence[int], count: int, index: int) -> Run:
    """Return (start, numel) of the flattened local shard that replica `index` of `count` averages.

    Near even, as ZeRO stage 1 divides optimizer state (arXiv:1910.02054): whole rows where there
    are at least as many rows as replicas, single elements otherwise.
    """
    rows = shape[0] if shape else 1
    units, unit_numel = (rows, prod(shape[1:])) if rows >= count else (prod(shape), 1)
    base, extra = divmod(units, count)
    start, size = index * base + min(index, extra), base + (index < extra)
    return start * unit_numel, size * unit_numel


def torch_computes_offsets(
    shape: Sequence[int], mesh_sizes: Sequence[int], placements: Sequence[Placement]
) -> bool:
    """Return whether torch's own offsets of a DTensor, as `dcp.save` uses them, are right.

    Of strided shards they are where the dimension divides evenly and each rank holds one box.
    """
    cuts = _mesh_cuts(placements, len(shape))
    strided = set(range(len(shape))).intersection(dim for dim, factor in cuts if factor != 1)
    for dim in strided:
        shards = prod(size for size, cut in zip(mesh_sizes, cuts, strict=True) if cut[0] == dim)
        if shape[dim] % shards or nested_cuts(dim, mesh_sizes, cuts) is None:
            return False
    return True


def _mesh_cuts(placements: Sequence[Placement], ndim: int) -> list[MeshCut]:
    cuts: list[MeshCut] = []
    for placement in placements:
        if isinstance(placement, _StridedShard):
            cuts.append((placement.dim % max(ndim, 1), int(placement.split_factor)))
        elif isinstance(placement, Shard):
            cuts.append((placement.dim % max(ndim, 1), 1))
        else:
            cuts.append((None, 1))
    return cuts


def _runs(
    dim: int,
    size: int,
    mesh_sizes: Sequence[int],
    coordinate: Sequence[int],
    cuts: Sequence[MeshCut],
) -> list[Run]:
    """Return the runs of one dimension; strided shards that cannot nest are cut left to right."""
    runs = [(0, size)] if size else []
    nested = nested_cuts(dim, mesh_sizes, cuts)
    if nested is not None:
        for axis in nested:
            runs = _chunk(runs, mesh_sizes[axis], coordinate[axis])
        return runs
    for axis, (cut_dim, factor) in enumerate(cuts):
        if cut_dim == dim:
            pieces: list[Run] = []
            for chunk in range(factor):
                outer = _chunk(runs, factor, chunk)
                pieces += _chunk(outer, mesh_sizes[axis], coordinate[axis])
            runs = _coalesce(pieces)
    return runs


def _chunk(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """Return the part of concatenated runs that `torch.chunk` would give to `index`."""
    total = sum(length for _, length in runs)
    step = -(-total // parts)
    low, high = min(index * step, total), min((index + 1) * step, total)
    chunk: list[Run] = []
    position = 0
    for start, length in runs:
        first, last = max(low, position), min(high, position + length)
        if first < last:
            chunk.append((start + first - position, last - first))
        position += length
    return chunk


def _coalesce(runs: Sequence[Run]) -> list[Run]:
    merged: list[Run] = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged


def _boxes_of_runs(runs: Sequence[Sequence[Run]]) -> tuple[Box, ...]:
    """Return the product of the runs of every dimension, in the order of the local flattening.

    Dimensions outside one with several runs are cut index by index.
    """
    inner = max((dim for dim, dim_runs in enumerate(runs) if len(dim_runs) > 1), default=0)
    outer: list[list[Run]] = []
    for dim_runs in runs[:inner]:
        single = []
        for start, length in dim_runs:
            single += [(index, 1) for index in range(start, start + length)]
        outer.append(single)
    boxes = []
    for cell in product(*outer, *runs[inner:]):
        offsets, sizes = zip(*cell, strict=True)
        boxes.append(Box(offsets, sizes))
    return tuple(boxes)
