"""The trees of a checkpoint: live weights, their averages, optimizer state, the rest."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ema_ckpt.core.arguments import one_text
from ema_ckpt.core.catalog import Catalog, Diagnostic, Object, Tensor
from ema_ckpt.core.errors import EmaCkptError, UsageError
from ema_ckpt.core.names import (
    EMA,
    LIVE,
    OPTIMIZER,
    OTHER,
    SETTINGS,
    canonical,
    live_partners,
    tree_role,
)
from ema_ckpt.core.nearest_names import nearest
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

_SHOWN_OPAQUE = 2
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

    @property
    def prefix(self) -> str:
        """What all full names in it begin with."""
        return f"{self.name}." if self.name else ""


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
    partners = _Partners(others)
    # Parameters that an optimizer's state lists: `state.<fqn>.exp_avg`.
    trained: set[str] = set()
    for optimizer in of_role(others, OPTIMIZER):
        trained.update(name.rpartition(".")[0] for name in inside(optimizer.named, "state."))
    for name in [tree.name for tree in of_role(trees.values(), EMA)]:
        group = groups[name]
        parent, _, last = name.rpartition(".")
        if group.beside is None and last in _LISTS_OF_AVERAGES:
            # An EMA's state dict saved as the whole file has its settings beside the list.
            group.beside = groups.get(parent)
        trees[name] = _average_tree(group, partners, trained)
    return tuple(trees.values())


def _plain_tree(group: Group, digests: Mapping[str, int]) -> Tree:
    """Make a tree that is no EMA; its weights may be live ones under the name of an average."""
    tensors = tuple(group.tensors.values())
    ordered = True
    if tensors and tensors[0].chunks and tensors[0].chunks[0].file.endswith(".safetensors"):
        # Such a file sorts its tensors; our own record in it, shown by its digests, restores the
        # order.
        ordered = tensors[0].name in digests
    tree = Tree(
        group.name,
        group.role or OTHER,
        tensors,
        tuple(group.objects.values()),
        dict(group.tensors),
        ordered=ordered,
    )
    if group.partner is None or group.averages.layout != AVERAGED_MODEL:
        return tree
    settings = _settings(group, {})
    named = {name: tensor for name, tensor in group.tensors.items() if name not in settings}
    return replace(tree, named=named, settings=settings, layout=AVERAGED_MODEL)


def _average_tree(group: Group, partners: _Partners, trained: Collection[str]) -> Tree:
    partner = _live_partner(group, partners)
    live = partner or Tree("", LIVE)
    found = _with_buffers(group, live)
    averages = name_averages(group.name, found, live.named, trained, ordered=live.ordered)
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
        None if partner is None else partner.name,
        layout=averages.layout,
        problem=averages.problem,
    )


def _with_buffers(group: Group, live: Tree) -> Averages:
    """Count what has the name of a setting as a buffer, if the live tree has it too (`step`)."""
    averages = group.averages
    # At the top of a checkpoint a `step` is the run's.
    if averages.layout != "*" or not live.name:
        return averages
    tensors: dict[str, Tensor] = {}
    for name, tensor in group.tensors.items():
        beside = live.named.get(name)
        is_buffer = beside is not None and beside.shape == tensor.shape
        if is_buffer or name in averages.tensors:
            tensors[name] = tensor
    return averages._replace(tensors=tensors)


def _settings(group: Group, averages: Mapping[str, Tensor]) -> dict[str, Tensor | Object]:
    weights = set(map(id, averages.values()))
    settings: dict[str, Tensor | Object] = {}
    for name, tensor in group.tensors.items():
        if is_setting(name, tensor) and id(tensor) not in weights:
            settings[name] = tensor
    for name, item in group.objects.items():
        if name.partition(".")[0] in SETTINGS:
            settings[name] = item
    return settings


class _Partners:
    """The trees that averages may belong to, by name; the live ones in stored order."""

    def __init__(self, trees: Iterable[Tree]) -> None:
        kept = [tree for tree in of_role(trees, LIVE, EMA, OTHER) if tree.tensors]
        self.by_name = {tree.name: tree for tree in kept}
        self.lives = of_role(kept, LIVE)

    def around(self, path: str) -> Iterator[Tree]:
        """Yield the live trees that something called `path` may lie in, the outermost first."""
        for name in ("", *accumulate(path.split(".")[:-1], "{}.{}".format)):
            tree = self.by_name.get(name)
            if tree is not None and tree.role == LIVE:
                yield tree


def _live_partner(group: Group, partners: _Partners) -> Tree | None:
    """Find the live tree of an EMA: by name, by name inside another tree, else the only one."""
    names = [*live_partners(group.name), f"{group.name}.online_model"]
    if group.partner:
        names = [group.partner]
    exact = partners.by_name.keys() & set(names) - {group.name}
    if exact:
        return partners.by_name[min(exact, key=names.index)]
    averaged = group.averages.tensors
    for name in names:
        for tree in partners.around(name):
            part = _cut(tree, name)
            if part and matches(averaged, part.named) and not matches(averaged, tree.named):
                return part
    return partners.lives[0] if len(partners.lives) == 1 else None


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
    if tree.role == EMA:
        return _part_of_average(tree, part)
    objects = inside({item.name: item for item in part.objects}, f"{part.name}.")
    group = Group(part.name, None, dict(part.named), objects)
    shows_average = group.is_average or group.averages.layout == AVERAGED_MODEL
    is_average = shows_average or tree_role(group.name) == EMA
    if not is_average or not group.has_weight:
        return part
    others: list[Tree] = []
    for name in live_partners(part.name):
        sibling = _cut(tree, name)
        if sibling is not None:
            others.append(sibling)
    for other in of_role(trees, LIVE, OPTIMIZER, OTHER):
        if other is not tree:
            others.append(other)
    return _average_tree(group, _Partners(others), ())


def _part_of_average(tree: Tree, part: Tree) -> Tree:
    part = replace(part, settings=tree.settings, layout=tree.layout)
    if tree.layout == POSITIONS:  # part of a list: the positions there are no names
        stored = set(map(id, part.tensors))
        named = {fqn: tensor for fqn, tensor in tree.named.items() if id(tensor) in stored}
        return replace(part, named=named, problem=tree.problem)
    prefix = _live_prefix(tree, part)
    if prefix is None:
        return replace(part, partner=None)
    return replace(part, partner=tree.partner, live_prefix=prefix)


def _live_prefix(tree: Tree, part: Tree) -> str | None:
    """Find how the averages in `part` of `tree` begin in the live tree; None if named otherwise."""
    fqns = {id(tensor): fqn for fqn, tensor in tree.named.items()}
    prefixes: set[str] = set()
    for name, tensor in part.named.items():
        fqn = fqns.get(id(tensor))
        if fqn is None:
            continue
        if not f".{fqn}".endswith(f".{name}"):
            return None
        prefixes.add(fqn[: -len(name)])
    if len(prefixes) != 1:
        return None
    return canonical(f"{prefixes.pop()}x")[:-1]


def find_tree(trees: Sequence[Tree], name: str, where: str = "the checkpoint") -> Tree:
    """Find the tree called `name`, or what lies below the dotted path `name` inside one.

    Raises:
        UsageError: `unknown-tree`, listing the trees there are, the nearest name first;
            `ambiguous-tree` if `name` fits several.
    """
    matching = find_trees(trees, one_text(name, "--tree"), where)
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
    warnings: Sequence[Diagnostic] = (),
) -> Tree:
    """Choose the tree for one-tree verbs if none is named: the only EMA, else the only live tree.

    `command` is the call so far and `options` what follows its paths, for the ready commands in the
    message, which has those of the checkpoint's `warnings` that say of weights that they are not
    read. A checkpoint that holds nothing has an empty live tree.

    Raises:
        UsageError: `ambiguous-tree` if neither is unique, with one command per candidate, and for
            an optimizer's state alone, be it values alone; `empty-selection` if there is no
            optimizer, no tree holds a tensor, and the checkpoint is not empty.
    """
    averages, lives = of_role(trees, EMA), of_role(trees, LIVE)
    if len(averages or lives) == 1:
        return (averages or lives)[0]
    filled = [tree for tree in trees if tree.tensors or tree.role == OPTIMIZER]
    if not filled:
        return _empty_tree(trees, where, warnings)
    counts = f"{counted(len(averages), 'EMA tree')} and {counted(len(lives), 'live tree')}"
    message = f"{where} has {counts}; name the one that is meant"
    candidates = averages + lives or of_role(filled, LIVE, EMA, OTHER)
    commands = [f"{command} --tree {shlex.quote(tree.name)}{options}" for tree in candidates]
    if not candidates:
        message = f"{where} holds optimizer state alone, {_no_weights(warnings)}"
        commands = [command.replace(" consolidate ", " convert ") + options]
    ready = "; ".join(f"`{command}`" for command in commands)
    raise UsageError("ambiguous-tree", f"{message}: {ready}")


def _empty_tree(trees: Sequence[Tree], where: str, warnings: Sequence[Diagnostic]) -> Tree:
    """Return the tree of a checkpoint that holds nothing at all; refuse values without a tensor."""
    names = [item.name for tree in trees for item in tree.entries]
    if names:
        message = f"{where}: holds no tensor that is read, only other values: {shown(names)}"
        message += _unread(warnings)
        raise UsageError("empty-selection", f"{message}; `ema-ckpt inspect` shows them")
    return Tree("", LIVE)


def _no_weights(warnings: Sequence[Diagnostic]) -> str:
    unread = _unread(warnings)
    return f"no weights{unread}; convert takes {'the rest' if unread else 'it whole'}"


def _unread(warnings: Sequence[Diagnostic]) -> str:
    """Say which objects of a class may hold the weights: a module that was saved as it is."""
    opaque = [warning.message for warning in warnings if warning.code == "opaque"]
    said = "".join(f"; {message}" for message in opaque[:_SHOWN_OPAQUE])
    return f"{said}; save the state_dict() of a module" if opaque else ""


def inner_names(tree: Tree) -> dict[str, str]:
    """Map the full name of each tensor to its name inside the tree, of an EMA's weight the fqn."""
    names = {tensor.name: tensor.name.removeprefix(tree.prefix) for tensor in tree.tensors}
    if tree.role != EMA or tree.problem is not None:
        return names
    for fqn, tensor in tree.named.items():
        names[tensor.name] = fqn
    return names
