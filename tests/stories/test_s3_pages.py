"""Answers with status 200 that are none of S3: a proxy's page to log in, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

import ema_ckpt
from ema_ckpt.storage.remote import ONCE
from tests.checkpoints import digests_of_files
from tests.s3_server import Proxy, Request
from tests.stories import test_object_targets
from tests.stories.test_object_targets import MEMORY, objects, s3fs

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

server = test_object_targets.server
proxy = test_object_targets.proxy
source = test_object_targets.source

RUN = "s3://bucket/run"


def fill_run() -> None:
    """Two complete steps."""
    for step in (1, 2):
        ema_ckpt.save(f"{RUN}/step_{step}", model=torch.nn.Linear(3, 2))


@pytest.mark.parametrize("what", ["page", "nothing"])
def test_a_listing_that_is_none_is_no_empty_directory(what: str, proxy: Proxy) -> None:
    """`latest` would say that there is nothing to go on from, or an older step."""
    fill_run()
    proxy.requests.clear()
    assert ema_ckpt.latest(RUN) == f"{RUN}/step_2"
    for number in range(len(proxy.requests)):
        count = 0

        def rule(request: Request, wrong: int = number) -> str | None:
            nonlocal count
            count += 1
            return what if count == wrong + 1 else None

        proxy.rule = rule
        assert ema_ckpt.latest(RUN) == f"{RUN}/step_2", number


def test_an_empty_page_before_others_is_no_empty_directory(proxy: Proxy) -> None:
    """As stores send them that pass over deleted objects; s3fs asks for one page to tell a directory."""
    fill_run()
    proxy.rule = lambda request: (
        "later" if request.method == "GET" and "list-type" in request.query else None
    )
    assert ema_ckpt.latest(RUN) == f"{RUN}/step_2"
    assert ema_ckpt.latest("s3://bucket/none") is None
    assert ema_ckpt.verify(RUN).status == "sound"
    with pytest.raises(ema_ckpt.TargetError) as caught:
        ema_ckpt.save(f"{RUN}/step_2", model=torch.nn.Linear(3, 2))
    assert caught.value.code == "target-exists"
    ema_ckpt.save(f"{RUN}/step_3", model=torch.nn.Linear(3, 2))
    assert ema_ckpt.latest(RUN) == f"{RUN}/step_3"


@pytest.mark.parametrize("what", ["page", "nothing"])
def test_a_server_that_only_says_200_is_trouble(
    what: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ema_ckpt.storage.remote._READ_PATIENCE", ONCE)
    fill_run()
    for place in ("GET", "HEAD", "all"):
        proxy.rule = lambda request, place=place: (
            what if request.method == place or place == "all" else None
        )
        for ask in (ema_ckpt.latest, ema_ckpt.verify, ema_ckpt.inspect):
            with pytest.raises(ema_ckpt.EmaCkptError) as caught:
                ask(RUN)
            assert caught.value.code == "unreadable", (place, ask)


def is_completion(request: Request) -> bool:
    return request.method == "POST" and "uploadId" in request.query


def is_beginning(request: Request) -> bool:
    return request.method == "POST" and "uploads" in request.query


def is_marker(request: Request) -> bool:
    return request.method == "PUT" and request.path.endswith("/.metadata")


REQUESTS: dict[str, Callable[[Request], bool]] = {
    "begin": is_beginning,
    "part": lambda request: request.is_part,
    "complete": is_completion,
    "marker": is_marker,
}


@pytest.mark.parametrize("what", ["page", "nothing"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_what_a_proxy_took_for_the_store_is_sent_again(
    kind: str, what: str, proxy: Proxy, source: Path, tmp_path: Path
) -> None:
    ema_ckpt.reshard(source, tmp_path / "out", 2)
    seen = list[Request]()

    def rule(request: Request) -> str | None:
        if not REQUESTS[kind](request):
            return None
        seen.append(request)
        return what if len(seen) == 1 else None

    proxy.rule = rule
    ema_ckpt.reshard(source, "s3://bucket/out", 2, max_memory=MEMORY)
    assert len(seen) >= 2
    assert objects("s3://bucket/out") == digests_of_files(tmp_path / "out")


def test_a_save_that_the_store_never_got_fails(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ema_ckpt.storage.remote.time.sleep", lambda seconds: None)
    model = torch.nn.Linear(3, 2)
    ema_ckpt.save(f"{RUN}/step_1", model=model)
    proxy.rule = lambda request: "page" if is_marker(request) else None
    with pytest.raises(ema_ckpt.EmaCkptError):
        ema_ckpt.save(f"{RUN}/step_2", model=model)
    proxy.reset()
    assert ema_ckpt.latest(RUN) == f"{RUN}/step_1"


def test_who_pays_for_requests_says_so_with_each(
    proxy: Proxy, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older releases of s3fs leave that to whoever calls S3 through them."""
    monkeypatch.setitem(fsspec.config.conf, "s3", {"requester_pays": True})
    s3fs.S3FileSystem.clear_instance_cache()
    usual = s3fs.S3FileSystem._get_s3_method_kwargs

    def older(self: object, *args: object, **kwargs: object) -> object:
        given = usual(self, *args, **kwargs)
        return (
            given
            if "RequestPayer" in kwargs
            else {k: v for k, v in given.items() if k != "RequestPayer"}
        )

    monkeypatch.setattr(s3fs.S3FileSystem, "_get_s3_method_kwargs", older)
    ema_ckpt.reshard(source, "s3://bucket/out", 2, max_memory=MEMORY)
    assert ema_ckpt.verify("s3://bucket/out").status == "sound"
    ours = [r for r in proxy.requests if r.is_part or r.method == "POST"]
    ours += [r for r in proxy.requests if r.method == "GET" and r.path.endswith(".distcp")]
    assert {one.payer for one in ours} == {"requester"}
