"""Result of `verify`."""

from __future__ import annotations

from dataclasses import dataclass

from ema_ckpt.core.catalog import Diagnostic, Problem
from ema_ckpt.ops.results.places import hide_credentials


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

    def __post_init__(self) -> None:
        hide_credentials(self, "path", "resolved")
