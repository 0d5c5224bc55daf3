"""Ranges of files behind HTTP: an answer is believed only if it says that it is what was asked for.

RFC 9110: a part has status 206 (15.3.7) and says in `Content-Range` (14.4) which bytes it holds; of
two parts with different entity tags (8.8.3) the file was replaced in between. Where there is no
strong tag, weak ones and `Last-Modified` (8.8.2) tell as much as servers know.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ema_ckpt.storage.remote import ReplacedError, ShortAnswerError, split_query

if TYPE_CHECKING:
    from fsspec.implementations.http import HTTPFileSystem

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_TOTAL = re.compile(r"bytes (?:\d+-\d+|\*)/(\d+)")
_PLAIN = ("", "identity")
_VALIDATORS = ("ETag", "Last-Modified")
_WEAK = "W/"
PAGE = "text/html"
_PAGE_TYPES = (PAGE, "application/xhtml+xml")
_JSON = "application/json"
_TEXT_TYPE = re.compile(r"text/.*|.*[/+](?:json|xml)")
_PROBLEM = "application/problem+json"
_HEAD_NBYTES = 64
# How what a server sends in place of a file begins: files have zeros there, or are JSON by name.
_BEGINS_AS_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*[<{\[\"][^\0]*\Z")
# What is called a page and is but text is no file either, unless it points to one in Git LFS.
_IS_TEXT = re.compile(rb"(?!\x80|version https://git-lfs)[\t\n\r -~\x80-\xf4]*\Z")
# No index, configuration or digests begin with what programs say of an error.
_BEGINS_AS_ERROR = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<|\{\s*\"(?:errors?|err|err_?(?:code|no|msg)|error_?(?:code|message)|"
    rb"exception|fault|messages?|msg|details?|status|status_?code|code|success|ok|timestamp|"
    rb"remoteexception)\")",
    re.IGNORECASE,
)
_MOST_PAGE_NBYTES = 256 << 10
# What a page that says something has, if it is one that lists what is there, be it nothing.
_LISTS = re.compile(rb"href|<(?:ul|ol|pre|table)\b|index of|director|folder|empty", re.IGNORECASE)
_MARKUP = re.compile(rb"<[^>]*>|\s")
# What a page asks that lists nothing: for a password, or to go on to another page.
_ASKS = re.compile(rb"type\s*=\s*[\"']?password|http-equiv\s*=\s*[\"']?refresh", re.IGNORECASE)


class HttpFile(NamedTuple):
    """A file as the server first described it.

    Attributes:
        tag: its strong entity tag, or empty.
        said: what else tells it from others, as in the first answer that had bytes of it. What
            HEAD has does not count: programs make weak tags of what they send, there of nothing.
    """

    url: str
    size: int
    tag: str
    said: dict[str, str]


class SaidSize(NamedTuple):
    """Bytes of a file as an answer says, None if it does not.

    Attributes:
        is_of_range: it sent a range.
        is_page: it is one that stands in place of the file, by its type and its beginning.
    """

    nbytes: int | None
    is_of_range: bool
    is_page: bool = False


class NoRangesError(ValueError):
    """A server sends whole files, whatever part is asked for."""


def strong_tag(info: dict[str, Any]) -> str:
    """Entity tag among what a server said of a file, unless there is none or it is weak."""
    tag = str(info.get("ETag") or "")
    return "" if tag.startswith(_WEAK) else tag


def may_be_page(content_type: object) -> bool:
    """Whether what is sent as a file may be a page to log in, or a program's error."""
    return isinstance(content_type, str) and _TEXT_TYPE.fullmatch(content_type) is not None


def _is_page(head: bytes, content_type: str, url: str) -> bool:
    """Whether what is sent as a file stands in its place, by the bytes that it begins with."""
    is_json = split_query(url)[0].endswith(".json")
    if not head:
        return content_type == PAGE or (content_type == _JSON and not is_json)
    if content_type == _PROBLEM or (content_type == PAGE and not is_json and _IS_TEXT.match(head)):
        return True
    return (_BEGINS_AS_ERROR if is_json else _BEGINS_AS_PAGE).match(head) is not None


def read_range(filesystem: HTTPFileSystem, file: HttpFile, start: int, stop: int) -> bytes:
    """Read bytes `start` to `stop` of a file.

    Raises:
        ReplacedError: the file is another one than before.
        ShortAnswerError: the answer is not what was asked for, or shorter or longer.
        NoRangesError: the server sends the whole file.
        Exception: what aiohttp raises for other answers, and for none.
    """
    from fsspec.asyn import sync

    data: bytes = sync(filesystem.loop, _ask, filesystem, file, start, stop)
    return data


def size_in_answer(filesystem: HTTPFileSystem, url: str) -> SaidSize:
    """Ask for a file's first bytes; the answer says how long the file is.

    Programs that make their answers often give HEAD the length of its own body, which is 0.
    """
    from fsspec.asyn import sync

    size: SaidSize = sync(filesystem.loop, _ask_size, filesystem, url)
    return size


def asks_to_log_in(filesystem: HTTPFileSystem, url: str) -> bool:
    """Whether the page at `url` asks for a password, says other things, or is none of that name.

    Who has to log in first is often sent on to such a page, which has status 200.
    """
    from fsspec.asyn import sync

    asks: bool = sync(filesystem.loop, _asks_to_log_in, filesystem, url)
    return asks


