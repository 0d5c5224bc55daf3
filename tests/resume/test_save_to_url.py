"""`save` to a URL and `restore` from it, by one process; S3 as a target of commands is in tests/stories/test_object_targets.py."""

from __future__ import annotations

import uuid

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile
from torch import nn

import ema_ckpt
from ema_ckpt import ShardedEMA, TargetError, restore, save
from ema_ckpt.resume.save_place import ObjectDirectory, part_nbytes
from ema_ckpt.resume.save_plan import Item
from tests.object_stores import refuse_marker

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_save_to_a_url_and_back() -> None:
    """The same files as on a disk; text stays text; an old checkpoint is complete until the new one is."""
    root = f"memory://{uuid.uuid4().hex}/runs"
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    ema = ShardedEMA(model, decay=0.9)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        ema.update()
    state = {"model": model, "ema": ema, "optimizer": optimizer, "extra": {"step": 7}}
    assert save(f"{root}/step_1", **state) == f"{root}/step_1"
    assert save(f"{root}/step_2", async_save=True, **state).result() == f"{root}/step_2"
    with pytest.raises(TargetError) as caught:
        save(f"{root}/step_2", **state)
    assert caught.value.code == "target-exists"
    assert ema_ckpt.latest(root) == f"{root}/step_2"
    assert ema_ckpt.verify(root).status == "sound"
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    averages = {name: value.clone() for name, value in ema.full_state_dict().items()}
    with torch.no_grad():
        model.weight.zero_()
    save(f"{root}/step_2", overwrite=True, **state)
    filesystem, base = fsspec.core.url_to_fs(f"{root}/step_2")
    names = {path.rpartition("/")[2] for path in filesystem.find(base)}
    assert names == {"__0_1.distcp", "ema_ckpt.json", ".metadata"}
    report = restore(f"{root}/step_1", **{**state, "extra": {}})
    assert report.path == f"{root}/step_1"
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name])
    for name, value in ema.full_state_dict().items():
        assert torch.equal(value, averages[name])


def test_a_save_to_a_url_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4().hex}/runs/step_1"
    filesystem, base = fsspec.core.url_to_fs(url)
    refuse_marker(filesystem, monkeypatch)
    with pytest.raises(ema_ckpt.AccessError, match="refused"):
        save(url, model=nn.Linear(2, 2))
    assert filesystem.find(base) == []


def test_a_save_whose_clean_up_fails_as_well_is_over_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"memory://{uuid.uuid4().hex}/runs/step_1"
    filesystem, base = fsspec.core.url_to_fs(url)
    with monkeypatch.context() as patch:
        refuse_marker(filesystem, patch, is_last=True)
        with pytest.raises(ema_ckpt.AccessError, match="not now"):
            save(url, model=nn.Linear(2, 2))
    parent = base.rpartition("/")[0]
    assert any(path.endswith(".note") for path in filesystem.find(parent)), "it is left"
    save(url, model=nn.Linear(2, 2))
    assert not [path for path in filesystem.find(parent) if ".ema-ckpt-" in path]
    assert ema_ckpt.verify(url).status == "sound"


def test_an_overwriting_save_that_fails_at_the_marker_leaves_the_old_checkpoint_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"memory://{uuid.uuid4().hex}/runs/step_1"
    save(url, model=nn.Linear(2, 2))
    filesystem, base = fsspec.core.url_to_fs(url)
    before = {path: filesystem.cat_file(path) for path in filesystem.find(base)}
    refuse_marker(filesystem, monkeypatch)
    with pytest.raises(ema_ckpt.AccessError, match="refused"):
        save(url, model=nn.Linear(2, 2), overwrite=True)
    found = filesystem.find(base.rpartition("/")[0])
    assert {path: filesystem.cat_file(path) for path in found} == before, "no shard, no note"
    assert ema_ckpt.verify(url).status == "sound"
    assert caplog.messages == []


def test_an_overwriting_save_whose_marker_arrived_leaves_what_it_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store has the new marker and its answer was lost: the new checkpoint is the valid one."""
    url = f"memory://{uuid.uuid4().hex}/runs/step_1"
    save(url, model=nn.Linear(2, 2))
    filesystem, _ = fsspec.core.url_to_fs(url)
    refuse_marker(filesystem, monkeypatch, is_lost=True)
    model = nn.Linear(2, 2)
    with pytest.raises(ema_ckpt.AccessError, match="refused"):
        save(url, model=model, overwrite=True)
    assert any(".metadata may be another one by now" in message for message in caplog.messages)
    assert ema_ckpt.verify(url).status == "sound"
    back = nn.Linear(2, 2)
    restore(url, model=back)
    assert torch.equal(back.weight, model.weight)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_is_interrupted_before_it_writes_leaves_no_note(
    monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """By such a note the process itself would be another run, for as long as it lives."""
    url = f"memory://{uuid.uuid4().hex}/runs/step_1"
    if overwrite:
        save(url, model=nn.Linear(2, 2))
    filesystem, base = fsspec.core.url_to_fs(url)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ObjectDirectory, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(url, model=nn.Linear(2, 2), overwrite=overwrite)
    assert not [p for p in filesystem.find(base.rpartition("/")[0]) if p.endswith(".note")]
    save(url, model=nn.Linear(2, 2), overwrite=overwrite)
    assert ema_ckpt.verify(url).status == "sound"


@pytest.mark.parametrize("count", [1, 12, 400])
def test_the_parts_of_a_rank_are_large_enough_for_ten_thousand(count: int) -> None:
    """A terabyte that is nowhere: a meta tensor has no bytes."""
    whole = torch.empty(10**12 // count, dtype=torch.uint8, device="meta")
    items = [Item(f"w{i}", None, whole) for i in range(count)]
    nbytes = part_nbytes(items)
    assert 10**12 / 10_000 < nbytes < 10**12 / 9_800
    assert part_nbytes([Item("w", None, b"short")]) == 16 << 20


def test_a_store_that_fails_in_the_middle_is_what_the_error_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch ends the archive all the same, and fails in its own words at that."""

    usual = MemoryFile.write

    def failing(file: MemoryFile, data: bytes) -> int:
        if ".distcp" in file.path and file.tell() > 0:
            raise OSError("reduce your request rate")
        return int(usual(file, data))

    monkeypatch.setattr(MemoryFile, "write", failing)
    with pytest.raises(ema_ckpt.AccessError, match="reduce your request rate"):
        save(f"memory://{uuid.uuid4().hex}/step_1", model=nn.Linear(2, 2))


def test_an_interrupt_in_the_midst_of_a_tensor_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = MemoryFile.write

    def interrupted(file: MemoryFile, data: bytes) -> int:
        if ".distcp" in file.path and file.tell() > 0:
            raise KeyboardInterrupt
        return int(usual(file, data))

    url = f"memory://{uuid.uuid4().hex}/step_1"
    monkeypatch.setattr(MemoryFile, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(url, model=nn.Linear(2, 2))
    filesystem, base = fsspec.core.url_to_fs(url)
    assert not filesystem.find(base)
