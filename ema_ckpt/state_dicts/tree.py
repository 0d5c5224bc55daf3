"""The trees of a checkpoint: live weights, their averages, optimizer state, the rest."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from operator import is_not

from ema_ckpt.core.catalog import Catalog, Object, Tensor
from ema_ckpt.core.errors import EmaCkptError, UsageError
from ema_ckpt.core.names import (
    EMA,
    LIVE,
    OPTIMIZER,
    OTHER,
    SETTINGS,
    canonical,
    live_partners,
    nearest,
    tree_role,
)
from ema_ckpt.core.text import counted, shown
from ema_ckpt.state_dicts.ema_weights import (
    AVERAGED_MODEL,
    POSITIONS,
    Averages,
    inside,
    is_setting,
    matches,
    name_averages,
)
from ema_ckpt.state_dicts.groups import Group
from ema_ckpt.state_dicts.tree_roles import group_entries

_LISTS_OF_AVERAGES = frozenset({"shadow_params", "shadow", "ema_model"})


@dataclass(frozen=True, slots=True)
class Tree:
    """One tree of a checkpoint.

    Attributes:
        name: dotted path of the tree, `""` for the root.
        role: `live`, `ema`, `optimizer` or `other`.
        tensors, objects: everything in it, in stored order, under full names.
        named: its weights by name inside the tree; of an EMA the averaged tensors by the plain fqn.
        settings: of an EMA, the entries that describe it (`num_updates`, `decay`, …), by name.
        partner: of an EMA, the name of the live tree it averages, if one is beside it.
        live_prefix: of a part of an EMA, how the names of its weights begin in the live tree
            (`layers.0.`), else `""`.
        layout: of an EMA, and of live weights that are stored in its place, the layout.
        problem: why the weights cannot be named, or None.
        ordered: whether the tensors stand in the order of the state dict; safetensors files sort
            them.
    """

    name: str
    role: str
    tensors: tuple[Tensor, ...] = ()
    objects: tuple[Object, ...] = ()
    named: Mapping[str, Tensor] = field(default_factory=dict)
    settings: Mapping[str, Tensor | Object] = field(default_factory=dict)
    partner: str | None = None
    live_prefix: str = ""
    layout: str = "*"
    problem: EmaCkptError | None = None
    ordered: bool = True

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Weights by their name inside the tree (of an EMA: the plain fqn), in stored order.

        Raises:
            SourceError: `unsupported` if positions or dotless names find no partner in the live
                tree.
        """
        if self.problem is not None:
            raise self.problem
        return self.named

    @property
    def entries(self) -> tuple[Tensor | Object, ...]:
        """Everything in it."""
        return (*self.tensors, *self.objects)

    @property
    def left_out(self) -> tuple[Tensor, ...]:
        """Tensors of an EMA tree that are neither weights nor settings (integer buffers, say)."""
        used = set(map(id, (*self.named.values(), *self.settings.values())))
        return tuple(tensor for tensor in self.tensors if id(tensor) not in used)


def of_role(trees: Iterable[Tree], *roles: str) -> list[Tree]:
    """Keep the trees of some roles."""
    return [tree for tree in trees if tree.role in roles]


def list_trees(catalog: Catalog) -> tuple[Tree, ...]:
    """List the trees of a checkpoint in stored order.

    Raises:
        SourceError: `name-collision` if two paths join to one dotted name.
    """
    groups = {group.name: group for group in group_entries(catalog)}
    trees = {name: _plain_tree(group, catalog.digests) for name, group in groups.items()}
    others = of_role(trees.values(), LIVE, OPTIMIZER, OTHER)
    states = [inside(tree.named, "state.") for tree in of_role(others, OPTIMIZER)]
    # Parameters that an optimizer's state lists: `state.<fqn>.exp_avg`.
    trained = {name.rpartition(".")[0] for name in chain.from_iterable(states)}
    for name in [tree.name for tree in of_role(trees.values(), EMA)]:
        group = groups[name]
        if group.beside is None and name.rpartition(".")[2] in _LISTS_OF_AVERAGES:
            # An EMA's state dict saved as the whole file has its settings beside the list.
            group.beside = groups.get(name.rpartition(".")[0])
        trees[name] = _average_tree(group, others, trained)
    return tuple(trees.values())


def _plain_tree(group: Group, digests: Mapping[str, int]) -> Tree:
    tensors, objects = tuple(group.tensors.values()), tuple(group.objects.values())
    # A safetensors file sorts its tensors; our own record in it, shown by its digests, restores the
    # order.
    chunks = tensors[0].chunks if tensors else ()
    is_sorted = bool(chunks) and chunks[0].file.endswith(".safetensors")
    ordered = not is_sorted or tensors[0].name in digests
    role = group.role or OTHER
    is_exchanged = group.partner is not None and group.averages.layout == AVERAGED_MODEL
    settings = _settings(group, {}) if is_exchanged else {}
    named = {n: t for n, t in group.tensors.items() if n not in settings}
    layout = AVERAGED_MODEL if is_exchanged else "*"
    return Tree(group.name, role, tensors, objects, named, settings, layout=layout, ordered=ordered)


