"""What the writing verbs return, and any result as JSON: frozen, and equal to what the command line
prints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache

from ema_ckpt.core.catalog import Diagnostic


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file that was written, relative to the target, and its bytes."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was left out, the file it is in, and why."""

    name: str
    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a writing verb did, or with `dry_run` would do. `nbytes` is payload, `seconds` wall
    time.
    """

    source: str
    target: str
    tree: str | None
    format: str
    files: tuple[FileEntry, ...]
    tensors: int
    nbytes: int
    seconds: float
    renamed: Mapping[str, str] = field(default_factory=dict)
    filled: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()
    dry_run: bool = False


def as_json(value: object) -> object:
    """A result as plain dicts, lists and scalars; NaN and infinities become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: as_json(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
