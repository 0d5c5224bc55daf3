"""Coverage proofs: each defect by its code, each sound layout accepted."""

from __future__ import annotations

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
    assert list(prove(tensor((4, 4), grid))) == [0, 1, 2, 3]


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
        ((4, 4), [Box((0, 0), (4, 2)), Box((0, 2), (3, 2))], "rows 3 of 4;"),
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
