"""What lies in a directory, on a local disk or behind an fsspec URL: names and kinds, nothing
read.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from ema_ckpt.core.errors import SourceError
from ema_ckpt.storage.files import is_url

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem


class Folder(NamedTuple):
    """A directory's path or URL and the names in it, sorted. What is no directory counts as a
    file.
    """

    root: str
    folders: tuple[str, ...]
    files: tuple[str, ...]


def join(root: str, name: str) -> str:
    """`name` inside the directory or URL `root`."""
    return f"{root.rstrip('/')}/{name}" if is_url(root) else os.path.join(root, name)


def base_name(path: str) -> str:
    """The last component of a path or URL."""
    return path.rstrip("/").rpartition("/")[2]


def parent_of(path: str) -> str:
    """The directory that holds `path`."""
    if is_url(path):
        return path.rstrip("/").rpartition("/")[0]
    return os.path.dirname(path.rstrip("/") or "/") or "."


def is_folder(path: str) -> bool | None:
    """Whether `path` is a directory; None if nothing is there.

    Raises:
        SourceError: `unreadable`; `missing-extra` if the URL needs a package that is not installed.
    """
    if is_url(path):
        return _is_remote_folder(path)
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def list_folder(root: str) -> Folder:
    """The names in a directory.

    Raises:
        SourceError: `unreadable`; `missing-extra` if the URL needs a package that is not installed.
    """
    folders: list[str] = []
    files: list[str] = []
    try:
        for name, folder in _remote_names(root) if is_url(root) else _local_names(root):
            (folders if folder else files).append(name)
    except SourceError:
        raise
    except Exception as error:
        raise _unreadable(root, error) from error
    return Folder(root, tuple(sorted(folders)), tuple(sorted(files)))


def _unreadable(path: str, error: Exception) -> SourceError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return SourceError("unreadable", f"{path}: {reason}", file=path)


def _local_names(root: str) -> list[tuple[str, bool]]:
    with os.scandir(root) as entries:
        return [(entry.name, entry.is_dir()) for entry in entries]


def _remote(url: str) -> tuple[AbstractFileSystem, str]:
    try:
        import fsspec

        filesystem, base = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise SourceError(
            "missing-extra", f"{url}: {error}; install the fsspec package for this URL"
        ) from None
    return filesystem, str(base).rstrip("/")


def _remote_names(root: str) -> list[tuple[str, bool]]:
    filesystem, base = _remote(root)
    entries = filesystem.ls(base or "/", detail=True)
    named = [(base_name(str(entry["name"])), entry["type"] == "directory") for entry in entries]
    # Object stores list the placeholder of the directory itself among its contents.
    return [
        (name, folder)
        for name, folder in named
        if name and not (name == base_name(base) and not folder)
    ]


def _is_remote_folder(url: str) -> bool | None:
    filesystem, base = _remote(url)
    try:
        return bool(filesystem.info(base or "/")["type"] == "directory")
    except FileNotFoundError:
        return None
    except Exception as error:
        raise _unreadable(url, error) from error
