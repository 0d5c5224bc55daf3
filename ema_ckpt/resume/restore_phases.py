"""What the parts of a restore share: pairing by name, phases, and findings for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ema_ckpt.comm.channel import Channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.names import canonical
from ema_ckpt.core.text import counted, shown
from ema_ckpt.ema.model.live_tree import tensor_names
from ema_ckpt.ema.model.scan import reshard, scan_model
from ema_ckpt.ema.model.shards import ModelShards, Shard
from ema_ckpt.ema.swap_state import refuse_inside
from ema_ckpt.resume.checkpoint_reader import CheckpointReader
from ema_ckpt.resume.flatten import LocalShards
from ema_ckpt.storage.files import is_url

Target = tuple[Shard, LocalShards]  # a live tensor to restore into, and this rank's part of it


@dataclass(frozen=True, slots=True, eq=False)
class RestoreContext:
    """The model of a restore, scanned once, and how strictly it is compared.

    `remote_names` are tensors that only other ranks have, as the stages of a pipeline do.
    """

    model: nn.Module
    shards: ModelShards
    strict: bool
    remote_names: frozenset[str]

    @classmethod
    def scan(cls, model: nn.Module, strict: bool, ranks: Channel, call: str) -> RestoreContext:
        """Scan the model on every rank, and exchange the names of its tensors; collective.

        Raises:
            StateError: inside `swap()`.
        """

        def scan() -> ModelShards:
            refuse_inside(model, f"{call}()")
            reshard(model)
            return scan_model(model)

        shards = run_on_all_ranks(ranks, call, scan)
        mine = tensor_names(shards)
        everyone = ranks.exchange_if_different(sorted(mine))
        return cls(model, shards, strict, mine.union(*everyone) - mine)

    def shards_of(self, model: nn.Module) -> ModelShards:
        """Return the shards of a manager's model, which mostly is the one restored."""
        return self.shards if model is self.model else scan_model(model)


@dataclass(slots=True, eq=False)
class Match:
    """Live tensors of one tree paired with stored ones, and what is left over or does not fit."""

    tree: str
    pairs: list[tuple[Shard, LocalShards, Tensor]] = field(default_factory=list)
    missing: list[Target] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    casts: dict[str, list[str]] = field(default_factory=dict)  # fqns by kind of cast
    staged: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # live, host

    def pair(self, shard: Shard, live: LocalShards, source: Tensor, *, strict: bool) -> None:
        """Pair a live tensor with a stored one, or note why that cannot go into it."""
        name, dtype = repr(f"{self.tree}.{shard.fqn}"), live.dtype
        here, there = str(dtype).removeprefix("torch."), source.dtype.name
        if source.shape != live.shape:
            shapes = f"{list(source.shape)} there and {list(live.shape)} here"
            self.misfits.append(f"{name} has shape {shapes}")
            return
        if here != there:
            both_float = dtype.is_floating_point and source.dtype.is_castable
            widens = both_float and torch.promote_types(dtype, getattr(torch, there)) is dtype
            if not widens and (strict or not both_float):
                loss = "which would lose values; strict=False casts it"
                self.misfits.append(f"{name} is {there} there and {here} here, {loss}")
                return
            cast = f"{there} there, cast to {here}" + " with loss" * (not widens)
            self.casts.setdefault(cast, []).append(shard.fqn)
        self.pairs.append((shard, live, source))

    def refuse(
        self, reader: CheckpointReader, *, strict: bool, allowed: Collection[str] = ()
    ) -> None:
        """Refuse misfits, and under `strict` missing names not in `allowed` and unexpected ones.

        Raises:
            SourceError: `index-mismatch` or `incomplete`.
        """
        if self.misfits:
            rest = len(self.misfits) - 10
            message = "; ".join(self.misfits[:10]) + f" and {rest} more" * (rest > 0)
            raise reader.refusal("index-mismatch", message)
        missing = [f"{self.tree}.{s.fqn}" for s, _ in self.missing if s.fqn not in allowed]
        reasons = []
        if missing:
            reasons.append(f"it lacks {shown(missing)}")
        if self.unexpected:
            reasons.append(f"it has {shown(self.unexpected)}, which this state has not")
        if strict and reasons:
            message = " and ".join(reasons)
            if missing and self.unexpected and not reader.has_rules:
                message += "; rules= takes other names and layouts"
            raise reader.refusal("incomplete", f"{message}; strict=False restores the rest")

    def read(self, reader: CheckpointReader) -> None:
        """Read this rank's boxes of every pair into host memory."""
        for _, live, tensor in self.pairs:
            boxes = [box for box, _ in live.shards]
            values = reader.read(tensor, boxes)
            for (_, view), value in zip(live.shards, values, strict=True):
                self.staged.append((view, value))

    def write(self) -> None:
        """Copy what was read into the live tensors."""
        with torch.no_grad():
            for view, value in self.staged:
                view.copy_(value)


