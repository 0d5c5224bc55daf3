"""Reading boxes from chunks: any grid of chunks, axis orders, slack, block sizes, against numpy."""

from __future__ import annotations

import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ema_ckpt.core.box import Box, linear, whole
from ema_ckpt.core.catalog import Chunk, Payload, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.box_reader import BoxReader, LocatedBox, locate_box
from ema_ckpt.reading.checksum_verifier import ChecksumVerifier
from ema_ckpt.reading.overlaps import (
    RowBlocks,
    contiguous_ranges,
    find_overlaps,
    find_row_slabs,
    row_ranges,
)
from ema_ckpt.storage.files import LocalFiles
from tests.searches import examples

KINDS = {"int16": "<i2", "float32": "<f4", "complex128": "<c16", "uint8": "u1", "float64": "<f8"}


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    marks = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    return [(a, b - a) for a, b in pairwise([0, *marks, size])]


def cut_out(values: np.ndarray, box: Box) -> np.ndarray:
    return values[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]


@st.composite
def stored(
    draw: st.DrawFn, row_major: bool = False
) -> tuple[np.ndarray, list[Chunk], list[Payload], bytes, str]:
    """A tensor's values, a grid of chunks, each with its own axis order and slack around it, and the file."""
    dtype = draw(st.sampled_from(sorted(KINDS)))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    values = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(KINDS[dtype])
    boxes = [Box((), ())]
    for size in shape:
        parts = draw(cuts(size))
        boxes = [Box((*b.offsets, o), (*b.sizes, s)) for b in boxes for o, s in parts]
    chunks, payloads, data = [], [], bytearray(b"\xee" * 5)
    for box in boxes:
        order = (
            tuple(range(len(shape)))
            if row_major
            else tuple(draw(st.permutations(range(len(shape)))))
        )
        slack = draw(st.integers(0, 3))
        laid = np.array(cut_out(values, box).transpose(order), order="C")
        strides = [0] * len(order)
        for axis, stride in zip(order, laid.strides, strict=True):
            strides[axis] = stride // values.itemsize
        storage = b"\xaa" * (slack * values.itemsize) + laid.tobytes() + b"\xbb" * values.itemsize
        plain = order == tuple(range(len(order)))
        crc = zlib.crc32(storage)
        payloads.append(
            Payload("data", len(data), len(storage), None if plain else tuple(strides), slack, crc)
        )
        chunks.append(Chunk(box.offsets, box.sizes, "data", len(data), len(storage)))
        data += storage
    return values, chunks, payloads, bytes(data), dtype


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=examples(200),
    deadline=None,
)
@given(case=stored(), block_nbytes=st.integers(1, 300), limit=st.integers(16, 400), data=st.data())
def test_blocks_equal_numpy(
    tmp_path: Path, case, block_nbytes: int, limit: int, data: st.DataObject
) -> None:
    values, chunks, payloads, raw, dtype = case
    (tmp_path / "data").write_bytes(raw)
    tensor = Tensor("t", ("t",), values.shape, by_name(dtype), tuple(chunks))
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in tensor.shape)
    box = Box(
        offsets,
        tuple(data.draw(st.integers(1, n - o)) for n, o in zip(tensor.shape, offsets, strict=True)),
    )
    source = LocalFiles(tmp_path)
    verifier = ChecksumVerifier(source, enabled=True)
    reader = BoxReader(limit, verifier)
    located = locate_box(source, tensor, payloads, prove(tensor), box)
    expected = cut_out(values, box).tobytes()
    itemsize = tensor.dtype.itemsize
    blocks = RowBlocks(box, itemsize, block_nbytes)
    first = data.draw(st.integers(0, blocks.count - 1))
    out = b""
    for part in (range(first), range(first, blocks.count)):
        for view, index in zip(reader.blocks(located, blocks, part.start, part.stop), part):
            block = blocks.block(index)
            assert linear(block.within(box).offsets, box.sizes) * itemsize == len(out)
            assert len(view) == block.numel * itemsize <= max(block_nbytes, itemsize)
            out += view
    assert out == expected
    # Any range of elements, read at once.
    start = data.draw(st.integers(0, box.numel)) * itemsize
    stop = data.draw(st.integers(start // itemsize, box.numel)) * itemsize
    ranged = bytearray(stop - start)
    crc = reader.read(located, memoryview(ranged), start)
    assert ranged == expected[start:stop]
    assert crc is None or crc == zlib.crc32(ranged)
    verifier.finish()
    source.close()
    overlaps = find_overlaps(tensor, payloads, prove(tensor), box)
    runs = contiguous_ranges(overlaps, box, itemsize)
    if runs is not None:
        starts = [r.payload.offset + r.start for r in runs]
        assert (
            b"".join(raw[s : s + r.nbytes] for s, r in zip(starts, runs, strict=True)) == expected
        )
        assert [r.dest for r in runs] == sorted(r.dest for r in runs)
    if box == whole(tensor.shape):
        fast = row_ranges(tensor, payloads, prove(tensor), box)
        assert fast is None or fast == runs


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=examples(100),
    deadline=None,
)
@given(case=stored(), data=st.data())
def test_a_flipped_bit_anywhere_in_a_used_storage_is_found(
    tmp_path: Path, case, data: st.DataObject
) -> None:
    values, chunks, payloads, raw, dtype = case
    hit = data.draw(st.sampled_from(payloads))
    damaged = bytearray(raw)
    damaged[hit.offset + data.draw(st.integers(0, hit.nbytes - 1))] ^= 1 << data.draw(
        st.integers(0, 7)
    )
    (tmp_path / "data").write_bytes(damaged)
    tensor = Tensor("t", ("t",), values.shape, by_name(dtype), tuple(chunks))
    source = LocalFiles(tmp_path)
    verifier = ChecksumVerifier(source, enabled=True)
    reader = BoxReader(64, verifier)
    located = locate_box(source, tensor, payloads, prove(tensor), whole(tensor.shape))
    with pytest.raises(SourceError) as caught:
        reader.read(located, memoryview(bytearray(tensor.nbytes)))
        verifier.finish()
    assert (caught.value.code, caught.value.tensor, caught.value.file) == ("checksum", "t", "data")
    source.close()


@pytest.mark.thorough
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=examples(300),
    deadline=None,
)
@given(case=stored(row_major=True), rows=st.integers(1, 4), data=st.data())
def test_slabs_equal_numpy(tmp_path: Path, case, rows: int, data: st.DataObject) -> None:
    values, chunks, payloads, raw, dtype = case
    (tmp_path / "data").write_bytes(raw)
    tensor = Tensor("t", ("t",), values.shape, by_name(dtype), tuple(chunks))
    start = data.draw(st.integers(0, tensor.shape[0] - 1)) if tensor.shape else 0
    box = Box((start, *(0,) * (len(tensor.shape) - 1))[: len(tensor.shape)], tensor.shape)
    if tensor.shape:
        box = Box(box.offsets, (tensor.shape[0] - start, *tensor.shape[1:]))
    itemsize = tensor.dtype.itemsize
    blocks = RowBlocks(box, itemsize, rows * int(np.prod(tensor.shape[1:])) * itemsize)
    overlaps = find_overlaps(tensor, payloads, prove(tensor), box)
    if find_row_slabs(overlaps, blocks, itemsize) is None:
        assert blocks.axis > 0 or not tensor.shape
        return
    source = LocalFiles(tmp_path)
    verifier = ChecksumVerifier(source, enabled=True)
    reader = BoxReader(16, verifier)
    located = LocatedBox(source, tensor, box, None, overlaps)
    half = blocks.count // 2
    out = b"".join(map(bytes, reader.blocks(located, blocks, 0, half)))
    out += b"".join(map(bytes, reader.blocks(located, blocks, half)))
    assert out == cut_out(values, box).tobytes()
    assert out == b"".join(map(bytes, BoxReader(16).blocks(located, blocks)))
    verifier.finish()
    source.close()


@given(
    sizes=st.lists(st.integers(0, 9), max_size=4),
    corner=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    nbytes=st.integers(1, 400),
)
def test_the_extent_of_a_block_is_where_its_elements_are(
    sizes: list[int], corner: list[int], itemsize: int, nbytes: int
) -> None:
    box = Box(tuple(corner[: len(sizes)]), tuple(sizes))
    blocks = RowBlocks(box, itemsize, nbytes)
    at = 0
    for index in range(blocks.count):
        block = blocks.block(index)
        assert blocks.extent(index) == (at, block.numel)
        assert linear(block.within(box).offsets, box.sizes) == at or not block.numel
        at += block.numel
    assert at == box.numel
