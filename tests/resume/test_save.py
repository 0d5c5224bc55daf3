"""What `save` writes, and where: files that torch reads, targets, saves in the background."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ema_ckpt import save
from ema_ckpt.core.errors import TargetError, UsageError
from ema_ckpt.resume import save_place
from ema_ckpt.resume.save_place import SharedDirectory
from tests.resume.training import Run, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_plain_torch_reads_it(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    state = {
        "model": {k: torch.zeros_like(v) for k, v in run.model.state_dict().items()},
        "ema": Run(9).ema.state_dict(),
    }
    dcp.load(state, checkpoint_id=path)
    for name, value in run.model.state_dict().items():
        assert torch.equal(state["model"][name], value)
    for name, value in run.ema.state_dict()["weights"].items():
        assert torch.equal(state["ema"]["weights"][name], value)
    assert int(state["ema"]["num_updates"]) == 3


def test_digests_and_paths_in_the_files(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    digests = json.loads((path / "ema_ckpt.json").read_text())["digests"]
    for name, value in run.model.state_dict().items():
        crc = zlib.crc32(value.contiguous().view(-1).view(torch.uint8).numpy())
        assert digests[f"model.{name}"]["crc32"] == f"crc32:{crc:08x}"
    assert all(str(tmp_path).encode() not in file.read_bytes() for file in path.iterdir())
    metadata = dcp.FileSystemReader(path).read_metadata()
    assert metadata.planner_data["ema.weights.enter.weight"] == ("ema", "weights", "enter.weight")
    assert metadata.storage_meta.checkpoint_id == "c"


def test_targets(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.save(tmp_path / "with space" / "c")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(TargetError) as caught:
        run.save(path)
    assert caught.value.code == "target-exists"
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    run.train(3, 4)
    assert run.save(path, overwrite=True) == path
    assert sorted(child.name for child in path.parent.iterdir()) == ["c"]
    other = Run(seed=9)
    other.restore(path)
    same(other.bits(), run.bits())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="URL"):
        run.save(Path("s3://bucket/key"))  # which lost a slash
    assert not (tmp_path / "s3:").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(TargetError) as caught:
        run.save(tmp_path / "mine", overwrite=True)
    assert caught.value.code == "foreign-files"


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: os.truncate(file, 100)])
@pytest.mark.parametrize("name", ["__0_0.distcp", "ema_ckpt.json", ".metadata"])
def test_a_file_of_the_stage_is_lost(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    damage: Callable[[Path], None],
) -> None:
    path = run.save(tmp_path / "c")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    publish = SharedDirectory.publish

    def clean(place: SharedDirectory, files: Mapping[str, int]) -> Path:
        (stage,) = tmp_path.glob(".c.ema-ckpt-*")
        damage(stage / "c" / name)
        return publish(place, files)

    monkeypatch.setattr(SharedDirectory, "publish", clean)
    with pytest.raises(TargetError, match=f"something removed or shortened '{name}'"):
        run.save(path, overwrite=True)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("link", ["", "c", "c/__0_0.distcp", "c/ema_ckpt.json", "c/.metadata"])
def test_no_link_that_is_put_in_place_of_the_stage_is_followed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    """Whoever may write beside the target can exchange its stage."""
    place, theirs = tmp_path / "place", tmp_path / "theirs"
    place.mkdir()
    (theirs / "c").mkdir(parents=True)
    files = ["__0_0.distcp", "ema_ckpt.json", ".metadata"]
    for name in files:
        (theirs / "c" / name).write_text("theirs")
    call = "write_items" if link == "c/__0_0.distcp" else "put"
    write = getattr(SharedDirectory, call)

    def exchanged(self: SharedDirectory, *args: Any) -> Any:
        for stage in place.glob(".c.ema-ckpt-*"):
            stage.rename(tmp_path / "away")
            (stage / link).parent.mkdir(parents=True, exist_ok=True)
            (stage / link).symlink_to(theirs / link)
            monkeypatch.undo()
        return write(self, *args)

    monkeypatch.setattr(SharedDirectory, call, exchanged)
    with pytest.raises(TargetError):
        run.save(place / "c")
    assert {(theirs / "c" / name).read_text() for name in files} == {"theirs"}


@pytest.mark.parametrize("name", ["__0_0.distcp", "ema_ckpt.json", ".metadata"])
def test_what_closing_a_file_tells_is_said_of_the_target(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Some network file systems write only then."""
    create = save_place.create_inside

    @contextlib.contextmanager
    def told(directory: Path, file: str) -> Iterator[BinaryIO]:
        with create(directory, file) as stream:
            yield stream
        if file == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(save_place, "create_inside", told)
    with pytest.raises(TargetError, match="c: cannot be written: Input/output error"):
        run.save(tmp_path / "c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupt_in_the_midst_of_a_tensor_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: BaseException
) -> None:
    """torch ends the archive all the same, and fails in its own words at that."""
    create, interrupts = save_place.create_inside, [interrupt]

    @contextlib.contextmanager
    def interrupted(directory: Path, file: str) -> Iterator[Any]:
        class Stream:
            def __getattr__(self, name: str) -> Any:
                return getattr(stream, name)

            def write(self, data: Any) -> int:
                if file.endswith(".distcp") and stream.tell() > 0 and interrupts:
                    raise interrupts.pop()
                return int(stream.write(data))

        with create(directory, file) as stream:
            yield Stream()

    monkeypatch.setattr(save_place, "create_inside", interrupted)
    with pytest.raises(type(interrupt)) as caught:
        save(tmp_path / "c", model=nn.Linear(2, 2))
    assert caught.value is interrupt
    assert not list(tmp_path.iterdir())


def test_a_target_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="file") as caught:
        save(tmp_path / "file" / "step", model=nn.Linear(2, 2))
    assert caught.value.code == "not-found"


def test_a_saved_state_is_that_of_the_call(run: Run, tmp_path: Path) -> None:
    before = run.bits()
    first = save(
        tmp_path / "a", model=run.model, ema=run.ema, optimizer=run.optimizer, async_save=True
    )
    run.train(3, 6)
    between = run.bits()
    second = save(
        tmp_path / "b", model=run.model, ema=run.ema, optimizer=run.optimizer, async_save=True
    )
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    assert first.result(30) == tmp_path / "a"
    assert second.result(30) == tmp_path / "b"
    for name, expected in (("a", before), ("b", between)):
        other = Run(seed=9)
        other.restore(tmp_path / name)
        same(other.bits(), expected)


def test_a_failed_background_save_is_not_forgotten(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "c")
    lost = save(tmp_path / "c", model=run.model, async_save=True)
    with pytest.warns(
        UserWarning, match="asynchronous save before this call failed: .*already exists"
    ):
        run.save(tmp_path / "d")
    with pytest.raises(TargetError):
        lost.result()
    asked = save(tmp_path / "c", model=run.model, async_save=True)
    with pytest.raises(TargetError):
        asked.result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.save(tmp_path / "e")
