"""S3's multipart uploads: an object in parts that are sent in any order and appear as one.

The parts of an upload that was begun stay in the store until it is completed or aborted; they can
be listed, which is how an interrupted run goes on.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import logging
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Any, NamedTuple

from ema_ckpt.core.crc import crc32
from ema_ckpt.core.display import displayed
from ema_ckpt.core.errors import AccessError, RefusedError, TargetError
from ema_ckpt.storage.directories import join
from ema_ckpt.storage.object_store import ObjectStore
from ema_ckpt.storage.remote import ask, stamp_of
from ema_ckpt.storage.s3_answers import is_s3, payer

LEAST_PART_NBYTES = 5 << 20  # but for the last one
MAX_PARTS = 10_000
# What stores answer that do not list uploads in progress, or their parts.
_NOT_LISTED = (errno.ENOSYS, errno.EINVAL, errno.EPERM)
_PART_FIELDS = ("ETag", "ChecksumCRC32")


def has_multipart(store: ObjectStore) -> bool:
    """Whether the store's client speaks S3."""
    return is_s3(store.filesystem)


def check_bucket(store: ObjectStore) -> None:
    """Check that the bucket is there. Raises TargetError `not-found`, AccessError `unreadable`."""
    bucket, _, _ = store.filesystem.split_path(store.path(""))
    with contextlib.suppress(RefusedError):  # who may not ask for a bucket may yet write to it
        store.request(lambda: store.filesystem.call_s3("head_bucket", Bucket=bucket), "")


class StoredPart(NamedTuple):
    """A part that an upload has: its length, and what the store says of its bytes."""

    nbytes: int
    fields: Mapping[str, str]

    def has(self, data: memoryview) -> bool:
        """Whether these are its bytes, as far as the store tells: by CRC-32, else by MD5."""
        if len(data) != self.nbytes:
            return False
        if "ChecksumCRC32" in self.fields:
            return self.fields["ChecksumCRC32"] == _encoded_crc(data)
        etag = self.fields.get("ETag", "").strip('"')
        return hashlib.md5(data, usedforsecurity=False).hexdigest() == etag


class MultipartUpload:
    """An upload of one object.

    Attributes:
        upload_id: by which the store knows it.
        stored: parts that an earlier run sent, by number from 1 on.
    """

    def __init__(self, store: ObjectStore, name: str, upload_id: str | None = None) -> None:
        """Begin an upload, or go on with one."""
        self._store = store
        self._name = name
        bucket, key, _ = store.filesystem.split_path(store.path(name))
        self._place = {"Bucket": bucket, "Key": key}
        self._parts: dict[int, Mapping[str, str]] = {}
        self.stored: dict[int, StoredPart] = {}
        if upload_id is None:
            begun = self._call("create_multipart_upload", ChecksumAlgorithm="CRC32")
            upload_id = str(begun["UploadId"])
        else:
            self._place["UploadId"] = upload_id
            self.stored = dict(self._list_parts())
        self.upload_id = upload_id
        self._place["UploadId"] = upload_id

    @classmethod
    def resumed(cls, store: ObjectStore, name: str, upload_id: str | None) -> MultipartUpload:
        """Go on with an upload, or begin one if there is none, or none any more."""
        if upload_id is not None:
            try:
                return cls(store, name, upload_id)
            except TargetError as error:
                if error.code != "not-found":
                    raise
            except RefusedError as error:
                what = f"{error}: all of it is sent again"
                logging.getLogger("ema_ckpt").warning(displayed(what))
                with contextlib.suppress(RefusedError):
                    abort_upload(store, name, upload_id)
        return cls(store, name)

    def send(self, number: int, data: BytesIO) -> bool:
        """Send a part, counted from 1; False if the upload has it already."""
        stored = self.stored.get(number)
        with data.getbuffer() as view:
            crc = _encoded_crc(view)
            if stored is not None and stored.has(view):
                self._parts[number] = stored.fields
                return False
        answer = self._call("upload_part", PartNumber=number, Body=data, ChecksumCRC32=crc)
        self._parts[number] = _fields(answer)
        return True

    def complete(self, nbytes: int) -> None:
        """Make the object of so many bytes appear; all parts have to be there."""
        parts = [{"PartNumber": n, **fields} for n, fields in sorted(self._parts.items())]
        before = self._there()
        try:
            self._call("complete_multipart_upload", MultipartUpload={"Parts": parts})
        except (TargetError, AccessError) as error:
            # Asked again after an answer that was lost, the store knows no such upload any more. So
            # it says too if the bucket has aborted the upload, and an object that was there before
            # often has the same length. What cannot be understood may be an answer all the same.
            if isinstance(error, TargetError) and error.code != "not-found":
                raise
            now: tuple[int | None, str] = None, ""
            with contextlib.suppress(AccessError):
                now = self._there()
            if now == before or now[0] != nbytes:
                raise

    def abort(self) -> None:
        """Delete what was sent, unless there is no such upload any more."""
        abort_upload(self._store, self._name, self.upload_id)

    def _there(self) -> tuple[int | None, str]:
        """Bytes of the object that has the name now, and what tells it from others."""
        filesystem, path = self._store.filesystem, self._store.path(self._name)
        try:
            info = ask(lambda: filesystem.info(path, refresh=True), self._name, self._store.url)
        except (FileNotFoundError, RefusedError):
            return None, ""
        return int(info["size"] or 0), stamp_of(info)

    def _list_parts(self) -> Iterator[tuple[int, StoredPart]]:
        marker = 0
        while True:
            more = {**self._place, "PartNumberMarker": marker}
            answer = _list(self._store, self._name, "list_parts", more)
            for part in answer.get("Parts", ()):
                yield int(part["PartNumber"]), StoredPart(int(part["Size"]), _fields(part))
            if not answer.get("IsTruncated"):
                return
            marker = int(_next(self._store, self._name, answer, "NextPartNumberMarker"))

    def _call(self, method: str, **values: Any) -> Mapping[str, Any]:
        return _call(self._store, self._name, method, **self._place, **values)


