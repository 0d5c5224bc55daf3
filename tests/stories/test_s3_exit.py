"""Scripts whose last statement is an asynchronous save to S3: the process ends once it is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import ema_ckpt
from tests.s3_server import Proxy, Request
from tests.stories import test_object_targets
from tests.stories.test_object_targets import REPO, environment, objects, uploads

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        (3, 12, 0) <= sys.version_info[:3] <= (3, 12, 2),
        reason="starts no thread once the script ended",
    ),
]

server = test_object_targets.server
proxy = test_object_targets.proxy

URL = "s3://bucket/run/step_1"
SCRIPT = f"""
import torch
from ema_ckpt import ShardedEMA, save
model = torch.nn.Sequential(torch.nn.Linear(2000, 2000), torch.nn.Linear(2000, 2000))
save("{URL}", model=model, ema=ShardedEMA(model), async_save=True)
"""


def run_script(proxy: Proxy) -> subprocess.CompletedProcess[str]:
    # A host that is a name is looked up in an executor of asyncio's, an address is not.
    endpoint = {"AWS_ENDPOINT_URL": f"http://localhost:{proxy.port}"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        timeout=120,
        env={**os.environ, **environment(proxy), **endpoint, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_exit_waits_for_a_save_to_a_host_with_a_name(proxy: Proxy) -> None:
    ended = run_script(proxy)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert {name.rpartition("/")[2] for name in objects(URL)} == {
        "__0_0.distcp", "ema_ckpt.json", ".metadata",
    }  # fmt: skip
    assert ema_ckpt.verify(URL).status == "sound"
    assert uploads() == []


def test_a_save_that_the_store_refuses_is_told_at_the_exit(proxy: Proxy) -> None:
    def rule(request: Request) -> str | None:
        return "refuse" if request.method in ("PUT", "POST") else None

    proxy.rule = rule
    ended = run_script(proxy)
    assert "the last asynchronous save failed: " in ended.stderr
    assert "AccessDenied" in ended.stderr
    assert ".metadata" not in {name.rpartition("/")[2] for name in objects(URL)}
