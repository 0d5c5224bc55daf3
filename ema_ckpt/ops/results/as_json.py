"""Results as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any


def as_json(value: object) -> object:
    """A result as plain dicts, lists and scalars; NaN and infinities become None."""
    # Texts and numbers come first: they are nearly all that there is.
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    kind: Any = type(value)
    names = _fields_of(kind)
    if names:
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, (tuple, list)):
        return list(map(as_json, value))
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    return value


@cache
def _fields_of(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass."""
    return tuple([one.name for one in fields(kind)]) if is_dataclass(kind) else ()
