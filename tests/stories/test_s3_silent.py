"""An S3 endpoint that answers no more, as behind a firewall: what was written stays, and the run ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import ema_ckpt
from ema_ckpt.storage import object_store
from ema_ckpt.storage.object_store import ObjectStore
from ema_ckpt.storage.remote import ONCE
from tests.s3_server import Proxy, Request
from tests.stories import test_object_targets
from tests.stories.test_object_targets import MEMORY, objects, uploads

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
s3fs = pytest.importorskip("s3fs")
server = test_object_targets.server
proxy = test_object_targets.proxy
source = test_object_targets.source

PATIENCE = 3.0  # of s3fs with one request
SILENT = 1.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", PATIENCE)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    usual = ObjectStore.request
    monkeypatch.setattr(
        ObjectStore, "request", lambda self, action, name, _=ONCE: usual(self, action, name, ONCE)
    )
    monkeypatch.setattr(object_store, "_SILENT_SECONDS", SILENT)


@pytest.mark.parametrize("server", ["nanio"], indirect=True)
@pytest.mark.parametrize("write", ["save", "reshard"])
def test_nothing_more_is_asked_of_a_store_that_is_silent(
    write: str, proxy: Proxy, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = "s3://bucket/silent/step_1"
    model = torch.nn.Linear(3000, 3000)  # of three parts

    def do() -> None:
        if write == "save":
            ema_ckpt.save(url, model=model)
        else:
            ema_ckpt.reshard(source, url, 2, max_memory=MEMORY, threads=1)

    def rule(request: Request) -> str | None:
        return "stall" if proxy.parts() > 1 else None

    proxy.rule = rule
    started = time.monotonic()
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        do()
    seconds = time.monotonic() - started
    assert caught.value.code == "unreadable"
    assert seconds < 4 * PATIENCE, "one request and what asks whether anybody is there"
    assert "the store does not answer" in caplog.text
    proxy.release()
    proxy.reset()
    do()
    assert ema_ckpt.verify(url).status == "sound"
    assert {name.partition("/")[0] for name in objects("s3://bucket/silent")} == {"step_1"}
    assert uploads() == []