def abort_upload(store: ObjectStore, name: str, upload_id: str) -> None:
    """Delete what was sent of an object, unless there is no such upload any more."""
    bucket, key, _ = store.filesystem.split_path(store.path(name))
    place = {"Bucket": bucket, "Key": key, "UploadId": upload_id}
    try:
        _call(store, name, "abort_multipart_upload", **place)
    except TargetError as error:
        if error.code != "not-found":
            raise


def put_object(store: ObjectStore, name: str, data: BytesIO) -> None:
    """Write an object at once."""
    bucket, key, _ = store.filesystem.split_path(store.path(name))
    _call(store, name, "put_object", Bucket=bucket, Key=key, Body=data)


def uploads_below(store: ObjectStore, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield name and id of the uploads in progress whose names begin with `prefix`."""
    bucket, base, _ = store.filesystem.split_path(store.path(""))
    place = {"Bucket": bucket, "Prefix": f"{base}{prefix}"}
    more: dict[str, str] = {}
    while True:
        answer = _list(store, prefix, "list_multipart_uploads", {**place, **more})
        for upload in answer.get("Uploads", ()):
            yield str(upload["Key"]).removeprefix(base), str(upload["UploadId"])
        if not answer.get("IsTruncated"):
            return
        more = {"KeyMarker": _next(store, prefix, answer, "NextKeyMarker")}
        if answer.get("NextUploadIdMarker"):
            more["UploadIdMarker"] = str(answer["NextUploadIdMarker"])


def _next(store: ObjectStore, name: str, answer: Mapping[str, Any], field: str) -> str:
    """Return where the next page of a list begins. Raises RefusedError if it is not said."""
    if not answer.get(field):
        message = f"{join(store.url, name)}: the store sends part of a list without {field}"
        raise RefusedError("unreadable", message)
    return str(answer[field])


def _list(
    store: ObjectStore, name: str, method: str, values: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Call S3 for a list that not every store has. Raises RefusedError where there is none."""
    values = {**values, **payer(store.filesystem)}

    def call() -> Mapping[str, Any]:
        try:
            answer: Mapping[str, Any] = store.filesystem.call_s3(method, **values)
        except OSError as error:
            if error.errno in _NOT_LISTED:
                raise PermissionError(f"{method}: {error.strerror}") from error
            raise
        return answer

    return store.request(call, name)


def _call(store: ObjectStore, name: str, method: str, **values: Any) -> Mapping[str, Any]:
    """Call S3; a body is sent from its start each time, read by the client as it goes."""
    body = values.get("Body")
    values |= payer(store.filesystem)

    def call() -> Mapping[str, Any]:
        if body is not None:
            body.seek(0)
        answer: Mapping[str, Any] = store.filesystem.call_s3(method, **values)
        return answer

    return store.request(call, name)


def _fields(answer: Mapping[str, Any]) -> dict[str, str]:
    return {field: str(answer[field]) for field in _PART_FIELDS if answer.get(field)}


def _encoded_crc(data: memoryview) -> str:
    return base64.b64encode(crc32(data).to_bytes(4, "big")).decode()
