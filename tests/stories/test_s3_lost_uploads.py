"""Uploads to S3 that end behind the writer's back: aborted by the bucket, begun with the answer lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import ema_ckpt
from ema_ckpt.storage.remote import Patience
from tests.s3_server import Proxy, Request
from tests.stories import test_object_targets
from tests.stories.test_object_targets import (
    MEMORY,
    WRITERS,
    objects,
    s3fs,
    uploads,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

server = test_object_targets.server
proxy = test_object_targets.proxy
source = test_object_targets.source


def is_completion(request: Request) -> bool:
    return request.method == "POST" and "uploadId" in request.query


def is_beginning(request: Request) -> bool:
    return request.method == "POST" and "uploads" in request.query


# moto answers 500 where S3 says NoSuchUpload.
@pytest.mark.parametrize("server", ["nanio"], indirect=True)
@pytest.mark.parametrize("name", ["one.safetensors", "one.pt", "shards"])
def test_an_upload_that_the_bucket_aborts_is_no_success(
    name: str,
    server: object,
    proxy: Proxy,
    source: Path,
) -> None:
    """A lifecycle rule does so. The old object has the same length; that does not make it the new one."""
    url = f"s3://bucket/runs/{name}"
    WRITERS[name](source, url, max_memory=MEMORY)
    before = objects(url)
    aborted = []

    def rule(request: Request) -> str | None:
        if is_completion(request) and not aborted:
            aborted.extend(uploads())
            store = s3fs.S3FileSystem(skip_instance_cache=True)
            for upload in aborted:
                store.call_s3("abort_multipart_upload", Bucket="bucket", **upload)
        return None

    proxy.rule = rule
    with pytest.raises(ema_ckpt.TargetError) as caught:
        WRITERS[name](source, url, rename=["layers=blocks"], overwrite=True, max_memory=MEMORY)
    assert aborted
    assert caught.value.code == "not-found"
    assert objects(url) == before


@pytest.mark.parametrize("name", ["one.safetensors", "resharded", "shards"])
def test_an_upload_whose_beginning_was_lost_is_aborted(
    name: str,
    proxy: Proxy,
    source: Path,
) -> None:
    other = {"Bucket": "bucket", "Key": f"runs/{name}/others"}
    store = s3fs.S3FileSystem(skip_instance_cache=True)
    store.call_s3("create_multipart_upload", **other)
    before = uploads()
    proxy.requests.clear()

    def rule(request: Request) -> str | None:
        return "lose" if is_beginning(request) and begun() == 1 else None

    def begun() -> int:
        return sum(map(is_beginning, proxy.requests))

    proxy.rule = rule
    WRITERS[name](source, f"s3://bucket/runs/{name}", max_memory=MEMORY)
    assert begun() > 1
    assert uploads() == before, "those of others stay"


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_save_whose_upload_was_begun_twice(
    has_failed: bool,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "s3://bucket/run/step_1"
    model = torch.nn.Linear(1500, 2000)

    def rule(request: Request) -> str | None:
        if has_failed and request.method == "PUT" and request.path.endswith("/.metadata"):
            return "refuse"
        return "lose" if is_beginning(request) and begun() == 1 else None

    def begun() -> int:
        return sum(map(is_beginning, proxy.requests))

    monkeypatch.setattr("ema_ckpt.resume.save_place._PART_NBYTES", 5 << 20)
    proxy.rule = rule
    if has_failed:
        with pytest.raises(ema_ckpt.AccessError, match="AccessDenied"):
            ema_ckpt.save(url, model=model)
    else:
        ema_ckpt.save(url, model=model)
    proxy.rule = lambda request: None
    assert begun() > 1
    assert uploads() == []
    assert len(objects("s3://bucket")) == (0 if has_failed else 3)


@pytest.mark.parametrize("answer", ["refuse", "lack", "invalid"])
def test_who_may_not_list_uploads_writes_all_the_same(
    answer: str,
    proxy: Proxy,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many a policy lacks `s3:ListBucketMultipartUploads`, and many a store the request itself."""
    proxy.rule = lambda r: answer if r.method == "GET" and "uploads" in r.query else None
    started = time.monotonic()
    ema_ckpt.reshard(source, "s3://bucket/runs/step_1", 2, max_memory=MEMORY)
    ema_ckpt.save("s3://bucket/runs/step_2", model=torch.nn.Linear(5, 5))
    assert not [name for name in objects("s3://bucket/runs") if name.endswith(".note")]
    with monkeypatch.context() as patch:
        patch.setattr(
            "ema_ckpt.writing.object_destination.ObjectDestination._give_up", lambda *_: None
        )
        patch.setattr("ema_ckpt.writing.upload_note.UploadNote.is_alive", lambda _: False)
        patch.setattr("ema_ckpt.writing.part_files.PartFiles.publish_early", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            ema_ckpt.reshard(source, "s3://bucket/runs/step_3", 2, max_memory=MEMORY)
        patch.undo()
        patch.setattr("ema_ckpt.writing.upload_note.UploadNote.is_alive", lambda _: False)
        ema_ckpt.reshard(source, "s3://bucket/runs/step_3", 2, max_memory=MEMORY)
    proxy.rule = lambda request: None
    assert ema_ckpt.verify("s3://bucket/runs/step_3").status == "sound"
    assert uploads() == [], "by the ids in the note"
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("answer", ["refuse", "lack"])
def test_what_cannot_list_parts_sends_them_again(
    answer: str,
    proxy: Proxy,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = "s3://bucket/runs/one.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr("ema_ckpt.writing.part_files.PartFiles.publish_early", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            ema_ckpt.consolidate(source, url, resume=True, max_memory=MEMORY)
    assert len(uploads()) == 1
    proxy.rule = lambda r: answer if r.method == "GET" and "uploadId" in r.query else None
    ema_ckpt.consolidate(source, url, resume=True, max_memory=MEMORY)
    assert any("all of it is sent again" in message for message in caplog.messages)
    assert ema_ckpt.verify(url).status == "sound"
    assert uploads() == []


@pytest.mark.parametrize("name", ["one.safetensors", "resharded"])
def test_blanks_before_the_answer_to_a_completion_are_none_of_it(
    name: str, proxy: Proxy, source: Path
) -> None:
    """Stores send some to keep the connection while they put a large object together."""
    url = f"s3://bucket/runs/{name}"
    proxy.rule = lambda r: "blanks" if is_completion(r) else None
    WRITERS[name](source, url, max_memory=MEMORY)
    ids = [r.query["uploadId"][0] for r in proxy.requests if is_completion(r)]
    assert ids and len(ids) == len(set(ids)), "each is asked for once"
    assert ema_ckpt.verify(url).status == "sound"


def _interrupted(_: object) -> None:
    raise KeyboardInterrupt


def test_a_rank_has_no_more_parts_than_the_store_takes(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three instead of 10 000, which 16 MiB each reach at 168 GB."""
    monkeypatch.setattr("ema_ckpt.resume.save_place._PART_NBYTES", 5 << 20)
    monkeypatch.setattr("ema_ckpt.resume.save_place.MAX_PARTS", 3)
    layers = [torch.nn.Linear(1000, 1000) for _ in range(7)]
    ema_ckpt.save("s3://bucket/run/step_1", model=torch.nn.Sequential(*layers))
    assert 2 <= proxy.parts() <= 3
    assert ema_ckpt.verify("s3://bucket/run/step_1").status == "sound"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["resharded", "shards"])
def test_a_target_that_the_store_does_not_list_yet_is_left_alone(
    name: str, overwrite: bool, proxy: Proxy, source: Path
) -> None:
    url = f"s3://bucket/runs/{name}"
    WRITERS[name](source, url)
    before = objects(url)
    proxy.rule = lambda r: "unlisted" if r.method == "GET" and "list-type" in r.query else None
    with pytest.raises(ema_ckpt.TargetError, match="does not list") as caught:
        WRITERS[name](source, url, exclude=["*.b"], overwrite=overwrite)
    assert caught.value.code == "busy"
    with pytest.raises(ema_ckpt.TargetError, match=r"does not list|already exists"):
        if name == "resharded":
            ema_ckpt.save(url, model=torch.nn.Linear(2, 2))
        else:
            WRITERS[name](source, url)
    proxy.rule = lambda request: None
    assert objects(url) == before


@pytest.mark.parametrize(
    "name", ["one.safetensors", "one?versionId=3.safetensors", "one?versionId=3"]
)
def test_a_version_of_an_object_is_neither_read_nor_written(
    name: str, proxy: Proxy, source: Path
) -> None:
    store = s3fs.S3FileSystem(skip_instance_cache=True)
    for key in ("one", "one.safetensors"):
        store.pipe_file(f"bucket/{key}", b"somebody's")
    before = objects("s3://bucket")
    url = f"s3://bucket/{name}"
    for write in (ema_ckpt.consolidate, WRITERS["resharded"]):
        with pytest.raises(ema_ckpt.EmaCkptError) as caught:
            write(source, url)
        assert caught.value.code in ("usage", "target-exists")
    if "?" in name:
        with pytest.raises(ema_ckpt.UsageError, match="one version"):
            ema_ckpt.save(url, model=torch.nn.Linear(2, 2))
    for read in (ema_ckpt.inspect, ema_ckpt.verify, ema_ckpt.open, ema_ckpt.latest):
        if "?" in name:
            with pytest.raises(ema_ckpt.UsageError, match="one version"):
                read(url)
    assert objects("s3://bucket") == before


def test_a_completion_whose_answers_nobody_understands_counts_by_what_is_there(
    proxy: Proxy, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = Patience((0.1, 0.1), 5.0)
    monkeypatch.setattr(
        "ema_ckpt.storage.object_store.ObjectStore.request.__defaults__", (patience,)
    )
    proxy.rule = lambda r: "garble" if is_completion(r) else None
    url = "s3://bucket/runs/one.safetensors"
    ema_ckpt.consolidate(source, url, max_memory=MEMORY)
    assert ema_ckpt.verify(url).status == "sound"
    assert uploads() == []
