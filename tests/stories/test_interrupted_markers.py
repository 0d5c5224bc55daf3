"""Interrupts while a store writes the object that makes a checkpoint in S3 complete: old or new, never neither."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ema_ckpt
from tests.s3_server import Proxy, Request
from tests.stories import test_object_targets
from tests.stories.test_object_targets import REPO, WRITERS, Command, objects, uploads

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

server = test_object_targets.server
proxy = test_object_targets.proxy
source = test_object_targets.source

COMMANDS = {
    "ema.safetensors": ("consolidate",),
    "shards": ("consolidate", "--max-shard-size", "12MB"),
    "resharded": ("reshard", "--world-size", "3"),
}
MARKERS = {
    "ema.safetensors": "/ema.safetensors",
    "shards": "/model.safetensors.index.json",
    "resharded": "/.metadata",
    "saved": "/.metadata",
}


class HeldMarker:
    """A rule of the proxy: the marker is passed on a second after it came, whoever still waits for it."""

    def __init__(self, name: str) -> None:
        self.came = threading.Event()
        self._end = MARKERS[name]

    def __call__(self, request: Request) -> None:
        is_end = request.method == "POST" and "uploadId" in request.query
        is_whole = request.method == "PUT" and not request.is_part
        if request.path.endswith(self._end) and (is_end or is_whole):
            self.came.set()
            time.sleep(1)


def verdict(url: str, proxy: Proxy) -> str:
    """What `verify` says once the store has done all that it was asked."""
    time.sleep(1.5)
    proxy.rule = lambda request: None
    return ema_ckpt.verify(url, values=True).status


@pytest.mark.parametrize("server", ["nanio"], indirect=True)  # it is about the client
@pytest.mark.parametrize(
    ("name", "is_there", "stop"),
    [
        ("resharded", True, signal.SIGINT),
        ("resharded", True, signal.SIGTERM),
        ("resharded", False, signal.SIGINT),
        ("shards", True, signal.SIGINT),
        ("ema.safetensors", True, signal.SIGTERM),
    ],
)
def test_a_command_that_is_stopped_while_the_marker_is_written(
    name: str, is_there: bool, stop: signal.Signals, proxy: Proxy, source: Path, tmp_path: Path
) -> None:
    url = f"s3://bucket/runs/{name}"
    if is_there:
        WRITERS.get(name, ema_ckpt.consolidate)(source, url)
    proxy.rule = held = HeldMarker(name)
    verb, *more = COMMANDS[name]
    command = Command(verb, str(source), url, *more, *["--overwrite"] * is_there)
    assert held.came.wait(60)
    time.sleep(0.3)
    command.process.send_signal(stop)
    code, _, err = command.end()
    assert code == 128 + stop, err
    assert f"{url}: is complete, it was interrupted too late" in err
    assert "Traceback" not in err
    assert verdict(url, proxy) == "sound"
    assert uploads() == []
    assert not [key for key in objects("s3://bucket") if key.endswith(".note")]


SAVE = """
import sys, torch
from ema_ckpt import ShardedEMA, save
torch.manual_seed(int(sys.argv[2]))
model = torch.nn.Linear(100, 100)
options = {"overwrite": True, "async_save": sys.argv[3] == "in background"}
saving = save(sys.argv[1], model=model, ema=ShardedEMA(model), **options)
if options["async_save"]:
    saving.result()
"""


@pytest.mark.parametrize("server", ["nanio"], indirect=True)  # it is about the client
@pytest.mark.parametrize(
    ("where", "stop"),
    [("in line", signal.SIGINT), ("in line", signal.SIGTERM), ("in background", signal.SIGINT)],
)
def test_a_save_that_is_stopped_while_the_marker_is_written(
    where: str, stop: signal.Signals, proxy: Proxy
) -> None:
    """SIGTERM ends Python at once: nothing is deleted then, and the store does what it was asked."""
    url = "s3://bucket/runs/step_1"

    def start(seed: int) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", SAVE, url, str(seed), where]
        environment = {**os.environ, "PYTHONPATH": str(REPO)}
        return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)

    _, err = start(1).communicate(timeout=120)
    before = objects(url)[".metadata"]
    proxy.rule = held = HeldMarker("saved")
    process = start(2)
    assert held.came.wait(60)
    time.sleep(0.3)
    process.send_signal(stop)
    _, err = process.communicate(timeout=120)
    assert verdict(url, proxy) == "sound"
    assert objects(url)[".metadata"] != before, err
