"""Boxes, against brute force over their elements and against torch.chunk."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ema_ckpt.core.box import (
    Box,
    first_overlap,
    intersect,
    is_contiguous_in,
    linear,
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
