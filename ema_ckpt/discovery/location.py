"""Where a checkpoint lies, in which format, and what lies beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ema_ckpt.core.catalog import Diagnostic
from ema_ckpt.core.errors import EmaCkptError, UsageError
from ema_ckpt.core.text import shown

if TYPE_CHECKING:
    from ema_ckpt.formats.dcp.metadata import Metadata

DCP, SAFETENSORS, TORCH, RANK_FILES, PARTS = "dcp", "safetensors", "torch", "rank-files", "parts"
TORCH_CHECKPOINTING = "torch-checkpointing"


class LeftOut(NamedTuple):
    """Something beside an opened checkpoint that is not read though it could belong to it.

    Attributes:
        path: its place.
        why: what is said of it.
        is_weights: whether `--strict` refuses to leave it out; False for an optimizer's state, say.
        error: of a newer step: why it is not complete.
        is_fresh: of a newer step: whether it may still be written.
    """

    path: str
    why: str
    is_weights: bool = True
    error: EmaCkptError | None = None
    is_fresh: bool = False

    def diagnostic(self) -> Diagnostic:
        """Return the warning that says so."""
        return Diagnostic("left-out", f"{self.path} is left out: {self.why}")


class Location(NamedTuple):
    """A checkpoint on disk or behind a URL.

    Attributes:
        format: `dcp`, `safetensors`, `torch`, `rank-files`, `torch-checkpointing`, or `parts` for
            several that belong together.
        root: the directory (or its URL) that holds `names`.
        names: the files to open there, in order; an index alone stands for its shards, and the
            metadata of torch_checkpointing comes before the files that it names.
        resolved: the directory or file that a person would name.
        parts: for `parts`, each part's name, which is also that of its tree, and its location.
        roles: for `parts`, the role of each.
        note: a remark for the user about the choice, or None.
        metadata: of a DCP, the contents of `names` if they were parsed already.
        left_out: what lies beside it and is not read.
        warnings: what the names leave open about it.
    """

    format: str
    root: str
    names: tuple[str, ...]
    resolved: str
    parts: tuple[tuple[str, Location], ...] = ()
    roles: tuple[str, ...] = ()
    note: str | None = None
    metadata: Sequence[Metadata] | None = None
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()


def is_index(name: str) -> bool:
    """Whether the file `name` of a location is an index of shards."""
    return name.endswith(".json")


def join_located(root: str, resolved: str, parts: Sequence[tuple[str, Location, str]]) -> Location:
    """Return the location of parts, given as name, location and role, below `root`."""
    named = tuple((name, location) for name, location, _ in parts)
    return Location(PARTS, root, (), resolved, named, tuple(role for _, _, role in parts))


def ambiguous(root: str, paths: Sequence[str]) -> UsageError:
    """Make the error for a directory `root` that holds several checkpoints, at `paths` below it."""
    names = [path.removeprefix(root).lstrip("/") for path in paths]
    message = f"{root}: holds {len(names)} checkpoints, {shown(names)}; name one of them"
    return UsageError("ambiguous-path", message)
