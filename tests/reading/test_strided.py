"""Strided storages read block by block, against torch's own views."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ema_ckpt.core.box import whole
from ema_ckpt.core.catalog import Chunk, Payload, Tensor
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.box_reader import BoxReader, locate_box
from ema_ckpt.reading.overlaps import RowBlocks
from ema_ckpt.storage.files import LocalFiles
from tests.formats.writing import raw_bytes
from tests.searches import examples


class CountingFiles(LocalFiles):
    """Real files; counts reads and their bytes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = self.nbytes = 0

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self.reads += 1
        self.nbytes += len(buffer)
        super().read_into(name, offset, buffer)


def assembled(folder: Path, view: torch.Tensor, limit: int) -> tuple[bytes, CountingFiles]:
    """A strided view, stored at an odd place of a file and read back in blocks of `limit` bytes."""
    storage = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    prefix = os.urandom(13)
    (folder / "f").write_bytes(prefix + raw_bytes(storage))
    dtype = by_name(str(view.dtype))
    tensor = Tensor(
        "t",
        ("t",),
        tuple(view.shape),
        dtype,
        (Chunk((0,) * view.dim(), tuple(view.shape), "f", 0, 0),),
    )
    payload = Payload("f", len(prefix), storage.nbytes, tuple(view.stride()), view.storage_offset())
    source = CountingFiles(folder)
    reader, box = BoxReader(limit), whole(tensor.shape)
    located = locate_box(source, tensor, [payload], [0], box)
    blocks = RowBlocks(box, dtype.itemsize, limit)
    result = b"".join(map(bytes, reader.blocks(located, blocks)))
    source.close()
    return result, source


DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]


@st.composite
def views(draw) -> torch.Tensor:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    strides = [draw(st.sampled_from([0, 1, 2, 3, 7, 20, 81])) for _ in sizes]
    start = draw(st.integers(0, 5))
    reach = (
        start + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
    )
    dtype = draw(st.sampled_from(DTYPES))
    base = torch.randint(
        0, 256, ((reach + draw(st.integers(0, 3))) * dtype.itemsize,), dtype=torch.uint8
    ).view(dtype)
    return base.as_strided(sizes, strides, start)


@pytest.mark.thorough
@settings(
    max_examples=examples(400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(view=views(), limit=st.sampled_from([16, 40, 64, 200, 1000, 1 << 16]))
def test_any_view_is_read_as_torch_reads_it(tmp_path, view, limit):
    assert assembled(tmp_path, view, limit)[0] == raw_bytes(view)


SHAPES = {
    "transposed": (lambda: torch.randn(512, 3000).t(), 24, 600),
    "wide rows transposed": (lambda: torch.randn(300, 20_000).t(), 1.01, 120_000),
    "channels last": (
        lambda: torch.randn(4, 64, 56, 56).contiguous(memory_format=torch.channels_last),
        16,
        300,
    ),
    "every seventh": (lambda: torch.arange(700_000.0)[::7], 7.1, 50),
    "one column": (lambda: torch.randn(2000, 8192)[:, 5], 1.01, 2001),
    "expanded": (lambda: torch.arange(500.0).reshape(500, 1).expand(500, 400), 1, 20),
    "inner slice": (lambda: torch.randn(400, 1000)[:, 100:700], 2, 20),
}


@pytest.mark.parametrize("name", SHAPES)
def test_reads_are_few_and_read_little_in_vain(tmp_path, name):
    make, most_times, most_reads = SHAPES[name]
    view = make()
    data, source = assembled(tmp_path, view, 256 << 10)
    assert data == raw_bytes(view)
    assert source.nbytes <= most_times * len(data)
    assert source.reads <= most_reads


def test_a_view_beyond_its_storage_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(bytes(40))
    tensor = Tensor("t", ("t",), (2, 4), by_name("float32"), (Chunk((0, 0), (2, 4), "f", 0, 0),))
    source = LocalFiles(tmp_path)
    located = locate_box(source, tensor, [Payload("f", 0, 40, (7, 1))], [0], whole((2, 4)))
    with pytest.raises(SourceError, match="'t' reaches beyond") as caught:
        BoxReader(1000).read(located, memoryview(bytearray(32)))
    assert caught.value.code == "out-of-bounds"


@pytest.mark.parametrize("limit", [8, 64, 1 << 16])
def test_more_axes_than_an_array_of_numpy_has(limit: int, tmp_path: Path) -> None:
    base, ones = torch.arange(4000.0), (1,) * 80
    for sizes, strides in [
        ((3, *ones, 5), (1, *ones, 7)),
        ((*ones, 40, 50), (*ones, 1, 40)),
        ((2, *ones[:40], 3, *ones[:40], 4), (12, *ones[:40], 1, *ones[:40], 3)),
        ((3, *ones), (2, *ones)),
    ]:
        view = torch.as_strided(base, sizes, strides)
        assert assembled(tmp_path, view, limit)[0] == raw_bytes(view.contiguous())


@pytest.mark.parametrize("tail", [1, 80])
def test_columns_of_a_tensor_of_many_axes(tail: int, tmp_path: Path) -> None:
    """Rows that several chunks share, as tensor parallelism along the last axis leaves them."""
    values = torch.arange(6000.0).reshape(30, *(1,) * 70, 200, *(1,) * tail)
    chunks, payloads, written = [], [], b""
    for first, stop in [(0, 90), (90, 200)]:
        part = values.narrow(71, first, stop - first).contiguous()
        offsets = (*(0,) * 71, first, *(0,) * tail)
        chunks.append(Chunk(offsets, tuple(part.shape), "f", 0, 0))
        payloads.append(Payload("f", len(written), part.nbytes))
        written += raw_bytes(part)
    (tmp_path / "f").write_bytes(written)
    tensor = Tensor("t", ("t",), tuple(values.shape), by_name("float32"), tuple(chunks))
    located = locate_box(
        LocalFiles(tmp_path), tensor, payloads, range(len(chunks)), whole(tensor.shape)
    )
    for limit in (256, 4096, 1 << 20):
        blocks = RowBlocks(located.box, 4, limit)
        read = b"".join(map(bytes, BoxReader(limit).blocks(located, blocks)))
        assert read == raw_bytes(values)
        out = bytearray(len(read))
        BoxReader(limit).read(located, memoryview(out))
        assert out == read
