"""Something writes where a verb reads or writes: no verdict of damage, no mixture, and no target with a hole."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, ItemsView, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ema_ckpt
from ema_ckpt.discovery import opening
from ema_ckpt.ops import convert, verify
from ema_ckpt.runtime import executor
from ema_ckpt.writing.switch import fsync_tree
from tests.checkpoints import ema, save_dcp, weights
from tests.resume.training import Run, same

VERBS: dict[str, Callable[[Path, Path], object]] = {
    "verify": lambda run, out: ema_ckpt.verify(run, threads=1),
    "diff": lambda run, out: ema_ckpt.diff(run, threads=1),
    "consolidate": lambda run, out: ema_ckpt.consolidate(run, out / "one.safetensors", threads=1),
    "reshard": lambda run, out: ema_ckpt.reshard(run, out / "two", 2, threads=1),
}


@pytest.fixture
def at_first_job() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Have something done as soon as a worker begins its first job."""

    def arrange(do: Callable[[], None]) -> None:
        def once(job: object) -> None:
            executor.on_job = None
            do()

        executor.on_job = once

    yield arrange
    executor.on_job = None


def step(path: Path, seed: float) -> Path:
    return save_dcp(path, {"model": weights(seed), "ema": ema(seed)})


@pytest.mark.parametrize("verb", VERBS)
def test_the_next_step_is_saved_over_the_one_that_is_read(
    at_first_job: Callable[[Callable[[], None]], None], tmp_path: Path, verb: str
) -> None:
    run, later = step(tmp_path / "run", 0.5), step(tmp_path / "later", 8.5)

    def overwrite() -> None:
        for file in later.glob("*.distcp"):  # as DCP does: the shards first, in place
            (run / file.name).write_bytes(file.read_bytes())

    at_first_job(overwrite)
    with pytest.raises(ema_ckpt.EmaCkptError, match="while being read") as caught:
        VERBS[verb](run, tmp_path)
    assert caught.value.code == "source-changed"
    assert sorted(os.listdir(tmp_path)) == ["later", "run"]
    assert ema_ckpt.verify(later).status == "sound"


def put_in_place(new: Path, old: Path, *, renamed: bool) -> None:
    """Give a file another content, and leave it its times, as `rsync -t`, `cp -p` and `tar` can."""
    status = old.stat()
    assert new.stat().st_size == status.st_size
    place = old.with_name("new") if renamed else old
    place.write_bytes(new.read_bytes())
    os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
    place.rename(old)


@pytest.mark.parametrize("renamed", [True, False])
@pytest.mark.parametrize("verb", VERBS)
def test_a_file_is_replaced_by_one_of_the_same_times(
    at_first_job: Callable[[Callable[[], None]], None], tmp_path: Path, verb: str, renamed: bool
) -> None:
    run, later = step(tmp_path / "run", 0.5), step(tmp_path / "later", 8.5)
    name = "__0_0.distcp"
    at_first_job(lambda: put_in_place(later / name, run / name, renamed=renamed))
    with pytest.raises(ema_ckpt.EmaCkptError, match="while being read") as caught:
        VERBS[verb](run, tmp_path)
    assert caught.value.code == "source-changed"
    assert sorted(os.listdir(tmp_path)) == ["later", "run"]


@pytest.mark.parametrize("renamed", [True, False])
def test_a_file_without_checksums_is_replaced_by_one_of_the_same_times(
    at_first_job: Callable[[Callable[[], None]], None], tmp_path: Path, renamed: bool
) -> None:
    """No checksum tells of a file of tensors that is copied into the place of another."""
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    for path, value in ((old, 0.5), (new, 8.5)):
        save_file({f"w{i}": torch.full((300, 300), value) for i in range(16)}, path)
    at_first_job(lambda: put_in_place(new, old, renamed=renamed))
    with pytest.raises(ema_ckpt.EmaCkptError, match="while being read") as caught:
        ema_ckpt.reshard(old, tmp_path / "out", 2, threads=1)
    assert caught.value.code == "source-changed"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", VERBS)
def test_bytes_are_lost_for_a_while_below_the_same_times(
    at_first_job: Callable[[Callable[[], None]], None], tmp_path: Path, verb: str
) -> None:
    run = step(tmp_path / "run", 0.5)
    zeros = tmp_path / "zeros"
    zeros.write_bytes(bytes((run / "__0_0.distcp").stat().st_size))
    at_first_job(lambda: put_in_place(zeros, run / "__0_0.distcp", renamed=False))
    with pytest.raises(ema_ckpt.EmaCkptError, match="while being read") as caught:
        VERBS[verb](run, tmp_path)
    assert caught.value.code == "source-changed"
    with pytest.raises(ema_ckpt.EmaCkptError):
        VERBS["consolidate"](run, tmp_path)
    assert ema_ckpt.verify(run).status == "damaged", "once nothing changes it any more"


