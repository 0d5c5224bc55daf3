"""What the parts of a restore share: the phases, the findings for the report, staged tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from ema_ckpt.core.text import shown
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.ema.model.shards import ModelShards
from ema_ckpt.resume.match import Match
from ema_ckpt.resume.tensor_source import CheckpointReader

StagedTensors = list[tuple[torch.Tensor, torch.Tensor]]  # live view, host value


@dataclass(slots=True, eq=False)
class Findings:
    """Results of a comparison, under the names that `RestoreReport` has for them."""

    trees: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    seeded: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    changed_settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # warnings for the report alone

    def merge(self, other: Findings) -> None:
        """Add the findings of another part."""
        for attribute in fields(self):
            mine, more = getattr(self, attribute.name), getattr(other, attribute.name)
            if isinstance(mine, dict):
                mine.update(more)
            else:
                mine.extend(more)

    def add_match(self, match: Match) -> None:
        """Add what was paired, renamed and cast, and what was unexpected."""
        self.loaded += [match.full_name(target) for target, _ in match.pairs]
        self.unexpected += match.unexpected
        self.renamed.update(match.renamed)
        for cast, names in match.casts.items():
            verb = "was" if len(names) == 1 else "were"
            self.warnings.append(f"{match.tree}: {shown(names)} {verb} {cast}")


@dataclass(frozen=True, slots=True, eq=False)
class RestoreContext:
    """The model of a restore, scanned once, and how strictly it is compared.

    `remote_names` are tensors that only other ranks have, as the stages of a pipeline do.
    """

    model: nn.Module
    shards: ModelShards
    strict: bool
    remote_names: frozenset[str]

    def shards_of(self, model: nn.Module) -> ModelShards:
        """Return the shards of a manager's model, which mostly is the one restored."""
        return self.shards if model is self.model else scan_model(model)


@dataclass(slots=True, eq=False)
class Restorer:
    """One part of the state that has been compared; its phases run on all ranks, one by one.

    User code (`load_state_dict` of an object, `set_extra_state` of a module) may refuse its values:
    it gets them before anything is written, and its own back if any of it refuses on any rank.
    """

    findings: Findings

    def read(self) -> None:
        """Read what this rank needs into host memory."""

    def apply_user_state(self) -> None:
        """Pass values to user code."""

    def rollback_user_state(self) -> None:
        """Give user code its former values, as far as `apply_user_state` came."""

    def write(self) -> None:
        """Copy what was read into place."""

    def finish(self) -> None:
        """Derive values from the other parts, which are in place by now."""


def read_pairs(reader: CheckpointReader, match: Match) -> StagedTensors:
    """Read this rank's boxes of every pair."""
    staged: StagedTensors = []
    for target, tensor in match.pairs:
        boxes = [box for box, _ in target.value.shards]
        views = [view for _, view in target.value.shards]
        staged += zip(views, reader.read(tensor, boxes), strict=True)
    return staged


def write_staged(staged: StagedTensors) -> None:
    """Copy staged values into their live views."""
    with torch.no_grad():
        for view, value in staged:
            view.copy_(value)
