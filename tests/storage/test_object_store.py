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
    other.mkdir("bucket")
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