@pytest.mark.parametrize("verb", VERBS)
def test_a_further_name_and_other_permissions_are_no_change(
    at_first_job: Callable[[Callable[[], None]], None], tmp_path: Path, verb: str
) -> None:
    run = step(tmp_path / "run", 0.5)

    def touch() -> None:
        (tmp_path / "snapshot").hardlink_to(run / "__0_0.distcp")
        (run / "__0_0.distcp").chmod(0o440)

    at_first_job(touch)
    VERBS[verb](run, tmp_path)


def large(path: Path, value: float) -> Path:
    return save_dcp(path, {"model": {f"w{i}": torch.full((300_000,), value) for i in range(8)}})


def interrupted(run: Path, out: Path) -> Callable[[], object]:
    """Consolidate with `resume` until some tensors are written; return what goes on from there."""

    def consolidate() -> object:
        return ema_ckpt.consolidate(run, out, threads=1, resume=True)

    begun = []

    def stop(job: object) -> None:
        begun.append(job)
        if len(begun) > 4:
            raise KeyboardInterrupt

    executor.on_job = stop
    try:
        with pytest.raises(KeyboardInterrupt):
            consolidate()
    finally:
        executor.on_job = None
    return consolidate


def test_a_run_is_not_resumed_from_other_files_of_the_same_times(tmp_path: Path) -> None:
    run, later = large(tmp_path / "run", 0.5), large(tmp_path / "later", 8.5)
    out = tmp_path / "out.safetensors"
    go_on = interrupted(run, out)
    put_in_place(later / "__0_0.distcp", run / "__0_0.distcp", renamed=True)
    with pytest.raises(ema_ckpt.EmaCkptError, match="differs in its source") as caught:
        go_on()
    assert caught.value.code == "resume-mismatch"
    ema_ckpt.consolidate(run, out, threads=1)
    opened = ema_ckpt.open(out)
    assert all(set(opened[name].tolist()) == {8.5} for name in opened)


def test_a_run_is_not_resumed_by_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = large(tmp_path / "run", 0.5), tmp_path / "out.safetensors"
    go_on = interrupted(run, out)
    with monkeypatch.context() as patch:
        patch.setattr("ema_ckpt.ops.write.__version__", "0.0.1")
        with pytest.raises(ema_ckpt.EmaCkptError, match="differs in its version") as caught:
            go_on()
    assert caught.value.code == "resume-mismatch"
    go_on()
    assert ema_ckpt.verify(out).status == "sound"


class Watched(dict[str, object]):
    """What is restored; it is asked for when the weights have been read, and writes to the checkpoint then."""

    on_read: Callable[[], None] | None = None

    def items(self) -> ItemsView[str, object]:
        if self.on_read is not None and self.is_compared:
            self.on_read()
            self.on_read = None
        return super().items()

    is_compared = False

    def keys(self):
        self.is_compared = True
        return super().keys()


def test_restore_takes_nothing_from_a_step_that_is_written_meanwhile(tmp_path: Path) -> None:
    run, later = Run(), Run(seed=3)
    values = {"table": torch.arange(5000.0)}
    path = run.save(tmp_path / "run", extra=values)
    other = later.save(tmp_path / "later", extra={"table": torch.arange(5000.0) + 1})
    restored = Run(seed=9)
    before = restored.bits()
    asked = Watched(table=None)
    asked.on_read = lambda: shutil.copytree(other, path, dirs_exist_ok=True) and None
    with pytest.raises(ema_ckpt.SourceError, match="while being read") as caught:
        restored.restore(path, extra=asked)
    assert asked.on_read is None
    assert caught.value.code == "source-changed"
    same(restored.bits(), before)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("verb", ["consolidate", "reshard"])
