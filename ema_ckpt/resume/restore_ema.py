"""Restore averages: from weights of their own, or from the restored live weights without any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import SourceError, StateError
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER, canonical
from ema_ckpt.core.text import shown
from ema_ckpt.ema.checkpoint.state import parse_config, ties_of
from ema_ckpt.ema.manager import ShardedEMA, state_of
from ema_ckpt.ema.model.shards import ModelShards
from ema_ckpt.ema.shadows import seed
from ema_ckpt.formats.nesting import nest
from ema_ckpt.resume.checkpoint_reader import Nested, name_inside, tensors_of
from ema_ckpt.resume.flatten import local_shards
from ema_ckpt.resume.restore_phases import Match, PartRestorer, Target, match
from ema_ckpt.state_dicts.ema_config import read_ema_config, read_samples_seen
from ema_ckpt.state_dicts.ema_weights import Averages, find_averages, is_setting, name_averages
from ema_ckpt.state_dicts.hidden_averages import find_hidden
from ema_ckpt.state_dicts.tree import Tree

_COMPARED_SETTINGS = (
    "schedule", "decay", "every", "dtype", "compensate", "rounding", "buffers", "seed", "nonfinite",
)  # fmt: skip


@dataclass(eq=False)
class EmaRestorer(PartRestorer):
    """Restores the averages of one manager.

    Args:
        label: `ema`, or `ema.<name>` among several managers.
        separate: the checkpoint was given for its averages, in whatever form.
        seed_missing: start from the live weights if the checkpoint has no averages.
    """

    manager: ShardedEMA
    label: str
    separate: bool
    seed_missing: bool
    tree: Tree | None = field(init=False)  # None: the checkpoint has no averages
    state: dict[str, Any] = field(init=False)  # live
    counters: dict[str, int | None] = field(default_factory=dict, init=False)  # stored
    config: Nested = field(default_factory=dict, init=False)  # stored
    weights: Match = field(init=False)
    residuals: Match = field(init=False)

    def compare(self) -> None:
        self.tree = self.reader.average_tree(self.label, separate=self.separate)
        self.state = state_of(self.manager, self.context.shards_of(self.manager.model))
        self.weights = Match(f"{self.label}.weights")
        self.residuals = Match(f"{self.label}.residual")
        if self.tree is None:
            self.seed_all()
            return
        if not self.separate:
            self.findings.trees.append(self.tree.name)
        loose: dict[str, Tensor | Object] = {}  # settings that no tree's name marks: `n_averaged`
        if self.tree.role != EMA:
            for tree in self.reader.trees:
                if tree.role != OPTIMIZER:
                    tensors = tensors_of(tree).items()
                    loose |= {name: tensor for name, tensor in tensors if is_setting(name, tensor)}
        self.compare_settings(replace(self.tree, settings=self.tree.settings or loose))
        self.match_weights(self.tree, loose)
        prefix = "residual."
        tensors = tensors_of(self.tree).items()
        stored = {n.removeprefix(prefix): t for n, t in tensors if n.startswith(prefix)}
        self.residuals = self._match("residual", stored)
        self.residuals.unexpected = []
        self.residuals.refuse(self.reader, strict=False)
        self.findings.add_match(self.residuals)

    def seed_all(self) -> None:
        """Let all averages start from the live weights, or refuse that."""
        path, label = self.reader.path, self.label
        if not self.seed_missing:
            hidden = "".join(f"; {found.message}" for found in find_hidden(self.reader.trees))
            raise SourceError(
                "unknown-tree",
                f"{path}: holds no averages {label!r}; its trees are"
                f" {shown(self.reader.tree_names)}{hidden}. Pass ema_path=, or missing_ema='seed'"
                " to start from the restored live weights",
            )
        shadows = self.manager._averages.shadows
        self.findings.seeded += [f"{label}.weights.{shadow.shard.fqn}" for shadow in shadows]
        start = "they start from the restored live weights"
        self.findings.warnings.append(f"{path} holds no averages {label!r}: {start}")

    def compare_settings(self, tree: Tree) -> None:
        """Read the stored settings, and report what differs from the manager's."""
        recorded = read_ema_config(self.reader.catalog, tree)
        samples = read_samples_seen(self.reader.catalog, tree)
        self.counters = {"num_updates": recorded.num_updates, "samples_seen": samples}
        # A configuration that is a dict was flattened.
        self.config = nest((key.split("."), value) for key, value in recorded.raw.items())
        if not self.config and "config" in tree.settings:
            parse_config(self.reader.load_scalar(tree.settings["config"]))  # refuses broken JSON
        self.check_counter(tree)
        current = json.loads(self.state["config"])
        for key in _COMPARED_SETTINGS:
            saved = self.config.get(key, current.get(key))
            if saved != current.get(key):
                self.findings.changed_settings[f"{self.label}.{key}"] = (saved, current[key])
        for name, (saved, now) in self.findings.changed_settings.items():
            self.findings.notes.append(
                f"{name} was {saved!r} in the saved run and is {now!r} here, which counts"
            )
        schedule = self.manager._settings.schedule
        if recorded.num_updates is None and schedule.kind in ("warmup", "power-function"):
            self.findings.notes.append(
                f"{self.reader.path} does not tell how many updates its averages have had:"
                f" {self.label} counts from 0, and with {schedule} the first update replaces them."
                " Use a constant decay, or a checkpoint with the counter"
            )

    def check_counter(self, tree: Tree) -> None:
        """Refuse a counter that no run can have, before anything is written."""
        if self.counters["num_updates"] is None and "counter" in self.config:
            message = f"{tree.name}.config has a counter, and {tree.name}.num_updates is missing"
            raise self.reader.refusal("incomplete", message)
        for name, count in self.counters.items():
            stored = tree.settings.get(name) if count is None else None
            # torch_ema stores None where it counts nothing.
            if stored is not None and self.reader.load_scalar(stored) is not None:
                raise self.reader.refusal("unsupported", f"{tree.name}.{name} is no whole number")
            if count is not None and count < 0:
                raise self.reader.refusal("unsupported", f"{tree.name}.{name} is {count}")
        try:
            replace(self.manager._counter).resume(**self.continued_counter())
        except StateError as error:
            raise self.reader.refusal("unsupported", f"{tree.name}: {error}") from error

    def continued_counter(self) -> dict[str, Any]:
        """Return what the counter goes on from; without the number of updates it begins anew."""
        counted = self.counters["num_updates"] is not None
        saved = self.config.get("counter", {}) if counted else {}
        return {**{name: count or 0 for name, count in self.counters.items()}, "saved": saved}

    def match_weights(self, tree: Tree, loose: Mapping[str, Tensor | Object]) -> None:
        """Pair the averages with stored ones; `loose` settings lie among these."""
        reader, context = self.reader, self.context
        model = context.shards_of(self.manager.model)
        # safetensors files sort their tensors.
        named = name_by_model(tree, model, ordered=reader.catalog.format != "safetensors")
        stored = reader.average_weights(named)
        weights = self.weights = self._match("weights", stored)
        if self.separate and not context.strict:
            self.fill_from_live(weights)
        # Buffers that are not averaged have no value of their own here: the live ones count.
        buffers: set[str] = set()
        for tracked in model.buffers:
            buffers.update(tracked.shard.names)
        ignored = set()
        for name, tensor in stored.items():
            if name in loose or canonical(name) in buffers:
                ignored.add(tensor.name)
        weights.unexpected = [name for name in weights.unexpected if name not in ignored]
        # A run known to have averaged no buffers: those averaged here start from the live ones.
        starts_buffers = self.config.get("buffers") not in (None, "average")
        weights.refuse(reader, strict=context.strict, allowed=buffers if starts_buffers else ())
        self.findings.add_match(weights)
        self.findings.seeded += [f"{weights.tree}.{shard.fqn}" for shard, _ in weights.missing]

    def fill_from_live(self, weights: Match) -> None:
        """Take averages that a separate file lacks from the live weights beside them there."""
        if not self.reader.by_role[LIVE]:
            return
        stored = self.reader.live_weights()
        beside = match(weights.tree, weights.missing, stored, self.context)
        weights.pairs += beside.pairs
        weights.missing = beside.missing
        weights.misfits += beside.misfits
        self.findings.filled += [f"{weights.tree}.{shard.fqn}" for shard, _, _ in beside.pairs]

    def _match(self, part: str, stored: dict[str, Tensor]) -> Match:
        """Match `weights` or `residual`; what the saved model had tied is added to `stored`."""
        values = self.state.get(part, {})
        targets: list[Target] = []
        names: set[str] = set()
        for shadow in self.manager._averages.shadows:
            shard = shadow.shard
            if shard.fqn in values:
                targets.append((shard, local_shards(values[shard.fqn])))
                names.update(shard.names)
        for first, aliases in ties_of(self.config).items():
            if first in stored:
                for name in names.intersection(aliases):
                    stored.setdefault(name, stored[first])
        return match(f"{self.label}.{part}", targets, stored, self.context)

    def read(self) -> None:
        self.weights.read(self.reader)
        self.residuals.read(self.reader)

    def write(self) -> None:
        if self.tree is None:
            return
        self.weights.write()
        self.residuals.write()
        restored = {shard.fqn for shard, _, _ in self.residuals.pairs}
        residuals = self.state.get("residual", {})
        counter = self.continued_counter()
        # Without the ties of the saved model: names are those of this one by now.
        config = {"counter": counter.pop("saved"), "attached": self.config.get("attached")}
        state = {
            **counter,
            "config": config,
            "weights": self.state["weights"],
            "residual": {fqn: value for fqn, value in residuals.items() if fqn in restored},
        }
        self.manager.load_state_dict(state)

    def finish(self) -> None:
        if self.tree is None:
            self.manager.reset()
            return
        missing = {shard.fqn for shard, _ in self.weights.missing}
        averages = self.manager._averages
        with torch.no_grad():
            for shadow, tracked in zip(averages.shadows, averages.tracked, strict=True):
                if shadow.shard.fqn in missing:
                    seed(shadow, tracked, self.manager._settings.source)


def name_by_model(tree: Tree, model: ModelShards, *, ordered: bool) -> Mapping[str, Tensor]:
    """Name averages by the model's parameters where the checkpoint itself cannot.

    diffusers and torch_ema store `shadow_params.N` in the order of `model.parameters()`, LitEma
    names without dots.

    Raises:
        SourceError: `unsupported`: the model's parameters fit neither by shape nor by name.
    """
    if tree.problem is None and any("." in name for name in tree.named):
        return tree.named
    live: dict[str, Tensor] = {}
    trained = set()
    for tracked in model.parameters:
        fqn, dtype = tracked.shard.fqn, by_name(str(tracked.shard.dtype))
        live[fqn] = Tensor(fqn, (fqn,), tracked.shard.shape, dtype, ())
        if tracked.requires_grad:
            trained.add(fqn)
    objects = [name_inside(tree, item) for item in tree.objects]
    averages = Averages("*", tree.named)
    if tree.problem is not None:
        averages = find_averages(tree.name, tensors_of(tree), objects)
    named = name_averages(tree.name, averages, live, trained, ordered=ordered)
    if named.problem is not None:
        raise named.problem
    return named.tensors
