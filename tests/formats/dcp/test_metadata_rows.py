"""Rows of tensors, chunks and items are read as the interpreter reads them, wherever a window ends."""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata

from ema_ckpt.formats.dcp import metadata, metadata_batches, metadata_columns, metadata_fast
from ema_ckpt.formats.dcp.metadata import Metadata
from ema_ckpt.formats.pickle.memo import Memo
from tests.formats.dcp import pickled_rows
from tests.formats.dcp.pickled_rows import PickledRows
from tests.formats.dcp.test_metadata_fast import check_same, outcome

# What takes the object before it, or several, and leaves the list or dict such as it is.
TAKING = [b"0", b"\x850", b"\x860", b"\x870", b"N\x860", b"NN\x870", b"2", b"200", b"00", b"1("]
TAKING += [b"(t0", b"t0(", b"l0(", b"\x910(", b"(\x910"]


@pytest.fixture(params=[40, 150, 64 << 10], ids="{} bytes".format)
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """In how many bytes rows are looked for at a time."""
    monkeypatch.setattr(metadata_columns, "_FIRST_WINDOW", request.param)
    monkeypatch.setattr(metadata_columns, "_LARGEST_WINDOW", 2 * request.param)
    return int(request.param)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What rows were read."""
    kinds: list[str] = []
    leave_out = Memo.leave_out

    def noted(memo: Memo, objects: object, count: int) -> None:
        kinds.append(type(objects).__name__)
        leave_out(memo, objects, count)  # type: ignore[arg-type]

    monkeypatch.setattr(Memo, "leave_out", noted)
    yield kinds


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("oddness", [0, 0.003, 0.02])
def test_drawn_pickles(oddness: float, rows: list[str]) -> None:
    """Numbers of every width, forward references, frames, opcodes between, equal keys, no chunks."""
    for seed in range(15):
        drawn = PickledRows(seed, oddness, Random(seed).choice([0, oddness]))
        check_same(drawn.whole())
    assert rows


@pytest.mark.usefixtures("window")
def test_usual_pickles_need_no_second_reading(
    rows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "_COLUMNS_FROM_NBYTES", 0)
    for seed in range(25):
        data = PickledRows(seed, 0, 0).whole()
        assert len(metadata._parse(data, "t", fast=True).entries) > 0
    assert set(rows) == {"_LeftOutTensors", "_LeftOutChunks", "_LeftOutItems"}


class OneInsertion(PickledRows):
    """A pickle with opcodes after one of the objects in lists and dicts."""

    def __init__(self, seed: int, place: int, opcodes: bytes) -> None:
        super().__init__(seed, 0, 0)
        self.left, self.opcodes = place, opcodes

    def between(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.data += self.opcodes


@pytest.mark.parametrize("opcodes", TAKING, ids=repr)
def test_opcodes_that_take_one_of_several(opcodes: bytes, rows: list[str]) -> None:
    """What stands for several objects is not taken for one."""
    read = 0
    for seed in range(25):
        place = Random(seed).randrange(1, 12)
        data = OneInsertion(seed, place, opcodes).whole()
        check_same(data)
        read += isinstance(outcome(data, fast=False), Metadata)
    assert read > 0 or opcodes not in TAKING[:8]
    assert rows


@pytest.mark.parametrize("count", [4, 5, 16])
def test_numbers_without_a_mark_before_an_empty_tuple(count: int) -> None:
    """They are no tuple: the interpreter finds that a number is called."""
    changed = 0
    for seed in range(80):
        data = PickledRows(seed, 0, 0).whole()
        places = list(re.finditer(rb"\((K.(?:K.){%d})t\x94\x85" % (count - 1), data, re.DOTALL))
        for match in places[-1:]:
            data = data[: match.start()] + match[1] + b")\x94\x85" + data[match.end() :]
            check_same(data)
            assert outcome(data, fast=True, columns=True) == "unreadable"
            changed += 1
    assert changed > 0


def test_a_size_of_another_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pickled_rows.CLASSES, "Size", "other")
    drawn = PickledRows(1, 0, 0)
    for name in pickled_rows.CLASSES:  # known before the first instance, which is a short cut then
        drawn.push_class(name)
    for name in ("properties", "size", "chunks", "offsets", "sizes"):
        drawn.text(name)
    data = drawn.whole()
    check_same(data)
    for columns in (False, True):
        assert outcome(data, fast=True, columns=columns) == "unsafe-pickle"


def c_pickler(value: object, protocol: int) -> bytes:
    return pickle.dumps(value, protocol)


def python_pickler(value: object, protocol: int) -> bytes:
    file = io.BytesIO()
    pickle._Pickler(file, protocol).dump(value)  # type: ignore[attr-defined]
    return file.getvalue()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("pickler", [c_pickler, python_pickler])
def test_lists_around_the_thousand_that_pickle_writes_at_a_time(
    pickler: Callable[[object, int], bytes], protocol: int
) -> None:
    """Properties are shared by tensors of one type, and frames begin in the midst of rows."""
    properties = [TensorProperties(dtype) for dtype in (torch.float32, torch.int8)]
    entries, items = {}, {}
    for i, count in enumerate([0, 1, 2, 1000, 1001]):
        offsets = [torch.Size([300 * k, k % 2]) for k in range(count)]
        chunks = [ChunkStorageMetadata(offset, torch.Size([300, 1])) for offset in offsets]
        size = torch.Size([300 * count, 2])
        entries[f"w.{i}"] = TensorStorageMetadata(properties[i % 2], size, chunks)
        for k, offset in enumerate(offsets):
            key = MetadataIndex(f"w.{i}", offset, k)
            items[key] = _StorageInfo(f"__{k % 3}_0.distcp", k << 20, 1 << 20)
    data = pickler(TorchMetadata(entries, {name: (name,) for name in entries}, items), protocol)
    check_same(data)
    result = outcome(data, fast=True, columns=True)
    assert isinstance(result, Metadata)
    assert {key: place[:3] for key, place in result.items.items()} == {
        (key.fqn, tuple(key.offset)): (place.relative_path, place.offset, place.length)
        for key, place in items.items()
    }


class EqualKeys(PickledRows):
    """Items of equal keys: some are read in rows, others alone, others by the interpreter."""

    def item(self, name: str, offsets: tuple[int, ...] | None, hint: int | None, file: str) -> None:
        self.oddness = self.random.choice([0, 0, 0.02])
        super().item("w", (0, 0), hint, file)
        self.oddness = 0


@pytest.mark.usefixtures("window")
def test_of_equal_keys_the_last_counts() -> None:
    read = 0
    for seed in range(20):
        data = EqualKeys(seed, 0, 0).whole()
        check_same(data)
        read += isinstance(outcome(data, fast=False), Metadata)
    assert read > 5


class ItemsForPaths(PickledRows):
    """Items where the paths of tensors should be."""

    def tables(self, drawn: list, has_paths: bool) -> dict[str, Callable[[], None]]:
        tables = super().tables(drawn, has_paths)
        return tables | {"planner_data": tables["storage_data"]}


def test_items_that_are_no_paths() -> None:
    for seed in range(20):
        data = ItemsForPaths(seed, 0, 0).whole()
        check_same(data)
        assert isinstance(outcome(data, fast=True, columns=True), Metadata)


def test_each_byte_is_looked_at_a_few_times(
    window: int, rows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one form are looked for once, from window to window, in odd pickles, too."""
    looked: Counter[bytes] = Counter()
    find = metadata_batches._find

    def counted(data: bytes, opened: bytes, span: tuple[int, int]) -> Any:
        looked[opened] += span[1] - span[0]
        return find(data, opened, span)

    monkeypatch.setattr(metadata_batches, "_find", counted)
    for seed in range(20):
        data = PickledRows(seed, 0.01, 0.01).whole()
        looked.clear()
        outcome(data, fast=True, columns=True)
        # Chunks are looked for in windows of tensors as well.
        assert max(looked.values(), default=0) <= 2 * metadata_fast._MAX_FORMS * len(data)
        if window < len(data):
            assert looked.total() < 8 * len(data)
    assert rows
