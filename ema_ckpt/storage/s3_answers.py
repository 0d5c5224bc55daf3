"""Answers of S3, each checked to be one.

The client takes any XML for an answer, and a page in HTML is often XML too. Where a proxy says 200
and means "log in first", a listing is empty, and an object was sent and is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsspec.asyn import AsyncFileSystem

_LISTING = ("IsTruncated", "Name", "KeyCount", "MaxKeys", "Contents", "CommonPrefixes")
# Fields of which an answer with status 200 has at least one, whoever has made the store.
_FIELDS: Mapping[str, Sequence[str]] = {
    "ListObjectsV2": _LISTING,
    "ListObjects": _LISTING,
    "ListObjectVersions": (*_LISTING, "Versions", "DeleteMarkers"),
    "ListMultipartUploads": ("IsTruncated", "Bucket", "MaxUploads", "Uploads"),
    "ListParts": ("IsTruncated", "Bucket", "Key", "MaxParts", "UploadId", "Parts"),
    "HeadObject": ("ETag", "LastModified"),
    "PutObject": ("ETag",),
    "CopyObject": ("CopyObjectResult",),
    "CreateMultipartUpload": ("UploadId",),
    "UploadPart": ("ETag",),
    "CompleteMultipartUpload": ("ETag", "Location", "Bucket", "Key"),
}
# What takes long: some stores send blanks until they have an answer.
_LONG = ("CompleteMultipartUpload", "CopyObject", "UploadPartCopy")


class ForeignAnswerError(Exception):
    """Something else than S3 has answered."""


def is_s3(filesystem: object) -> bool:
    """Whether a file system speaks S3 itself, through s3fs."""
    protocol = getattr(filesystem, "protocol", ())
    protocols = (protocol,) if isinstance(protocol, str) else protocol
    return "s3" in protocols and hasattr(filesystem, "_call_s3")


def check_answers(filesystem: AsyncFileSystem, path: str) -> None:
    """Have the client that asks for `path` raise ForeignAnswerError for what is no answer of S3."""
    from fsspec.asyn import sync

    sync(filesystem.loop, _check_answers, filesystem, path)


def payer(filesystem: Any) -> Mapping[str, str]:
    """Return what says with a request who pays for it, which not every release of s3fs adds."""
    fields: Mapping[str, str] = getattr(filesystem, "req_kw", {})
    return fields


def has_objects(filesystem: Any, path: str) -> bool:
    """Whether objects lie below `path`, on whichever page of its listing.

    s3fs looks at the first page alone. Stores pass over what was deleted, and may send that page
    empty, with the word that it is not the last one. Raises FileNotFoundError as s3fs.
    """
    bucket, key, _ = filesystem.split_path(path)
    place: dict[str, Any] = {"Bucket": bucket, "Prefix": f"{key}/" if key else "", "MaxKeys": 1}
    place |= payer(filesystem)
    while True:
        answer: Mapping[str, Any] = filesystem.call_s3("list_objects_v2", **place)
        if answer.get("Contents") or not answer.get("IsTruncated"):
            return bool(answer.get("Contents"))
        token = answer.get("NextContinuationToken")
        if not token:
            raise ForeignAnswerError("the store sends part of a list, and not how it goes on")
        place["ContinuationToken"] = token


async def _check_answers(filesystem: Any, path: str) -> None:
    await filesystem.set_session()
    bucket, _, _ = filesystem.split_path(path)
    client = await filesystem.get_s3(bucket or None)
    for operation, fields in _FIELDS.items():
        event = f"after-call.s3.{operation}"
        client.meta.events.register(event, _checker(fields), unique_id=f"ema_ckpt-{operation}")
    for operation in _LONG:
        event = f"before-parse.*.{operation}"  # the client calls it before its own for `s3.*`
        client.meta.events.register_first(event, _strip, unique_id=f"ema_ckpt-strip-{operation}")


def _strip(response_dict: dict[str, Any], **_: object) -> None:
    """Remove blanks before an answer; before its declaration the client takes it for no XML."""
    body = response_dict.get("body")
    if isinstance(body, bytes):
        response_dict["body"] = body.lstrip()


def _checker(fields: Sequence[str]) -> Callable[..., None]:
    def check(parsed: Mapping[str, Any], **_: object) -> None:
        status = parsed.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if 200 <= status < 300 and not any(field in parsed for field in fields):
            message = f"the answer with status {status} is none of S3, but of a proxy or a page"
            raise ForeignAnswerError(message)

    return check
