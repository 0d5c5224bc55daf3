"""Checkpoints behind nginx: as a user serves a directory of them, slowly too, and killed on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ema_ckpt
from tests.checkpoints import save_dcp
from tests.local_ports import free_port, wait_for_server

pytest.importorskip("aiohttp")
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light"),
]
REPO = Path(__file__).parents[2]
CONFIG = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
worker_processes 2;
events {{ worker_connections 64; }}
{user}
http {{
    access_log {folder}/access.log;
    default_type application/octet-stream;
    client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
    uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
    server {{
        listen 127.0.0.1:{port};
        root {root};
        autoindex on;
        location /slow/ {{ alias {root}/; autoindex on; limit_rate 2m; }}
        location /gzip/ {{ alias {root}/; autoindex on; gzip on; gzip_types application/octet-stream; }}
    }}
}}
"""


class Nginx:
    """A server of a directory, on a port of its own."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.port = free_port()
        user = "user root;" if os.getuid() == 0 else ""
        self._log = folder / "access.log"
        config = folder / "nginx.conf"
        config.write_text(CONFIG.format(folder=folder, root=root, port=self.port, user=user))
        self._command = [str(NGINX), "-p", str(folder), "-c", str(config)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stderr=subprocess.DEVNULL, start_new_session=True
        )
        wait_for_server(self.process, self.port)

    def url(self, name: str = "") -> str:
        return f"http://127.0.0.1:{self.port}/{name}"

    def answers(self) -> list[tuple[str, int, int]]:
        """Path, status and bytes of each answer so far."""
        found = []
        for line in self._log.read_text().splitlines():
            _, request, rest = line.split('"')[:3]
            status, nbytes = rest.split()
            found.append((request.split()[1], int(status), int(nbytes)))
        return found

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of 8 MB, and the second as a Hugging Face directory."""
    root = tmp_path_factory.mktemp("served")
    torch.manual_seed(3)
    for step in (1, 2):
        weights = {f"layers.{i}.w": torch.randn(500, 1000) for i in range(4)}
        save_dcp(
            root / "run" / f"step_{step}",
            {"ema": {"weights": weights, "num_updates": torch.tensor(step)}},
        )
    ema_ckpt.consolidate(root / "run", root / "hf", max_shard_size="3MB")
    ema_ckpt.consolidate(root / "run", root / "one.safetensors")
    return root


@pytest.fixture
def nginx(checkpoints: Path, tmp_path: Path) -> Iterator[Nginx]:
    (tmp_path / "nginx").mkdir()
    running = Nginx(checkpoints, tmp_path / "nginx")
    yield running
    running.kill()


@pytest.mark.parametrize("name", ["run", "run/step_1", "hf", "one.safetensors"])
@pytest.mark.parametrize("place", ["", "gzip/"])
def test_verdict_and_listing_are_those_of_the_disk(
    name: str, place: str, nginx: Nginx, checkpoints: Path
) -> None:
    local, served = ema_ckpt.verify(checkpoints / name), ema_ckpt.verify(nginx.url(place + name))
    assert (served.status, served.checked_bytes) == (local.status, local.checked_bytes)
    ours, theirs = ema_ckpt.inspect(checkpoints / name), ema_ckpt.inspect(nginx.url(place + name))
    assert (ours.tensors, ours.trees, ours.ema) == (theirs.tensors, theirs.trees, theirs.ema)


def test_consolidating_reads_ranges_and_gives_the_same_bytes(
    nginx: Nginx, checkpoints: Path, tmp_path: Path
) -> None:
    ema_ckpt.consolidate(nginx.url("run"), tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == (
        checkpoints / "one.safetensors"
    ).read_bytes()
    data = [(status, nbytes) for path, status, nbytes in nginx.answers() if "distcp" in path]
    read = sum(nbytes for status, nbytes in data if status == 206)
    assert 8_000_000 <= read < 1.2 * 8_100_000, "each byte once, as ranges"
    assert not [nbytes for status, nbytes in data if status == 200 and nbytes > 100_000]


def test_a_slow_server_only_takes_longer(nginx: Nginx, checkpoints: Path, tmp_path: Path) -> None:
    ema_ckpt.consolidate(nginx.url("slow/run"), tmp_path / "out.safetensors", threads=2)
    assert (tmp_path / "out.safetensors").read_bytes() == (
        checkpoints / "one.safetensors"
    ).read_bytes()


def command(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ema_ckpt", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("verb", ["consolidate", "verify"])
def test_a_server_that_is_killed_is_no_damage_and_leaves_nothing(
    verb: str, nginx: Nginx, tmp_path: Path
) -> None:
    out = [tmp_path / "out" / "ema.safetensors"] if verb == "consolidate" else []
    process = command(verb, nginx.url("slow/run"), *out, "--threads", 1, "--json")
    wait_for_data(nginx)
    nginx.kill()
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Traceback" not in stderr
    error = json.loads(stdout)["error"]
    assert error["code"] == "unreadable"
    assert nginx.url("slow/run/step_2") in error["message"]
    if out:
        assert not out[0].parent.exists() or os.listdir(out[0].parent) == []


def test_a_server_that_comes_back_is_waited_for(
    nginx: Nginx, checkpoints: Path, tmp_path: Path
) -> None:
    process = command(
        "consolidate", nginx.url("slow/run"), tmp_path / "ema.safetensors", "--threads", 1
    )
    wait_for_data(nginx)
    nginx.kill()
    back = threading.Timer(0.3, nginx.start)
    back.start()
    _, stderr = process.communicate(timeout=120)
    back.join()
    assert process.returncode == 0, stderr
    assert (tmp_path / "ema.safetensors").read_bytes() == (
        checkpoints / "one.safetensors"
    ).read_bytes()


def wait_for_data(nginx: Nginx) -> None:
    """Wait until a data file is being sent: its headers have been read by then."""
    deadline = time.monotonic() + 60
    while not [path for path, _, _ in nginx.answers() if "distcp" in path]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
