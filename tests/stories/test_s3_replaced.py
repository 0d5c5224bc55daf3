"""Objects in S3 that are replaced while they are read, with and without the right to list them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt
from tests.s3_server import Proxy, Request
from tests.stories import test_object_targets
from tests.stories.test_object_targets import s3fs

pytestmark = pytest.mark.integration

server = test_object_targets.server
proxy = test_object_targets.proxy

URL = "s3://bucket/w/plain.safetensors"


def read_all(url: str, _: Path) -> object:
    with ema_ckpt.open(url) as opened:
        return {float(opened[name][-1, -1]) for name in opened.keys()}  # noqa: SIM118


VERBS: dict[str, Callable[[str, Path], object]] = {
    "consolidate": lambda url, out: ema_ckpt.consolidate(url, out, max_memory="8MiB", threads=1),
    "diff": lambda url, out: ema_ckpt.diff(url, out.with_name("1.safetensors")),
    "verify": lambda url, out: ema_ckpt.verify(url, values=True),
    "open": read_all,
}


@pytest.mark.parametrize("may_list", [True, False])
@pytest.mark.parametrize("verb", VERBS)
def test_an_object_is_never_read_half_old_and_half_new(
    verb: str, may_list: bool, proxy: Proxy, tmp_path: Path
) -> None:
    """The new one has the same length and the same header, as the weights of the next step have."""
    for value in (1, 2):
        weights = {f"layers.{i}.w": torch.full((1000, 700), float(value)) for i in range(12)}
        save_file(weights, tmp_path / f"{value}.safetensors")
    store = s3fs.S3FileSystem(skip_instance_cache=True)
    path = URL.removeprefix("s3://")
    store.put_file(tmp_path / "1.safetensors", path)
    proxy.requests.clear()
    seen = list[Request]()

    def rule(request: Request) -> str | None:
        if request.method == "GET" and request.path.endswith(path):
            seen.append(request)
            if len(seen) == 9:
                store.put_file(tmp_path / "2.safetensors", path)
        elif request.method == "GET" and not may_list:
            return "refuse"
        return None

    proxy.rule = rule
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        VERBS[verb](URL, tmp_path / "out.safetensors")
    assert caught.value.code == "source-changed"
    assert len(seen) >= 9
    assert not (tmp_path / "out.safetensors").exists()


def test_shards_that_may_not_be_listed_are_of_one_time(proxy: Proxy, tmp_path: Path) -> None:
    """Each object is read whole from one version, and the second one is another than at the beginning."""
    for value in (1, 2):
        torch.manual_seed(0)
        weights = {f"w{i}": torch.full((400, 700), float(value)) for i in range(6)}
        save_file(weights, tmp_path / f"{value}.safetensors")
        ema_ckpt.consolidate(
            tmp_path / f"{value}.safetensors", tmp_path / f"{value}", max_shard_size="4MB"
        )
    store = s3fs.S3FileSystem(skip_instance_cache=True)

    def put(value: int) -> None:
        for file in (tmp_path / f"{value}").iterdir():
            if file.name != "ema_ckpt.json":
                store.put_file(file, f"bucket/hf/{file.name}")

    put(1)
    done = list[Request]()

    def rule(request: Request) -> str | None:
        if request.method == "GET" and "/hf/" not in request.path:
            return "refuse"
        if request.method == "GET" and "00001-of" in request.path and not done:
            reads = [r for r in proxy.requests if r.method == "GET" and "00001-of" in r.path]
            if len(reads) == 4:
                done.append(request)
                put(2)
        return None

    proxy.requests.clear()
    proxy.rule = rule
    out = tmp_path / "out.safetensors"
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.consolidate(
            "s3://bucket/hf/model.safetensors.index.json", out, threads=1, max_memory="8MiB"
        )
    assert done
    assert caught.value.code == "source-changed"
