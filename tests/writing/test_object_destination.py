"""Writers to a URL, against what they write to a disk: `memory://` stands for stores that take bytes in order."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

import ema_ckpt
from ema_ckpt.core.crc import crc32
from ema_ckpt.storage.object_store import ObjectStore
from ema_ckpt.writing.object_destination import ObjectDestination
from ema_ckpt.writing.part_files import divide_memory
from ema_ckpt.writing.publish_order import PublishOrder
from ema_ckpt.writing.streamed_files import StreamedFiles
from ema_ckpt.writing.upload_note import NoteFile, UploadNote
from tests.object_stores import refuse_marker

Write = Callable[[str], object]


@pytest.fixture
def store() -> Iterator[str]:
    root = f"memory://{uuid.uuid4().hex}"
    yield root
    filesystem, path = fsspec.core.url_to_fs(root)
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


def objects(url: str) -> dict[str, str]:
    """Digests of the objects at and below a URL, by name."""
    filesystem, base = fsspec.core.url_to_fs(url)
    return {
        path[len(base) :].lstrip("/"): hashlib.sha256(filesystem.cat_file(path)).hexdigest()
        for path in filesystem.find(base)
    }


def files(path: Path) -> dict[str, str]:
    found = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {
        str(p.relative_to(path)) if p != path else "": hashlib.sha256(p.read_bytes()).hexdigest()
        for p in found
    }


WRITERS: dict[str, Callable[[Path, str], object]] = {
    "one.safetensors": ema_ckpt.consolidate,
    "cast.safetensors": lambda source, out: ema_ckpt.consolidate(source, out, dtype="bf16"),
    "one.pt": ema_ckpt.consolidate,
    "shards": lambda source, out: ema_ckpt.consolidate(source, out, max_shard_size=100),
    "resharded": lambda source, out: ema_ckpt.reshard(source, out, 3),
    "all.safetensors": ema_ckpt.convert,
    "all.pt": ema_ckpt.convert,
    "sum.safetensors": lambda source, out: ema_ckpt.synthesize(
        [source, source], out, weights=[0.25, 0.75]
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_url_gets_the_bytes_that_a_disk_gets(
    name: str, store: str, fixtures: Path, tmp_path: Path
) -> None:
    source = fixtures / "dcp" / "fsdp2-w4"
    WRITERS[name](source, str(tmp_path / name))
    url = f"{store}/runs/{name}"
    result = WRITERS[name](source, url)
    assert result.target == url
    assert objects(url) == files(tmp_path / name)
    assert ema_ckpt.verify(url).status == "sound"


def test_a_hugging_face_directory_at_a_url_always_has_an_index(store: str, fixtures: Path) -> None:
    result = ema_ckpt.consolidate(fixtures / "dcp" / "fsdp2-w2", f"{store}/hf")
    names = [file.path for file in result.files]
    assert names == [
        "model-00001-of-00001.safetensors",
        "ema_ckpt.json",
        "model.safetensors.index.json",
    ]
    assert set(objects(f"{store}/hf")) == set(names)


def test_an_existing_target_is_refused_and_stays(store: str, fixtures: Path) -> None:
    source = fixtures / "dcp" / "fsdp2-w2"
    for name in ("one.safetensors", "shards", "resharded"):
        url = f"{store}/{name}"
        WRITERS[name](source, url)
        before = objects(url)
        for dry_run in (False, True):
            with pytest.raises(ema_ckpt.TargetError, match="already exists") as caught:
                ema_ckpt.consolidate(source, url, dry_run=dry_run)
            assert caught.value.code == "target-exists"
        assert objects(url) == before


class Snapshots:
    """What a reader finds at a URL after every change of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        self.seen: list[set[str]] = []
        self.statuses: list[str] = []
        filesystem, _ = fsspec.core.url_to_fs(url)
        for name in ("mv", "rm_file"):
            usual = getattr(filesystem, name)
            monkeypatch.setattr(filesystem, name, self._observed(usual, url))

    def _observed(self, usual: Callable[..., object], url: str) -> Callable[..., object]:
        def observed(*args: object, **options: object) -> object:
            result = usual(*args, **options)
            self.seen.append({name for name in objects(url) if ".ema-ckpt-" not in name})
            self.statuses.append(ema_ckpt.verify(url).status)
            return result

        return observed


