"""What `verify` returns."""

from __future__ import annotations

from dataclasses import dataclass

from ema_ckpt.core.catalog import Diagnostic


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a checkpoint: a stable code, the tensor and file concerned (or None),
    and what it is.
    """

    code: str
    tensor: str | None
    file: str | None
    message: str


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What `verify` found.

    Attributes:
        status: `sound`, `unproven` (nothing wrong, but some payload carries no checksum) or
            `damaged`.
        checked_bytes, unchecked_bytes: payload compared with a checksum, and payload that carries
            none.
    """

    status: str
    checked_bytes: int
    unchecked_bytes: int
    problems: tuple[Problem, ...]
    warnings: tuple[Diagnostic, ...]