def _average_tree(group: Group, others: Sequence[Tree], trained: Collection[str]) -> Tree:
    live = _live_partner(group, others)
    named = live.named if live else {}
    ordered = live is None or live.ordered
    found = _with_buffers(group, live)
    averages = name_averages(group.name, found, named, trained, ordered=ordered)
    settings = _settings(group, averages.tensors)
    if not settings and group.beside is not None:
        settings = _settings(group.beside, {})
    return Tree(
        group.name,
        EMA,
        tuple(group.tensors.values()),
        tuple(group.objects.values()),
        averages.tensors,
        settings,
        live.name if live else None,
        layout=averages.layout,
        problem=averages.problem,
    )


def _with_buffers(group: Group, live: Tree | None) -> Averages:
    """Count what has the name of a setting as a buffer, if the live tree has it too (`step`)."""
    averages = group.averages
    # At the top of a checkpoint a `step` is the run's.
    if averages.layout != "*" or live is None or not live.name:
        return averages
    shapes = {name: tensor.shape for name, tensor in live.named.items()}
    tensors = {
        name: tensor
        for name, tensor in group.tensors.items()
        if name in averages.tensors or shapes.get(name) == tensor.shape
    }
    return averages._replace(tensors=tensors)


def _settings(group: Group, averages: Mapping[str, Tensor]) -> dict[str, Tensor | Object]:
    weights = set(map(id, averages.values()))
    settings: dict[str, Tensor | Object] = {
        name: tensor
        for name, tensor in group.tensors.items()
        if is_setting(name, tensor) and id(tensor) not in weights
    }
    objects = group.objects.items()
    return settings | {name: item for name, item in objects if name.partition(".")[0] in SETTINGS}


def _live_partner(group: Group, others: Sequence[Tree]) -> Tree | None:
    """Find the live tree of an EMA: by name, by name inside another tree, else the only one."""
    candidates = {tree.name: tree for tree in of_role(others, LIVE, EMA, OTHER) if tree.tensors}
    names = [*live_partners(group.name), f"{group.name}.online_model"]
    if group.partner:
        names = [group.partner]
    exact = candidates.keys() & set(names) - {group.name}
    if exact:
        return candidates[min(exact, key=names.index)]
    averaged = group.averages.tensors
    lives = of_role(candidates.values(), LIVE)
    for name, tree in product(names, lives):
        part = _cut(tree, name)
        if part and matches(averaged, part.named) and not matches(averaged, tree.named):
            return part
    return lives[0] if len(lives) == 1 else None


def live_of(trees: Sequence[Tree], ema: Tree) -> Tree | None:
    """Find the live tree paired with the EMA tree `ema`, or return None if none is beside it.

    With a part of an EMA, that is the same part of the live tree, which may hold nothing.
    """
    live = None if ema.partner is None else _exact_or_below(trees, ema.partner)
    if live is None or not ema.live_prefix:
        return live
    named = {canonical(name): tensor for name, tensor in live.named.items()}
    part = inside(named, ema.live_prefix)
    path = f"{live.name}.{ema.live_prefix}".strip(".")
    return Tree(path, live.role, tuple(part.values()), (), part, ordered=live.ordered)


def _exact_or_below(trees: Sequence[Tree], path: str) -> Tree | None:
    for tree in trees:
        if tree.name == path:
            return tree
    # The longest tree name first: `ema.online_model.layers` lies in `ema.online_model`, not in
    # `ema`.
    for tree in sorted(trees, key=lambda tree: -len(tree.name)):
        part = _cut(tree, path)
        if part is not None:
            return _part_of(tree, part, trees)
    return None


def _cut(tree: Tree, path: str) -> Tree | None:
    """Take what lies below the dotted `path` inside `tree`, under names without that path."""
    if tree.name and not path.startswith(f"{tree.name}."):
        return None
    named = inside({tensor.name: tensor for tensor in tree.tensors}, f"{path}.")
    objects = inside({item.name: item for item in tree.objects}, f"{path}.")
    if not named and not objects:
        return None
    contents = tuple(named.values()), tuple(objects.values())
    return Tree(path, tree.role, *contents, named, partner=tree.partner, ordered=tree.ordered)


