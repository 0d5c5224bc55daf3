"""Rules in a writing verb: applied to what it opened, and reported with what it wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ema_ckpt.core.catalog import Catalog, Diagnostic, Object, Tensor
from ema_ckpt.core.errors import UsageError
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
        unwrapped: a stored name of which rules made one that lacks a wrapper prefix; None if none.
    """

    catalog: Catalog
    trees: tuple[Tree, ...]
    rules: Rules | None = None
    filled: Mapping[str, Tensor] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    unwrapped: str | None = None

    @property
    def tree(self) -> Tree:
        """The only tree."""
        return self.trees[0]

    def refuse_mixed_prefixes(self) -> None:
        """Refuse rules that make a name without a wrapper prefix where such prefixes stay.

        Raises:
            UsageError: `unsupported`, with a name that would lose one.
        """
        if self.unwrapped is not None:
            message = f"wrapper prefixes are kept, and the rules make of {self.unwrapped!r}"
            remedy = "`convert` and `consolidate` without --keep-prefixes drop all of them"
            raise UsageError("unsupported", f"{message} a name without its own; {remedy}")

    def changed_names(self, selection: Selection) -> tuple[dict[str, str], AppliedRules | None]:
        """Return the new name of everything that got one, and what became of what by rules."""
        renamed = dict(selection.renamed)
        if self.rules is None:
            return renamed, None
        written = {entry.name for entry in selection.entries}
        written |= {item.name for item in selection.objects}
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


def rule_all(
    rules: Rules | None,
    catalog: Catalog,
    only: Sequence[str] = (),
    *,
    optimizers: bool = True,
) -> RuledSource:
    """List the trees of a checkpoint, after rules if there are any.

    Args:
        only: what is written, as `--tree` names it; rules apply to the trees that have part in it.
        optimizers: without it optimizer state is left out.

    Raises:
        UsageError, SourceError: as rules raise; `unsupported` if `only` names an optimizer whose
            state is left out.
    """
    trees = list_trees(catalog)
    if rules is None:
        return RuledSource(catalog, trees)
    from ema_ckpt.state_dicts.rules.ruled_catalog import apply_rules

    wanted = tuple([tree for tree in trees if _has_part(tree, only)]) if only else trees
    apart = [tree for tree in trees if wanted and tree not in wanted]
    named = bool(only and wanted)
    done = apply_rules(rules, catalog, wanted or trees, apart, optimizers=optimizers, named=named)
    return replace(_ruled(rules, done), trees=(*done.trees, *apart))


def _has_part(tree: Tree, names: Sequence[str]) -> bool:
    """Whether a name is the tree's, of something in it or around it, or the end of its name."""
    own = f"{tree.name}." if tree.name else ""
    for name in names:
        below = f"{name}." if name else ""
        if own.startswith(below) or below.startswith(own) or own.endswith(f".{below}"):
            return True
    return False


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
    labels = {tensor.name: name for name, tensor in named.items()}
    labels |= {tensor.name: name for name, tensor in ruled.named.items()}
    done = replace(done, trees=(replace(ruled, named=kept),))
    return replace(_ruled(rules, done, labels), filled=added)


def _ruled(
    rules: Rules, done: RuledCheckpoint, labels: Mapping[str, str] | None = None
) -> RuledSource:
    labels = labels or {}
    skipped = []
    for item, reason in (*done.dropped, *done.left_out):
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
        unwrapped=done.unwrapped,
    )
