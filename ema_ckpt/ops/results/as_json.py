"""Results as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass


def as_json(value: object) -> object:
    """A result as plain dicts, lists and scalars; NaN and infinities become None.

    A field that is marked `"json": "if set"` is left out while it is None.
    """
    if is_dataclass(value) and not isinstance(value, type):
        document = {}
        for one in fields(value):
            item = getattr(value, one.name)
            if item is not None or "json" not in one.metadata:
                document[one.name] = as_json(item)
        return document
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
