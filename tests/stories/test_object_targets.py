"""Checkpoints in S3: written there, replaced, interrupted, continued, on servers that fail."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ema_ckpt
from tests.checkpoints import digests_of_files
from tests.distributed import launcher
from tests.s3_server import KEYS, Proxy, Request, S3Server
from tests.stories import ranks_to_s3

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
pytest.importorskip("nanio")

MEMORY = "48MiB"  # gives parts of about five megabytes
REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["moto", "nanio"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[S3Server]:
    running = S3Server(request.param, tmp_path_factory.mktemp("objects"))
    yield running
    running.stop()


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    running = Proxy(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{running.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem()
    if store.exists("bucket"):
        for upload in uploads():
            store.call_s3("abort_multipart_upload", Bucket="bucket", **upload)
        for path in store.find("bucket"):
            store.rm_file(path)
    else:
        store.mkdir("bucket")
    running.requests.clear()
    yield running
    s3fs.S3FileSystem.clear_instance_cache()
    running.stop()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four tensors of 7 to 8 MB and small ones: parts of 5 MiB cut them anywhere."""
    torch.manual_seed(1)
    weights = {f"layers.{i}.w": torch.randn(1400, 1300 + 37 * i) for i in range(4)}
    weights |= {f"layers.{i}.b": torch.randn(1301 + i) for i in range(40)}
    folder = tmp_path_factory.mktemp("source") / "step_1"
    dcp.save(
        {"ema": {"weights": weights, "num_updates": torch.tensor(9)}}, checkpoint_id=str(folder)
    )
    return folder


def objects(url: str) -> dict[str, str]:
    """Digests of the objects at and below a URL, by name."""
    store = s3fs.S3FileSystem(skip_instance_cache=True)
    base = url.removeprefix("s3://")
    return {
        path[len(base) :].lstrip("/"): hashlib.sha256(store.cat_file(path)).hexdigest()
        for path in store.find(base)
    }


def uploads() -> list[dict[str, str]]:
    """Keys and ids of the uploads in progress."""
    store = s3fs.S3FileSystem(skip_instance_cache=True)
    answer = store.call_s3("list_multipart_uploads", Bucket="bucket")
    return [
        {key: upload[key] for key in ("Key", "UploadId")} for upload in answer.get("Uploads", ())
    ]


