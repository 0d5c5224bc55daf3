"""An object store whose client keeps what it listed: the truth is asked anew. The server is moto's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ema_ckpt

pytestmark = pytest.mark.integration
s3fs = pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    other = s3fs.S3FileSystem(skip_instance_cache=True)  # another process, as it were
    other.makedirs("bucket", exist_ok=True)
    yield other
    s3fs.S3FileSystem.clear_instance_cache()
    running.stop()


def test_listings_and_sizes_are_those_of_now(store: object, fixtures: Path) -> None:
    def put(fixture: str, step: int) -> None:
        store.put(
            f"{fixtures / 'dcp' / fixture}/", f"s3://bucket/runs/step_{step}/", recursive=True
        )

    put("fsdp2-w2", 1)
    assert str(ema_ckpt.latest("s3://bucket/runs")) == "s3://bucket/runs/step_1"
    put("fsdp2-w4", 2)
    assert str(ema_ckpt.latest("s3://bucket/runs")) == "s3://bucket/runs/step_2"
    assert ema_ckpt.inspect("s3://bucket/runs").world_size == 4
    store.rm("s3://bucket/runs/step_2", recursive=True)
    put("fsdp2-w8", 2)
    assert ema_ckpt.inspect("s3://bucket/runs").world_size == 8
    assert ema_ckpt.verify("s3://bucket/runs").status == "sound"


def test_two_colons_are_letters_of_a_key(store: object, fixtures: Path) -> None:
    """fsspec ends a URL there, so that `--overwrite` deleted the objects of another checkpoint."""
    store.mkdir("colons")
    source = fixtures / "dcp" / "fsdp2-w2"
    ema_ckpt.reshard(source, "s3://colons/run", 2)
    before = {path: store.cat_file(path) for path in store.find("colons")}
    ema_ckpt.consolidate(source, "s3://colons/run::v2", overwrite=True)
    ema_ckpt.consolidate(source, "s3://colons/run::v2", overwrite=True)
    ema_ckpt.consolidate(source, "s3://colons/run::v3.pt")
    ema_ckpt.reshard(source, "s3://colons/runs::a/step_1", 2)
    assert ema_ckpt.latest("s3://colons/runs::a") == "s3://colons/runs::a/step_1"
    assert {ema_ckpt.verify(f"s3://colons/run::v{n}").status for n in (2, "3.pt")} == {"sound"}
    store.invalidate_cache()
    found = store.find("colons")
    assert {path: store.cat_file(path) for path in found if path in before} == before
    assert {path.split("/")[1] for path in found} == {"run", "run::v2", "run::v3.pt", "runs::a"}
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.inspect("s3://colons/run::v4")
    assert caught.value.code == "not-found"
