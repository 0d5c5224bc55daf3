"""List directories on a local disk or behind an fsspec URL: names and kinds, nothing is read."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from ema_ckpt.core.errors import SourceError
from ema_ckpt.storage.files import is_url, open_filesystem


class Folder(NamedTuple):
    """A directory's path or URL and the names in it, sorted; `files` is all but directories."""

    root: str
    folders: tuple[str, ...]
    files: tuple[str, ...]


def join(root: str, name: str) -> str:
    """Path of `name` inside the directory or URL `root`."""
    if is_url(root):
        return f"{root.rstrip('/')}/{name}"
    return os.path.join(root, name)


def base_name(path: str) -> str:
    """Last component of a path or URL."""
    return path.rstrip("/").rpartition("/")[2]


def parent_of(path: str) -> str:
    """Directory that holds `path`."""
    stripped = path.rstrip("/")
    if is_url(path):
        return stripped.rpartition("/")[0]
    return os.path.dirname(stripped or "/") or "."


def is_folder(path: str) -> bool | None:
    """Whether `path` is a directory; None if nothing is there.

    Raises:
        SourceError: `unreadable`; `missing-extra` if the URL needs a package that is not installed.
    """
    if is_url(path):
        filesystem, base = open_filesystem(path)
        try:
            return bool(filesystem.info(base or "/")["type"] == "directory")
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _unreadable(path, error) from error
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def list_folder(root: str) -> Folder:
    """List the names in a directory.

    Raises:
        SourceError: `unreadable`; `missing-extra` if the URL needs a package that is not installed.
    """
    names, folders, placeholder = set[str](), set[str](), ""
    try:
        if is_url(root):
            filesystem, base = open_filesystem(root)
            for item in filesystem.ls(base or "/", detail=True):
                names.add(base_name(str(item["name"])))
                if item["type"] == "directory":
                    folders.add(base_name(str(item["name"])))
            # Object stores list the placeholder of the directory itself among its contents.
            placeholder = base_name(base)
        else:
            with os.scandir(root) as entries:
                for entry in entries:
                    names.add(entry.name)
                    if entry.is_dir():
                        folders.add(entry.name)
    except SourceError:
        raise
    except Exception as error:
        raise _unreadable(root, error) from error
    files = names - folders - {"", placeholder}
    return Folder(root, tuple(sorted(folders - {""})), tuple(sorted(files)))


def _unreadable(path: str, error: Exception) -> SourceError:
    reason = getattr(error, "strerror", None) or str(error)
    return SourceError("unreadable", f"{path}: {reason}", file=path)
