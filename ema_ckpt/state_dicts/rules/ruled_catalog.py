"""Rules applied to a checkpoint: a catalog like any other, as if it had been saved that way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ema_ckpt.core.catalog import (
    Catalog,
    Diagnostic,
    Nesting,
    Object,
    Path,
    Payload,
    Reader,
    Tensor,
)
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER
from ema_ckpt.core.text import shown
from ema_ckpt.state_dicts.ema_config import parse_config, with_tied_names
from ema_ckpt.state_dicts.rules.constants import FilesWithConstants, constant_payload
from ema_ckpt.state_dicts.rules.optimizer_entries import list_entries, weights_of
from ema_ckpt.state_dicts.rules.ruled_optimizer import apply_to_optimizer
from ema_ckpt.state_dicts.rules.ruled_tree import RuledTree, apply_to_tree
from ema_ckpt.state_dicts.rules.rules import ConstantRule, Rules
from ema_ckpt.state_dicts.rules.views import StoredViews
from ema_ckpt.state_dicts.ties import with_dropped
from ema_ckpt.state_dicts.tree import Tree

_NOT_WANTED = "optimizer state is not read"


class RuledReader:
    """The reader of a checkpoint, and of the tensors that rules made of its tensors."""

    def __init__(self, inner: Reader) -> None:
        self._inner = inner
        self.views = StoredViews(self._located)

    def _located(self, tensor: Tensor) -> tuple[Payload, ...]:
        return constant_payload(tensor) or self._inner.payloads(tensor)

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        return self.views.payloads(tensor)

    def load(self, item: Object) -> object:
        return item.inline if item.is_inline else self._inner.load(item)


@dataclass(frozen=True, slots=True)
class Change:
    """Names that rules took, and the names that became of them; full names of tensors."""

    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RuledCheckpoint:
    """A checkpoint after rules.

    Attributes:
        trees: those that were given, in their order, without what is left out.
        changes: what became of what, by full names.
        dropped: tensors and objects that rules drop, with the reason.
        left_out: optimizer state that they do not carry, with the reason.
        warnings: optimizers that are left out, and rules whose inverse does not lead back.
        unwrapped: a stored name of which rules made one that lacks a wrapper prefix; None if none.
    """

    catalog: Catalog
    trees: tuple[Tree, ...]
    changes: tuple[Change, ...] = ()
    dropped: tuple[tuple[Tensor | Object, str], ...] = ()
    left_out: tuple[tuple[Tensor | Object, str], ...] = ()
    warnings: tuple[Diagnostic, ...] = ()
    unwrapped: str | None = None


def list_ties(catalog: Catalog) -> Catalog:
    """List the names that the source dropped as tied, so that rules see them; they stay tied."""
    listed = with_dropped(catalog)
    owners = {kept: kept for kept in catalog.ties.values()} | dict(catalog.ties)
    tensors: list[Tensor] = []
    for tensor in listed.tensors:
        owner = owners.get(tensor.name)
        is_marked = owner is not None and tensor.storage is None
        tensors.append(replace(tensor, storage=("tied", owner)) if is_marked else tensor)
    return replace(listed, tensors=tuple(tensors), ties={}) if catalog.ties else catalog


def apply_rules(
    rules: Rules,
    catalog: Catalog,
    trees: Sequence[Tree],
    beside: Sequence[Tree] = (),
    *,
    keeps_places: bool = True,
    optimizers: bool = True,
    named: bool = False,
) -> RuledCheckpoint:
    """Apply rules to the weights, averages and optimizers among `trees`; no weight is read.

    Optimizer state that does not name its parameters is left out. What is in the catalog and in
    none of `trees` stays.

    Args:
        beside: other trees of the checkpoint, whose weights an optimizer may step.
        keeps_places: whether full names and paths matter, as where all trees are written.
        optimizers: without it optimizer state is left out.
        named: each of `trees` was asked for, so that an optimizer is carried or refused.

    Raises:
        UsageError: `empty-selection` if a rule fits nothing; `unsupported` for an optimizer that
            cannot be carried; as rules raise.
        SourceError: `unsupported` if the weights of a tree cannot be named.
    """
    reader = RuledReader(catalog.reader)
    work = _CatalogWork(catalog, reader)
    for tree in trees:
        if tree.role == OPTIMIZER and not optimizers:
            work.leave_out(tree, _NOT_WANTED)
        elif tree.role == OPTIMIZER:
            work.take_optimizer(rules, tree, (*trees, *beside), named=named)
        elif tree.role in (LIVE, EMA):
            tied = _tied(catalog, tree)
            done = apply_to_tree(rules, tree, reader.views, tied, keeps_places=keeps_places)
            work.take(done)
        else:
            work.trees.append(tree)
    rules.refuse_idle(work.used, catalog.resolved)
    if any(isinstance(rule, ConstantRule) for rule in rules.rules):
        catalog = replace(catalog, source=FilesWithConstants(catalog.source))
    return work.finish(rules, catalog)


def _tied(catalog: Catalog, tree: Tree) -> dict[str, str]:
    """Return further names that an average's settings record, each with the stored one."""
    expanded = with_tied_names(catalog, tree).named
    if len(expanded) == len(tree.named):
        return {}
    names = {id(tensor): name for name, tensor in tree.named.items()}
    return {n: names[id(t)] for n, t in expanded.items() if n not in tree.named}


