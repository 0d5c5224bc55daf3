"""Boxes, against brute force over their elements and against torch.chunk."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ema_ckpt.core.box import (
    Box,
    first_overlap,
    flat_range_boxes,
    intersect,
    is_contiguous_in,
    linear,
    placement_box,
    row_major_strides,
    split_rows,
    whole,
)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))))


@st.composite
def boxes(draw: st.DrawFn, ndim: int, limit: int = 5) -> Box:
    offsets = tuple(draw(st.integers(0, limit)) for _ in range(ndim))
    return Box(offsets, tuple(draw(st.integers(0, 4)) for _ in range(ndim)))


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n))))
def test_intersection(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = elements(a) & elements(b)
    found = intersect(a, b)
    assert (set() if found is None else elements(found)) == common


def test_scalars_are_boxes_of_one_element() -> None:
    assert intersect(Box((), ()), Box((), ())) == Box((), ())
    assert Box((), ()).numel == 1
    assert Box((), ()).fits(())
    assert first_overlap([Box((), ()), Box((), ())]) == (0, 1)


@given(st.integers(1, 3).flatmap(lambda n: st.lists(boxes(n), max_size=6)))
def test_first_overlap_finds_one_exactly_if_there_is_one(many: list[Box]) -> None:
    found = first_overlap(many)
    clashes = any(elements(a) & elements(b) for i, a in enumerate(many) for b in many[:i])
    assert (found is not None) == clashes
    if found is not None:
        assert elements(many[found[0]]) & elements(many[found[1]])
        assert found[0] != found[1]


@given(st.integers(0, 20), st.integers(1, 9), st.integers(0, 3))
def test_rows_are_split_as_torch_chunk_splits_them(rows: int, parts: int, columns: int) -> None:
    tensor = torch.arange(rows * max(columns, 1)).reshape(rows, max(columns, 1))
    cut = list(split_rows(tuple(tensor.shape), parts))
    assert len(cut) == parts
    expected = [piece for piece in torch.chunk(tensor, parts) if piece.shape[0]]
    found = [tensor[b.offsets[0] : b.offsets[0] + b.sizes[0]] for b in cut if b.numel]
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(b.offsets[0] == rows for b in cut if not b.numel)


@given(
    st.integers(0, 3).flatmap(lambda n: st.tuples(st.tuples(*[st.integers(1, 4)] * n), st.data()))
)
def test_contiguity_and_linear_index(given_: tuple[tuple[int, ...], st.DataObject]) -> None:
    shape, data = given_
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(
        data.draw(st.integers(1, size - o)) for size, o in zip(shape, offsets, strict=True)
    )
    inner, outer = Box(offsets, sizes), whole(shape)
    numbers = np.arange(outer.numel).reshape(shape)
    taken = numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].ravel()
    assert linear(offsets, shape) == taken[0]
    assert is_contiguous_in(inner, outer) == bool(
        np.array_equal(taken, taken[0] + np.arange(len(taken)))
    )


@given(st.lists(st.integers(0, 5), max_size=4))
def test_row_major_strides_are_torchs(shape: list[int]) -> None:
    assert row_major_strides(shape) == torch.empty(shape).stride()


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_of_a_flat_range_hold_its_elements_in_order(
    shape: list[int], data: st.DataObject
) -> None:
    index = np.arange(prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, index.size))
    stop = data.draw(st.integers(start, index.size))
    boxes = flat_range_boxes(shape, start, stop)
    found = []
    for box in boxes:
        inside = index[box.slices()].ravel()
        assert inside[0] == linear(box.offsets, shape)
        assert inside.tolist() == list(range(inside[0], inside[0] + box.numel))
        found += inside.tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_boxes_of_an_empty_flat_range() -> None:
    assert flat_range_boxes((0, 8), 0, 0) == ()
    assert flat_range_boxes((), 0, 0) == ()
    assert flat_range_boxes((), 0, 1) == (Box((), ()),)


@st.composite
def nested_shards(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[tuple[int, int]]]:
    """A shape, the mesh, and the (dimension, index in the order of the cuts) of every mesh axis."""
    shape = tuple(draw(st.lists(st.integers(0, 8), min_size=1, max_size=3)))
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dims = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    ranks = draw(st.permutations(range(len(mesh))))
    return shape, mesh, list(zip(dims, ranks, strict=True))


@given(nested_shards())
def test_placements_cut_as_torch_chunk_does_one_after_the_other(
    case: tuple[tuple[int, ...], list[int], list[tuple[int | None, int]]],
) -> None:
    """The split factor of a mesh axis counts the shards that axes to its right made before it."""
    shape, mesh, cuts = case
    placements = []
    for axis, (dim, rank) in enumerate(cuts):
        inside = [
            mesh[i] for i in range(axis + 1, len(mesh)) if cuts[i][0] == dim and cuts[i][1] < rank
        ]
        placements.append((dim, prod(inside) if dim is not None else 1))
    index = torch.arange(prod(shape)).reshape(shape)
    for coordinate in product(*map(range, mesh)):
        expected = index
        for axis in sorted(range(len(mesh)), key=lambda axis: cuts[axis][1]):
            dim = cuts[axis][0]
            if dim is not None:
                parts = torch.chunk(expected, mesh[axis], dim)
                empty = expected.narrow(dim, 0, 0)
                parts = (*parts, *[empty] * (mesh[axis] - len(parts)))
                expected = parts[coordinate[axis]]
        order = {
            dim: sorted(
                (a for a in range(len(mesh)) if cuts[a][0] == dim), key=lambda a: cuts[a][1]
            )
            for dim in range(len(shape))
        }
        box = placement_box(shape, mesh, coordinate, placements, order)
        assert box is not None
        assert torch.equal(index[box.slices()], expected)
        assert box.fits(shape)
        bare = placement_box(shape, mesh, coordinate, placements)
        right = all(size > 1 for size in mesh)
        assert not right or bare == box


def test_a_split_factor_that_no_mesh_axes_make_gives_no_box() -> None:
    assert placement_box((8,), (2, 2), (0, 0), [(0, 3), (0, 1)]) is None
    assert placement_box((8,), (2, 2), (1, 0), [(0, 2), (0, 1)]) == Box((2,), (2,))
