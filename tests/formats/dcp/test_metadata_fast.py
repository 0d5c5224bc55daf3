"""The fast way to read `.metadata` gives what the interpreter gives, on whole files and damaged ones."""

from __future__ import annotations

import pickle
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pickletools import genops

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata

from ema_ckpt import EmaCkptError
from ema_ckpt.formats.dcp import metadata
from ema_ckpt.formats.dcp.metadata import Metadata, parse
from ema_ckpt.formats.dcp.metadata_values import ItemPlace

FIXTURES = Path(__file__).parents[3] / "fixtures"
METADATA = sorted(FIXTURES.glob("*/.metadata")) + sorted(FIXTURES.glob("*/*/.metadata"))
WHOLE = [(FIXTURES / "dcp" / name / ".metadata").read_bytes() for name in ("fsdp2-w4", "dtypes-w2")]


def outcome(data: bytes, *, fast: bool, columns: bool = False) -> Metadata | str:
    """What is read, or the code of the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "_COLUMNS_FROM_NBYTES", 0 if columns else 1 << 40)
        try:
            return parse(data, "t", fast=fast)
        except EmaCkptError as error:
            return error.code


def check_same(data: bytes) -> None:
    slow = outcome(data, fast=False)
    for columns in (False, True):
        fast = outcome(data, fast=True, columns=columns)
        assert fast == slow
        if isinstance(fast, Metadata) and isinstance(slow, Metadata):
            assert list(fast.entries) == list(slow.entries)
            assert list(fast.items) == list(slow.items)
            check_same_items(fast, slow)


def check_same_items(fast: Metadata, slow: Metadata) -> None:
    """Everything that is asked of the places of items."""
    for name, entry in slow.entries.items():
        mine = fast.entries[name]
        if entry is not None and mine is not None:
            assert fast.items.chunks_of(name, mine) == slow.items.chunks_of(name, entry)
    assert list(fast.items.ends().items()) == list(slow.items.ends().items())
    assert fast.items.transformed() == slow.items.transformed()
    assert list(fast.items.strays(fast.entries)) == list(slow.items.strays(slow.entries))
    found: list[dict[str, list[ItemPlace]]] = []
    for part in (fast, slow):
        found.append({name: [] for name in [*list(slow.entries)[::2], "?"]})
        part.items.add_places(found[-1])
    assert found[0] == found[1]


@pytest.mark.parametrize("path", METADATA, ids=lambda p: str(p.parent.relative_to(FIXTURES)))
def test_fixtures(path: Path) -> None:
    check_same(path.read_bytes())


@given(st.sampled_from(WHOLE), st.integers(0, 1 << 20), st.integers(1, 255))
def test_one_changed_byte(data: bytes, place: int, change: int) -> None:
    damaged = bytearray(data)
    damaged[place % len(data)] ^= change
    check_same(bytes(damaged))


@pytest.mark.parametrize("data", WHOLE)
@pytest.mark.parametrize("op", [b"\x85", b"\x86", b"\x87", b"t", b"("])
def test_a_tuple_of_another_length(data: bytes, op: bytes) -> None:
    """Every opcode that makes a tuple of numbers, exchanged for another that takes fewer or more."""
    places = [
        match.start(2) for match in re.finditer(rb"(K.)([\x85-\x87t])\x94\x85", data, re.DOTALL)
    ]
    assert len(places) > 20
    for place in places[::7]:
        check_same(data[:place] + op + data[place + 1 :])


def test_an_instance_that_is_built_twice() -> None:
    """Without its NEWOBJ, what follows is given to the instance before it."""
    data = WHOLE[0]
    opening = next(re.finditer(rb"ub(h.\)\x81)\x94}\x94\(h.h.K", data, re.DOTALL))
    check_same(data[: opening.start(1)] + data[opening.end(1) :])


@given(st.sampled_from(WHOLE), st.integers(0, 1 << 20), st.integers(0, 40), st.binary(max_size=8))
def test_a_replaced_run_of_bytes(data: bytes, place: int, length: int, new: bytes) -> None:
    place %= len(data)
    check_same(data[:place] + new + data[place + length :])


_INNERMOST = re.compile(rb"(?:h.|j....)\)\x81\x94}\x94\((?:(?!\)\x81).)*?ub", re.DOTALL)
_METADATA_CLASSES = "BytesStorageMetadata ChunkStorageMetadata MetadataIndex TensorProperties"
_CALLED = [
    *(f"ctorch.distributed.checkpoint.metadata\n{name}\n" for name in _METADATA_CLASSES.split()),
    *("ctorch\nSize\n", "cbuiltins\nset\n", "cbuiltins\nfrozenset\n", "ctorch\ndevice\n"),
    *("ccollections\nOrderedDict\n", "ccollections\ndefaultdict\n", "cpathlib\nPosixPath\n"),
    *("cunknown\nClass\n", "ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n"),
]
_CALLS = [
    (b"", b"R"),
    (b"", b"\x81"),
    (b"", b"\x85R"),
    (b"(", b"tR"),
    (b"((", b"ltR"),
    (b"N", b"\x86R"),
]


@pytest.mark.parametrize("called", _CALLED)
def test_no_instance_is_taken_for_arguments(called: str) -> None:
    """Nor for what is in them: an instance is no tuple, whatever stands for it meanwhile."""
    data = WHOLE[0]
    instances = list(_INNERMOST.finditer(data))
    assert len(instances) > 20
    for match in [instances[0], *instances[-3:]]:
        for before, after in _CALLS:
            spliced = called.encode() + before + match[0] + after
            check_same(data[: match.start()] + spliced + data[match.end() :])


@pytest.mark.parametrize("name", ["planner_data", "storage_data", "state_dict_metadata"])
def test_no_table_is_made_of_instances(name: str) -> None:
    """As a list of pairs would be, which indices with two fields are not."""
    data, index = WHOLE[0], b""
    for match in _INNERMOST.finditer(data):
        if b"ab" not in match[0]:
            index = match[0]
    key = data.index(b"\x8c" + bytes([len(name)]) + name.encode() + b"\x94") + len(name) + 3
    if data[key : key + 2] == b"}\x94":  # an empty dict, and what fills it
        table = b"ccollections\nOrderedDict\n(" + b"(" + index + b"ltR\x94"
        check_same(data[:key] + table + data[key + 2 :])


def test_plain_tuples_are_no_instances() -> None:
    """Torch would find no item by them."""
    metadata = pickle.loads(WHOLE[0])
    metadata.storage_data = {
        (k.fqn, tuple(k.offset or ())): v for k, v in metadata.storage_data.items()
    }
    assert outcome(pickle.dumps(metadata), fast=True) == "unreadable"
    metadata = pickle.loads(WHOLE[0])
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            entry.chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
    check_same(pickle.dumps(metadata))
    assert outcome(pickle.dumps(metadata), fast=True) == "unreadable"


NAMES = st.one_of(
    st.from_regex(r"[a-z.]{1,12}", fullmatch=True),
    st.sampled_from(["“quoted” — name", "ends in \x94", "é" * 100, "n" * 300]),
)
SHAPES = st.lists(st.sampled_from([0, 1, 300, 70_000, 1 << 33, 1 << 45]), max_size=4)


def same_text(text: str) -> str:
    """Return an equal text that pickle does not refer back to."""
    return text.encode().decode()


@given(
    st.dictionaries(NAMES, st.tuples(SHAPES, st.integers(0, 5)), min_size=1, max_size=12),
    st.integers(1, 40),
    st.booleans(),
)
def test_what_torch_pickles(
    drawn: dict[str, tuple[list[int], int]], copies: int, shared: bool
) -> None:
    """Names in full and by reference, numbers of every width, lists of none, one and several."""
    entries: dict[str, object] = {}
    items = {}
    for copy in range(copies):
        for name, (shape, count) in drawn.items():
            full = f"{name}.{copy}"
            size = torch.Size(shape)
            chunks = [ChunkStorageMetadata(torch.Size([i] * len(size)), size) for i in range(count)]
            properties = TensorProperties(dtype=(torch.float32, torch.int8)[copy % 2])
            entries[full] = TensorStorageMetadata(properties, size, chunks)
            for i, chunk in enumerate(chunks):
                key = MetadataIndex(full if shared else same_text(full), chunk.offsets, i)
                items[key] = _StorageInfo(f"__{i}_0.distcp", copy << (8 * i), i)
    data = pickle.dumps(TorchMetadata(entries, None, items), protocol=4)
    check_same(data)
    result = parse(data, "t")
    for name, entry in entries.items():
        read = result.entries[name]
        assert read is not None and isinstance(entry, TensorStorageMetadata)
        assert read.shape == tuple(entry.size)
        expected = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        assert list(read.chunks) == expected
    assert result.items == {
        (key.fqn, tuple(key.offset)): (place.relative_path, place.offset, place.length, ())
        for key, place in items.items()
    }


def test_tensors_inside_tensors_take_no_more_steps_than_bytes() -> None:
    """Each opens a list of chunks in which the next one stands; none of them ends."""
    data = WHOLE[0]
    head = next(
        re.finditer(
            rb"h.\)\x81\x94}\x94\(h.h.\)\x81\x94\(.{5,20}?t\x94b.{5,20}?h.\]\x94\(", data, re.DOTALL
        )
    )
    nested = data[: head.start()] + (head.group() * 300 + b"N") * 16
    check_same(nested)
    assert count_calls(lambda: outcome(nested, fast=True)) < 8 * len(nested)


def test_fields_named_anew_for_each_chunk_compile_few_expressions() -> None:
    """Names of fields that are written again and again, and chunks that refer to another each."""
    data = WHOLE[0]
    chunk = next(
        re.finditer(
            rb"(h.\)\x81\x94}\x94\()h.(h.K.{1,20}?R\x94h.h.K.{1,20}?R\x94ub)", data, re.DOTALL
        )
    )
    before = data[: chunk.start()]
    known = sum(
        op.name == "MEMOIZE" for op, _, position in genops(data) if position < chunk.start()
    )
    names = b"\x8c\x07offsets\x94" * 500
    chunks = [
        chunk[1] + b"j" + struct.pack("<I", known + i // 2) + chunk[2] for i in range(2, 1000)
    ]
    hostile = before + names + b"".join(chunks) + b"."
    check_same(hostile)
    assert count_calls(lambda: outcome(hostile, fast=True)) < 8 * len(hostile)


def count_calls(act: Callable[[], object]) -> int:
    """Count the calls of functions, which unlike seconds are always the same."""
    events: Counter[str] = Counter()
    sys.setprofile(lambda _frame, event, _argument: events.update([event]))
    try:
        act()
    finally:
        sys.setprofile(None)
    return events["call"]
