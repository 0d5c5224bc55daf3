"""Restore averages: from weights of their own, or from the restored live weights without any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER, canonical
from ema_ckpt.core.text import shown
from ema_ckpt.ema.checkpoint.state import parse_config
from ema_ckpt.ema.manager import ShardedEMA, state_of
from ema_ckpt.ema.model.shards import ModelShards
from ema_ckpt.ema.shadows import seed as seed_shadow
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
from ema_ckpt.resume.tensor_source import (
    CheckpointReader,
    average_tree,
    average_weights,
    live_weights,
    nested,
    tensors_of,
)
from ema_ckpt.state_dicts.ema_config import read_ema_config, read_samples_seen
from ema_ckpt.state_dicts.ema_layouts import find_averages, is_setting, name_averages

if TYPE_CHECKING:
    from ema_ckpt.state_dicts.tree import Tree

_COMPARED_SETTINGS = (
    "schedule", "decay", "every", "dtype", "compensate", "rounding", "buffers", "seed", "nonfinite",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class EmaSeeder(Restorer):
    """Averages that the checkpoint lacks altogether: they start from the restored live weights."""

    manager: ShardedEMA

    def finish(self) -> None:
        self.manager.reset()


@dataclass(slots=True, eq=False)
class EmaRestorer(Restorer):
    """The averages of one manager."""

    reader: CheckpointReader
    manager: ShardedEMA
    state: Mapping[str, Any]  # live
    settings: Mapping[str, Any]  # stored
    weights: Match
    residuals: Match
    staged: StagedTensors = field(default_factory=list)

    def read(self) -> None:
        self.staged = read_pairs(self.reader, self.weights)
        self.staged += read_pairs(self.reader, self.residuals)

    def write(self) -> None:
        write_staged(self.staged)
        restored = {target.names[0] for target, _ in self.residuals.pairs}
        residuals = self.state.get("residual", {})
        state = {
            "num_updates": self.settings["num_updates"],
            "samples_seen": self.settings["samples_seen"],
            # Without the ties of the saved model: names are those of this one by now.
            "config": {"counter": self.settings["config"].get("counter", {})},
            "weights": self.state["weights"],
            "residual": {fqn: value for fqn, value in residuals.items() if fqn in restored},
        }
        self.manager.load_state_dict(state)

    def finish(self) -> None:
        missing = {target.names[0] for target in self.weights.missing}
        averages = self.manager.averages
        with torch.no_grad():
            for shadow, tracked in zip(averages.shadows, averages.tracked, strict=True):
                if shadow.shard.fqn in missing:
                    seed_shadow(shadow, tracked, self.manager.settings.source)


def compare_averages(
    reader: CheckpointReader,
    context: RestoreContext,
    manager: ShardedEMA,
    name: str,
    *,
    separate: bool,
    seed: bool,
) -> Restorer:
    """Compare the averages of one manager with the checkpoint's.

    Args:
        name: of the manager among several, or empty.
        separate: the checkpoint was given for its averages, in whatever form.
        seed: start from the live weights if the checkpoint has no averages.

    Raises:
        SourceError: `unknown-tree`, `incomplete`, `index-mismatch`, or `unsupported`: the model's
            parameters do not name averages that are stored by position or without dots.
    """
    label = f"ema.{name}" if name else "ema"
    tree = average_tree(reader, label, separate=separate)
    strict, model = context.strict, context.shards_of(manager.model)
    state = state_of(manager, model)
    if tree is None:
        return _seed_all(reader, manager, label, seed=seed)
    findings = Findings([] if separate else [tree.name])
    loose = {} if tree.role == EMA else _loose_settings(reader)
    settings = _read_settings(reader, replace(tree, settings=tree.settings or loose))
    _compare_settings(reader, manager, label, state, settings, findings)

    targets = _targets(manager, state["weights"])
    names = {name for target in targets for name in target.names}
    stored = average_weights(reader, _named_by_model(reader, tree, model))
    stored = {n: t for n, t in stored.items() if n not in loose or canonical(n) in names}
    stored |= _tied_tensors(settings, stored, names)
    weights = match(
        f"{label}.weights", targets, stored, strict=strict, remote_names=context.remote_names
    )
    if separate and not strict and any(tree.role == LIVE for tree in reader.trees):
        beside = match(weights.tree, weights.missing, live_weights(reader), strict=False)
        weights.pairs += beside.pairs
        weights.missing = beside.missing
        weights.misfits += beside.misfits
        findings.filled += [beside.full_name(target) for target, _ in beside.pairs]
    # Buffers that are not averaged have no value of their own here: the live ones count.
    buffers = {name for tracked in model.buffers for name in tracked.shard.names}
    own = {tensor.name for name, tensor in stored.items() if canonical(name) in buffers}
    weights.unexpected = [name for name in weights.unexpected if name not in own]
    # A run known to have averaged no buffers: those averaged here start from the live ones.
    starts_buffers = settings["config"].get("buffers") not in (None, "average")
    weights.refuse(reader.path, strict=strict, allowed=buffers if starts_buffers else ())
    findings.add_match(weights)
    findings.seeded += [weights.full_name(target) for target in weights.missing]

    tensors = tensors_of(tree).items()
    stored = {n.removeprefix("residual."): t for n, t in tensors if n.startswith("residual.")}
    stored |= _tied_tensors(settings, stored, names)
    residual_targets = _targets(manager, state.get("residual", {}))
    residuals = match(f"{label}.residual", residual_targets, stored, strict=strict)
    residuals.unexpected = []
    residuals.refuse(reader.path, strict=False)
    findings.add_match(residuals)
    return EmaRestorer(findings, reader, manager, state, settings, weights, residuals)


def _seed_all(
    reader: CheckpointReader, manager: ShardedEMA, label: str, *, seed: bool
) -> EmaSeeder:
    if not seed:
        trees = shown([tree.name for tree in reader.trees])
        raise SourceError(
            "unknown-tree",
            f"{reader.path}: holds no averages {label!r}; its trees are {trees}. Pass ema_path=,"
            " or missing_ema='seed' to start from the restored live weights",
        )
    seeded = [f"{label}.weights.{shadow.shard.fqn}" for shadow in manager.averages.shadows]
    start = "they start from the restored live weights"
    warning = f"{reader.path} holds no averages {label!r}: {start}"
    return EmaSeeder(Findings(seeded=seeded, warnings=[warning]), manager)


def _targets(manager: ShardedEMA, values: Mapping[str, torch.Tensor]) -> list[RestoreTarget]:
    shards = [shadow.shard for shadow in manager.averages.shadows if shadow.shard.fqn in values]
    return [RestoreTarget(shard.names, local_shards(values[shard.fqn])) for shard in shards]


def _tied_tensors(
    settings: Mapping[str, Any], stored: Mapping[str, Tensor], names: set[str]
) -> dict[str, Tensor]:
    """Tensors that the saved model had tied, under the names that are separate here."""
    ties = settings["config"].get("tied")
    tensors: dict[str, Tensor] = {}
    for first, aliases in ties.items() if isinstance(ties, Mapping) else ():
        if first in stored:
            missing = [name for name in aliases if name in names and name not in stored]
            tensors |= dict.fromkeys(missing, stored[first])
    return tensors


def _named_by_model(
    reader: CheckpointReader, tree: Tree, model: ModelShards
) -> Mapping[str, Tensor]:
    """Name averages by the model's parameters where the checkpoint itself cannot.

    diffusers and torch_ema store `shadow_params.N` in the order of `model.parameters()`, LitEma
    names without dots.

    Raises:
        SourceError: `unsupported`: the model's parameters fit neither by shape nor by name.
    """
    if tree.problem is None and any("." in name for name in tree.named):
        return tree.named
    live = {}
    for tracked in model.parameters:
        fqn, dtype = tracked.shard.fqn, by_name(str(tracked.shard.dtype))
        live[fqn] = Tensor(fqn, (fqn,), tracked.shard.shape, dtype, ())
    trained = {tracked.shard.fqn for tracked in model.parameters if tracked.requires_grad}
    prefix = f"{tree.name}." if tree.name else ""
    objects = [item.name.removeprefix(prefix) for item in tree.objects]
    averages = find_averages(tree.name, tensors_of(tree), objects)
    # safetensors files sort their tensors.
    ordered = reader.catalog.format != "safetensors"
    named = name_averages(tree.name, averages, live, trained, ordered=ordered)
    if named.problem is not None:
        raise named.problem
    return named.tensors


def _loose_settings(reader: CheckpointReader) -> dict[str, Tensor | Object]:
    """Settings beside weights that no tree's name marks as averages: `n_averaged`."""
    settings: dict[str, Tensor | Object] = {}
    for tree in reader.trees:
        if tree.role != OPTIMIZER:
            tensors = tensors_of(tree).items()
            settings |= {name: tensor for name, tensor in tensors if is_setting(name, tensor)}
    return settings


