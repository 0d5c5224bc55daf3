"""What a search for a checkpoint comes upon."""

from __future__ import annotations

from typing import NamedTuple

DCP, SAFETENSORS, TORCH, RANK_FILES, PARTS = "dcp", "safetensors", "torch", "rank-files", "parts"


class Location(NamedTuple):
    """A checkpoint on disk or behind a URL.

    Attributes:
        format: `dcp`, `safetensors`, `torch`, `rank-files`, or `parts` for several that belong
            together.
        root: the directory (or its URL) that holds `names`.
        names: the files to open there, in order; an index alone stands for its shards.
        resolved: the directory or file that a person would name.
        parts: for `parts`, each part's name and what it is; the name is also that of its tree.
        note: what a person should know about the choice, or None.
    """

    format: str
    root: str
    names: tuple[str, ...]
    resolved: str
    parts: tuple[tuple[str, Location], ...] = ()
    note: str | None = None
