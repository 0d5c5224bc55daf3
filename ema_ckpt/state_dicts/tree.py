"""The trees of a checkpoint: live weights, their averages, optimizer state, the rest."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from ema_ckpt.state_dicts.ema_layouts import POSITIONS, is_setting, matches, name_averages
from ema_ckpt.state_dicts.roles import Group, group_entries

_LISTS_OF_AVERAGES = frozenset({"shadow_params", "shadow", "ema_model", "state_dict"})


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
        layout: of an EMA, the layout its weights are stored in.
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
    def left_out(self) -> tuple[Tensor, ...]:
        """Tensors of an EMA tree that are neither weights nor settings (integer buffers, say)."""
        used = {id(tensor) for tensor in (*self.named.values(), *self.settings.values())}
        return tuple(tensor for tensor in self.tensors if id(tensor) not in used)


def list_trees(catalog: Catalog) -> tuple[Tree, ...]:
    """List the trees of a checkpoint in stored order.

    Raises:
        SourceError: `name-collision` if two paths join to one dotted name.
    """
    groups = {group.name: group for group in group_entries(catalog)}
    plain = {}
    trained: set[str] = set()  # parameters that an optimizer's state lists: `state.<fqn>.exp_avg`
    for group in groups.values():
        if group.role != EMA:
            plain[group.name] = _plain_tree(group, catalog.digests)
        if group.role == OPTIMIZER:
            states = [name for name, _ in group.tensors if name.startswith("state.")]
            trained.update(name.removeprefix("state.").rpartition(".")[0] for name in states)
    others = list(plain.values())
    trees = []
    for group in groups.values():
        if group.role == EMA:
            # An EMA's state dict saved as the whole file has its settings beside the list.
            beside = groups.get("averaging_state" if group.name == "state_dict" else "")
            trees.append(_average_tree(group, others, frozenset(trained), beside))
        else:
            trees.append(plain[group.name])
    return tuple(trees)


def _plain_tree(group: Group, digests: Mapping[str, int]) -> Tree:
    tensors = tuple(tensor for _, tensor in group.tensors)
    objects = tuple(item for _, item in group.objects)
    # A safetensors file sorts its tensors; our own record in it, shown by its digests, restores the
    # order.
    first = tensors[0] if tensors else None
    is_sorted = first and first.chunks and first.chunks[0].file.endswith(".safetensors")
    ordered = first is None or not is_sorted or first.name in digests
    role = group.role or OTHER
    return Tree(group.name, role, tensors, objects, dict(group.tensors), ordered=ordered)


def _average_tree(
    group: Group, others: Sequence[Tree], trained: frozenset[str], beside: Group | None
) -> Tree:
    live = _live_partner(group, others)
    averages = name_averages(
        group.name,
        group.averages,
        live.named if live else {},
        trained,
        ordered=live is None or live.ordered,
    )
    settings = _settings(group, {id(tensor) for tensor in averages.tensors.values()})
    is_list = group.name.rpartition(".")[2] in _LISTS_OF_AVERAGES
    if not settings and beside is not None and is_list:
        settings = _settings(beside, set())
    return Tree(
        group.name,
        EMA,
        tuple(tensor for _, tensor in group.tensors),
        tuple(item for _, item in group.objects),
        averages.tensors,
        settings,
        live.name if live else None,
        layout=averages.layout,
        problem=averages.problem,
    )


def _settings(group: Group, weights: set[int]) -> dict[str, Tensor | Object]:
    settings: dict[str, Tensor | Object] = {}
    for name, tensor in group.tensors:
        if is_setting(name, tensor) and id(tensor) not in weights:
            settings[name] = tensor
    for name, item in group.objects:
        if name.partition(".")[0] in SETTINGS:
            settings[name] = item
    return settings


def _live_partner(group: Group, others: Sequence[Tree]) -> Tree | None:
    """Find the live tree of an EMA: by name, by name one level below the root, else the only one."""
    candidates = {tree.name: tree for tree in others if tree.role != OPTIMIZER and tree.tensors}
    names = live_partners(group.name)
    if group.name == "state_dict":
        names = ("current_model_state",)
    for name in names:
        if name in candidates and name != group.name:
            return candidates[name]
    lives = [tree for tree in candidates.values() if tree.role == LIVE]
    averaged = group.averages.tensors
    for name in names:
        for tree in lives:
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
    part = {}
    for name, tensor in live.named.items():
        plain = canonical(name)
        if plain.startswith(ema.live_prefix):
            part[plain.removeprefix(ema.live_prefix)] = tensor
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
    head = f"{path}."
    tensors = tuple(tensor for tensor in tree.tensors if tensor.name.startswith(head))
    objects = tuple(item for item in tree.objects if item.name.startswith(head))
    if not tensors and not objects:
        return None
    named = {tensor.name.removeprefix(head): tensor for tensor in tensors}
    return Tree(
        path, tree.role, tensors, objects, named, partner=tree.partner, ordered=tree.ordered
    )


def _part_of(tree: Tree, part: Tree, trees: Sequence[Tree]) -> Tree:
    """Complete `part`, which was cut out of `tree`, with what makes it an EMA if it is one."""
    group = Group(part.name, None, list(part.named.items()))
    group.objects = [(item.name[len(part.name) + 1 :], item) for item in part.objects]
    is_named_ema = tree_role(part.name) == EMA and tree.role in (LIVE, OTHER)
    if group.weights and (is_named_ema or group.is_average()):
        siblings = (_cut(tree, name) for name in live_partners(part.name))
        others = [sibling for sibling in siblings if sibling is not None]
        others += [other for other in trees if other.role != EMA and other is not tree]
        return _average_tree(group, others, frozenset(), None)
    if tree.role != EMA:
        return part
    part = replace(part, settings=tree.settings, layout=tree.layout)
    fqns = {id(tensor): fqn for fqn, tensor in tree.named.items()}
    if tree.layout == POSITIONS:  # part of a list: the positions there are no names
        stored = {id(tensor) for tensor in part.tensors}
        named = {fqn: tensor for fqn, tensor in tree.named.items() if id(tensor) in stored}
        return replace(part, named=named, problem=tree.problem)
    heads = set()
    for name, tensor in part.named.items():
        fqn = fqns.get(id(tensor))
        if fqn is not None:
            heads.add(fqn[: -len(name)] if f".{fqn}".endswith(f".{name}") else None)
    head = heads.pop() if len(heads) == 1 else None
    if head is None:  # the averages are named otherwise than in the live tree
        return replace(part, partner=None)
    return replace(part, live_prefix=canonical(f"{head}x")[:-1])


def find_tree(trees: Sequence[Tree], name: str, where: str = "the checkpoint") -> Tree:
    """Find the tree called `name`, or what lies below the dotted path `name` inside one.

    Raises:
        UsageError: `unknown-tree`, listing the trees there are, the nearest name first;
            `ambiguous-tree` if `name` fits several.
    """
    found = find_trees(trees, name, where)
    if len(found) > 1:
        names = shown([tree.name for tree in found])
        message = f"{where}: {name!r} may mean {names}; name one of them with --tree"
        raise UsageError("ambiguous-tree", message)
    return found[0]


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
    where: str = "",
    options: str = "",
) -> Tree:
    """Choose the tree for one-tree verbs if none is named: the only EMA, else the only live tree.

    `command` is the call so far and `options` what follows its paths, for the ready commands in the
    message. A checkpoint that holds nothing has an empty live tree.

    Raises:
        UsageError: `ambiguous-tree` if neither is unique, with one command per candidate.
    """
    averages = [tree for tree in trees if tree.role == EMA]
    lives = [tree for tree in trees if tree.role == LIVE]
    if len(averages or lives) == 1:
        return (averages or lives)[0]
    filled = [tree for tree in trees if tree.tensors]
    if not filled:
        return Tree("", LIVE)
    candidates = averages + lives or [tree for tree in filled if tree.role != OPTIMIZER]
    if candidates:
        counts = f"{counted(len(averages), 'EMA tree')} and {counted(len(lives), 'live tree')}"
        reason = f"has {counts}; name the one that is meant"
        commands = [f"{command} --tree {shlex.quote(t.name)}{options}" for t in candidates]
    else:
        reason = "holds optimizer state alone, no weights; convert takes it whole"
        commands = [command.replace(" consolidate ", " convert ") + options]
    ready = "; ".join(f"`{one}`" for one in commands)
    raise UsageError("ambiguous-tree", f"{where or 'the checkpoint'} {reason}: {ready}")


def inner_names(tree: Tree) -> dict[str, str]:
    """Map the full name of each tensor to its name inside the tree, of an EMA's weight the fqn."""
    skip = len(tree.name) + 1 if tree.name else 0
    names = {tensor.name: tensor.name[skip:] for tensor in tree.tensors}
    if tree.role == EMA and tree.problem is None:
        names.update((tensor.name, fqn) for fqn, tensor in tree.named.items())
    return names
