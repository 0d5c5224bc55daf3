"""File systems behind fsspec URLs: how they are asked, and what their failures mean.

Only what may be asked twice is asked again: sizes, listings, ranges, whole objects, parts of one. A
question is tried again while that may help, and then refused as trouble of the server, which says
nothing of the checkpoint.
"""

from __future__ import annotations

import errno
import inspect
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ema_ckpt.core.display import masked
from ema_ckpt.core.errors import AccessError, EmaCkptError, RefusedError, SourceError, UsageError
from ema_ckpt.storage.ftp_answers import FtpTroubleError, check_ftp
from ema_ckpt.storage.s3_answers import ForeignAnswerError, check_answers, is_s3

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

AnswerT = TypeVar("AnswerT")
# What file systems call the checksum, the version or the time of an object. The last five are those
# of the Hub's repositories and its buckets, of GitHub, FTP and WebHDFS.
_STAMP_FIELDS = tuple(
    "ETag etag md5Hash generation LastModified Last-Modified mtime created "
    "blob_id xet_hash sha modify modificationTime".split()
)
# Protocols that threads may speak side by side through one file system, though it is not async.
_SHARED = {"file", "local", "memory", "hf"}
HTTP = ("http://", "https://")
_ABSENT = (404, 410)
_OF_GATEWAYS = (502, 504)  # answered before what is behind them
_UNHEARD = (TimeoutError, ConnectionError, EOFError)
_CLIENTS = ("aiohttp", "botocore", "requests", "urllib3", "httpx", "httpcore")
_REFUSED = (401, 403)
_PASSING = (408, 425, 429)  # and every status from 500 on but one
_NOT_OFFERED = 501
# A slash that an address has inside a component, as those of some stores' objects have.
_INNER_SLASH = re.compile("(%2F)", re.IGNORECASE)
_CHAINED = re.compile("::[A-Za-z0-9+_]{2,}://")
# Where two slashes stand for one, or for what the server takes them for.
_FOLDED = tuple("file local sftp ssh ftp smb hdfs webhdfs".split())
_FINAL = (PermissionError, NotImplementedError, ImportError, TypeError, ValueError, EmaCkptError)


class Patience(NamedTuple):
    """Seconds before the second, third … try, and after how many of them none is begun."""

    delays: tuple[float, ...]
    seconds: float


_READ_PATIENCE = Patience((0.3, 1.0, 3.0), 5.0)  # a file system may try again itself
# A part may take long to send, and a store that is asked too often says so for minutes.
UPLOAD_PATIENCE = Patience((0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0), 300.0)
ONCE = Patience((), 0.0)
# Of a request over HTTP: until there is a connection, without a byte, and in all, as in aiohttp.
_CONNECT_SECONDS, _HTTP_SILENCE_SECONDS, _HTTP_SECONDS = 30.0, 60.0, 300.0
# In all, as sending a part is silence too. gcsfs tries again after any other failure.
_GOOGLE_SECONDS = 300.0


class ShortAnswerError(Exception):
    """A server sent another number of bytes than it was asked for."""


class ReplacedError(Exception):
    """A server has another file than the one that was asked for first."""


