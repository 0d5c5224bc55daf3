"""List directories on a local disk or behind an fsspec URL: names and kinds, nothing is read."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from ema_ckpt.core.errors import AccessError, EmaCkptError, RefusedError, SourceError
from ema_ckpt.storage.files import is_url
from ema_ckpt.storage.remote import (
    HTTP,
    ask,
    in_turn,
    join_url,
    last_component,
    open_filesystem,
    split_query,
    stamp_of,
)
from ema_ckpt.storage.remote_folders import is_remote_folder, list_remote
from ema_ckpt.storage.stage_names import is_stage_name
from ema_ckpt.storage.stamp import Stamp

_UNKNOWN = Stamp("?")
_Listed = tuple[dict[str, Stamp], Stamp | None]


class Folder(NamedTuple):
    """A directory's path or URL and the names in it, sorted; `files` is all but directories."""

    root: str
    folders: tuple[str, ...]
    files: tuple[str, ...]


def join(root: str, name: str) -> str:
    """Path of `name` inside the directory or URL `root`."""
    if is_url(root):
        return join_url(root, name)
    return os.path.join(root, name)


def base_name(path: str) -> str:
    """Last component of a path or URL."""
    return last_component(path)


def parent_of(path: str) -> str:
    """Directory that holds `path`."""
    place, query = split_query(path)
    stripped = place.rstrip("/")
    if is_url(path):
        return stripped.rpartition("/")[0] + query
    return os.path.dirname(stripped or "/") or "."


def is_folder(path: str) -> bool | None:
    """Whether `path` is a directory; None if nothing is there.

    Raises:
        SourceError: `missing-extra` if the URL needs a package that is not installed.
        AccessError: `unreadable` if the system or the server refuses to tell.
    """
    if is_url(path):
        return is_remote_folder(*open_filesystem(path), path)
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def list_folder(root: str) -> Folder:
    """List the names in a directory, as they are now.

    Raises:
        SourceError: `unreadable` if it is no directory; `missing-extra` if the URL needs a package
            that is not installed.
        AccessError: `unreadable` if the system or the server refuses to tell.
    """
    if is_url(root):
        return Folder(root, *list_remote(*open_filesystem(root), root))
    names, folders = set[str](), set[str]()
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                names.add(entry.name)
                if entry.is_dir():
                    folders.add(entry.name)
    except (OSError, ValueError) as error:
        raise _unreadable(root, error) from error
    return Folder(root, tuple(sorted(folders)), tuple(sorted(names - folders)))


def _unreadable(path: str, error: Exception) -> EmaCkptError:
    reason = getattr(error, "strerror", None) or str(error)
    is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
    kind = SourceError if is_absent else AccessError
    return kind("unreadable", f"{path}: {reason}", file=path)


def modified_at(path: str) -> float | None:
    """Seconds since the epoch at which a file or directory last changed.

    None if it is gone, or if the store does not tell, as plain HTTP.

    Raises:
        AccessError: `unreadable` if the system or the server refuses to tell.
    """
    try:
        if is_url(path):
            filesystem, base = open_filesystem(path)
            question = partial(filesystem.modified, base)
            return float(ask(in_turn(filesystem, question), path, path).timestamp())
        return os.stat(path).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    except AccessError as error:
        if isinstance(error.__cause__, NotImplementedError):
            return None
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def changed_within(path: str, seconds: float) -> bool:
    """Whether a file or directory changed in so many last seconds, as far as its time is known.

    A time that is yet to come counts as well: the clock of a server may be ahead of this one, and
    what is being written must not be taken for old.

    Raises:
        AccessError: as `modified_at`.
    """
    changed = modified_at(path)
    return changed is not None and time.time() - changed < seconds


def walk_files(root: str) -> list[str]:
    """Names of all files below a directory or URL, with `/`, sorted.

    Stages of writers are left out, and directories behind symbolic links, which may lead anywhere.

    Raises:
        EmaCkptError: as `list_folder`.
    """
    found: list[str] = []
    pending = [""]
    while pending:
        inner = pending.pop()
        folder = list_folder(join(root, inner) if inner else root)
        prefix = f"{inner}/" if inner else ""
        found += [prefix + name for name in folder.files]
        for name in folder.folders:
            path = join(folder.root, name)
            is_link = not is_url(root) and os.path.islink(path)
            if not is_link and not is_stage_name(name):
                pending.append(prefix + name)
    return sorted(found)


def stamps_of(root: str, files: Iterable[str]) -> dict[str, Stamp]:
    """Return what tells whether a file was written anew.

    A file may be given by a path or URL of its own.
    """
    places = {file: file if is_url(file) else join(root, file) for file in files}
    folders: dict[str, _Listed] = {}
    stamps = {}
    for file, place in places.items():
        if not is_url(place):
            stamps[file] = _local_stamp(place)
            continue
        if place.startswith(HTTP):
            stamps[file] = _stamp_alone(place)
            continue
        folder = parent_of(place)
        if folder not in folders:
            folders[folder] = _remote_stamps(folder)
        listed, unlisted = folders[folder]
        if unlisted is None:
            stamps[file] = _stamp_alone(place)
        else:
            stamps[file] = listed.get(base_name(place), unlisted)
    return stamps


def _local_stamp(path: str) -> Stamp:
    try:
        return Stamp.of(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return _UNKNOWN
    except OSError as error:
        return Stamp("?", failure=error.strerror or str(error))


def _remote_stamps(folder: str) -> _Listed:
    """Stamps of all objects in a folder, from its listing, and that of what is not listed.

    The latter is None for who may not list, but may read: each object is to be asked for by name.
    """
    try:
        filesystem, base = open_filesystem(folder)
        question = partial(filesystem.ls, base, detail=True)
        items = ask(in_turn(filesystem, question), folder, folder)
    except FileNotFoundError:
        return {}, _UNKNOWN
    except RefusedError:
        return {}, None
    except EmaCkptError as error:
        return {}, Stamp("?", failure=str(error))
    return {base_name(str(item["name"])): Stamp(stamp_of(item)) for item in items}, _UNKNOWN


def _stamp_alone(url: str) -> Stamp:
    """Stamp of one file: no listing says anything of it, as the page of a web server does not."""
    try:
        filesystem, base = open_filesystem(url)
        question = partial(filesystem.info, base)
        return Stamp(stamp_of(ask(in_turn(filesystem, question), url, url)))
    except FileNotFoundError:
        return _UNKNOWN
    except EmaCkptError as error:
        return Stamp("?", failure=str(error))
