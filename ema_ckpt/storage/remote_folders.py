"""List directories behind fsspec URLs: objects of a store, and links of a web server's page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from ema_ckpt.core.errors import AccessError, SourceError
from ema_ckpt.storage.http_ranges import PAGE, asks_to_log_in, begins_as_data
from ema_ckpt.storage.remote import (
    ask,
    in_turn,
    is_http,
    join_url,
    last_component,
    split_query,
    unescaped,
)
from ema_ckpt.storage.s3_answers import has_objects, is_s3

if TYPE_CHECKING:
    from fsspec.implementations.http import HTTPFileSystem
    from fsspec.spec import AbstractFileSystem

# The file that a folder with these needs, under a name that web servers do not list.
_HIDDEN, _NAMED_BY_HIDDEN = ".metadata", ".distcp"
_NO_NAMES = {"", ".", ".."}


class RemoteNames(NamedTuple):
    """The names in a directory, sorted; `files` is all but directories."""

    folders: tuple[str, ...]
    files: tuple[str, ...]


def is_remote_folder(filesystem: AbstractFileSystem, path: str, url: str) -> bool | None:
    """Whether `path` is a directory; None if nothing is there. Messages say `url`.

    Raises:
        AccessError: `unreadable` if the server refuses to tell.
    """
    try:
        info = ask(in_turn(filesystem, lambda: filesystem.info(path or "/")), url, url)
    except FileNotFoundError:
        return _has_objects(filesystem, path, url) or None
    # HTTP has no directories: a page with links stands for one.
    is_page = is_http(filesystem) and info.get("mimetype") == PAGE
    return bool(info["type"] == "directory" or (is_page and not _is_data(filesystem, path, url)))


def _is_data(filesystem: AbstractFileSystem, path: str, url: str) -> bool:
    """Whether what the server calls a page is a file. Only names with a dot are asked for."""
    if split_query(path)[0].endswith("/") or "." not in last_component(path):
        return False
    question = partial(begins_as_data, cast("HTTPFileSystem", filesystem), path)
    try:
        return ask(question, url, url)
    except FileNotFoundError:
        return False


def _has_objects(filesystem: AbstractFileSystem, path: str, url: str) -> bool:
    try:
        return is_s3(filesystem) and ask(lambda: has_objects(filesystem, path), url, url)
    except FileNotFoundError:
        return False


def list_remote(filesystem: AbstractFileSystem, path: str, url: str) -> RemoteNames:
    """List the names in the directory `path`. Messages say `url`.

    Raises:
        SourceError: `unreadable` if there is no such directory.
        AccessError: `unreadable` if the server refuses to tell, or is a web server without a page.
    """
    # A page's links are relative to it only if its own address ends in a slash.
    place = join_url(path, "") if is_http(filesystem) else path or "/"
    try:
        items = ask(in_turn(filesystem, lambda: filesystem.ls(place, detail=True)), url, url)
    except FileNotFoundError:
        if is_http(filesystem):  # its files may be there all the same
            message = f"{url}: the server does not list what is there"
            raise AccessError("unreadable", message, file=url) from None
        raise SourceError("unreadable", f"{url}: no such directory", file=url) from None
    if is_http(filesystem):
        names = _linked_names([str(item["name"]) for item in items], place)
        if not names.folders + names.files:
            _refuse_login(filesystem, place, url)
        if _lacks_hidden(names.files):
            files = sorted((*names.files, *_hidden_files(filesystem, path, url)))
            names = names._replace(files=tuple(files))
        return names
    return _object_names([(str(item["name"]), item["type"]) for item in items], path)


def _object_names(items: Sequence[tuple[str, str]], path: str) -> RemoteNames:
    folders = {last_component(name) for name, kind in items if kind == "directory"} - {""}
    # Object stores list the placeholder of the directory itself among its contents.
    files = {last_component(name) for name, _ in items} - folders - {"", last_component(path)}
    return RemoteNames(tuple(sorted(folders)), tuple(sorted(files)))


def _linked_names(links: Sequence[str], place: str) -> RemoteNames:
    below = [_linked(link, place) for link in links]
    # Pages have `step%3D20` for what is called `step=20`.
    names = {link: unescaped(last_component(link)) for link in below}
    folders = {name for link, name in names.items() if link.endswith("/")} - _NO_NAMES
    files = set(names.values()) - folders - _NO_NAMES
    return RemoteNames(tuple(sorted(folders)), tuple(sorted(files)))


def _refuse_login(filesystem: AbstractFileSystem, place: str, url: str) -> None:
    """Refuse a page that stands where a directory's would, and says nothing of it."""
    question = partial(asks_to_log_in, cast("HTTPFileSystem", filesystem), place)
    if ask(question, url, url):
        message = f"{url}: the server does not list what is there; its page is one to log in"
        raise AccessError("unreadable", f"{message}, or another one", file=url)


def _linked(link: str, place: str) -> str:
    """Return the path that a page's link has below the page, without its query.

    fsspec joins a relative link to the page's whole address, behind the query of that; a link that
    is a query alone sorts the page.
    """
    _, _, address = link.partition("://")  # a page may have links to itself under another scheme
    return address.removeprefix(place.partition("://")[2]).partition("?")[0]


def _lacks_hidden(files: Sequence[str]) -> bool:
    return _HIDDEN not in files and any(name.endswith(_NAMED_BY_HIDDEN) for name in files)


def _hidden_files(filesystem: AbstractFileSystem, path: str, url: str) -> set[str]:
    """Return the files of a folder that the pages of nginx and Apache leave out, if there are any.

    They list no name that begins with a dot.
    """
    hidden, shown = join_url(path, _HIDDEN), join_url(url, _HIDDEN)
    is_page = is_remote_folder(filesystem, hidden, shown)
    if is_page:
        message = f"{_HIDDEN}: the server sends a page in its place, as one to log in (in {url})"
        raise AccessError("unreadable", message, file=_HIDDEN)
    return set() if is_page is None else {_HIDDEN}
