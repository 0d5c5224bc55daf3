"""What tells whether a file was written anew since it was looked at."""

from __future__ import annotations

import os
from typing import NamedTuple


class Stamp(NamedTuple):
    """State of a file, to be compared with a later one.

    Attributes:
        written: its size, and its time or checksum; `?` if that cannot be told.
        changed_ns: when a local file, or what is noted of it, last changed. A file that is written
            anew with its old time (`cp -p`, `rsync -t`, `tar`) has another.
        inode: number of a local file, which one that replaces it does not have.
        access: owner, permissions and number of links of a local file. Where these are others,
            they are why `changed_ns` is.
        failure: why it cannot be told, unless nothing is there.
    """

    written: str
    changed_ns: int = 0
    inode: int = 0
    access: tuple[int, ...] = ()
    failure: str = ""

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Return the stamp of a local file."""
        written = f"{status.st_size} {status.st_mtime_ns}"
        access = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink)
        return cls(written, status.st_ctime_ns, status.st_ino, access)

    def is_other(self, later: Stamp, *, suspicious: bool) -> bool:
        """Whether the file was written or replaced in between, as far as stamps tell.

        Args:
            suspicious: its bytes were found to be wrong, so that any new `changed_ns` counts.
        """
        if self.written != later.written:
            return True
        if self.changed_ns == later.changed_ns:
            return False
        return suspicious or self.inode != later.inode or self.access == later.access