class MaskedError(Exception):
    """Stands for what a library raised, where the text of that has credentials of a URL.

    An error that nobody catches is printed with its causes.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{masked(str(error))} ({type(error).__name__})")
        self.is_unanswered = is_unanswered(error)


def open_filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the fsspec file system of a URL, and the path in it. What it listed before is dropped.

    Raises:
        SourceError: `missing-extra` if fsspec or the URL's own package is not installed.
        AccessError: `unreadable` if the file system cannot be set up.
        UsageError: `usage` if the URL is a chain of several, has an empty component, or names one
            version of an object.
    """
    if not url.startswith(HTTP) and _CHAINED.search(url):
        raise UsageError("usage", f"{url}: is a chain of URLs; name the last one alone")
    refuse_empty_component(url)
    try:
        filesystem, path = _split_url(url)
        if is_s3(filesystem):
            check_answers(filesystem, path)
        if hasattr(filesystem, "ftp") and "ftp" in protocols_of(filesystem):
            check_ftp(filesystem)
    except (ImportError, ValueError) as error:
        message = f"{url}: {error}; install the fsspec package for this URL"
        raise SourceError("missing-extra", message) from None
    except Exception as error:  # noqa: BLE001  # it is raised as another one
        raise AccessError("unreadable", f"{url}: {describe_failure(error)}") from _shown(error)
    # The directory that the object lies in has no versions, so that the newest one would be read.
    if type(filesystem)._get_kwargs_from_urls(url).get("version_aware"):
        reason = "names one version of an object, which is neither read nor written"
        raise UsageError("usage", f"{url}: {reason}; copy it under a name of its own")
    with turn(filesystem):
        filesystem.invalidate_cache()  # another process may have written there since
    return filesystem, str(path).rstrip("/")


def _limits(kind: Any) -> dict[str, object]:
    """Options by which requests end where a server falls silent, unless timeouts are configured.

    A connection that has broken without a word is never closed. gcsfs waits for ever; aiohttp as
    long as for all of a long answer, and fsspec asks twice how long a file is. With options of its
    own an instance is ours: what else this process reads and writes there may take longer.
    """
    import fsspec

    if not is_http(kind) and "gs" not in kind.protocol:
        return {}
    said = fsspec.config.apply_config(kind, {})
    if not is_http(kind):
        is_set = said.get("requests_timeout") is not None
        return {} if is_set else {"requests_timeout": _timeout(None, _GOOGLE_SECONDS)}
    is_set = "timeout" in {*said, *(said.get("client_kwargs") or {})}
    return {} if is_set else {"timeout": _timeout(_HTTP_SILENCE_SECONDS, _HTTP_SECONDS)}


def _timeout(silence: float | None, total: float) -> object:
    from aiohttp import ClientTimeout

    return ClientTimeout(total=total, sock_connect=_CONNECT_SECONDS, sock_read=silence)


def refuse_empty_component(url: str) -> None:
    """Refuse `//` in the URL of a store, where it is part of an object's name.

    Directories and names beside it are found by their components, which would name another object.

    Raises:
        UsageError: `usage`.
    """
    scheme, _, place = url.partition("://")
    if "//" in place and scheme not in _FOLDED and not scheme.endswith(("http", "https")):
        reason = "'//' in it would name another object than '/' does; write one slash"
        raise UsageError("usage", f"{url}: {reason}, or copy what lies there")


