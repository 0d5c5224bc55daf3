"""Steps and parts in one another: real depths are read, endless ones end soon, with a word."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from ema_ckpt.core.errors import SourceError, UsageError
from ema_ckpt.discovery.locate import latest_step, locate_checkpoint, select_steps
from tests.checkpoints import dcp_at, safetensors_at, touch

STEPS = "step_3/step_2/step_1/step_4"


def linked(root: Path, names: list[str], levels: int = 10) -> Path:
    """Directories of which each leads to the next under all `names`."""
    for level in range(levels + 1):
        here = root / f"l{level}"
        here.mkdir(parents=True)
        for name in names if level < levels else ():
            (here / name).symlink_to(f"../l{level + 1}")
    return root / "l0"


STEP_NAMES = [f"step_{number}" for number in range(1, 41)]
PAIRS = [f"x{number}{end}" for number in range(6) for end in ("", "_ema")]


@pytest.mark.parametrize(
    "names",
    [STEP_NAMES[:3], STEP_NAMES, PAIRS, ["model", "ema"]],
    ids=["3", "40", "pairs", "parts"],
)
def test_links_to_one_another_end_soon(names: list[str], tmp_path: Path) -> None:
    root = linked(tmp_path, names)
    begin = time.monotonic()
    with pytest.raises(SourceError) as caught:
        locate_checkpoint(str(root))
    assert time.monotonic() - begin < 20
    assert caught.value.code == "not-a-checkpoint"
    assert "\n" not in str(caught.value)
    assert "levels d" in str(caught.value)


def test_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    root = linked(tmp_path, STEP_NAMES[:3])
    argv = [sys.executable, "-m", "ema_ckpt", "verify", str(root)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "steps in steps are followed 4 levels deep" in ended.stderr


def test_a_checkpoint_at_the_end_of_links_is_read_at_its_own_path(tmp_path: Path) -> None:
    root = linked(tmp_path, STEP_NAMES[:3])
    safetensors_at(tmp_path / "l10" / "model.safetensors")
    with pytest.raises(SourceError, match="levels deep"):
        locate_checkpoint(str(root))
    with pytest.raises(SourceError, match="levels deep"):
        latest_step(str(root))
    with pytest.raises(UsageError, match="levels deep"):
        select_steps(str(root), count=2)
    assert locate_checkpoint(str(tmp_path / "l6")).names == ("model.safetensors",)


def test_four_levels_of_steps_are_followed(tmp_path: Path) -> None:
    dcp_at(tmp_path / "run" / STEPS / "model")
    dcp_at(tmp_path / "run" / STEPS / "ema")
    found = locate_checkpoint(str(tmp_path / "run"))
    assert found.root == f"{tmp_path}/run/{STEPS}"
    assert locate_checkpoint(str(tmp_path)).root == found.root
    steps, _ = select_steps(str(tmp_path / "run"), count=None)
    assert steps == [f"{tmp_path}/run/step_3"]


def test_a_step_too_deep_is_left_out_with_a_word(tmp_path: Path) -> None:
    dcp_at(tmp_path / "step_2")
    dcp_at(tmp_path / "step_9" / STEPS / "step_5")
    found = locate_checkpoint(str(tmp_path))
    assert found.root == f"{tmp_path}/step_2"
    assert [item.path for item in found.left_out] == ["step_9"]
    assert "levels deep" in found.left_out[0].why


def test_what_lies_beside_steps_too_deep_is_found(tmp_path: Path) -> None:
    touch(tmp_path / "step_9" / STEPS / "step_5" / "log.txt")
    dcp_at(tmp_path / "final")
    found = locate_checkpoint(str(tmp_path))
    assert found.root == f"{tmp_path}/final"
    assert any("levels deep" in item.why for item in found.left_out)


def test_parts_in_parts_are_followed_two_levels(tmp_path: Path) -> None:
    dcp_at(tmp_path / "a" / "model")
    dcp_at(tmp_path / "a" / "unet" / "unet")
    dcp_at(tmp_path / "a" / "unet" / "unet_ema")
    dcp_at(tmp_path / "a" / "unet_ema")
    assert locate_checkpoint(str(tmp_path / "a" / "unet")).format == "parts"
    dcp_at(tmp_path / "b" / "model" / "model" / "ema" / "model")
    dcp_at(tmp_path / "b" / "optim")
    found = locate_checkpoint(str(tmp_path / "b"))
    assert [name for name, _ in found.parts] == ["optim"]
    assert "model" in [item.path for item in found.left_out]


def test_the_same_limit_in_memory() -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/depth/run/" + "step_1/" * 12 + "notes.txt", b"x")
    try:
        with pytest.raises(SourceError, match="levels deep"):
            locate_checkpoint("memory://depth/run")
    finally:
        files.rm("/depth", recursive=True)


class _Endless(http.server.BaseHTTPRequestHandler):
    """Every page lists a step, whatever its address."""

    def do_GET(self) -> None:
        page = b'<html><a href="step_1/">step_1/</a></html>'
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endless() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Endless)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/run"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("end", ["", "/", "#f"])
def test_a_server_whose_every_page_lists_a_step(end: str, endless: str) -> None:
    pytest.importorskip("aiohttp")
    argv = [sys.executable, "-m", "ema_ckpt", "inspect", endless + end]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1, ended.stderr[-2000:]
    assert "Traceback" not in ended.stderr