def match(
    tree: str,
    targets: Iterable[Target],
    stored: Mapping[str, Tensor],
    context: RestoreContext,
) -> Match:
    """Pair targets with the stored tensors of one tree, by name or without wrapper prefixes."""
    counts = Counter(map(canonical, stored))
    # Stored names by their form without wrapper prefixes, where that is unambiguous.
    wrapped = {canonical(name): name for name in stored if counts[canonical(name)] == 1}
    result = Match(tree)
    used: set[str | None] = {*context.remote_names, *map(wrapped.get, context.remote_names)}
    for shard, live in targets:
        candidates = [name for name in shard.names if name in stored]
        candidates += [wrapped[name] for name in shard.names if name in wrapped]
        used.update(candidates)
        if not candidates:
            result.missing.append((shard, live))
            continue
        source = stored[candidates[0]]
        if candidates[0] not in shard.names:
            result.renamed[source.name] = f"{tree}.{shard.fqn}"
        result.pair(shard, live, source, strict=context.strict)
    result.unexpected = [tensor.name for name, tensor in stored.items() if name not in used]
    return result


@dataclass(frozen=True, slots=True, repr=False)
class RestoreReport:
    """Results of a `restore`. Names are full: `model.layer.weight`, `ema.weights.layer.weight`.

    Attributes:
        path: the checkpoint that was read; of a URL the text. world_size: of the run that wrote it,
            if recorded.
        trees: every tree of the checkpoint by name, `"restored"` or `"ignored"`.
        loaded: names of this state that were restored.
        missing: names of this state that the checkpoint lacks, and that were left as they were.
        unexpected: names of the checkpoint, in restored trees, that this state lacks.
        seeded: averages that the checkpoint lacks and that were set to the restored live weights.
        filled: averages that `ema_path` lacks and that were taken from the live weights there.
        renamed: names in the checkpoint that differ by wrapper prefixes, and the names here.
        changed_settings: settings of averages that differ from the saved run's: (saved, now).
        extra: the restored values of `extra`, by name; objects restored in place are themselves.
        warnings: all warnings, also those that were not issued through `warnings`.
    """

    path: Path | str
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

    def __repr__(self) -> str:
        kinds = "loaded missing unexpected seeded filled renamed".split()
        counts = [(len(getattr(self, kind)), kind) for kind in kinds]
        told = [f"{count} {kind}" for count, kind in counts if count]
        if self.changed_settings:
            told.append(counted(len(self.changed_settings), "changed setting"))
        if self.warnings:
            told.append(counted(len(self.warnings), "warning"))
        return f"<RestoreReport of {str(self.path)!r}: {', '.join(told) or 'nothing loaded'}>"


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

    def report(self, reader: CheckpointReader) -> RestoreReport:
        """Make the report of a restore from the checkpoint of `reader`."""
        trees = {}
        for name in reader.tree_names:
            trees[name] = "restored" if name in self.trees else "ignored"
        return RestoreReport(
            reader.path if is_url(reader.path) else Path(reader.path),
            reader.catalog.world_size,
            trees,
            tuple(self.loaded),
            tuple(self.missing),
            tuple(self.unexpected),
            tuple(self.seeded),
            tuple(self.filled),
            self.renamed,
            self.changed_settings,
            self.extra,
            (*self.warnings, *self.notes),
        )

    def add_match(self, match: Match) -> None:
        """Add what was paired, renamed and cast, and what was unexpected."""
        self.loaded += [f"{match.tree}.{shard.fqn}" for shard, _, _ in match.pairs]
        self.unexpected += match.unexpected
        self.renamed.update(match.renamed)
        for cast, names in match.casts.items():
            verb = "was" if len(names) == 1 else "were"
            self.warnings.append(f"{match.tree}: {shown(names)} {verb} {cast}")


class Restorer(Protocol):
    """One part of the state to restore; its phases run on all ranks, one after the other.

    The phases that return at once may be left out.

    User code (`load_state_dict` of an object, `set_extra_state` of a module) may refuse its values:
    it gets them before anything is written, and its own back if any of it refuses on any rank.
    """

    findings: Findings

    def compare(self) -> None:
        """Compare names, shapes and dtypes with the checkpoint's.

        Raises:
            SourceError: `incomplete`, `index-mismatch`, or what the checkpoint lacks.
            UsageError: `unknown-tree` or `ambiguous-tree`.
        """

    def read(self) -> None:
        """Read what this rank needs into host memory."""

    def apply_user_state(self) -> None:
        """Pass values to user code."""
        return

    def rollback_user_state(self) -> Iterable[tuple[str, Callable[[], object]]]:
        """Return what gives user code its former values, as far as `apply_user_state` came."""
        return ()

    def write(self) -> None:
        """Copy what was read into place."""
        return

    def finish(self) -> None:
        """Derive values from the other parts, which are in place by now."""
        return


@dataclass(eq=False)
class PartRestorer(Restorer):
    """Base of the restorers, whose phases do nothing unless they are overridden."""

    reader: CheckpointReader
    context: RestoreContext
    findings: Findings = field(default_factory=Findings, init=False)