def _part_of(tree: Tree, part: Tree, trees: Sequence[Tree]) -> Tree:
    """Complete `part`, which was cut out of `tree`, with what makes it an EMA if it is one."""
    objects = inside({item.name: item for item in part.objects}, f"{part.name}.")
    group = Group(part.name, None, dict(part.named), objects)
    if tree.role != EMA and _is_ema(group):
        siblings = filter(None, map(partial(_cut, tree), live_partners(part.name)))
        others = filter(partial(is_not, tree), of_role(trees, LIVE, OPTIMIZER, OTHER))
        return _average_tree(group, [*siblings, *others], ())
    if tree.role != EMA:
        return part
    part = replace(part, settings=tree.settings, layout=tree.layout)
    if tree.layout == POSITIONS:  # part of a list: the positions there are no names
        stored = set(map(id, part.tensors))
        named = {fqn: tensor for fqn, tensor in tree.named.items() if id(tensor) in stored}
        return replace(part, named=named, problem=tree.problem)
    prefix = _live_prefix(tree, part)
    partner = None if prefix is None else tree.partner
    return replace(part, partner=partner, live_prefix=prefix or "")


def _is_ema(group: Group) -> bool:
    """Check whether something below a tree is an average, by its name or its contents."""
    is_average = group.is_average or group.averages.layout == AVERAGED_MODEL
    return group.has_weight and (is_average or tree_role(group.name) == EMA)


def _live_prefix(tree: Tree, part: Tree) -> str | None:
    """Find how the averages in `part` of `tree` begin in the live tree; None if named otherwise."""
    fqns = {id(tensor): fqn for fqn, tensor in tree.named.items()}
    prefixes = set()
    for name, tensor in part.named.items():
        fqn = fqns.get(id(tensor))
        if fqn is not None:
            prefixes.add(fqn[: -len(name)] if f".{fqn}".endswith(f".{name}") else None)
    prefix = prefixes.pop() if len(prefixes) == 1 else None
    return None if prefix is None else canonical(f"{prefix}x")[:-1]


def find_tree(trees: Sequence[Tree], name: str, where: str = "the checkpoint") -> Tree:
    """Find the tree called `name`, or what lies below the dotted path `name` inside one.

    Raises:
        UsageError: `unknown-tree`, listing the trees there are, the nearest name first;
            `ambiguous-tree` if `name` fits several.
    """
    matching = find_trees(trees, name, where)
    if len(matching) > 1:
        names = shown([tree.name for tree in matching])
        message = f"{where}: {name!r} may mean {names}; name one of them with --tree"
        raise UsageError("ambiguous-tree", message)
    return matching[0]


def find_trees(trees: Sequence[Tree], name: str, where: str = "the checkpoint") -> tuple[Tree, ...]:
    """Find all that `name` stands for: a tree, a part of one, or all trees in a dictionary of them.

    Raises:
        UsageError: `unknown-tree`, listing the trees there are, the nearest name first.
    """
    exact = _exact_or_below(trees, name)
    if exact is not None:
        return (exact,)
    inside = [tree for tree in trees if tree.name.startswith(f"{name}.")]
    if not inside and name:
        inside = [tree for tree in trees if tree.name.endswith(f".{name}")]
    if inside:
        return tuple(inside)
    names = nearest(name, [tree.name for tree in trees])
    contents = f"it has {shown(names)}" if names else "it holds no tree"
    message = (
        f"{where} has no tree {name!r}: {contents}, and --tree takes any dotted path below one"
    )
    raise UsageError("unknown-tree", message)


def default_tree(
    trees: Sequence[Tree],
    command: str = "ema-ckpt consolidate PATH OUT",
    where: str = "the checkpoint",
    options: str = "",
) -> Tree:
    """Choose the tree for one-tree verbs if none is named: the only EMA, else the only live tree.

    `command` is the call so far and `options` what follows its paths, for the ready commands in the
    message. A checkpoint that holds nothing has an empty live tree.

    Raises:
        UsageError: `ambiguous-tree` if neither is unique, with one command per candidate.
    """
    averages, lives = of_role(trees, EMA), of_role(trees, LIVE)
    if len(averages or lives) == 1:
        return (averages or lives)[0]
    filled = [tree for tree in trees if tree.tensors or tree.role == OPTIMIZER]
    if not filled:
        return Tree("", LIVE)
    counts = f"{counted(len(averages), 'EMA tree')} and {counted(len(lives), 'live tree')}"
    message = f"{where} has {counts}; name the one that is meant"
    candidates = averages + lives or of_role(filled, LIVE, EMA, OTHER)
    commands = [f"{command} --tree {shlex.quote(tree.name)}{options}" for tree in candidates]
    if not candidates:
        message = f"{where} holds optimizer state alone, no weights; convert takes it whole"
        commands = [command.replace(" consolidate ", " convert ") + options]
    ready = "; ".join(f"`{command}`" for command in commands)
    raise UsageError("ambiguous-tree", f"{message}: {ready}")


def inner_names(tree: Tree) -> dict[str, str]:
    """Map the full name of each tensor to its name inside the tree, of an EMA's weight the fqn."""
    skip = len(tree.name) + 1 if tree.name else 0
    names = {tensor.name: tensor.name[skip:] for tensor in tree.tensors}
    if tree.role == EMA and tree.problem is None:
        names.update((tensor.name, fqn) for fqn, tensor in tree.named.items())
    return names
