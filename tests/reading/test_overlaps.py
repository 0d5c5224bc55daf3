"""Pieces find the chunks they need among many: the same as by looking at each."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ema_ckpt.core.box import Box, intersect
from ema_ckpt.core.catalog import Chunk, Payload, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.reading.overlaps import find_overlaps
from tests.searches import examples


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=60), st.data()
)
def test_bisection_finds_what_a_full_search_finds(
    cuts: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Bands of any height, each cut into columns, stored in any order."""
    boxes, row = [], 0
    for height, columns in cuts:
        for column in range(columns):
            boxes.append(Box((row, column * 6 // columns), (height, 6 // columns)))
        row += height
    boxes = data.draw(st.permutations(boxes))
    chunks = tuple(Chunk(*box, "f", 0, 1) for box in boxes)
    tensor = Tensor("t", ("t",), (row, 6), by_name("int8"), chunks)
    payloads = [Payload("f", index, 1) for index in range(len(chunks))]
    first = data.draw(st.integers(0, row))
    piece = Box((first, 0), (data.draw(st.integers(0, row - first)), 6))
    found = find_overlaps(tensor, payloads, prove(tensor), piece)
    wanted = [common for box in boxes if box.numel and (common := intersect(box, piece))]
    assert sorted(overlap.box for overlap in found) == sorted(wanted)
    assert all(chunks[o.payload.offset].box == o.chunk for o in found)
