"""Reprs of results: one line, whatever the size of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field

from ema_ckpt.core.text import counted


def short_repr(result: object) -> str:
    """Return the repr of a dataclass with the number of items in place of what is in a field."""
    fields: Mapping[str, Field[object]] = result.__dataclass_fields__  # type: ignore[attr-defined]
    shown = []
    for name in fields:
        value = getattr(result, name)
        if isinstance(value, tuple | Mapping) and value:
            shown.append(f"{name}=<{counted(len(value), 'item')}>")
        else:
            shown.append(f"{name}={value!r}")
    return f"{type(result).__name__}({', '.join(shown)})"
