"""Object stores that fail at a given point."""

from __future__ import annotations

import pytest
from fsspec import AbstractFileSystem


def refuse_marker(
    filesystem: AbstractFileSystem,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_lost: bool = False,
    is_last: bool = False,
) -> None:
    """Have the file system refuse to give a DCP its `.metadata`, or do it and lose the answer.

    With `is_last` it deletes nothing from then on.
    """
    usual = filesystem.mv

    def deleting_nothing(path: str) -> None:
        raise PermissionError(f"{path}: not now")

    def failing(old: str, new: str, **options: object) -> None:
        if new.endswith(".metadata"):
            if is_last:
                monkeypatch.setattr(filesystem, "rm_file", deleting_nothing)
            if is_lost:
                usual(old, new, **options)
            raise OSError("refused")
        usual(old, new, **options)

    monkeypatch.setattr(filesystem, "mv", failing)
