"""Reprs of results: one line, whatever the size of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from ema_ckpt.core.text import counted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def short_repr(result: DataclassInstance) -> str:
    """Return the repr of a dataclass with the number of items in place of what is in a field."""
    shown = []
    for name in (field.name for field in fields(result)):
        value = getattr(result, name)
        if isinstance(value, tuple | Mapping) and value:
            shown.append(f"{name}=<{counted(len(value), 'item')}>")
        else:
            shown.append(f"{name}={value!r}")
    return f"{type(result).__name__}({', '.join(shown)})"
