"""Names of a writer's stage and of what lies in it; how to read past an interrupted switch.

A writer of `NAME` works in the hidden sibling `.NAME.ema-ckpt-<8 hex digits>/`:

    .NAME.ema-ckpt-0a1b2c3d/
        NAME                  the output, a file or a directory
        .ema-ckpt.journal     ranges already written, for `--resume`
        .ema-ckpt.note        {"old": …, "new": …}, while switching where rename cannot exchange
        .ema-ckpt.old         the old target, moved aside under that note
        .ema-ckpt.new         the inode of NAME before an exchange; another NAME is the old target
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

JOURNAL = ".ema-ckpt.journal"
LOCK = ".ema-ckpt.lock"
NOTE = ".ema-ckpt.note"
OLD = ".ema-ckpt.old"
NEW = ".ema-ckpt.new"

_NOTE_NBYTES = 64 << 10
_PLAIN_NAME = re.compile(r"(?!\.{1,2}\Z)[^/]+")
_ANY_STAGE = re.compile(r"\..*\.ema-ckpt-.*", re.DOTALL)


def stage_path(target: Path, token: str) -> Path:
    """Stage of `target` with the id `token` (8 hex digits)."""
    return target.with_name(stage_name(target.name, token))


def stage_name(name: str, token: str) -> str:
    """Name beside `name` that is a writer's and no checkpoint; `token` are 8 hex digits."""
    return f".{name}.ema-ckpt-{token}"


def is_stage_name(name: str) -> bool:
    """Whether a directory entry is a writer's stage, which is no checkpoint."""
    return _ANY_STAGE.fullmatch(name) is not None


def stages_of(target: Path) -> list[Path]:
    """List stages of `target`, live or left behind, sorted by name."""
    own = re.compile(re.escape(f".{target.name}.ema-ckpt-") + "[0-9a-f]{8}")
    try:
        names = os.listdir(target.parent)
    except OSError:
        return []
    stages = []
    for name in sorted(filter(own.fullmatch, names)):
        path = target.parent / name
        if path.is_dir() and not path.is_symlink():
            stages.append(path)
    return stages


def interrupted_switch(stage: Path) -> Path | None:
    """The complete new target inside `stage`, if its note says that it was being switched in."""
    try:
        # O_NONBLOCK: whatever has that name, opening it must not wait.
        fd = os.open(stage / NOTE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as note:
            name = json.loads(note.read(_NOTE_NBYTES))["new"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
        return None
    new = stage / name
    return new if os.path.lexists(new) else None


def find_interrupted_switch(target: str | os.PathLike[str]) -> Path | None:
    """The complete new target, if a crash fell between moving the old one aside and the new one in.

    Only file systems whose rename cannot exchange two names ever show this state; the next writer
    ends it. None if `target` exists or there is no such note.
    """
    path = Path(target)
    if os.path.lexists(path):
        return None
    for stage in stages_of(path):
        if new := interrupted_switch(stage):
            return new
    return None
