"""`.metadata` in pieces: it is not held where it is large."""

from __future__ import annotations

import pickle
import warnings
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ema_ckpt
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.formats.dcp import metadata_writer
from ema_ckpt.formats.dcp.metadata_writer import MetadataPickle, StoredItem, StoredTensor
from tests.checkpoints import save_dcp


def metadata_of(tensors: int) -> MetadataPickle:
    names = [f"layer.{index}" for index in range(tensors)]
    entries = {name: StoredTensor(by_name("float32"), (4, 3)) for name in names}
    items = {
        name: [StoredItem((2 * k, 0), (2, 3), f"__{k}_0.distcp", 99, 400) for k in range(2)]
        for name in names
    }
    return MetadataPickle(entries, items, {name: ("model", name) for name in names})


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_writer, "_PIECE_NBYTES", 100)
    monkeypatch.setattr(metadata_writer, "_KEPT_NBYTES", 200)
    monkeypatch.setattr(metadata_writer, "_MAX_RUN", 3)


@pytest.mark.usefixtures("small_pieces")
def test_pieces_are_those_of_one_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = metadata_of(20)
    pieces = [bytes(piece) for piece in cut.pieces()]
    assert pieces == [bytes(piece) for piece in cut.pieces()]
    assert len(pieces) > 20
    assert max(map(len, pieces)) < 1000
    monkeypatch.undo()
    whole = b"".join(metadata_of(20).pieces())
    assert b"".join(pieces) == whole
    assert (cut.nbytes, cut.crc) == (len(whole), zlib.crc32(whole))
    assert len(pickle.loads(whole).storage_data) == 40


@pytest.mark.usefixtures("small_pieces")
def test_large_metadata_is_written_whole(tmp_path: Path) -> None:
    state = {f"layer.{index}": torch.full((4, 3), float(index)) for index in range(20)}
    source = save_dcp(tmp_path / "one", state)
    ema_ckpt.reshard(source, tmp_path / "two", world_size=2)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(loaded, checkpoint_id=tmp_path / "two")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert ema_ckpt.verify(tmp_path / "two").status == "sound"
