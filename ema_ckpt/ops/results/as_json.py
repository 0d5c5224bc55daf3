"""Results as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import is_dataclass


def as_json(value: object) -> object:
    """A result as plain dicts, lists and scalars; NaN and infinities become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: as_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
