"""Result of `verify`."""

from __future__ import annotations

from dataclasses import dataclass

from ema_ckpt.core.catalog import Diagnostic, Problem


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Verdict on a checkpoint.

    Attributes:
        path: what was named. resolved: the checkpoint that it stood for.
        status: `sound`, `damaged`, or `unproven` if some payload has no checksum.
        checked_bytes, unchecked_bytes: payload with and without a checksum to compare.
    """

    path: str
    resolved: str
    status: str
    checked_bytes: int
    unchecked_bytes: int
    problems: tuple[Problem, ...]
    warnings: tuple[Diagnostic, ...]
