"""What tells whether a file was written anew since it was looked at."""

from __future__ import annotations

import os
from typing import NamedTuple


class Stamp(NamedTuple):
    """State of a file, to be compared with a later one.

    Attributes:
        written: its size, and its time or checksum; `?` if that cannot be told.
        changed_ns, inode: of a local file. A copy that keeps times (`rsync -t`, `cp -p`, `tar`) has
            others, but so may a file that only got other permissions or a further link, and some
            network file systems number files anew.
        failure: why it cannot be told, unless nothing is there.
    """

    written: str
    changed_ns: int = 0
    inode: int = 0
    failure: str = ""

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Return the stamp of a local file."""
        written = f"{status.st_size} {status.st_mtime_ns}"
        return cls(written, status.st_ctime_ns, status.st_ino)

    def is_other(self, later: Stamp, *, suspicious: bool) -> bool:
        """Whether `later` is of another content; `suspicious`: whether it may be."""
        if self.written != later.written:
            return True
        is_touched = self.changed_ns != later.changed_ns
        return is_touched and (suspicious or self.inode != later.inode)
