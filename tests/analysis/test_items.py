"""Items that are recognised: the same verdict as by reading every record, whole or damaged, here or in children."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

from ema_ckpt import EmaCkptError, verify
from ema_ckpt.analysis import items
from ema_ckpt.analysis.item_checker import ItemChecker
from tests.checkpoints import save_dcp

FIXTURES = Path(__file__).parents[2] / "fixtures"
WHOLE = sorted(path for path in (FIXTURES / "dcp").iterdir() if path.is_dir())
NASTY = sorted(path for path in (FIXTURES / "nasty").iterdir() if list(path.glob("*.distcp")))


def verdict(path: Path) -> object:
    """All that `verify` finds out, or the code of its error."""
    try:
        return verify(path, threads=1)
    except EmaCkptError as error:
        return error.code


def verdict_by_records(path: Path) -> object:
    """The same by reading every item record by record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ItemChecker, "_recognise", lambda *_: None)
        return verdict(path)


@pytest.mark.parametrize("path", [*WHOLE, *NASTY], ids=lambda path: path.name)
def test_fixtures(path: Path) -> None:
    assert verdict(path) == verdict_by_records(path)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve tensors of two shapes in one file, and an object."""
    torch.manual_seed(0)
    shapes = [(3, 5), (40,)]
    tensors = {f"w{i}": torch.randn(shapes[i % 2]) for i in range(12)}
    return save_dcp(tmp_path_factory.mktemp("many") / "c", {"model": tensors, "note": "text"})


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
@given(data=st.data())
def test_damaged_items(many: Path, tmp_path: Path, data: st.DataObject) -> None:
    (file,) = many.glob("*.distcp")
    raw = bytearray(file.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4)):
        raw[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "c"
    shutil.copytree(many, path, dirs_exist_ok=True)
    (path / file.name).write_bytes(raw)
    assert verdict(path) == verdict_by_records(path)


@pytest.mark.parametrize("flip", [None, 700, 2000, 5000])
def test_parts_of_large_items(
    flip: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items of several segments: the parts are joined, and looked at again where they do not match."""
    tensors = {f"w{i}": torch.randn(1000) for i in range(3)}
    path = save_dcp(tmp_path / "c", {"model": tensors})
    if flip is not None:
        (file,) = path.glob("*.distcp")
        raw = bytearray(file.read_bytes())
        raw[flip] ^= 4
        file.write_bytes(raw)
    expected = verdict_by_records(path)
    monkeypatch.setattr(items, "_SEGMENT_NBYTES", 1000)
    progress: list[int] = []
    assert verify(path, threads=3, progress=progress.append) == expected
    assert min(progress) > 0
    assert sum(progress) == 3 * 4000 or flip


def share_item(path: Path, name: str, shape: tuple[int, ...] | None = None) -> None:
    """Let `name` come first in the metadata and lie where `model.w` does, with another shape if one is given."""
    metadata = FileSystemReader(path).read_metadata()
    entry = copy.deepcopy(metadata.state_dict_metadata["model.w"])
    if shape is not None:
        entry.size = torch.Size(shape)
        entry.chunks[0] = dataclasses.replace(entry.chunks[0], sizes=torch.Size(shape))
    metadata.state_dict_metadata = {name: entry, **metadata.state_dict_metadata}
    for index, place in list(metadata.storage_data.items()):
        if index.fqn == "model.w":
            metadata.storage_data[MetadataIndex(name, index.offset, index.index)] = place
    metadata.planner_data = {name: tuple(name.split(".")), **metadata.planner_data}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def flip_payload(path: Path, tensor: torch.Tensor) -> None:
    (file,) = path.glob("*.distcp")
    raw = bytearray(file.read_bytes())
    at = raw.index(tensor.numpy().tobytes())
    raw[at + 5] ^= 4
    file.write_bytes(raw)


@pytest.mark.parametrize("segment_nbytes", [items._SEGMENT_NBYTES, 1000])
@pytest.mark.parametrize("threads", [1, 3])
def test_several_names_at_one_item(
    threads: int, segment_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payload is read once; damage is that of each name, and a wrong name hides nothing."""
    monkeypatch.setattr(items, "_SEGMENT_NBYTES", segment_nbytes)
    weight = torch.randn(40, 30)

    def made(name: str, *aliases: str, shape: tuple[int, ...] | None = None) -> Path:
        path = save_dcp(tmp_path / name, {"model": {"w": weight, "other": torch.ones(3)}})
        for alias in aliases:
            share_item(path, alias, shape)
        return path

    def damaged(path: Path) -> set[tuple[str, str | None]]:
        found = verify(path, threads=threads)
        assert found.status == "damaged"
        return {(problem.code, problem.tensor) for problem in found.problems}

    shared = made("shared", "model.a", "model.b")
    found = verify(shared, threads=threads)
    assert (found.status, found.checked_bytes) == ("sound", 4 * (1200 + 3))
    flip_payload(shared, weight)
    names = ("model.a", "model.b", "model.w")
    assert damaged(shared) == {("checksum", name) for name in names}

    wrong = made("wrong", "model.a", shape=(30, 40))
    assert damaged(wrong) == {("index-mismatch", "model.a")}
    assert verify(wrong, threads=threads).checked_bytes == 4 * (1200 + 3)
    flip_payload(wrong, weight)
    assert damaged(wrong) == {("index-mismatch", "model.a"), ("checksum", "model.w")}


def test_many_names_at_one_item_take_the_time_of_one(tmp_path: Path) -> None:
    """Bytes read are counted: a metadata file of kilobytes cannot have a terabyte read."""
    path = save_dcp(tmp_path / "c", {"model": {"w": torch.zeros(1 << 20)}})
    for number in range(100):
        share_item(path, f"model.a{number}")
    before = bytes_read()
    assert verify(path, threads=1).status == "sound"
    assert bytes_read() - before < 3 * (4 << 20)


def bytes_read() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar:")[1].split()[0])
