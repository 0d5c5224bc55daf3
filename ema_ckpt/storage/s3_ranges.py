"""Ranges of objects in S3, each compared by its entity tag with the first that was read.

fsspec gives the bytes alone, and a listing before and after is not always allowed: an object that
was replaced in between would be read as half the old and half the new one.
https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ema_ckpt.storage.remote import ReplacedError, ShortAnswerError
from ema_ckpt.storage.s3_answers import ForeignAnswerError, payer

if TYPE_CHECKING:
    from fsspec.asyn import AsyncFileSystem

_BODY_SECONDS = 300.0  # the client's own limit begins anew with every byte


class S3Ranges:
    """Reads ranges, and keeps the entity tag of each object from its first answer."""

    def __init__(self, filesystem: AsyncFileSystem) -> None:
        self._filesystem: Any = filesystem
        self._tags: dict[str, str] = {}

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` of an object.

        Raises:
            ReplacedError: it is another one than before.
            ShortAnswerError: more bytes are sent than were asked for; they are not read.
            ForeignAnswerError: the answer is none of S3.
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
        import asyncio

        bucket, key, version = self._filesystem.split_path(path)
        place = {"Bucket": bucket, "Key": key} | ({"VersionId": version} if version else {})
        place |= payer(self._filesystem)
        answer: Mapping[str, Any] = await self._filesystem._call_s3(
            "get_object", **place, Range=f"bytes={start}-{stop - 1}"
        )
        body, said = answer["Body"], answer.get("ContentLength", stop - start)
        try:
            if said > stop - start:  # as of a server that sends the whole object for any range
                raise ShortAnswerError(f"the server sends {said} bytes for {stop - start}")
            async with asyncio.timeout(_BODY_SECONDS):
                data: bytes = await body.read()
        finally:
            body.close()
        self._compare(path, str(answer.get("ETag") or "").strip('"'), len(data) == stop - start)
        return data

    def _compare(self, path: str, tag: str, is_whole: bool) -> None:
        """Compare the entity tag of an object with the former one; keep that of a whole answer.

        What is cut short may be a proxy's own, and is asked for again.
        """
        known = self._tags.get(path)
        if not known:
            if tag and is_whole:
                self._tags[path] = tag
        elif not tag:
            raise ForeignAnswerError("the answer has no entity tag, and is none of S3")
        elif known != tag:
            raise ReplacedError
