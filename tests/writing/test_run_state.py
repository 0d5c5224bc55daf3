"""Results of several processes make the same whole, however the parts are divided."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from ema_ckpt.core.box import whole
from ema_ckpt.core.catalog import Catalog, Chunk, Payload, Tensor
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.write_plan import OutputTensor, WriteItem
from ema_ckpt.reading.checksum_verifier import ChecksumVerifier
from ema_ckpt.storage.files import LocalFiles
from ema_ckpt.writing.run_state import RunState

NAME = "näme\udcff"
DATA = bytes(range(24))


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    """Of one tensor of 24 bytes."""
    tensor = Tensor(NAME, (NAME,), (24,), by_name("uint8"), (Chunk((0,), (24,), "a", 0, 24),))
    files = LocalFiles(tmp_path)
    catalog = Catalog("p", "p", "dcp", (tensor,), (), files, files, nested=True)  # type: ignore[arg-type]
    item = WriteItem(OutputTensor(NAME, (NAME,), tensor, tensor.dtype), whole((24,)), "", 0)
    return RunState(catalog, [item], verify=True)


def part(start: int, stop: int) -> tuple[int, int, int]:
    return start, stop - start, zlib.crc32(DATA[start:stop])


def test_parts_of_several_processes_make_a_whole(state: RunState) -> None:
    dumps = []
    for start, stop in ((8, 10), (10, 24)):
        state.record(0, [part(start, stop)])
        state.add_overflow({NAME: 2})
        dumps.append(state.dump())
        state.reset()
    state.record(0, [part(0, 8)])
    for dumped in dumps:
        state.merge(dumped)
    outcome = state.finish()
    assert outcome.crcs == [zlib.crc32(DATA)]
    assert outcome.digests == {NAME: zlib.crc32(DATA)}
    assert outcome.overflow == {NAME: 4}


def test_a_whole_item_comes_back_as_it_was(state: RunState) -> None:
    state.record(0, [part(0, 24)])
    dumped = state.dump()
    state.reset()
    state.merge(dumped)
    assert state.finish().crcs == [zlib.crc32(DATA)]


def test_an_item_of_which_a_part_is_missing_is_an_error(state: RunState) -> None:
    state.record(0, [part(0, 8)])
    with pytest.raises(SourceError, match="was not written") as caught:
        state.finish()
    assert caught.value.code == "internal"


def test_storages_that_several_processes_read_are_compared(tmp_path: Path) -> None:
    strided = Payload("__0_0.distcp", 64, 24, (1, 10), 3, zlib.crc32(DATA))
    others = ChecksumVerifier(LocalFiles(tmp_path), enabled=True)
    others.record("w", strided, *part(0, 10))
    verifier = ChecksumVerifier(LocalFiles(tmp_path), enabled=True)
    verifier.record("w", strided, *part(10, 24))
    verifier.merge(json.loads(json.dumps(others.dump())))
    verifier.finish()
    broken = ChecksumVerifier(LocalFiles(tmp_path), enabled=True)
    broken.record("w", strided, 10, 14, 7)
    broken.merge(json.loads(json.dumps(others.dump())))
    with pytest.raises(SourceError, match="expected CRC-32"):
        broken.finish()