async def _asks_to_log_in(filesystem: HTTPFileSystem, url: str) -> bool:
    async with await _get(filesystem, url) as answer:
        answer.raise_for_status()
        asked = answer.history[0].url if answer.history else answer.url
        is_elsewhere = _last_name(asked.path) != _last_name(answer.url.path)
        # A redirect may lead nowhere; JSON and text are what a program says of an error.
        if is_elsewhere or answer.status != 200 or answer.content_type not in _PAGE_TYPES:
            return True
        page = await _first_bytes(answer.content, _MOST_PAGE_NBYTES, is_whole=True)
        says_else = _MARKUP.sub(b"", page) and not _LISTS.search(page)
        return not page.strip() or bool(says_else) or _ASKS.search(page) is not None


def begins_as_data(filesystem: HTTPFileSystem, url: str) -> bool:
    """Whether what the server calls a page is a file of a checkpoint, by its first bytes.

    Some servers call whatever they do not know a page.
    """
    from fsspec.asyn import sync

    head: bytes = sync(filesystem.loop, _ask_head, filesystem, url)
    return b"\0" in head or head[:1] in (b"\x80", b"{")  # no zip or safetensors file lacks zeros


async def _ask_head(filesystem: HTTPFileSystem, url: str) -> bytes:
    async with await _get(filesystem, url, 0, _HEAD_NBYTES) as answer:
        answer.raise_for_status()
        return await _first_bytes(answer.content, _HEAD_NBYTES, is_whole=True)


def _last_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


async def _ask_size(filesystem: HTTPFileSystem, url: str) -> SaidSize:
    async with await _get(filesystem, url, 0, _HEAD_NBYTES) as answer:
        if answer.status != 416:
            answer.raise_for_status()
        if may_be_page(answer.content_type) and answer.status in (200, 206):
            head = await _first_bytes(answer.content, _HEAD_NBYTES, is_whole=True)
            if _is_page(head, answer.content_type, url):
                return SaidSize(None, is_of_range=False, is_page=True)
        if answer.headers.get("Content-Encoding", "").lower() not in _PLAIN:
            return SaidSize(None, is_of_range=False)
        if answer.status == 200:
            said = answer.headers.get("Content-Length", "")
            return SaidSize(int(said) if said.isdecimal() else None, is_of_range=False)
        total = _TOTAL.fullmatch(answer.headers.get("Content-Range", "").strip())
        nbytes = None if total is None else int(total[1])
        return SaidSize(nbytes, is_of_range=answer.status == 206)


async def _get(filesystem: HTTPFileSystem, url: str, start: int = 0, stop: int = 0) -> Any:
    """Ask for bytes `start` to `stop`, or for all; the answer is a context manager."""
    options = dict(filesystem.kwargs)
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
    if stop:
        headers["Range"] = f"bytes={start}-{stop - 1}"
    session = await filesystem.set_session()
    return session.get(filesystem.encode_url(url), headers=headers, **options)


async def _ask(filesystem: HTTPFileSystem, file: HttpFile, start: int, stop: int) -> bytes:
    async with await _get(filesystem, file.url, start, stop) as answer:
        if answer.status != 416:  # a range beyond the end
            answer.raise_for_status()
        _check(answer.status, answer.headers, file, start, stop)
        return await _first_bytes(answer.content, stop - start, is_whole=answer.status == 200)


def _check(status: int, headers: Any, file: HttpFile, start: int, stop: int) -> None:
    """Compare the head of an answer with the question, and with those of former answers."""
    tag = strong_tag(headers)
    if tag and file.tag and tag != file.tag:
        raise ReplacedError
    _check_range(status, headers, file, start, stop)
    if tag and file.tag:
        return
    for field in _VALIDATORS:
        now = headers.get(field, "").removeprefix(_WEAK)
        if now and file.said.setdefault(field, now) != now:
            raise ReplacedError


def _check_range(status: int, headers: Any, file: HttpFile, start: int, stop: int) -> None:
    encoding = headers.get("Content-Encoding", "")
    if encoding.lower() not in _PLAIN:
        raise ShortAnswerError(f"the server sent {encoding!r} data, which was not asked for")
    if status == 416:
        raise ShortAnswerError(f"the server has no bytes {start} to {stop} of {file.size}")
    if status != 206:
        _check_whole(status, headers, file, start)
        return
    said = headers.get("Content-Range", "")
    parts = _CONTENT_RANGE.fullmatch(said.strip())
    if parts is not None and parts[3] not in ("*", str(file.size)):
        raise ReplacedError
    if parts is None or (int(parts[1]), int(parts[2])) != (start, stop - 1):
        asked = f"bytes {start}-{stop - 1}/{file.size}"
        raise ShortAnswerError(f"the server was asked for {asked} and sent {said or 'others'!r}")


def _check_whole(status: int, headers: Any, file: HttpFile, start: int) -> None:
    """Accept the whole file for a range at its start."""
    if status != 200 or start:
        message = "The HTTP server doesn't appear to support range requests"
        raise NoRangesError(f"{message} (it answered {status})")
    if headers.get("Content-Length", str(file.size)) != str(file.size):
        raise ReplacedError


async def _first_bytes(content: Any, nbytes: int, *, is_whole: bool) -> bytes:
    """Read `nbytes` bytes; any more are an error, unless the whole file was sent."""
    parts: list[bytes] = []
    missing = nbytes if is_whole else nbytes + 1
    while missing and (part := await content.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
