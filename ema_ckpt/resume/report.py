"""What a restore did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What `restore` took from a checkpoint. Names are full: `model.layer.weight`,
    `ema.weights.layer.weight`.

    Attributes:
        path: the checkpoint that was read. world_size: of the run that wrote it, if it tells.
        trees: every tree of the checkpoint by name, `"restored"` or `"ignored"`.
        loaded: names of this state that were restored.
        missing: names of this state that the checkpoint lacks, and that were left as they were.
        unexpected: names of the checkpoint, in restored trees, that this state lacks.
        seeded: averages that the checkpoint lacks and that were set to the restored live weights.
        filled: averages that `ema_path` lacks and that were taken from the live weights beside them
            there.
        renamed: names in the checkpoint that differ from those here by wrapper prefixes, and what
            they became.
        changed_settings: settings of averages that are not those of the saved run: name to (saved,
            now).
        extra: the restored values of `extra`, by name; objects restored in place stand for
            themselves.
        warnings: what a person should know.
    """

    path: Path
    world_size: int | None
    trees: Mapping[str, str] = field(default_factory=dict)
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    seeded: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    changed_settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
