"""torch is an extra: import it where it is needed, or say what needs it and how to install it."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

from ema_ckpt.core.errors import UsageError

TESTED = ((2, 11), (2, 16))
"""The torch versions that the tests run on, from the first up to but without the second."""

_checked = False


def import_torch(what: str) -> None:
    """Import torch for `what`, a call or an option; warn once of a version that is not tested.

    Raises:
        UsageError: `missing-extra` if torch is not installed, or cannot be imported.
    """
    global _checked
    try:
        import torch
    except ImportError as error:
        raise _missing(what, str(error)) from None
    if _checked:
        return
    _checked = True
    version = str(torch.__version__)
    first, end = TESTED
    if not first <= _numbers(version) < end:
        tested = f"{_dotted(first)} up to, without, {_dotted(end)}"
        message = f"torch {version} is outside the range that ema_ckpt is tested with ({tested})"
        warnings.warn(message, stacklevel=3)


def require_torch(what: str) -> None:
    """Check that torch is there, without importing it.

    Raises:
        UsageError: `missing-extra` if it is not installed.
    """
    try:
        found = find_spec("torch") is not None
    except (ImportError, ValueError):  # something keeps it from being found
        found = False
    if not found:
        raise _missing(what, "it is not installed")


def _missing(what: str, reason: str) -> UsageError:
    hint = "install it with `pip install 'ema-ckpt[train]'`"
    return UsageError("missing-extra", f"{what} needs torch ({reason.rstrip('.')}); {hint}")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version such as `2.13.0a0+git123`."""
    parts = version.partition("+")[0].split(".")[:2]
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