def _split_url(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL, and the path in it.

    fsspec takes `::` for the link between the URLs of a chain. In a single one it is part of a name
    or of a numeric host; fsspec would leave out what follows, and find another file.
    """
    import fsspec

    scheme = url.partition("://")[0]
    kind = fsspec.get_filesystem_class(scheme)
    limits = _limits(kind)
    if "::" not in url:
        filesystem, path = fsspec.core.url_to_fs(url, **limits)
        return filesystem, str(path)
    path = str(kind._strip_protocol(url))
    root = "" if path.startswith(kind.root_marker) else kind.root_marker  # that of memory lacks it
    return fsspec.filesystem(scheme, **kind._get_kwargs_from_urls(url), **limits), root + path


def turn(filesystem: AbstractFileSystem) -> AbstractContextManager[object]:
    """Return what one thread at a time holds while it uses `filesystem`.

    Some have one connection (sftp, ftp), whose answers belong to whoever asked last. The lock is
    the instance's own, for fsspec gives the same instance for many URLs.
    """
    if getattr(filesystem, "async_impl", False) or protocols_of(filesystem) & _SHARED:
        return nullcontext()
    lock: threading.RLock = vars(filesystem).setdefault("_ema_ckpt_turn", threading.RLock())
    return lock


def in_turn(filesystem: AbstractFileSystem, action: Callable[[], AnswerT]) -> Callable[[], AnswerT]:
    """Return `action` as one that waits for the turn of its thread at `filesystem`."""

    def act() -> AnswerT:
        with turn(filesystem):
            return action()

    return act


def reads_whole(filesystem: Any) -> bool:
    """Whether its client reads a whole file, whatever part is asked for, as the one of sshfs."""
    method = getattr(filesystem, "_cat_file", filesystem.cat_file)
    parameters = inspect.signature(method).parameters
    takes_more = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
    return "end" not in parameters and not takes_more


def read_part(filesystem: AbstractFileSystem, path: str, start: int, stop: int) -> bytes:
    """Read bytes `start` to `stop` of a file; fewer if it is shorter."""
    if not reads_whole(filesystem):
        return bytes(filesystem.cat_file(path, start=start, end=stop))
    parts = list[bytes]()
    with filesystem.open(path, "rb") as file:
        file.seek(start)
        while start < stop and (part := file.read(stop - start)):
            parts.append(part)
            start += len(part)
    return b"".join(parts)


def stamp_of(info: Mapping[str, object]) -> str:
    """Return what tells whether a file was written anew, of what a server says of it."""
    known = [str(info[key]) for key in _STAMP_FIELDS if info.get(key)]
    return " ".join([str(info.get("size")), *known])


def _is_address(url: str) -> bool:
    return any(scheme in url for scheme in HTTP)


def split_query(url: str) -> tuple[str, str]:
    """Split the query from an HTTP URL; elsewhere `?` is a letter of a name.

    What signs or names a file in a query (`?X-Amz-Signature=…`) goes with its directory, and is no
    part of the file's name.
    """
    if _is_address(url):
        place, mark, query = url.partition("?")
        return place, mark + query
    return url, ""


def join_url(url: str, name: str) -> str:
    """URL of `name` inside the directory `url`, with the query of that."""
    place, query = split_query(url)
    return f"{place.rstrip('/')}/{_escaped(name) if _is_address(url) else name}{query}"


def last_component(path: str) -> str:
    """Last component of a path or URL, without a query, as the name that a file has there."""
    place, _ = split_query(path)
    name = place.rstrip("/").rpartition("/")[2]
    return unescaped(name.partition("#")[0]) if _is_address(path) else name


def _escaped(name: str) -> str:
    """Return the part of an address that stands for a file's name and for nothing else.

    HTTP clients take `?` and `#` for the end of a path, and `%2e%2e` for `..`, which would read
    another file than the one that is named, and one outside the directory.
    """
    parts = _INNER_SLASH.split(name)
    pieces = [unescaped(part) for part in parts[::2]]
    if any(piece in ("", ".", "..") for inner in pieces for piece in inner.split("/")):
        return urllib.parse.quote(name, errors="surrogateescape")
    slashes = [*parts[1::2], ""]
    quoted = [urllib.parse.quote(part, errors="surrogateescape") for part in parts[::2]]
    return "".join(part + slash for part, slash in zip(quoted, slashes, strict=True))


def unescaped(component: str) -> str:
    """Return the name that a component of an address stands for. A slash inside it stays `%2F`."""
    parts = _INNER_SLASH.split(component)
    parts[::2] = [urllib.parse.unquote(part, errors="surrogateescape") for part in parts[::2]]
    return "".join(parts)


def is_http(filesystem: AbstractFileSystem) -> bool:
    """Whether a file system speaks HTTP itself, and not an object store's protocol above it."""
    return "http" in protocols_of(filesystem)


def protocols_of(filesystem: AbstractFileSystem) -> set[str]:
    """Return the names under which URLs have a file system."""
    protocol = filesystem.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)