@pytest.mark.parametrize("name", ["resharded", "shards"])
def test_overwrite_keeps_one_complete_checkpoint_all_the_time(
    name: str, store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, url = fixtures / "dcp" / "fsdp2-w2", f"{store}/{name}"
    WRITERS[name](source, url)
    old = set(objects(url))
    snapshots = Snapshots(monkeypatch, url)
    if name == "resharded":
        ema_ckpt.reshard(source, url, 2, overwrite=True)
    else:
        ema_ckpt.consolidate(source, url, max_shard_size=150, overwrite=True)
    monkeypatch.undo()
    new = set(objects(url))
    marker = ".metadata" if name == "resharded" else "model.safetensors.index.json"
    assert old & new == {marker, "ema_ckpt.json"}
    assert not any("damaged" in status for status in snapshots.statuses)
    assert any(seen > old for seen in snapshots.seen), "new files lie beside the old ones"
    assert any(seen > new for seen in snapshots.seen), "old files go last"
    assert ema_ckpt.verify(url).status == "sound"


def test_foreign_files_stay_or_are_refused(store: str, fixtures: Path) -> None:
    source = fixtures / "dcp" / "fsdp2-w2"
    filesystem, _ = fsspec.core.url_to_fs(store)
    for name in ("shards", "resharded"):
        WRITERS[name](source, f"{store}/{name}")
        filesystem.pipe_file(f"{store}/{name}/notes.md", b"mine")
    ema_ckpt.consolidate(source, f"{store}/shards", overwrite=True)
    assert filesystem.cat_file(f"{store}/shards/notes.md") == b"mine"
    before = objects(f"{store}/resharded")
    with pytest.raises(ema_ckpt.TargetError, match=r"notes\.md") as caught:
        ema_ckpt.reshard(source, f"{store}/resharded", 2, overwrite=True)
    assert caught.value.code == "foreign-files"
    assert objects(f"{store}/resharded") == before


def test_the_source_is_no_target(store: str, fixtures: Path) -> None:
    url = f"{store}/runs/step_1"
    WRITERS["resharded"](fixtures / "dcp" / "fsdp2-w2", url)
    for target in (url, f"{url}/inner", f"{store}/runs"):
        with pytest.raises(ema_ckpt.TargetError) as caught:
            ema_ckpt.reshard(url, target, 2, overwrite=True)
        assert caught.value.code == "target-is-source"
    ema_ckpt.reshard(url, f"{store}/runs/step_10", 2)  # a name that begins alike is another


@pytest.mark.parametrize("name", ["one.safetensors", "one.pt", "shards", "resharded"])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_run_that_fails_leaves_nothing(
    name: str,
    kind: type[BaseException],
    store: str,
    fixtures: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filesystem, _ = fsspec.core.url_to_fs(store)
    usual, calls = filesystem.mv, 0

    def failing(*args: object, **options: object) -> None:
        nonlocal calls
        calls += 1
        last = name in ("one.safetensors", "one.pt")
        if calls == (1 if last else 3):
            raise kind("now")
        usual(*args, **options)

    monkeypatch.setattr(filesystem, "mv", failing)
    with pytest.raises((ema_ckpt.AccessError, KeyboardInterrupt)):
        WRITERS[name](fixtures / "dcp" / "fsdp2-w4", f"{store}/{name}")
    monkeypatch.undo()
    assert objects(store) == {}
    WRITERS[name](fixtures / "dcp" / "fsdp2-w4", f"{store}/{name}")  # nothing is in the way
    assert ema_ckpt.verify(f"{store}/{name}").status == "sound"


def test_a_failed_overwrite_leaves_the_old_checkpoint_sound(
    store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, url = fixtures / "dcp" / "fsdp2-w2", f"{store}/resharded"
    WRITERS["resharded"](source, url)
    before = objects(url)
    filesystem, _ = fsspec.core.url_to_fs(store)
    refuse_marker(filesystem, monkeypatch)
    with pytest.raises(ema_ckpt.AccessError, match="refused"):
        ema_ckpt.reshard(source, url, 2, overwrite=True)
    monkeypatch.undo()
    assert before.items() <= objects(url).items()
    assert ema_ckpt.verify(url).status == "sound"


def test_a_half_written_step_is_not_the_newest(store: str, fixtures: Path) -> None:
    filesystem, _ = fsspec.core.url_to_fs(store)
    for step in (1, 2):
        WRITERS["resharded"](fixtures / "dcp" / "fsdp2-w2", f"{store}/step_{step}")
        WRITERS["shards"](fixtures / "dcp" / "fsdp2-w2", f"{store}/hf/step_{step}")
    filesystem.rm_file(f"{store}/step_2/.metadata")
    filesystem.rm_file(f"{store}/hf/step_2/model.safetensors.index.json")
    assert ema_ckpt.latest(store) == f"{store}/step_1"
    assert ema_ckpt.latest(f"{store}/hf") == f"{store}/hf/step_1"
    for half in (f"{store}/step_2", f"{store}/hf/step_2"):
        for verb in (ema_ckpt.inspect, ema_ckpt.open):
            with pytest.raises(ema_ckpt.SourceError) as caught:
                verb(half)
            assert caught.value.code == "missing-metadata"
        assert ema_ckpt.verify(half).status == "damaged"


def test_who_may_not_delete_still_writes(
    store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is in place: what stays beside it is a warning."""
    filesystem, _ = fsspec.url_to_fs(store)
    usual = filesystem.rm_file

    def refusing(path: str) -> None:
        if path.endswith(".note"):
            raise PermissionError("not allowed to delete")
        usual(path)

    monkeypatch.setattr(filesystem, "rm_file", refusing)
    result = ema_ckpt.reshard(fixtures / "dcp" / "fsdp2-w2", f"{store}/out", 2)
    assert [warning.code for warning in result.warnings] == ["stale-file"]
    assert "is complete" in result.warnings[0].message
    assert ema_ckpt.verify(f"{store}/out").status == "sound"


def test_dry_run_says_what_it_cannot_check(store: str, fixtures: Path) -> None:
    result = ema_ckpt.consolidate(
        fixtures / "dcp" / "fsdp2-w2", f"{store}/one.safetensors", dry_run=True
    )
    assert [w.message for w in result.warnings if w.code == "unchecked"] == [
        f"{store}/one.safetensors: neither free space nor the right to write is checked at a URL"
    ]
    assert objects(store) == {}


def test_http_is_refused_and_says_so(fixtures: Path) -> None:
    with pytest.raises(ema_ckpt.UsageError, match="HTTP can only be read"):
        ema_ckpt.consolidate(fixtures / "dcp" / "fsdp2-w2", "http://127.0.0.1:9/out.safetensors")


def test_a_file_url_is_a_path(fixtures: Path, tmp_path: Path) -> None:
    source = fixtures / "dcp" / "fsdp2-w2"
    ema_ckpt.consolidate(source, f"file://{tmp_path}/one.safetensors")
    ema_ckpt.consolidate(source, tmp_path / "two.safetensors")
    assert files(tmp_path / "one.safetensors") == files(tmp_path / "two.safetensors")


def test_parts_fit_the_memory() -> None:
    from ema_ckpt.writing.options import WriteOptions

    for threads in (1, 2, 4, 8):
        for budget in (45 << 20, 64 << 20, 256 << 20):
            options = WriteOptions(threads=threads, budget_nbytes=budget)
            reading, sizes = divide_memory(options, {"": 10**9})
            parts = 3 * reading.threads + 1 + 2 * sizes.senders
            assert sizes.nbytes >= 5 << 20
            assert parts * sizes.nbytes + reading.budget_nbytes <= budget
            assert 1 <= reading.threads <= threads
    with pytest.raises(ema_ckpt.UsageError, match="45MiB or more"):
        divide_memory(WriteOptions(threads=1, budget_nbytes=44 << 20), {"": 10**9})
    _, sizes = divide_memory(WriteOptions(threads=1, budget_nbytes=4 << 30), {"": 10**12})
    assert 10**12 / sizes.nbytes <= 10_000


def test_what_replaced_something_is_never_deleted_again() -> None:
    fresh = PublishOrder({}, {}, ["marker"], set())
    assert fresh.removable(["a", "marker"]) == ["marker", "a"]
    replacing = PublishOrder({}, {}, ["record", "marker"], {"record", "marker"})
    assert replacing.removable(["a", "record", "marker"]) == ["a"]


def test_what_a_new_marker_may_name_is_left_and_told(caplog: pytest.LogCaptureFixture) -> None:
    store = ObjectStore(f"memory://{uuid.uuid4().hex}/c")
    for name in ("a", "record", "marker"):
        store.put(name, b"old")
    order = PublishOrder({}, {}, ["record", "marker"], {"record", "marker"}, crc32(b"old"))
    order.delete_written(store, ["a", "record", "marker"])
    assert {name: store.read(name) for name in ("a", "record", "marker")} == {
        "a": None, "record": b"old", "marker": b"old",
    }  # fmt: skip
    assert caplog.messages == []
    store.put("a", b"new")
    store.put("marker", b"new")
    order.delete_written(store, ["a", "record", "marker"])
    assert store.read("a") == b"new"
    (said,) = caplog.messages
    assert "marker may be another one by now, so 'a' were left there" in said


@pytest.mark.parametrize("had_one", [True, False])
def test_what_a_marker_names_that_the_store_may_yet_write_is_left_and_told(
    had_one: bool,
    store: str,
    fixtures: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client waits no more, and the store writes the marker after the run has ended."""
    url = f"{store}/resharded"
    if had_one:
        ema_ckpt.reshard(fixtures / "dcp" / "fsdp2-w2", url, 2)
    before = objects(url)
    filesystem, _ = fsspec.core.url_to_fs(store)
    usual, late = filesystem.mv, list[tuple[str, bytes]]()

    def slow(source: str, target: str, **options: object) -> None:
        if target.endswith(".metadata"):
            late.append((target, filesystem.cat_file(source)))
            raise TimeoutError
        usual(source, target, **options)

    monkeypatch.setattr(filesystem, "mv", slow)
    with pytest.raises(ema_ckpt.AccessError, match="no whole answer in time"):
        ema_ckpt.reshard(fixtures / "dcp" / "fsdp2-w2", url, 3, overwrite=had_one)
    monkeypatch.undo()
    assert before.items() <= objects(url).items()
    assert any(".metadata may be another one by now" in said for said in caplog.messages)
    if had_one:
        assert ema_ckpt.verify(url).status == "sound"
    ((target, data),) = late
    filesystem.pipe_file(target, data)
    assert ema_ckpt.verify(url).status == "sound"
    assert ema_ckpt.inspect(url).world_size == 3


def test_objects_that_the_marker_of_another_run_names_are_left_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ObjectStore(f"memory://{uuid.uuid4().hex}/c")
    order = PublishOrder({}, {}, ["record", "marker"], set())
    store.put("a", b"mine")
    order.delete_written(store, ["a"])
    assert store.read("a") is None and caplog.messages == []
    store.put("a", b"mine or not")
    store.put("marker", b"not mine")
    order.delete_written(store, ["a"])
    assert store.read("a") == b"mine or not"
    (said,) = caplog.messages
    assert "marker may be another one by now, so 'a' were left there" in said


@pytest.mark.parametrize("name", ["one.safetensors", "resharded"])
def test_of_runs_that_begin_together_one_writes_at_most(
    name: str, store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{store}/{name}"
    usual, others = ObjectDestination.note, list[NoteFile]()

    def note(self: ObjectDestination, *args: Any) -> NoteFile:
        """Another run has found nothing either, and is the first to leave its note."""
        content = UploadNote({}, 0, 0, [], name, None)
        others.append(NoteFile(ObjectStore(store), name, content))
        return usual(self, *args)

    monkeypatch.setattr(ObjectDestination, "note", note)
    with pytest.raises(ema_ckpt.TargetError, match="another run is writing it") as caught:
        WRITERS[name](fixtures / "dcp/fsdp2-w2", url)
    assert caught.value.code == "busy"
    assert list(objects(store)) == [others[0].name]


@pytest.mark.parametrize("was_begun", [False, True], ids=["new", "begun before"])
def test_what_another_run_wrote_while_this_one_planned_is_left_alone(
    store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch, was_begun: bool
) -> None:
    url = f"{store}/out"
    usual, inside = ObjectDestination._begin, ObjectStore(url)
    content = UploadNote({}, 0, 0, ["__0_0.distcp"], ".metadata", None)
    other = NoteFile(ObjectStore(store), "out", content) if was_begun else None
    if other is not None:
        content.started = "long ago"  # it ends before this one looks for it
        other._write()
        inside.put("__0_0.distcp", b"other")

    def begin(self: ObjectDestination, *args: Any) -> Any:
        for name in ("__0_0.distcp", ".metadata"):
            inside.put(name, b"other")
        if other is not None:
            other.delete()
        return usual(self, *args)

    monkeypatch.setattr(ObjectDestination, "_begin", begin)
    with pytest.raises(ema_ckpt.TargetError, match="others have just written there") as caught:
        WRITERS["resharded"](fixtures / "dcp/fsdp2-w2", url)
    assert caught.value.code == "busy"
    assert {name: inside.read(name) for name in ("__0_0.distcp", ".metadata", "__1_0.distcp")} == {
        "__0_0.distcp": b"other", ".metadata": b"other", "__1_0.distcp": None,
    }  # fmt: skip
    assert sorted(objects(store)) == ["out/.metadata", "out/__0_0.distcp"]


@pytest.mark.parametrize("name", ["one.safetensors", "resharded"])
def test_a_run_that_sends_nothing_for_long_shows_other_machines_that_it_lives(
    name: str, store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, seen = f"{store}/{name}", list[str]()
    monkeypatch.setattr("ema_ckpt.writing.upload_note._TOUCHED_EVERY_SECONDS", 0.05)
    monkeypatch.setattr("ema_ckpt.writing.upload_note._FRESH_SECONDS", 0.5)
    monkeypatch.setattr(UploadNote, "is_alive", lambda _: None)  # of another machine
    usual = StreamedFiles.finish

    def finish(self: StreamedFiles) -> None:
        time.sleep(1.5)
        monkeypatch.undo()
        monkeypatch.setattr("ema_ckpt.writing.upload_note._FRESH_SECONDS", 0.5)
        monkeypatch.setattr(UploadNote, "is_alive", lambda _: None)
        with pytest.raises(ema_ckpt.TargetError) as caught:
            WRITERS[name](fixtures / "dcp/fsdp2-w2", url)
        seen.append(caught.value.code)
        usual(self)

    monkeypatch.setattr(StreamedFiles, "finish", finish)
    WRITERS[name](fixtures / "dcp/fsdp2-w2", url)
    assert seen == ["busy"]
    assert ema_ckpt.verify(url).status == "sound"
    assert not [left for left in objects(store) if left.endswith(".note")]


@pytest.mark.parametrize("name", ["one.safetensors", "resharded"])
def test_a_run_that_was_taken_for_dead_neither_publishes_nor_deletes(
    name: str, store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was cut off for long: the other run's files have the same names."""
    url = f"{store}/{name}"
    usual = StreamedFiles.finish

    def finish(self: StreamedFiles) -> None:
        usual(self)
        monkeypatch.setattr(StreamedFiles, "finish", usual)
        with monkeypatch.context() as patch:
            patch.setattr(UploadNote, "is_alive", lambda _: False)
            WRITERS[name](fixtures / "dcp/fsdp2-w2", url)
        written.update(complete())

    def complete() -> dict[str, str]:
        """What has its name for good: the first run still holds temporary files, which go with it."""
        return {k: v for k, v in objects(store).items() if ".ema-ckpt-" not in k}

    written: dict[str, str] = {}
    monkeypatch.setattr(StreamedFiles, "finish", finish)
    with pytest.raises(ema_ckpt.TargetError, match="taken this one for dead") as caught:
        WRITERS[name](fixtures / "dcp/fsdp2-w4", url)
    assert caught.value.code == "busy"
    assert complete() == written
    assert ema_ckpt.verify(url).status == "sound"


def test_a_run_whose_clean_up_fails_as_well_is_over_all_the_same(
    store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{store}/out"
    filesystem, _ = fsspec.core.url_to_fs(url)
    with monkeypatch.context() as patch:
        refuse_marker(filesystem, patch, is_last=True)
        with pytest.raises(ema_ckpt.AccessError, match="refused"):
            WRITERS["resharded"](fixtures / "dcp/fsdp2-w2", url)
    assert any(name.endswith(".note") for name in objects(store)), "it could not be deleted"
    WRITERS["resharded"](fixtures / "dcp/fsdp2-w2", url)
    assert not [name for name in objects(store) if ".ema-ckpt-" in name]
    assert ema_ckpt.verify(url).status == "sound"


@pytest.mark.parametrize("replaces", [False, True])
def test_what_a_killed_run_left_under_temporary_names_is_in_nobodys_way(
    store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch, *, replaces: bool
) -> None:
    """That of digests which replace others stayed for good."""
    url = f"{store}/out"
    if replaces:
        WRITERS["resharded"](fixtures / "dcp/fsdp2-w2", url)
    write = partial(ema_ckpt.reshard, fixtures / "dcp/fsdp2-w2", url, 3, overwrite=replaces)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectDestination, "_give_up", lambda *_: None)
        patch.setattr(ObjectDestination, "publish", refused)
        with pytest.raises(KeyboardInterrupt):
            write()
    assert any("/..metadata.ema-ckpt-" in f"/{name}" for name in objects(url))
    filesystem, base = fsspec.core.url_to_fs(url)
    filesystem.pipe_file(f"{base}/.probe.ema-ckpt-00112233", b"")  # a connection broke off
    monkeypatch.setattr(UploadNote, "is_alive", lambda _: False)
    write()
    assert not [name for name in objects(store) if ".ema-ckpt-" in name]
    assert ema_ckpt.verify(url).status == "sound"


def refused(*_: object) -> None:
    raise KeyboardInterrupt


def test_resume_after_a_run_that_was_killed_behind_its_marker_starts_anew(
    store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, url = fixtures / "dcp/fsdp2-w2", f"{store}/out"
    ema_ckpt.consolidate(source, url, max_shard_size=150)
    with monkeypatch.context() as patch:
        patch.setattr(NoteFile, "delete", refused)
        with pytest.raises(KeyboardInterrupt):
            ema_ckpt.consolidate(source, url, max_shard_size=100, overwrite=True)
    assert ema_ckpt.verify(url).status == "sound"
    monkeypatch.setattr(UploadNote, "is_alive", lambda _: False)
    ema_ckpt.consolidate(source, url, max_shard_size=100, overwrite=True, resume=True)
    assert ema_ckpt.verify(url).status == "sound"
    assert not [name for name in objects(store) if ".ema-ckpt-" in name]


@pytest.mark.parametrize("name", ["one.safetensors", "resharded"])
def test_a_process_tries_again_what_it_gave_up(
    name: str, store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its note is there: it may resume, its note came late, or could not be deleted."""
    source, url = fixtures / "dcp/fsdp2-w2", f"{store}/{name}"
    write = ema_ckpt.consolidate
    if name == "resharded":
        write = partial(ema_ckpt.reshard, world_size=3)
    with monkeypatch.context() as patch:
        patch.setattr(StreamedFiles, "finish", refused)
        with pytest.raises(KeyboardInterrupt):
            write(source, url, resume=True)
    assert [left for left in objects(store) if left.endswith(".note")]
    write(source, url, resume=True)
    assert ema_ckpt.verify(url).status == "sound"
    assert not [left for left in objects(store) if ".ema-ckpt-" in left]


def test_a_note_whose_writing_was_interrupted_is_no_other_run(
    store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes on without who waited for it."""
    usual = NoteFile._write

    def write(self: NoteFile) -> None:
        usual(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NoteFile, "_write", write)
        with pytest.raises(KeyboardInterrupt):
            ema_ckpt.consolidate(fixtures / "dcp/fsdp2-w2", f"{store}/one.pt")
    ema_ckpt.consolidate(fixtures / "dcp/fsdp2-w2", f"{store}/one.pt")
    assert list(objects(store)) == ["one.pt"]


@pytest.mark.parametrize("name", ["one.safetensors", "resharded"])
def test_a_piece_that_a_store_has_twice_is_no_success(
    name: str, store: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the answer to a piece is lost, the client sends it again, and not every store notices."""
    url, source = f"{store}/runs/{name}", fixtures / "dcp" / "fsdp2-w4"
    write = ema_ckpt.consolidate if name == "one.safetensors" else partial(_resharded, 3)
    write(source, url)
    before = objects(f"{store}/runs")
    memory = type(fsspec.filesystem("memory").open(f"{store}/file", "wb"))
    usual, is_sent = memory.write, []

    def write_twice(self: Any, data: Any) -> int:
        if not is_sent and len(data) > 40:
            is_sent.append(usual(self, data))
        return int(usual(self, data))

    for overwrite in (False, True):
        is_sent.clear()
        other = url if overwrite else f"{store}/runs/other-{name}"
        with monkeypatch.context() as patch:
            patch.setattr(memory, "write", write_twice)
            # The note is the first thing that is written: it is left out.
            patch.setattr(NoteFile, "_write", lambda self: None)
            patch.setattr(NoteFile, "refuse_loss", lambda self: None)
            with pytest.raises(ema_ckpt.EmaCkptError) as caught:
                write(source, other, overwrite=overwrite)
        assert is_sent
        assert caught.value.code == "unreadable"
        assert "were sent; write it again" in str(caught.value)
        assert objects(f"{store}/runs") == before


def _resharded(world_size: int, source: Path, url: str, **options: bool) -> None:
    ema_ckpt.reshard(source, url, world_size, **options)
