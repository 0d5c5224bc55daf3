"""Restoring averages: from weights of their own, or from the restored live weights where there are
none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.core.errors import SourceError, shown
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER, canonical
from ema_ckpt.ema.checkpoint.state import parse_config
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.ema.shadows import seed
from ema_ckpt.resume.flatten import pieces
from ema_ckpt.resume.foreign import named_by_model
from ema_ckpt.resume.match import Match, RestoreTarget, match
from ema_ckpt.resume.restore_model import Restorer, Staged, put, refuse_unfit, stage_pairs
from ema_ckpt.resume.sources import (
    Checkpoint,
    average_tree,
    average_weights,
    live_weights,
    loaded,
    nested,
    setting,
    tensors_of,
)
from ema_ckpt.state_dicts.ema_layouts import is_setting

if TYPE_CHECKING:
    from ema_ckpt.ema.manager import ShardedEMA
    from ema_ckpt.state_dicts.tree import Tree

_COUNTERS = ("num_updates", "n_averaged", "optimization_step", "step")
_COMPARED = (
    "schedule",
    "decay",
    "every",
    "dtype",
    "compensate",
    "rounding",
    "buffers",
    "seed",
    "nonfinite",
)


class EmaRestorer(Restorer):
    """The averages of one manager. `name` is that among several managers, or empty."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        manager: ShardedEMA,
        name: str,
        *,
        foreign: bool,
        strict: bool,
        seed: bool,
        elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        self._label = f"ema.{name}" if name else "ema"
        tree = average_tree(checkpoint, self._label, foreign=foreign)
        super().__init__([] if tree is None or foreign else [tree.name])
        self._checkpoint, self._manager, self._tree = checkpoint, manager, tree
        self._state = manager.state_dict()
        self._weights, self._residuals = (
            Match(f"{self._label}.weights"),
            Match(f"{self._label}.residual"),
        )
        self._staged: Staged = []
        self._settings: Mapping[str, Any] = {}
        if tree is None:
            self._refuse_unless(seed)
        else:
            self._compare(tree, foreign=foreign, strict=strict, elsewhere=elsewhere)

    def _refuse_unless(self, seed: bool) -> None:
        where = self._checkpoint.where
        if not seed:
            raise SourceError(
                "unknown-tree",
                f"{where}: holds no averages {self._label!r}; its trees are "
                f"{shown([tree.name for tree in self._checkpoint.trees])}. Pass ema_path=, or missing_ema='seed' to "
                "start from the restored live weights",
            )
        self.seeded += [
            f"{self._label}.weights.{slot.shard.fqn}" for slot in self._manager.averages.shadows
        ]
        self.warnings.append(
            f"{where} holds no averages {self._label!r}: they start from the restored live weights"
        )

    def _compare(
        self, tree: Tree, *, foreign: bool, strict: bool, elsewhere: frozenset[str]
    ) -> None:
        loose = {} if tree.role == EMA else _loose_settings(self._checkpoint)
        self._settings = _settings(self._checkpoint, tree.settings or loose)
        if not self._settings["is_counted"] and self._manager.settings.schedule.kind in (
            "warmup",
            "power-function",
        ):
            self.notes.append(
                f"{self._checkpoint.where} does not tell how many updates its averages have had: {self._label} counts"
                f" from 0, and with {self._manager.settings.schedule} the first update replaces them. Use a constant"
                " decay, or a checkpoint with the counter"
            )
        ordered = self._checkpoint.catalog.format != "safetensors"
        named = named_by_model(tree, self._manager.model, ordered=ordered)
        stored, targets = average_weights(self._checkpoint, named), self._targets("weights")
        wanted = {name for target in targets for name in target.names}
        stored = {
            name: t for name, t in stored.items() if name not in loose or canonical(name) in wanted
        }
        stored |= self._untied(stored, wanted)
        self._weights = match(
            self._weights.tree, targets, stored, strict=strict, elsewhere=elsewhere
        )
        if foreign and not strict:
            self._fill()
        # Buffers that are not averaged have no value of their own here: the live ones count.
        buffers = {name for h in scan_model(self._manager.model).buffers for name in h.shard.names}
        own = {stored[name].name for name in stored if canonical(name) in buffers}
        self._weights.unexpected = [name for name in self._weights.unexpected if name not in own]
        inside = {
            name.removeprefix("residual."): t
            for name, t in tensors_of(tree).items()
            if name.startswith("residual.")
        }
        inside |= self._untied(inside, wanted)
        self._residuals = match(
            self._residuals.tree, self._targets("residual"), inside, strict=strict
        )
        excused = buffers if self._weights.missing and self._began_anew() else set()
        for found in (self._weights, self._residuals):
            found.unexpected = found.unexpected if found is self._weights else []
            due = [target for target in found.missing if target.names[0] not in excused]
            refuse_unfit(
                self._checkpoint.where,
                replace(found, missing=due),
                strict=strict and found is self._weights,
            )
            self.note(found)
        self.seeded += [self._weights.full(target) for target in self._weights.missing]

    def _untied(self, stored: Mapping[str, Tensor], wanted: set[str]) -> dict[str, Tensor]:
        """What the saved model had tied, under the names that are separate here."""
        tied = self._settings["config"].get("tied")
        pairs = tied.items() if isinstance(tied, Mapping) else ()
        return {
            alias: stored[first]
            for first, aliases in pairs
            for alias in aliases
            if first in stored and alias in wanted and alias not in stored
        }

    def _fill(self) -> None:
        """Take averages that a separate file lacks from the live weights beside them there."""
        if not any(tree.role == LIVE for tree in self._checkpoint.trees):
            return
        beside = match(
            self._weights.tree, self._weights.missing, live_weights(self._checkpoint), strict=False
        )
        self._weights.pairs += beside.pairs
        self._weights.missing = beside.missing
        self._weights.misfits += beside.misfits
        self.filled += [beside.full(target) for target, _ in beside.pairs]

    def _began_anew(self) -> bool:
        """Whether the saved run is known to have averaged no buffers: those averaged here start
        from the live ones.
        """
        mode = self._settings["config"].get("buffers")
        return mode is not None and mode != "average"

    def _targets(self, part: str) -> list[RestoreTarget]:
        values = self._state.get(part, {})
        shards = [slot.shard for slot in self._manager.averages.shadows if slot.shard.fqn in values]
        return [RestoreTarget(shard.names, pieces(values[shard.fqn])) for shard in shards]

    def read(self) -> None:
        """Read averages and residuals, and compare the settings."""
        if self._tree is None:
            return
        self._staged = [
            pair
            for found in (self._weights, self._residuals)
            for pair in stage_pairs(self._checkpoint, found)
        ]
        now, then = json.loads(self._state["config"]), self._settings["config"]
        changed = {
            key: (then[key], now[key])
            for key in _COMPARED
            if key in then and then[key] != now.get(key)
        }
        self.changed_settings.update(
            {f"{self._label}.{key}": values for key, values in changed.items()}
        )

    def write(self) -> None:
        """Write averages and counter."""
        if self._tree is None:
            return
        put(self._staged)
        found = {target.names[0] for target, _ in self._residuals.pairs}
        residual = {
            fqn: value for fqn, value in self._state.get("residual", {}).items() if fqn in found
        }
        config = {
            "counter": self._settings["config"].get("counter", {})
        }  # names are those of this model by now
        tree = {
            **self._settings,
            "config": config,
            "weights": self._state["weights"],
            "residual": residual,
        }
        self._manager.load_state_dict(tree)

    def finish(self) -> None:
        """Begin what has no averages with the values that they follow, which are in place by
        now.
        """
        if self._tree is None:
            self._manager.reset()
        missing = {target.names[0] for target in self._weights.missing}
        with torch.no_grad():
            for slot, held in zip(
                self._manager.averages.shadows, self._manager.averages.tracked, strict=True
            ):
                if slot.shard.fqn in missing:
                    seed(slot, held, self._manager.settings.source)


def _loose_settings(checkpoint: Checkpoint) -> dict[str, Tensor | Object]:
    """Counters beside the weights of a separate file that no tree's name tells to be averages:
    `n_averaged`.
    """
    inner = [
        item
        for tree in checkpoint.trees
        if tree.role != OPTIMIZER
        for item in tensors_of(tree).items()
    ]
    return {name: tensor for name, tensor in inner if is_setting(name, tensor)}


def _settings(checkpoint: Checkpoint, settings: Mapping[str, Tensor | Object]) -> dict[str, Any]:
    """Counter and configuration, as far as the source has them; a configuration that is a dict was
    flattened.
    """
    config = parse_config(setting(checkpoint.source, settings, "config"))
    entries = [
        (name.split(".")[1:], item) for name, item in settings.items() if name.startswith("config.")
    ]
    config |= {str(name): loaded(checkpoint.source, item) for name, item in nested(entries).items()}
    count = setting(checkpoint.source, settings, *_COUNTERS)
    told = config.get("num_updates", config.get("decay_steps")) if count is None else count
    seen = setting(checkpoint.source, settings, "samples_seen")
    return {
        "num_updates": int(told or 0),
        "samples_seen": int(seen or 0),
        "config": config,
        "is_counted": told is not None,
    }
