"""Coverage proofs: each defect by its code, each sound layout accepted."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ema_ckpt.core.box import Box, split_rows
from ema_ckpt.core.catalog import Chunk, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import SourceError


def tensor(shape: tuple[int, ...], boxes: list[Box], file: str = "__0_0.distcp") -> Tensor:
    chunks = tuple(Chunk(b.offsets, b.sizes, file, 0, 0) for b in boxes)
    return Tensor("model.w", ("model", "w"), shape, by_name("float32"), chunks)


@given(st.integers(0, 12), st.integers(0, 3), st.integers(1, 8), st.randoms())
def test_row_shards_in_any_order(rows: int, columns: int, parts: int, random: object) -> None:
    cut = list(split_rows((rows, columns), parts))
    random.shuffle(cut)  # type: ignore[attr-defined]
    picked = prove(tensor((rows, columns), cut))
    assert sum(cut[index].numel for index in picked) == rows * columns


def test_grid_shards_whose_rank_order_is_not_row_order() -> None:
    grid = [Box((2, 0), (2, 3)), Box((0, 0), (2, 3)), Box((2, 3), (2, 1)), Box((0, 3), (2, 1))]
    assert list(prove(tensor((4, 4), grid))) == [1, 3, 0, 2]  # by their first rows


def test_equal_boxes_are_replicas_and_the_first_is_read() -> None:
    assert list(prove(tensor((4,), [Box((0,), (2,)), Box((2,), (2,)), Box((0,), (2,))]))) == [0, 1]


@pytest.mark.parametrize(
    ("shape", "boxes", "code", "words"),
    [
        ((4, 4), [Box((0, 0), (2, 4))], "hole", "8 of 16 elements covered"),
        ((4, 4), [], "hole", "0 of 16 elements covered"),
        ((4,), [Box((0,), (3,)), Box((2,), (2,))], "overlap", "[0] and [2]"),
        ((4, 4), [Box((0, 0), (4, 3)), Box((0, 2), (4, 2))], "overlap", "same elements"),
        ((4,), [Box((0,), (5,))], "out-of-bounds", "does not fit into [4]"),
        ((4,), [Box((-1,), (5,))], "out-of-bounds", "does not fit"),
        ((4,), [Box((0, 0), (4, 1))], "out-of-bounds", "does not fit"),
        ((), [], "hole", "0 of 1 element covered"),
    ],
)
def test_defects_are_named(shape: tuple[int, ...], boxes: list[Box], code: str, words: str) -> None:
    with pytest.raises(SourceError) as caught:
        prove(tensor(shape, boxes))
    assert caught.value.code == code
    assert caught.value.tensor == "model.w"
    assert words in str(caught.value)
    assert "model.w" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "boxes", "rows"),
    [
        ((8, 4), [Box((0, 0), (2, 4)), Box((5, 0), (2, 4))], "rows 2 to 4, 7 of 8;"),
        ((4, 4), [Box((0, 0), (4, 2)), Box((0, 2), (3, 2))], "row 3 of 4;"),
        ((4, 4), [Box((2, 0), (2, 4))], "rows 0 to 1 of 4;"),
        ((2, 2), [], "rows 0 to 1 of 2; no file holds any of it"),
    ],
)
def test_a_hole_tells_its_rows(shape: tuple[int, ...], boxes: list[Box], rows: str) -> None:
    with pytest.raises(SourceError) as caught:
        prove(tensor(shape, boxes))
    assert rows in str(caught.value)
    assert ("the rest is in '__0_0.distcp'" in str(caught.value)) is bool(boxes)
    assert "use another copy, or save again" in str(caught.value)


def test_a_chunk_that_no_file_holds() -> None:
    with pytest.raises(SourceError, match="no file is named") as caught:
        prove(tensor((2,), [Box((0,), (2,))], file=""))
    assert caught.value.code == "incomplete"


def test_zero_size_tensors_need_no_chunk() -> None:
    assert list(prove(tensor((0, 5), []))) == []
    assert list(prove(tensor((0, 5), [Box((0, 0), (0, 5))]))) == []


def staircase(steps: int) -> list[Box]:
    """Row i is cut at column i + 1: no axis has few boxes abreast."""
    rows = [(Box((i, 0), (1, i + 1)), Box((i, i + 1), (1, steps - i - 1))) for i in range(steps)]
    return [box for row in rows for box in row if box.numel]


def diagonal(steps: int) -> list[Box]:
    """Bars that all end at the far side of the axis on which they begin at different places."""
    return [Box((i, i), (steps - i, 1)) for i in range(steps)]


@pytest.mark.thorough
@pytest.mark.parametrize("cut", [staircase, diagonal])
def test_the_proof_takes_time_in_proportion_to_the_chunks(cut: object) -> None:
    seconds = {}
    for steps in (1000, 16_000):
        boxes = cut(steps)
        started = time.process_time()
        try:
            prove(tensor((steps, steps), boxes))
        except SourceError as error:
            assert (cut, error.code) == (diagonal, "hole")
        seconds[steps] = time.process_time() - started
    assert seconds[16_000] < 64 * seconds[1000]  # 16 times the chunks; the square would be 256


def test_too_many_overlaps_to_name_one_are_still_overlaps() -> None:
    boxes = [*diagonal(4000), Box((0, 1), (3999, 3999))]  # the far column twice, and holes
    with pytest.raises(SourceError) as caught:
        prove(tensor((4000, 4000), boxes))
    assert caught.value.code == "overlap"


@pytest.mark.thorough
def test_chunks_cut_on_many_axes_are_proven_or_refused() -> None:
    halves = [Box((i,) + (0,) * 63, (1,) + (2,) * 63) for i in range(2)]
    assert prove(tensor((2,) * 64, halves)) == (0, 1)
    # A corner of each axis' own: nothing cancels until the last axis.
    ones = [Box(tuple(int(i == j) for j in range(40)), (1,) * 40) for i in range(40)]
    with pytest.raises(SourceError) as caught:
        prove(tensor((2,) * 40, ones))
    assert caught.value.code in ("unsupported", "hole")


@given(st.data())
def test_a_proof_agrees_with_counting_elements(data: st.DataObject) -> None:
    """Random boxes in a small tensor, often a sound tiling with one box changed."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(data.draw(st.integers(0, 6))):  # cut one box in two
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        axis = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, box.sizes[axis]))
        for start, size in ((0, at), (at, box.sizes[axis] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis] += start
            sizes[axis] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    if data.draw(st.booleans()):
        index = data.draw(st.integers(0, len(boxes) - 1))
        offsets = [
            data.draw(st.integers(0, n - s)) for n, s in zip(shape, boxes[index].sizes, strict=True)
        ]
        boxes[index] = Box(tuple(offsets), boxes[index].sizes)
    count = np.zeros(shape, int)
    for box in set(boxes):  # equal boxes are replicas
        count[box.slices()] += 1
    try:
        prove(tensor(shape, boxes))
        code = ""
    except SourceError as error:
        code = error.code
    assert code == ("overlap" if count.max() > 1 else "hole" if count.min() < 1 else "")
