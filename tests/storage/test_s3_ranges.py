"""Ranges of objects in S3, where a server sends something else than was asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import fsspec.asyn
import pytest

from ema_ckpt.core.errors import RefusedError
from ema_ckpt.storage import s3_ranges
from ema_ckpt.storage.multipart import uploads_below
from ema_ckpt.storage.remote import ShortAnswerError
from ema_ckpt.storage.s3_answers import ForeignAnswerError, has_objects
from ema_ckpt.storage.s3_ranges import S3Ranges


class Body:
    seconds = 0.0

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.is_read, self.is_closed = nbytes, False, False

    async def read(self) -> bytes:
        self.is_read = True
        await asyncio.sleep(self.seconds)
        return bytes(self.nbytes)

    def close(self) -> None:
        self.is_closed = True


class Client:
    """The part of s3fs that is used; it sends `nbytes` for any range."""

    loop = fsspec.asyn.get_loop()

    def __init__(self, nbytes: int) -> None:
        self.body = Body(nbytes)

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = path.partition("/")
        return bucket, key, None

    async def _call_s3(self, *_: object, **__: object) -> dict[str, Any]:
        return {"Body": self.body, "ContentLength": self.body.nbytes, "ETag": '"a"'}


def test_an_object_that_is_sent_whole_for_a_range_is_not_read() -> None:
    """A server that ignores ranges sent an object of many gigabytes into memory, several times."""
    whole, part = Client(1 << 20), Client(16)
    with pytest.raises(ShortAnswerError, match="1048576 bytes for 16"):
        S3Ranges(whole).read("bucket/key", 0, 16)
    assert whole.body.is_closed
    assert not whole.body.is_read
    assert S3Ranges(part).read("bucket/key", 0, 16) == bytes(16)


def test_a_body_that_comes_byte_by_byte_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own limit begins anew with every byte."""
    monkeypatch.setattr(s3_ranges, "_BODY_SECONDS", 0.1)
    client = Client(16)
    client.body.seconds = 30.0
    with pytest.raises(TimeoutError):
        S3Ranges(client).read("bucket/key", 0, 16)
    assert client.body.is_closed


class Lists:
    """A store whose every list is a part of one, without a word on how it goes on."""

    url, protocol = "s3://bucket/runs", ("s3",)

    @property
    def filesystem(self) -> Lists:
        return self

    def path(self, name: str) -> str:
        return f"bucket/runs/{name}"

    def split_path(self, path: str) -> tuple[str, str, None]:
        return "bucket", path.partition("/")[2], None

    def call_s3(self, method: str, **values: object) -> dict[str, object]:
        return {"IsTruncated": True}

    def request(self, action: Any, name: str) -> object:
        return action()


def test_a_list_that_does_not_say_how_it_goes_on_is_refused() -> None:
    with pytest.raises(RefusedError, match="without NextKeyMarker"):
        list(uploads_below(Lists(), ""))
    with pytest.raises(ForeignAnswerError, match="how it goes on"):
        has_objects(Lists(), "bucket/runs")
