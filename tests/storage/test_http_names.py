"""Names of files that an address cannot hold as they are, behind a real web server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import ema_ckpt
from ema_ckpt.storage.directories import base_name, join, list_folder
from tests.storage.http_server import Server, serving

pytest.importorskip("aiohttp")
safetensors = pytest.importorskip("safetensors.numpy")
numpy = pytest.importorskip("numpy")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as running:
        yield running


def write(path: Path, value: float, shard: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.save_file({"a": numpy.full(4, value, "float32")}, path)
    if shard:
        index = {"metadata": {"total_size": 16}, "weight_map": {"a": shard}}
        (path.parent / "model.safetensors.index.json").write_text(json.dumps(index))


def value(path: object, out: Path) -> float:
    ema_ckpt.consolidate(path, out, overwrite=True)
    return float(safetensors.load_file(out)["a"][0])


@pytest.mark.parametrize(
    "name",
    [
        "a#1.st",
        "b?1.st",
        "%2e.st",
        "g%41.st",
        "c d.st",
        "e+f.st",
        "100%.st",
        "\u00e9.st",
        "a::b.st",
    ],
)
def test_a_file_is_read_under_its_own_name(server: Server, tmp_path: Path, name: str) -> None:
    write(tmp_path / "c" / name, 1.0, shard=name)
    for other in ("a", "b", "..st", "gA.st"):  # what a client makes of some of these
        write(tmp_path / "c" / other, 2.0)
    assert value(server.url("c"), tmp_path / "o.safetensors") == 1.0
    assert name in list_folder(server.url("c")).files
    alone = join(server.url("c"), name)
    assert base_name(alone) == name
    assert value(alone, tmp_path / "o.safetensors") == 1.0


@pytest.mark.parametrize(
    "name",
    [
        "%2e%2e/x.st",
        "%2E./x.st",
        "s/.%2e/%2e%2e/x.st",
        "..%2fx.st",
        "..%2Fx.st",
        "s%2F..%2F..%2Fx.st",
    ],
)
def test_no_name_of_an_index_leads_out_of_the_directory(
    server: Server, tmp_path: Path, name: str
) -> None:
    write(tmp_path / "c" / "here.st", 1.0, shard=name)
    write(tmp_path / "x.st", 2.0)
    assert ema_ckpt.verify(server.url("c/")).status == "damaged"
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.consolidate(server.url("c/"), tmp_path / "o.safetensors")
    assert caught.value.code in ("missing-file", "unsafe-path")
    assert not [request for request in server.requests if request.endswith(" /x.st")]


def test_steps_whose_names_a_page_escapes_are_steps(server: Server, tmp_path: Path) -> None:
    for step in (5, 20, 100):
        write(tmp_path / "run" / f"epoch=1-step={step}" / "model.safetensors", step)
    write(tmp_path / "run" / "step_7" / "model.safetensors", 7)
    found = ema_ckpt.inspect(server.url("run"))
    assert found.resolved == server.url("run/epoch%3D1-step%3D100")
    assert not found.warnings
    assert value(server.url("run"), tmp_path / "o.safetensors") == 100.0
    assert ema_ckpt.latest(server.url("run")) == found.resolved


def test_an_address_keeps_the_slash_inside_its_last_component(
    server: Server, tmp_path: Path
) -> None:
    write(tmp_path / "o" / "d" / "x.safetensors", 3.0)
    assert value(server.url("o/d%2Fx.safetensors?alt=media"), tmp_path / "o.safetensors") == 3.0
    assert "GET /o/d%2Fx.safetensors?alt=media" in server.requests


def test_a_host_may_be_an_address_with_two_colons(tmp_path: Path) -> None:
    """fsspec splits chains of URLs there, and `latest` said that nothing is there."""

    class Numeric(Server):
        address_family = socket.AF_INET6
        host = "::1"

    try:
        running = Numeric(tmp_path)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    threading.Thread(target=running.serve_forever, daemon=True).start()
    url = f"http://[::1]:{running.server_port}/run"
    try:
        write(tmp_path / "run" / "step_1" / "model.safetensors", 3.0)
        assert ema_ckpt.latest(url) == f"{url}/step_1"
        assert value(url, tmp_path / "o.safetensors") == 3.0
        assert value(f"{url}/step_1/model.safetensors", tmp_path / "o.safetensors") == 3.0
    finally:
        running.shutdown()
        running.server_close()