def test_a_file_that_vanishes_from_the_stage_is_missed(
    at_first_job: Callable[[Callable[[], None]], None], tmp_path: Path, verb: str, is_replaced: bool
) -> None:
    run = step(tmp_path / "run", 0.5)

    def clean() -> None:
        (stage,) = tmp_path.glob(".*.ema-ckpt-*")
        file = max((p for p in stage.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        file.unlink()
        if is_replaced:
            file.write_text("another one")

    at_first_job(clean)
    with pytest.raises(ema_ckpt.TargetError, match="from its stage meanwhile"):
        VERBS[verb](run, tmp_path)
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("verb", ["consolidate", "reshard"])
def test_a_file_that_vanishes_after_it_was_made_durable_is_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str, is_cut: bool
) -> None:
    """Of many gigabytes that takes minutes, and the old target would be deleted for an incomplete one."""
    run = step(tmp_path / "run", 0.5)

    def sync_and_clean(path: Path, **options: bool) -> None:
        fsync_tree(path, **options)
        file = max(
            (p for p in path.parent.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
        )
        if is_cut:
            os.truncate(file, 10)
        else:
            file.unlink()

    monkeypatch.setattr("ema_ckpt.writing.staging.fsync_tree", sync_and_clean)
    with pytest.raises(ema_ckpt.TargetError, match="removed or shortened"):
        VERBS[verb](run, tmp_path)
    assert os.listdir(tmp_path) == ["run"]


def test_a_checkpoint_replaced_while_its_copy_is_planned_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects are read to plan: those of the next save, by the checksums of the one before it."""
    training = Run()
    training.train(0, 1)
    run = training.save(tmp_path / "run")
    training.train(1, 30)
    new = training.save(tmp_path / "new")
    rule = convert.rule_all

    def replace_and_rule(*args: Any, **options: Any) -> Any:
        run.rename(tmp_path / "old")
        new.rename(run)
        return rule(*args, **options)

    monkeypatch.setattr(convert, "rule_all", replace_and_rule)
    with pytest.raises(ema_ckpt.EmaCkptError, match="while being read") as caught:
        ema_ckpt.reshard(run, tmp_path / "two", 2)
    assert caught.value.code == "source-changed"


@pytest.mark.parametrize("read", [ema_ckpt.verify, ema_ckpt.check, ema_ckpt.open, ema_ckpt.inspect])
def test_one_of_another_format_comes_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    """Its directory is there, and has no `.metadata`: the other one is whole, and never had any."""
    run = step(tmp_path / "run", 0.5)
    ema_ckpt.consolidate(run, tmp_path / "new")
    locate = opening.locate_checkpoint

    def locate_and_replace(path: str) -> opening.Location:
        location = locate(path)
        run.rename(tmp_path / "old")
        (tmp_path / "new").rename(run)
        return location

    for module in (opening, verify):
        monkeypatch.setattr(module, "locate_checkpoint", locate_and_replace)
    with pytest.raises(ema_ckpt.EmaCkptError, match="while it was being opened") as caught:
        read(run)
    assert caught.value.code == "source-changed"


def in_files(path: Path, value: float) -> Path:
    """Two tensors and an object, each in a file of its own."""
    state = {"model": {name: torch.full((8, 8), value) for name in "ab"}, "step": str(value)}
    writer = dcp.FileSystemWriter(path, single_file_per_rank=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it saves without a process group
        dcp.save(state, storage_writer=writer, no_dist=True)
    return path


@pytest.mark.parametrize("how", ["renamed", "in place"])
def test_a_handle_never_has_tensors_of_two_checkpoints(tmp_path: Path, how: str) -> None:
    old, new = in_files(tmp_path / "old", 1.0), in_files(tmp_path / "new", 2.0)
    with ema_ckpt.open(old) as handle:
        assert handle["model.a"].unique().tolist() == [1.0]
        if how == "renamed":
            old.rename(tmp_path / "older")
            new.rename(old)
        else:
            for file in new.iterdir():
                (old / file.name).write_bytes(file.read_bytes())
        for read in (lambda: handle["model.b"], handle.state_dict, lambda: handle.objects["step"]):
            with pytest.raises(ema_ckpt.EmaCkptError, match="while being read") as caught:
                read()
            assert caught.value.code == "source-changed"
    with ema_ckpt.open(old) as handle:
        assert handle["model.b"].unique().tolist() == [2.0]
        assert handle.objects["step"] == "2.0"


def test_a_handle_of_what_was_replaced_tells_of_no_damage(tmp_path: Path) -> None:
    """Its checksums are those of the old one, and the bytes are the new one's."""
    sources = [step(tmp_path / name, seed) for name, seed in (("run", 0.5), ("later", 8.5))]
    old, new = (ema_ckpt.reshard(source, f"{source}-2", 2).target for source in sources)
    with ema_ckpt.open(old) as handle:
        shutil.rmtree(old)
        os.rename(new, old)
        with pytest.raises(ema_ckpt.EmaCkptError, match="while being read") as caught:
            handle.state_dict("model")
        assert caught.value.code == "source-changed"


def test_a_file_that_stays_open_is_read_to_its_end(tmp_path: Path) -> None:
    """It is whole, though it was deleted, or another one has its name by now."""
    path = tmp_path / "one.safetensors"
    save_file({"a": torch.ones(8), "b": torch.ones(8)}, path)
    save_file({"a": torch.zeros(8), "b": torch.zeros(8)}, tmp_path / "two.safetensors")
    with ema_ckpt.open(path) as handle:
        assert handle["a"].tolist() == [1.0] * 8
        os.replace(tmp_path / "two.safetensors", path)
        assert handle["b"].tolist() == [1.0] * 8
        path.unlink()
        assert handle["a"].tolist() == [1.0] * 8


def test_a_switch_in_two_steps_that_ends_while_a_reader_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system cannot exchange two names, as NFS, the target is missing for a moment."""
    run = step(tmp_path / "run", 0.5)
    run.rename(tmp_path / "new")

    def end_switch(path: str) -> None:
        (tmp_path / "new").rename(path)

    monkeypatch.setattr("ema_ckpt.discovery.locate.find_interrupted_switch", end_switch)
    assert not ema_ckpt.verify(run).problems