class _CatalogWork:
    """What rules did to the trees of a checkpoint so far."""

    def __init__(self, catalog: Catalog, reader: RuledReader) -> None:
        self.trees: list[Tree] = []
        self.used: set[int] = set()
        self._catalog = catalog
        self._reader = reader
        self._replaced: dict[str, list[Tensor]] = {}
        self._added: list[Tensor] = []
        self._sources: dict[str, tuple[Tensor, ...]] = {}
        self._moved: dict[str, str] = {}
        self._objects: dict[str, list[Object]] = {}
        self._paths: list[tuple[Path, Path]] = []
        self._constants: dict[str, None] = {}
        self._changes: list[Change] = []
        self._dropped: list[tuple[Tensor | Object, str]] = []
        self._left_out: list[tuple[Tensor | Object, str]] = []
        self._warnings: list[Diagnostic] = []
        self._inexact: dict[int, str] = {}
        self._unwrapped: str | None = None

    def leave_out(self, tree: Tree, reason: str) -> None:
        """Leave out a tree of an optimizer."""
        self._replaced |= {tensor.name: [] for tensor in tree.tensors}
        self._objects |= {item.name: [] for item in tree.objects}
        self._left_out += [(item, reason) for item in tree.entries]

    def take_optimizer(
        self, rules: Rules, tree: Tree, trees: Sequence[Tree], *, named: bool
    ) -> None:
        """Apply rules to an optimizer that steps weights of one of `trees`, or leave it out."""
        catalog, views = self._catalog, self._reader.views
        entries, stepped = list_entries(tree, trees, catalog.reader.load)
        if stepped is not None and not entries.problem:
            if stepped.role not in (LIVE, EMA):  # rules leave those weights as they are
                self.trees.append(tree)
                return
            weights = weights_of(stepped)
            self.take(apply_to_optimizer(rules, tree, entries, weights, catalog, views))
            return
        reason = f"optimizer state is not carried through rules: {entries.problem}"
        if named:
            message = f"tree {tree.name!r}: {reason}; leave out --rules, or that tree"
            raise UsageError("unsupported", message)
        self.leave_out(tree, reason)
        remedy = "save it by get_optimizer_state_dict of torch, which names parameters, or name"
        message = f"tree {tree.name!r} is left out: {reason}; {remedy} the other trees with --tree"
        self._warnings.append(Diagnostic("left-out", message))

    def take(self, done: RuledTree) -> None:
        """Add a tree that rules were applied to."""
        self.used |= done.used
        self._inexact |= done.inexact
        self._replaced |= done.replaced
        self._added += done.added
        self._sources |= done.sources
        self._moved |= done.moved
        self._unwrapped = self._unwrapped or done.unwrapped
        self._objects |= done.objects
        self._paths += done.paths
        self._constants |= dict.fromkeys(done.constants)
        self._dropped += done.dropped
        self._left_out += done.left_out
        self._changes += _changes(done)
        self.trees.append(self._with_tied(done))

    def _with_tied(self, done: RuledTree) -> Tree:
        """Put the new names of tied weights into the settings of an average."""
        tree, entry = done.tree, done.tree.settings.get("config")
        if not done.tied or not isinstance(entry, Object):
            return tree
        config = parse_config(self._catalog.reader.load(entry))
        if config.get("tied") == done.tied:
            return tree
        config["tied"] = done.tied
        changed = replace(entry, inline=json.dumps(config), is_inline=True)
        self._objects[entry.name] = [changed]
        objects = tuple([changed if item is entry else item for item in tree.objects])
        return replace(tree, objects=objects, settings={**tree.settings, "config": changed})

    def finish(self, rules: Rules, catalog: Catalog) -> RuledCheckpoint:
        """Return the checkpoint that rules made."""
        tensors: list[Tensor] = []
        for tensor in catalog.tensors:
            tensors += self._replaced.get(tensor.name, [tensor])
        objects: list[Object] = []
        for item in catalog.objects:
            objects += self._objects.get(item.name, [item])
        changed = replace(
            catalog,
            tensors=(*tensors, *self._added),
            objects=tuple(objects),
            reader=self._reader,
            digests=self._digests(catalog),
            order=tuple(self._order(catalog.order)),
            nesting=self._nesting(catalog.nesting),
            made_from=self._sources,
            made_by=catalog.made_by + rules.digest + "inverse" * rules.is_inverse,
        )
        warnings = self._warnings
        for number, name in sorted(self._inexact.items()):
            message = f"{rules.name}: the inverse of rule {number} would not lead back: it takes"
            message += f" {name!r} for what the rule made; mark the rule one_way = true"
            warnings.append(Diagnostic("one-way", message))
        if self._constants:
            message = f"{rules.name}: no optimizer state for {shown(list(self._constants))}: made"
            warnings.append(Diagnostic("no-optimizer-state", f"{message} of no parameter"))
        return RuledCheckpoint(
            changed,
            tuple(self.trees),
            tuple(self._changes),
            tuple(self._dropped),
            tuple(self._left_out),
            tuple(warnings),
            self._unwrapped,
        )

    def _nesting(self, nesting: Nesting) -> Nesting:
        """Return the facts about containers, for new paths too."""
        facts = nesting.moved(self._paths)
        return Nesting({**nesting.keys, **facts.keys}, nesting.tuples | facts.tuples)

    def _order(self, order: Iterable[str]) -> list[str]:
        names: list[str] = []
        for name in order:
            if name in self._replaced:
                names += [tensor.name for tensor in self._replaced[name]]
            elif name in self._objects:
                names += [item.name for item in self._objects[name]]
            else:
                names.append(name)
        return names

    def _digests(self, catalog: Catalog) -> Mapping[str, int]:
        """Return the digests of tensors that are as they were, some under other names."""
        digests = {n: crc for n, crc in catalog.digests.items() if n not in self._replaced}
        for name, stored in self._moved.items():
            if stored in catalog.digests:
                digests[name] = catalog.digests[stored]
        return digests


def _changes(done: RuledTree) -> list[Change]:
    """Return what became of what: names of one origin together."""
    made: dict[tuple[str, ...], list[str]] = {}
    origins: dict[str, tuple[Tensor | Object, ...]] = {**done.sources, **done.object_sources}
    for name, sources in origins.items():
        made.setdefault(tuple([source.name for source in sources]), []).append(name)
    return [Change(before, tuple(after)) for before, after in made.items()]
