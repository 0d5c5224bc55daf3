"""Result of `verify`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ema_ckpt.core.catalog import Diagnostic, Problem
from ema_ckpt.ops.results.places import hide_credentials
from ema_ckpt.ops.results.short_repr import short_repr


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

    __repr__ = short_repr

    def __post_init__(self) -> None:
        hide_credentials(self, "path", "resolved")


@dataclass(frozen=True, slots=True)
class ManifestResult:
    """What became of a manifest.

    Attributes:
        path: the manifest. written: whether it was made; if not, files were compared with it.
        files, nbytes: files that were listed or that match, and bytes that were hashed.
        uncovered: files that are there and that it does not list; if one of them belongs to the
            checkpoint, this is `unproven`.
    """

    path: str
    written: bool
    files: int
    nbytes: int
    uncovered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GateResult(VerifyResult):
    """Verdict of `verify` with `--quick` or `--manifest`, and of `check`.

    Attributes:
        quick: whether payload was left unread.
        manifest: what became of the manifest, if one was given.
    """

    quick: bool
    manifest: ManifestResult | None

    @property
    def passes(self) -> bool:
        """Whether nothing is wrong, and nothing unproven but payload that `quick` leaves out."""
        is_compared = self.manifest is not None and not self.manifest.written
        return self.status == "sound" or (
            self.quick and self.status == "unproven" and not is_compared
        )

    @classmethod
    def of(cls, verdict: VerifyResult, quick: bool, manifest: ManifestResult | None) -> GateResult:
        """Make it of a plain verdict."""
        shared = {field.name: getattr(verdict, field.name) for field in fields(verdict)}
        return cls(**shared, quick=quick, manifest=manifest)