def _read_settings(reader: CheckpointReader, tree: Tree) -> dict[str, Any]:
    """Read counters and configuration, as far as the tree has them."""
    recorded = read_ema_config(reader.catalog, tree)
    entries = [(key.split("."), value) for key, value in recorded.raw.items()]
    config = nested(entries)  # a configuration that is a dict was flattened
    if not config:
        parse_config(reader.setting(tree.settings, "config"))  # refuses what is no JSON document
    return {
        "num_updates": recorded.num_updates or 0,
        "samples_seen": read_samples_seen(reader.catalog, tree) or 0,
        "config": config,
        "is_counted": recorded.num_updates is not None,
    }


def _compare_settings(
    reader: CheckpointReader,
    manager: ShardedEMA,
    label: str,
    state: Mapping[str, Any],
    settings: Mapping[str, Any],
    findings: Findings,
) -> None:
    saved, current = settings["config"], json.loads(state["config"])
    for key in _COMPARED_SETTINGS:
        if key in saved and saved[key] != current.get(key):
            findings.changed_settings[f"{label}.{key}"] = (saved[key], current[key])
    schedule = manager.settings.schedule
    if not settings["is_counted"] and schedule.kind in ("warmup", "power-function"):
        findings.notes.append(
            f"{reader.path} does not tell how many updates its averages have had: {label} counts"
            f" from 0, and with {schedule} the first update replaces them. Use a constant decay,"
            " or a checkpoint with the counter"
        )
