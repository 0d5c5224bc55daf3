"""What a stage is called, what lies in it, and how a reader gets past a switch that a crash cut in
two.

A writer of `NAME` works in the hidden sibling `.NAME.ema-ckpt-<8 hex digits>/`:

    .NAME.ema-ckpt-0a1b2c3d/
        NAME                  what is being written, a file or a directory
        .ema-ckpt.journal     ranges already written, for `--resume`
        .ema-ckpt.note        only while switching where rename cannot exchange: {"old": …, "new":
        …} .ema-ckpt.old         the old target, moved aside under that note
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

_ANY_STAGE = re.compile(r"\..*\.ema-ckpt-.*", re.DOTALL)


def stage_path(target: Path, token: str) -> Path:
    """The stage of `target` with the id `token` (8 hex digits)."""
    return target.with_name(f".{target.name}.ema-ckpt-{token}")


def is_stage_name(name: str) -> bool:
    """Whether a directory entry is a writer's stage, which no search for checkpoints may pick."""
    return _ANY_STAGE.fullmatch(name) is not None


def stages_of(target: Path) -> list[Path]:
    """Stages of `target` that exist, live or left behind, sorted by name."""
    own = re.compile(re.escape(f".{target.name}.ema-ckpt-") + "[0-9a-f]{8}")
    try:
        names = os.listdir(target.parent)
    except OSError:
        return []
    found = [target.parent / name for name in sorted(names) if own.fullmatch(name)]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def noted(stage: Path) -> Path | None:
    """The complete new target inside `stage`, if a note says that it was about to take the target's
    place.
    """
    try:
        note = json.loads((stage / NOTE).read_bytes())
        name = note["new"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
        return None
    new = stage / name
    return new if os.path.lexists(new) else None


def recovered(target: str | os.PathLike[str]) -> Path | None:
    """Where to read `target` from when a crash fell between moving the old one aside and the new
    one in.

    Only file systems whose rename cannot exchange two names ever show this state; the next writer
    ends it.

    Returns:
        The complete new checkpoint inside its stage, or None if `target` exists or there is no such
        note.
    """
    path = Path(target)
    if os.path.lexists(path):
        return None
    for stage in stages_of(path):
        if new := noted(stage):
            return new
    return None
