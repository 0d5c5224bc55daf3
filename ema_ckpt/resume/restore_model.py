"""Restore parameters, persistent buffers and extra state of the model."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.ema.model.live_tree import extra_state, set_extra_state
from ema_ckpt.resume.checkpoint_reader import Nested, name_inside, nest_items
from ema_ckpt.resume.flatten import is_extra_state, local_shards
from ema_ckpt.resume.restore_phases import Match, PartRestorer, match


@dataclass(eq=False)
class ModelRestorer(PartRestorer):
    """Restores the live weights."""

    weights: Match = field(init=False)
    stored_extra: Nested = field(init=False)  # of `get_extra_state`, by its name in the state dict
    extra: dict[str, Any] = field(default_factory=dict, init=False)
    former_extra: dict[str, Any] = field(default_factory=dict, init=False)

    def compare(self) -> None:
        reader, context = self.reader, self.context
        tree = reader.live_tree()
        self.findings.trees.append(tree.name)
        items: list[Tensor | Object] = [*tree.tensors, *tree.objects]
        extra = [item for item in items if is_extra_state(item.path)]
        self.stored_extra = nest_items(tree.name, extra)
        tracked = context.shards.tensors
        targets = [(t.shard, local_shards(t.shard)) for t in tracked if t.persistent]
        stored = reader.live_weights()
        for item in extra:
            stored.pop(name_inside(tree, item), None)
        self.weights = match("model", targets, stored, context)
        self.weights.refuse(reader, strict=context.strict)
        self.findings.add_match(self.weights)
        self.findings.missing += [f"model.{shard.fqn}" for shard, _ in self.weights.missing]
        if reader.is_swapped:
            self.findings.warnings.append(
                f"{reader.path} is marked as swapped: it was saved with averages in the model's"
                " place, and its trees were exchanged back"
            )

    def read(self) -> None:
        self.weights.read(self.reader)
        self.extra = {str(name): self.reader.load(it) for name, it in self.stored_extra.items()}

    def apply_user_state(self) -> None:
        if self.extra:
            self.former_extra = deepcopy(extra_state(self.context.shards))
        set_extra_state(self.context.shards, self.extra)

    def rollback_user_state(self) -> list[tuple[str, Callable[[], object]]]:
        return [
            (f"model.{name}", partial(set_extra_state, self.context.shards, {name: value}))
            for name, value in self.former_extra.items()
        ]

    def write(self) -> None:
        self.weights.write()
