"""Ranges of objects in S3, each compared by its entity tag with the first that was read.

fsspec gives the bytes alone, and a listing before and after is not always allowed: an object that
was replaced in between would be read as half the old and half the new one.
https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ema_ckpt.storage.remote import ReplacedError

if TYPE_CHECKING:
    from fsspec.asyn import AsyncFileSystem


def is_s3(filesystem: object) -> bool:
    """Whether a file system speaks S3 itself, through s3fs."""
    protocol = getattr(filesystem, "protocol", ())
    protocols = (protocol,) if isinstance(protocol, str) else protocol
    return "s3" in protocols and hasattr(filesystem, "_call_s3")


class S3Ranges:
    """Reads ranges, and keeps the entity tag of each object from its first answer."""

    def __init__(self, filesystem: AsyncFileSystem) -> None:
        self._filesystem: Any = filesystem
        self._tags: dict[str, str] = {}

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` of an object.

        Raises:
            ReplacedError: it is another one than before.
            Exception: what s3fs raises for other answers, and for none.
        """
        from fsspec.asyn import sync

        data: bytes = sync(self._filesystem.loop, self._ask, path, start, stop)
        return data

    def read_several(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[object]:
        """Ask for several ranges at a time; what fails is an exception among the answers."""
        from fsspec.asyn import sync

        answers: list[object] = sync(self._filesystem.loop, self._ask_several, path, ranges)
        return answers

    async def _ask_several(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[object]:
        import asyncio

        questions = [self._ask(path, start, stop) for start, stop in ranges]
        return list(await asyncio.gather(*questions, return_exceptions=True))

    async def _ask(self, path: str, start: int, stop: int) -> bytes:
        bucket, key, version = self._filesystem.split_path(path)
        place = {"Bucket": bucket, "Key": key} | ({"VersionId": version} if version else {})
        answer: Mapping[str, Any] = await self._filesystem._call_s3(
            "get_object", **place, Range=f"bytes={start}-{stop - 1}"
        )
        body = answer["Body"]
        try:
            tag = str(answer.get("ETag") or "").strip('"')
            if self._tags.setdefault(path, tag) != tag:
                raise ReplacedError
            data: bytes = await body.read()
        finally:
            body.close()
        return data
