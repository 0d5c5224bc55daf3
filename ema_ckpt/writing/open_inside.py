"""Open what lies in a stage, and nothing that a link in its place leads to.

Whoever may write beside a target can move its stage away, and put another one there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from ema_ckpt.storage.files import NO_DESCRIPTORS, close_read

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def open_directory(path: Path) -> int:
    """Open a directory that is no symbolic link, to open files in it."""
    return os.open(path, _DIRECTORY)


def open_inside(directory: int, name: str, flags: int) -> int:
    """Open the file `name` of an open directory; a symbolic link of that name is an OSError."""
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666, dir_fd=directory)


def create_inside(directory: Path, name: str) -> BinaryIO:
    """Open a file to write it anew, as `open_below` does."""
    return open(open_below(directory, name, _CREATE), "wb")


def open_below(directory: Path, name: str, flags: int) -> int:
    """Open a file of a directory; neither it, its directory nor the one above may be a link.

    Raises:
        OSError: naming the file.
    """
    try:
        above = open_directory(directory.parent)
        try:
            inner = os.open(directory.name, _DIRECTORY, dir_fd=above)
        finally:
            close_read(above)
        try:
            return open_inside(inner, name, flags)
        finally:
            close_read(inner)
    except OSError as error:
        error.filename = str(directory / name)
        raise


def set_mode(path: Path, mode: int) -> None:
    """Change the mode of a file or directory that may be read, not of what a link leads to.

    Raises:
        OSError: it may not be, or is a link.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in NO_DESCRIPTORS or path.is_symlink():
            raise
        os.chmod(path, mode)  # what replaces a private file stays private
        return
    try:
        os.chmod(fd, mode)
    finally:
        close_read(fd)
