"""What all parts of a training state have in common when they are restored, and the part of live
weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.core.errors import SourceError, shown
from ema_ckpt.ema.model.live import extra_state, set_extra_state
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.resume.flatten import shard_pieces
from ema_ckpt.resume.match import Match, RestoreTarget, match
from ema_ckpt.resume.sources import Checkpoint, live_tree_of, live_weights, loaded, nested
from ema_ckpt.state_dicts.tree import Tree

Staged = list[tuple[torch.Tensor, torch.Tensor]]  # live view, host value


class Restorer:
    """One part of the state. Making it compares; `read` stages values; `write` and `finish` put
    them in place.

    What user code takes (`load_state_dict` of an object, `set_extra_state` of a module) may be
    refused by it. It is handed over before anything is written, and taken back if any of it is
    refused on any rank.
    """

    def __init__(self, trees: Iterable[str] = ()) -> None:
        self.trees = list(trees)
        self.loaded: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.seeded: list[str] = []
        self.filled: list[str] = []
        self.renamed: dict[str, str] = {}
        self.changed_settings: dict[str, tuple[Any, Any]] = {}
        self.extra: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.notes: list[str] = []  # for the report alone

    def read(self) -> None:
        """Read what this rank needs into host memory."""

    def hand_over(self) -> None:
        """Pass values to user code."""

    def take_back(self) -> None:
        """Undo `hand_over`, as far as it came."""

    def write(self) -> None:
        """Put what was read in place."""

    def finish(self) -> None:
        """What can only be done when all parts are in place."""

    def note(self, found: Match) -> None:
        """Take a comparison's findings into the report."""
        self.loaded += [found.full(target) for target, _ in found.pairs]
        self.unexpected += found.unexpected
        self.renamed.update(found.renamed)
        self.warnings += [
            f"{found.tree}: {shown(names)} {'was' if len(names) == 1 else 'were'} {change}"
            for change, names in found.casts.items()
        ]


def refuse_unfit(where: str, found: Match, *, strict: bool) -> None:
    """Refuse a comparison with misfits, or under `strict` with missing or unexpected names.

    Raises:
        SourceError: `index-mismatch` or `incomplete`.
    """
    if found.misfits:
        more = f" and {len(found.misfits) - 10} more" if len(found.misfits) > 10 else ""
        raise SourceError(
            "index-mismatch",
            f"{where}: nothing was restored: {'; '.join(found.misfits[:10])}{more}",
        )
    if not strict or not (found.missing or found.unexpected):
        return
    missing = [found.full(target) for target in found.missing]
    said = [f"it lacks {shown(missing)}"] if missing else []
    said += (
        [f"it has {shown(found.unexpected)}, which this state has not"] if found.unexpected else []
    )
    raise SourceError(
        "incomplete",
        f"{where}: nothing was restored: {' and '.join(said)}; strict=False restores the rest",
    )


def stage_pairs(checkpoint: Checkpoint, found: Match) -> Staged:
    """Read the boxes that this rank holds of every pair."""
    staged: Staged = []
    for target, tensor in found.pairs:
        boxes = [box for box, _ in target.pieces.held]
        values = checkpoint.source.read(tensor, boxes)
        staged += [
            (view, value) for (_, view), value in zip(target.pieces.held, values, strict=True)
        ]
    return staged


def put(staged: Staged) -> None:
    """Copy staged values into place."""
    with torch.no_grad():
        for view, value in staged:
            view.copy_(value)


class ModelRestorer(Restorer):
    """Parameters, persistent buffers and extra state of the model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: nn.Module,
        *,
        strict: bool,
        elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        tree = live_tree_of(checkpoint)
        super().__init__([tree.name])
        self._checkpoint, self._model = checkpoint, model
        found = scan_model(model)
        held = [h for h in (*found.parameters, *found.buffers) if h.persistent]
        targets = [RestoreTarget(h.shard.names, shard_pieces(h.shard)) for h in held]
        extra_state = _extra_state_of(tree)
        sources = {
            name: t for name, t in live_weights(checkpoint).items() if not _is_extra_state(t)
        }
        self._match = match("model", targets, sources, strict=strict, elsewhere=elsewhere)
        refuse_unfit(checkpoint.where, self._match, strict=strict)
        self.note(self._match)
        self.missing += [self._match.full(target) for target in self._match.missing]
        if checkpoint.is_exchanged:
            self.warnings.append(
                f"{checkpoint.where} is marked as swapped: it was saved with averages in the model's place, and its "
                "trees were exchanged back"
            )
        self._extra_state = extra_state
        self._staged: Staged = []
        self._values: dict[str, Any] = {}
        self._former: dict[str, Any] = {}

    def read(self) -> None:
        """Read the live weights."""
        self._staged = stage_pairs(self._checkpoint, self._match)
        self._values = {
            name: loaded(self._checkpoint.source, item) for name, item in self._extra_state.items()
        }

    def hand_over(self) -> None:
        """Pass extra state to the modules."""
        if self._values:
            self._former = deepcopy(extra_state(scan_model(self._model)))
        set_extra_state(scan_model(self._model), self._values)

    def take_back(self) -> None:
        """Give the modules the extra state that they had."""
        set_extra_state(scan_model(self._model), self._former)

    def write(self) -> None:
        """Write the live weights."""
        put(self._staged)


def _is_extra_state(item: Tensor | Object) -> bool:
    return any(isinstance(part, str) and part.endswith("_extra_state") for part in item.path)


def _extra_state_of(tree: Tree) -> dict[str, Any]:
    """What modules returned from `get_extra_state`, by its name in the state dict; dicts among it
    were flattened.
    """
    depth = len(tree.name.split(".")) if tree.name else 0
    items: list[Tensor | Object] = [*tree.tensors, *tree.objects]
    return {
        str(k): v
        for k, v in nested([(i.path[depth:], i) for i in items if _is_extra_state(i)]).items()
    }
