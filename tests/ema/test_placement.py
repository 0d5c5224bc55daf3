from __future__ import annotations

import itertools
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

try:
    from torch.distributed.tensor.placement_types import _MaskPartial
except ImportError:  # torch up to 2.9
    from torch.distributed.tensor._ops._embedding_ops import _MaskPartial

from ema_ckpt.core.box import Box, flat_range_boxes
from ema_ckpt.core.errors import StateError
from ema_ckpt.ema.model.placement import (
    dtensor_boxes,
    replica_part,
    torch_computes_offsets,
)

DIMS = [1, 2, 3, 5, 7, 10, 13]
MESHES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def tag(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


def cut(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))]


def held(full: torch.Tensor, boxes: tuple[Box, ...]) -> torch.Tensor:
    """The row-major reading of boxes, one after the other."""
    return torch.cat([cut(full, box).reshape(-1) for box in boxes] or [full.new_empty(0)])


def coordinates(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh)))


def replayed(
    full: torch.Tensor, mesh: tuple[int, ...], at: tuple[int, ...], placements: list[Placement]
) -> torch.Tensor:
    """torch's own cutting of a full tensor, mesh dimension by mesh dimension from the left."""
    for size, index, placement in zip(mesh, at, placements):
        if isinstance(placement, (Shard, _StridedShard)):
            full = placement._split_tensor(full, size, with_padding=False)[0][index]
    return full


@given(shapes.filter(lambda s: prod(s) > 0), st.data())
def test_flat_boxes_are_the_flattening_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    full = tag(shape)
    start = data.draw(st.integers(0, full.numel()))
    numel = data.draw(st.integers(0, full.numel() - start))
    boxes = flat_range_boxes(shape, start, start + numel)
    assert torch.equal(held(full, boxes), full.reshape(-1)[start : start + numel])
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    for box in boxes:
        inside = cut(full, box).reshape(-1)
        assert torch.equal(inside, torch.arange(int(inside[0]), int(inside[0]) + box.numel))


def test_flat_boxes_of_nothing() -> None:
    assert flat_range_boxes((0, 8), 0, 0) == ()
    assert flat_range_boxes((3, 4), 5, 5) == ()
    assert flat_range_boxes((), 0, 1) == (Box((), ()),)


def test_flat_boxes_in_three_dimensions() -> None:
    assert flat_range_boxes((3, 4, 5), 7, 47) == (
        Box((0, 1, 2), (1, 1, 3)),
        Box((0, 2, 0), (1, 2, 5)),
        Box((1, 0, 0), (1, 4, 5)),
        Box((2, 0, 0), (1, 1, 5)),
        Box((2, 1, 0), (1, 1, 2)),
    )


@given(shapes, st.integers(1, 7))
def test_replica_parts_tile_the_flattening_near_evenly(shape: tuple[int, ...], count: int) -> None:
    parts = [replica_part(shape, count, index) for index in range(count)]
    position = 0
    for start, numel in parts:
        assert start == position
        position += numel
    assert position == prod(shape)
    row = prod(shape[1:])
    by_rows = bool(shape) and shape[0] >= count
    unit = row if by_rows else 1
    assert max(n for _, n in parts) - min(n for _, n in parts) <= unit
    if by_rows:
        assert all(start % max(row, 1) == 0 for start, _ in parts)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rows", DIMS)
def test_plain_shards_are_torchs_cuts(mesh: tuple[int, ...], rows: int) -> None:
    shape = (rows, 6, 5)
    full = tag(shape)
    kinds = [Replicate(), Shard(0), Shard(1), Shard(2)]
    for placements in itertools.product(kinds, repeat=len(mesh)):
        for at in coordinates(mesh):
            boxes = dtensor_boxes(shape, mesh, at, placements)
            assert torch.equal(
                held(full, boxes), replayed(full, mesh, at, list(placements)).reshape(-1)
            )
            assert len(boxes) <= 1


@pytest.mark.parametrize("mesh", [m for m in MESHES if len(m) > 1])
@pytest.mark.parametrize("rows", [0, *DIMS])
@pytest.mark.parametrize("dim", [0, 1])
def test_strided_shards_are_cut_by_the_right_mesh_dimensions_first(
    mesh: tuple[int, ...], rows: int, dim: int
) -> None:
    """As FSDP2 on top of tensor parallelism does it: `torch.chunk` of what an outer `torch.chunk` left."""
    shape = (4, rows) if dim else (rows, 4)
    full = tag(shape)
    placements = [
        _StridedShard(dim, split_factor=prod(mesh[i + 1 :])) for i in range(len(mesh) - 1)
    ] + [Shard(dim)]
    seen = []
    for at in coordinates(mesh):
        expected = full
        for size, index in zip(reversed(mesh), reversed(at)):
            expected = Shard(dim)._split_tensor(expected, size, with_padding=False)[0][index]
        boxes = dtensor_boxes(shape, mesh, at, placements)
        assert len(boxes) == (1 if expected.numel() else 0)
        assert torch.equal(held(full, boxes), expected.reshape(-1))
        seen.append(held(full, boxes))
    assert torch.equal(torch.cat(seen).sort().values, full.reshape(-1))