def ask(
    question: Callable[[], AnswerT], what: str, url: str, patience: Patience | None = None
) -> AnswerT:
    """Ask a server, four times within about five seconds where trying again may help.

    Args:
        what: the file or directory asked about. `url`: where it is.
        patience: how often is asked, and how long; that of reading without it.

    Raises:
        FileNotFoundError: there is nothing.
        ReplacedError: as `question`.
        AccessError: `unreadable`: the server failed, refused or could not be reached.
    """
    patience = patience or _READ_PATIENCE
    started, tries = time.monotonic(), 0
    while True:
        tries += 1
        try:
            return question()
        except Exception as error:
            cause = _cause(error)
            if isinstance(cause, ReplacedError):
                raise
            if _is_absent(cause):
                raise FileNotFoundError(masked(what)) from _shown(error)
            seconds = time.monotonic() - started
            is_last = tries > len(patience.delays) or seconds > patience.seconds
            if is_last or not _may_pass(cause):
                asked = f"; asked {tries} times in {seconds:.1f} s" if tries > 1 else ""
                where = "" if what == url else f" (in {url})"
                message = f"{what}: {describe_failure(cause)}{where}{asked}"
                kind = RefusedError if _is_refusal(cause) else AccessError
                raise kind("unreadable", message, file=what) from _shown(error)
        time.sleep(patience.delays[tries - 1])


def _shown(error: Exception) -> BaseException:
    """Return the error, and those that are printed with it, as they may be printed."""
    chain = list[BaseException]()
    pending: BaseException | None = error
    while pending is not None and pending not in chain:
        chain.append(pending)
        context = None if pending.__suppress_context__ else pending.__context__
        pending = pending.__cause__ or context
    if all(masked(str(one)) == str(one) for one in chain):
        return error
    shown: BaseException | None = None
    for one in reversed(chain):
        stand_in = MaskedError(one).with_traceback(one.__traceback__)
        stand_in.__cause__, shown = shown, stand_in
    return shown or error


def describe_failure(error: BaseException) -> str:
    """Say in a few words what a server or a library answered."""
    status = _status(error)
    if status is not None:
        reason = getattr(error, "message", "")
        return f"the server answered {status} {reason if isinstance(reason, str) else ''}".rstrip()
    if _redirects_on(error):
        return "the server redirects on and on"
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, ShortAnswerError | ForeignAnswerError | FtpTroubleError):
        return first
    if isinstance(error, TimeoutError) and not first:
        return f"no whole answer in time ({type(error).__name__})"
    return f"{first} ({type(error).__name__})" if first else type(error).__name__


def is_unanswered(error: BaseException) -> bool:
    """Whether the server may yet do what it was asked: it was not heard of, as far as that shows.

    Of an interrupted wait too: fsspec lets the request go on in its own thread.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MaskedError):
            return cause.is_unanswered
        if not isinstance(cause, Exception) or isinstance(cause, _UNHEARD):
            return True
        response = getattr(cause, "response", None)
        of_s3 = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        status = _status(cause) or of_s3.get("HTTPStatusCode")
        if status is not None:
            return status in _OF_GATEWAYS
        if type(cause).__module__.partition(".")[0] in _CLIENTS and response is None:
            return True
        cause = cause.__cause__
    return False


def _cause(error: Exception) -> BaseException:
    """fsspec turns whatever HTTP meets when it looks for a file into FileNotFoundError."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        cause = error.__cause__
        if _status(cause) is not None or isinstance(cause, OSError | TimeoutError):
            return cause
        if type(cause).__module__.startswith("aiohttp"):
            return cause
    return error


def _status(error: BaseException) -> int | None:
    """Status of an answer; aiohttp has 0 where there was none that could be used."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) and status else None


def _is_absent(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) or _status(error) in _ABSENT


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or _status(error) in _REFUSED


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status in _PASSING or (status >= 500 and status != _NOT_OFFERED)
    if isinstance(error, OSError) and error.errno == errno.ENOSYS:  # s3fs makes this of 501
        return False
    return not (isinstance(error, _FINAL) or _redirects_on(error))


def _redirects_on(error: BaseException) -> bool:
    return type(error).__name__ == "TooManyRedirects"  # of aiohttp, which may not be there
