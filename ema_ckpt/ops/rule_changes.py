"""Rules in a writing verb: applied to what it opened, and reported with what it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ema_ckpt.core.catalog import Catalog, Diagnostic, Object, Tensor
from ema_ckpt.core.names import canonical
from ema_ckpt.ops.results.write import AppliedRules, RuleChange, Skipped
from ema_ckpt.state_dicts.selection import Selection
from ema_ckpt.state_dicts.ties import with_dropped
from ema_ckpt.state_dicts.tree import Tree, list_trees

if TYPE_CHECKING:
    from ema_ckpt.state_dicts.rules.ruled_catalog import Change, RuledCheckpoint
    from ema_ckpt.state_dicts.rules.rules import Rules


@dataclass(frozen=True, slots=True)
class RuledSource:
    """What a writing verb reads, after rules if there are any.

    Attributes:
        filled: those of the weights that another tree gave, by name; they are not in `trees`.
        labels: names to show in place of full ones.
    """

    catalog: Catalog
    trees: tuple[Tree, ...]
    rules: Rules | None = None
    filled: Mapping[str, Tensor] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def tree(self) -> Tree:
        """The only tree."""
        return self.trees[0]

    def changed_names(self, selection: Selection) -> tuple[dict[str, str], AppliedRules | None]:
        """Return the new name of everything that got one, and what became of what by rules."""
        renamed = dict(selection.renamed)
        if self.rules is None:
            return renamed, None
        written = {entry.name for entry in selection.entries}
        applied = []
        for change in self.changes:
            before = [self.labels.get(name, name) for name in change.before]
            after = []
            for name in change.after:
                label = self.labels.get(name, name)
                final = renamed.pop(label, label)
                if final in written:
                    after.append(final)
            if not after:
                continue
            applied.append(RuleChange(tuple(before), tuple(after)))
            if len(after) == 1:
                renamed |= {name: after[0] for name in before if name != after[0]}
        return renamed, AppliedRules(self.rules.name, self.rules.is_inverse, tuple(applied))


def listed(catalog: Catalog, rules: Rules | None, *, expand_ties: bool) -> Catalog:
    """List tied names that the source dropped where they are written, or where rules see them."""
    if rules is not None:
        from ema_ckpt.state_dicts.rules.ruled_catalog import list_ties

        return list_ties(catalog)
    return with_dropped(catalog) if expand_ties else catalog


def rule_all(rules: Rules | None, catalog: Catalog) -> RuledSource:
    """List the trees of a checkpoint, after rules if there are any.

    Raises:
        UsageError, SourceError: as rules raise.
    """
    trees = list_trees(catalog)
    if rules is None:
        return RuledSource(catalog, trees)
    from ema_ckpt.state_dicts.rules.ruled_catalog import apply_rules

    return _ruled(rules, apply_rules(rules, catalog, trees))


def rule_one(
    rules: Rules | None,
    catalog: Catalog,
    tree: Tree,
    filled: Mapping[str, Tensor] | None = None,
) -> RuledSource:
    """Apply rules, if there are any, to one tree and the weights that another gives it.

    Raises:
        UsageError, SourceError: as rules raise.
    """
    filled = filled or {}
    if rules is None:
        return RuledSource(catalog, (tree,), filled=filled)
    from ema_ckpt.state_dicts.rules.ruled_catalog import apply_rules

    named = {**tree.weights, **filled}
    done = apply_rules(rules, catalog, [replace(tree, named=named)], keeps_places=False)
    ruled = done.trees[0]
    given = {tensor.name for tensor in filled.values()}
    kept, added = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in ruled.named.items():
        sources = done.catalog.made_from.get(tensor.name, (tensor,))
        is_added = any(source.name in given for source in sources)
        (added if is_added else kept)[name] = tensor
    labels = {tensor.name: canonical(name) for name, tensor in named.items()}
    labels |= {tensor.name: canonical(name) for name, tensor in ruled.named.items()}
    done = replace(done, trees=(replace(ruled, named=kept),))
    return replace(_ruled(rules, done, labels), filled=added)


def _ruled(
    rules: Rules, done: RuledCheckpoint, labels: Mapping[str, str] | None = None
) -> RuledSource:
    labels = labels or {}
    skipped = []
    for item, reason in done.dropped:
        file = item.file if isinstance(item, Object) else item.first_file
        skipped.append(Skipped(labels.get(item.name, item.name), file or "", reason))
    return RuledSource(
        done.catalog,
        done.trees,
        rules,
        changes=done.changes,
        skipped=tuple(skipped),
        warnings=done.warnings,
        labels=labels,
    )
