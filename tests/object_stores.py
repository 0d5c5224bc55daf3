"""Object stores that fail at a given point."""

from __future__ import annotations

import pytest
from fsspec import AbstractFileSystem


def refuse_marker(
    filesystem: AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, *, is_lost: bool = False
) -> None:
    """Have the file system refuse to give a DCP its `.metadata`, or do it and lose the answer."""
    usual = filesystem.mv

    def failing(old: str, new: str, **options: object) -> None:
        if new.endswith(".metadata"):
            if is_lost:
                usual(old, new, **options)
            raise OSError("refused")
        usual(old, new, **options)

    monkeypatch.setattr(filesystem, "mv", failing)
