"""Restore parameters, persistent buffers and extra state of the model."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.ema.model.live import extra_state, set_extra_state
from ema_ckpt.ema.model.shards import ModelShards
from ema_ckpt.resume.flatten import local_shards
from ema_ckpt.resume.match import Match, RestoreTarget, match
from ema_ckpt.resume.restorer import (
    Findings,
    RestoreContext,
    Restorer,
    StagedTensors,
    read_pairs,
    write_staged,
)
from ema_ckpt.resume.tensor_source import CheckpointReader, live_tree, live_weights, nested


@dataclass(slots=True, eq=False)
class ModelRestorer(Restorer):
    """The live weights."""

    reader: CheckpointReader
    model: ModelShards
    pairs: Match
    stored_extra: dict[str, Any]  # of `get_extra_state`, by its name in the state dict
    staged: StagedTensors = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    former_extra: dict[str, Any] = field(default_factory=dict)

    def read(self) -> None:
        self.staged = read_pairs(self.reader, self.pairs)
        self.extra = {name: self.reader.load(item) for name, item in self.stored_extra.items()}

    def apply_user_state(self) -> None:
        if self.extra:
            self.former_extra = deepcopy(extra_state(self.model))
        set_extra_state(self.model, self.extra)

    def rollback_user_state(self) -> None:
        set_extra_state(self.model, self.former_extra)

    def write(self) -> None:
        write_staged(self.staged)


def compare_model(reader: CheckpointReader, context: RestoreContext) -> ModelRestorer:
    """Compare the live weights with the checkpoint's.

    Raises:
        SourceError: `index-mismatch` or `incomplete`.
        UsageError: `unknown-tree` or `ambiguous-tree`.
    """
    tree = live_tree(reader)
    shards = [tracked.shard for tracked in context.shards.tensors if tracked.persistent]
    targets = [RestoreTarget(shard.names, local_shards(shard)) for shard in shards]
    weights = live_weights(reader)
    stored = {name: tensor for name, tensor in weights.items() if not _is_extra_state(tensor)}
    pairs = match(
        "model", targets, stored, strict=context.strict, remote_names=context.remote_names
    )
    pairs.refuse(reader.path, strict=context.strict)
    findings = Findings([tree.name])
    findings.add_match(pairs)
    findings.missing += [pairs.full_name(target) for target in pairs.missing]
    if reader.is_swapped:
        findings.warnings.append(
            f"{reader.path} is marked as swapped: it was saved with averages in the model's place,"
            " and its trees were exchanged back"
        )
    depth = len(tree.name.split(".")) if tree.name else 0
    items: list[Tensor | Object] = [*tree.tensors, *tree.objects]
    extra = nested((item.path[depth:], item) for item in items if _is_extra_state(item))
    named = {str(name): item for name, item in extra.items()}
    return ModelRestorer(findings, reader, context.shards, pairs, named)


def _is_extra_state(item: Tensor | Object) -> bool:
    return any(isinstance(part, str) and part.endswith("_extra_state") for part in item.path)