Write = Callable[..., object]
WRITERS: dict[str, Write] = {
    "one.safetensors": ema_ckpt.consolidate,
    "one.pt": ema_ckpt.consolidate,
    "cast.safetensors": lambda path, out, **more: ema_ckpt.consolidate(
        path, out, dtype="bf16", **more
    ),
    "shards": lambda path, out, **more: ema_ckpt.consolidate(
        path, out, max_shard_size="12MB", **more
    ),
    "resharded": lambda path, out, **more: ema_ckpt.reshard(path, out, 3, **more),
    "all.pt": ema_ckpt.convert,
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_store_gets_the_bytes_that_a_disk_gets(
    name: str, proxy: Proxy, source: Path, tmp_path: Path
) -> None:
    WRITERS[name](source, tmp_path / name)
    url = f"s3://bucket/runs/{name}"
    WRITERS[name](source, url, max_memory=MEMORY, threads=3)
    assert proxy.parts() >= 2
    assert objects(url) == digests_of_files(tmp_path / name)
    assert ema_ckpt.verify(url).status == "sound"
    assert uploads() == []
    assert set(objects("s3://bucket/runs")) == {
        f"{name}/{file}".rstrip("/") for file in digests_of_files(tmp_path / name)
    }, "nothing else is left"


def test_from_the_store_to_the_store(proxy: Proxy, source: Path, tmp_path: Path) -> None:
    ema_ckpt.reshard(source, "s3://bucket/runs/step_1", 3)
    proxy.requests.clear()
    ema_ckpt.consolidate("s3://bucket/runs", "s3://bucket/ema.safetensors", max_memory=MEMORY)
    ema_ckpt.consolidate(source, tmp_path / "ema.safetensors")
    assert objects("s3://bucket/ema.safetensors") == digests_of_files(tmp_path / "ema.safetensors")


def test_a_throttled_and_flaky_store_only_takes_longer(
    proxy: Proxy, source: Path, tmp_path: Path
) -> None:
    dice = random.Random(4)

    def rule(request: Request) -> str | None:
        return dice.choices([None, "slow", "cut", "lose"], [85, 6, 5, 4])[0]

    proxy.rule = rule
    for name in ("one.safetensors", "resharded"):
        url = f"s3://bucket/runs/{name}"
        WRITERS[name](source, url, max_memory=MEMORY, threads=2)
        WRITERS[name](source, tmp_path / name)
    proxy.rule = lambda request: None
    for name in ("one.safetensors", "resharded"):
        assert objects(f"s3://bucket/runs/{name}") == digests_of_files(tmp_path / name)
    assert uploads() == []


@pytest.mark.parametrize("name", ["one.safetensors", "resharded", "shards"])
def test_a_failure_leaves_nothing(name: str, proxy: Proxy, source: Path) -> None:
    """A part is refused for good: no object, no part, no note stays."""
    refused = b"<Error><Code>AccessDenied</Code><Message>Not this one.</Message></Error>"
    store = s3fs.S3FileSystem()
    usual = store.call_s3

    def failing(method: str, **values: object) -> object:
        if method == "upload_part" and values["PartNumber"] == 2:
            raise PermissionError(refused.decode())
        return usual(method, **values)

    store.call_s3 = failing
    with pytest.raises(ema_ckpt.AccessError, match="AccessDenied"):
        WRITERS[name](source, f"s3://bucket/runs/{name}", max_memory=MEMORY)
    del store.call_s3
    assert objects("s3://bucket") == {}
    assert uploads() == []


class Command:
    """`ema-ckpt` in a process of its own, writing to the store."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ema_ckpt", *arguments, "--max-memory", MEMORY],
            env={**os.environ, "PYTHONPATH": str(REPO)},
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def stall_at(number: int) -> Callable[[Request], str | None]:
    return lambda request: "stall" if request.is_part and request.number >= number else None


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_nothing(
    stop: signal.Signals, proxy: Proxy, source: Path
) -> None:
    proxy.rule = stall_at(3)
    command = Command("consolidate", str(source), "s3://bucket/ema.safetensors")
    assert proxy.stalled.wait(60)
    command.process.send_signal(stop)
    time.sleep(0.5)
    proxy.rule = lambda request: None
    proxy.release()
    code, _, err = command.end()
    assert code == (130 if stop == signal.SIGINT else 143), err
    assert objects("s3://bucket") == {}
    assert uploads() == []


@pytest.mark.parametrize("name", ["ema.safetensors", "resharded"])
def test_a_killed_command_is_continued_at_the_part(
    name: str, proxy: Proxy, source: Path, tmp_path: Path
) -> None:
    words = ["consolidate", str(source)]
    write: Write = ema_ckpt.consolidate
    more: list[str] = []
    if name == "resharded":
        words, write, more = ["reshard", str(source)], WRITERS["resharded"], ["--world-size", "3"]
    write(source, tmp_path / name)
    url = f"s3://bucket/runs/{name}"
    proxy.rule = stall_at(3)
    command = Command(*words, url, *more)
    assert proxy.stalled.wait(60)
    command.process.kill()
    command.end()
    proxy.rule = lambda request: None
    proxy.release()
    done = proxy.parts()
    assert uploads(), "the parts wait in the store"
    if name == "resharded":
        with pytest.raises(ema_ckpt.SourceError):
            ema_ckpt.inspect(url)
    assert ema_ckpt.latest("s3://bucket/runs", incomplete="ignore") is None

    changed = Command(*words, url, *more, "--exclude", "*.b", "--resume", "--json")
    code, out, _ = changed.end()
    assert (code, json.loads(out)["error"]["code"]) == (2, "resume-mismatch")
    assert uploads(), "and still do"

    proxy.requests.clear()
    code, _, err = Command(*words, url, *more, "--resume").end()
    assert code == 0, err
    assert "were there" in err
    assert objects(url) == digests_of_files(tmp_path / name)
    assert uploads() == []
    total = done + proxy.parts()
    proxy.requests.clear()
    Command(*words, f"s3://bucket/again/{name}", *more).end()
    assert total - proxy.parts() <= 4, "only what stalled was sent twice"
    assert set(objects("s3://bucket/runs")) == {
        f"{name}/{file}".rstrip("/") for file in digests_of_files(tmp_path / name)
    }


def test_what_a_killed_command_left_is_deleted_by_the_next(
    proxy: Proxy, source: Path, tmp_path: Path
) -> None:
    ema_ckpt.reshard(source, tmp_path / "two", 2)
    url = "s3://bucket/runs/step_1"
    proxy.rule = stall_at(4)
    command = Command("reshard", str(source), url, "--world-size", "3")
    assert proxy.stalled.wait(60)
    with pytest.raises(ema_ckpt.TargetError) as caught:
        ema_ckpt.reshard(source, url, 2)
    assert caught.value.code == "busy"
    command.process.kill()
    command.end()
    proxy.rule = lambda request: None
    proxy.release()
    ema_ckpt.reshard(source, url, 2)
    assert objects(url) == digests_of_files(tmp_path / "two")
    assert uploads() == []
    assert set(objects("s3://bucket/runs")) == {
        f"step_1/{name}" for name in digests_of_files(tmp_path / "two")
    }


def test_credentials_and_reasons(
    proxy: Proxy, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dry_run in (True, False):
        with pytest.raises(ema_ckpt.TargetError, match="s3://nobucket/") as caught:
            ema_ckpt.consolidate(source, "s3://nobucket/a.safetensors", dry_run=dry_run)
        assert caught.value.code == "not-found"
    proxy.requests.clear()
    ema_ckpt.consolidate(source, "s3://bucket/a.safetensors", dry_run=True)
    assert not [r for r in proxy.requests if r.method not in ("GET", "HEAD")]
    assert objects("s3://bucket") == {}


# ---------------------------------------------------------------- ranks that save


def environment(proxy: Proxy) -> dict[str, str]:
    names = ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION")
    return {f"AWS_{name}": os.environ[f"AWS_{name}"] for name in names}


def assert_restored(values: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    assert len(saved) > 20
    assert values.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(values[name], value), name


def test_two_ranks_save_and_three_restore_bit_for_bit(proxy: Proxy) -> None:
    url = "s3://bucket/run/step_1"
    saved = launcher.run(2, ranks_to_s3.train_and_save, environment(proxy), url, 1)[0]
    assert {name.rpartition("/")[2] for name in objects(url)} == {
        "__0_0.distcp", "__1_0.distcp", "ema_ckpt.json", ".metadata",
    }  # fmt: skip
    assert uploads() == []
    assert ema_ckpt.verify(url).status == "sound"
    found = launcher.run(3, ranks_to_s3.restore_whole, environment(proxy), "s3://bucket/run")
    path, extra, values = found[0]
    assert (path, extra) == (url, ranks_to_s3.STEP)
    assert_restored(values, saved)


def test_ranks_killed_between_shards_and_marker_leave_the_former_step(
    proxy: Proxy, tmp_path: Path
) -> None:
    old, new = "s3://bucket/run/step_1", "s3://bucket/run/step_2"
    saved = launcher.run(2, ranks_to_s3.train_and_save, environment(proxy), old, 1)[0]
    kill = tmp_path / "kill"

    def at_marker(request: Request) -> str | None:
        is_marker = request.method == "PUT" and request.path.endswith("step_2/.metadata")
        return "stall" if is_marker else None

    def kill_when_stalled() -> None:
        if proxy.stalled.wait(50):
            kill.touch()

    proxy.rule = at_marker
    watcher = threading.Thread(target=kill_when_stalled)
    watcher.start()
    with pytest.raises(launcher.WorkersFailed):
        launcher.run(2, ranks_to_s3.train_and_save, environment(proxy), new, 2, str(kill))
    watcher.join()
    assert kill.exists(), "they were killed at the marker, and did not fail before it"
    proxy.rule = lambda request: None
    proxy.release()
    there = {name.rpartition("/")[2] for name in objects(new)}
    assert {"__0_0.distcp", "__1_0.distcp"} <= there
    assert ".metadata" not in there
    assert ema_ckpt.latest("s3://bucket/run") == old
    path, _, values = launcher.run(
        3, ranks_to_s3.restore_whole, environment(proxy), "s3://bucket/run"
    )[0]
    assert path == old
    assert_restored(values, saved)
    again = launcher.run(2, ranks_to_s3.train_and_save, environment(proxy), new, 2)[0]
    assert ema_ckpt.latest("s3://bucket/run") == new
    assert ema_ckpt.verify(new).status == "sound"
    assert not torch.equal(again["model.0.weight"], saved["model.0.weight"])
    assert set(objects("s3://bucket/run")) == {
        f"{step}/{name}"
        for step in ("step_1", "step_2")
        for name in ("__0_0.distcp", "__1_0.distcp", "ema_ckpt.json", ".metadata")
    }, "no note is left"
    assert uploads() == []
