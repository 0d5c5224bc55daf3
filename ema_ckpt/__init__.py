"""Sharded EMA for large-scale training, and a toolkit for the checkpoints it leaves.

Names are loaded when they are first used: importing the package loads neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ema_ckpt.errors import (
        CollectiveError,
        EmaCkptError,
        SourceError,
        StateError,
        TargetError,
        UnsafeError,
        UsageError,
    )
    from ema_ckpt.ops.checkpoint import Checkpoint
    from ema_ckpt.ops.checkpoint import open_checkpoint as open  # noqa: A004 - as gzip.open: named by its module
    from ema_ckpt.ops.consolidate import consolidate
    from ema_ckpt.ops.convert import convert, reshard
    from ema_ckpt.ops.inspect import inspect
    from ema_ckpt.ops.verify import verify

_MODULES = {
    "ema_ckpt.errors": (
        "CollectiveError",
        "EmaCkptError",
        "SourceError",
        "StateError",
        "TargetError",
        "UnsafeError",
        "UsageError",
    ),
    "ema_ckpt.ops.checkpoint": ("Checkpoint", "open"),
    "ema_ckpt.ops.consolidate": ("consolidate",),
    "ema_ckpt.ops.convert": ("convert", "reshard"),
    "ema_ckpt.ops.inspect": ("inspect",),
    "ema_ckpt.ops.verify": ("verify",),
}
_RENAMED = {"open": "open_checkpoint"}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Checkpoint",
    "CollectiveError",
    "EmaCkptError",
    "SourceError",
    "StateError",
    "TargetError",
    "UnsafeError",
    "UsageError",
    "__version__",
    "consolidate",
    "convert",
    "inspect",
    "open",
    "reshard",
    "verify",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ema_ckpt' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(home), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