@pytest.mark.parametrize("rows", DIMS)
def test_expert_and_tensor_parallel_shards_stay_outside_data_parallel_ones(rows: int) -> None:
    """(dp, ep, tp) = (2, 2, 2): ep cuts first, then tp, then dp."""
    full = tag((rows, 2))
    placements = [_StridedShard(0, split_factor=4), Shard(0), Shard(0)]
    for dp, ep, tp in coordinates((2, 2, 2)):
        expected = full
        for index in (ep, tp, dp):
            expected = Shard(0)._split_tensor(expected, 2, with_padding=False)[0][index]
        assert torch.equal(
            held(full, dtensor_boxes(full.shape, (2, 2, 2), (dp, ep, tp), placements)),
            expected.reshape(-1),
        )


@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("rows", DIMS)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_strided_shard_of_its_own_is_several_boxes(factor: int, rows: int, dim: int) -> None:
    shape = (3, rows) if dim else (rows, 3)
    full = tag(shape)
    for placements in (
        [_StridedShard(dim, split_factor=factor), Replicate()],
        [Shard(dim), _StridedShard(dim, split_factor=factor)],
    ):
        for at in coordinates((2, 2)):
            boxes = dtensor_boxes(shape, (2, 2), at, placements)
            assert torch.equal(
                held(full, boxes), replayed(full, (2, 2), at, placements).reshape(-1)
            )
            for box in boxes:
                assert box.numel


def test_negative_dims_and_absent_dimensions() -> None:
    assert dtensor_boxes((4, 6), (2,), (1,), [Shard(-1)]) == (Box((0, 3), (4, 3)),)
    assert dtensor_boxes((), (2,), (1,), [Replicate()]) == (Box((), ()),)
    assert dtensor_boxes((0, 8), (2,), (0,), [Shard(0)]) == ()
    assert dtensor_boxes((6,), (4,), (3,), [Shard(0)]) == ()


class RaggedShard(Placement):
    """As in veScale and in torch's proposals: each rank has as many units as it is told."""

    def __init__(self, *units: int) -> None:
        super().__init__()
        self.units = units

    def __hash__(self) -> int:
        return hash(self.units)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self.units == other.units


class InterleavedShard(Shard):
    """A `Shard` by its class, and cut in another way."""


@pytest.mark.parametrize(
    "placement",
    [Partial(), Partial("max"), _MaskPartial(), RaggedShard(3, 1), InterleavedShard(0)],
    ids=lambda placement: type(placement).__name__,
)
def test_placements_that_do_not_tell_the_elements_are_refused_by_name(placement: Any) -> None:
    kind = type(placement)
    for placements in ([placement], [Shard(0), placement], [placement, Replicate()]):
        with pytest.raises(
            StateError, match=rf"class {kind.__module__}\.{kind.__name__}"
        ) as caught:
            dtensor_boxes((4,), (2,) * len(placements), (0,) * len(placements), placements)
        assert caught.value.code == "unsupported"


def test_torch_is_trusted_only_where_it_is_right() -> None:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torchs

    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    assert not torch_computes_offsets((7, 3), (3, 2), strided)
    assert not torch_computes_offsets(
        (10, 6),
        (2, 2, 2),
        [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)],
    )
    assert not torch_computes_offsets(
        (8, 3), (2, 2), [_StridedShard(0, split_factor=2), Replicate()]
    )
    for shape, mesh, placements in [
        ((12, 3), (3, 2), strided),
        ((7, 5), (3, 2), [Shard(0), Shard(0)]),
        ((7, 6), (3, 2), [Shard(0), Shard(1)]),
        (
            (16, 6),
            (2, 2, 2),
            [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)],
        ),
    ]:
        assert torch_computes_offsets(shape, mesh, placements)
        for at in coordinates(mesh):
            sizes, offsets = torchs(shape, mesh, list(at), placements)
            boxes = dtensor_boxes(shape, mesh, at, placements)
            assert boxes == ((Box(tuple(offsets), tuple(sizes)),) if prod(sizes) else ())
