"""Types of arguments that callers in Python give; the command line makes them by itself."""

from __future__ import annotations

import operator
from typing import NoReturn

from ema_ckpt.core.errors import UsageError


def whole_number(value: object, what: str) -> int:
    """Return a whole number, also one of numpy. Raises UsageError `usage` for anything else."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        _refuse(value, what, "a whole number")
    return operator.index(value)


def number(value: object, what: str) -> float | None:
    """Return a number, also of a tensor, or None. Raises UsageError `usage` for anything else."""
    return None if value is None else _number(value, what)


def numbers(values: object, what: str) -> list[float] | None:
    """Return numbers of any iterable, or None. Raises UsageError `usage` for anything else."""
    if values is None:
        return None
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        _refuse(values, what, "a list of numbers")
    return [_number(value, what) for value in values]


def _number(value: object, what: str) -> float:
    if isinstance(value, (str, bytes)) or not (
        hasattr(value, "__float__") or hasattr(value, "__index__")
    ):
        _refuse(value, what, "a number")
    return float(value)  # type: ignore[arg-type]


def one_text(value: object, what: str) -> str:
    """Return a text. Raises UsageError `usage` for anything else."""
    if not isinstance(value, str):
        _refuse(value, what, "one text")
    return value


def texts(values: object, what: str) -> tuple[str, ...]:
    """Return texts of any iterable; a lone text is one of them, and None is none.

    Raises:
        UsageError: `usage` for anything else.
    """
    if values is None:
        return ()
    if isinstance(values, str):
        return (values,)
    found = tuple(values) if hasattr(values, "__iter__") else (None,)
    if not all(isinstance(one, str) for one in found):
        _refuse(values, what, "texts")
    return found


def _refuse(value: object, what: str, expected: str) -> NoReturn:
    found = f"{value!r:.80}, of type {type(value).__name__}"
    raise UsageError("usage", f"{what}: expected {expected}; found {found}")
