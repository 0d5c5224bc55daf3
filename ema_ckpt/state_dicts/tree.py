"""The trees of a checkpoint: live weights, their averages, optimizer state, the rest.

A tree is a top-level entry of the state dict that is a dictionary itself. Where the format records
nesting, the first element of a tensor's path tells its tree, never the first dot of its name; names
decide only where nothing nests, and then on whole dot components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from ema_ckpt.state_dicts.ema_layouts import (
    POSITIONS,
    Averages,
    find_averages,
    is_setting,
    matches,
    name_averages,
)
from ema_ckpt.state_dicts.roles import Group, group_entries


@dataclass(frozen=True, slots=True)
class Tree:
    """One tree of a checkpoint.

    Attributes:
        name: dotted path of the tree, `""` for the root.
        role: `live`, `ema`, `optimizer` or `other`.
        tensors, objects: everything in it, in stored order, under full names.
        named: its weights by name inside the tree; of an EMA the averaged tensors by the plain fqn.
        settings: of an EMA, the entries that describe it (`num_updates`, `decay`, `config`, …), by
            name.
        partner: of an EMA, the name of the live tree it averages, if one is beside it.
        below: of a part of an EMA, how the names of its weights begin in the live tree
            (`layers.0.`), else `""`.
        form: of an EMA, the form its weights are stored in.
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
    below: str = ""
    form: str = "*"
    problem: EmaCkptError | None = None
    ordered: bool = True

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Weights by the name they have inside the tree (of an EMA: the plain fqn), in stored
        order.

        Raises:
            SourceError: `unsupported` if positions or dotless names find no partner in the live
                tree.
        """
        if self.problem is not None:
            raise self.problem
        return self.named

    @property
    def left_out(self) -> tuple[Tensor, ...]:
        """Tensors of an EMA tree that are neither averaged weights nor settings (integer buffers,
        say).
        """
        taken = {id(tensor) for tensor in (*self.named.values(), *self.settings.values())}
        return tuple(tensor for tensor in self.tensors if id(tensor) not in taken)


def list_trees(catalog: Catalog) -> tuple[Tree, ...]:
    """Tell the trees of a checkpoint apart, in stored order.

    Raises:
        SourceError: `name-collision` if two paths join to one dotted name.
    """
    groups = group_entries(catalog)
    _assign_roles(groups)
    return _finish(groups, catalog.digests)


def _assign_roles(groups: Sequence[Group]) -> None:
    for group in groups:
        role = group.role or tree_role(group.name)
        if group.is_average():
            role = EMA
        if (role == EMA and not group.has_weights()) or (role == LIVE and not group.tensors):
            role = OTHER
        group.role = role
    _assign_lightning_roles({group.name: group for group in groups})
    unknown = [group for group in groups if group.role is None]
    only = [group for group in unknown if any(tensor.shape for _, tensor in group.tensors)]
    if not only and all(group.role in (None, OTHER, OPTIMIZER) for group in groups):
        only = [group for group in unknown if group.tensors]
    alone = len(only) == 1 and all(group.role != LIVE for group in groups)
    for group in unknown:
        group.role = LIVE if alone and group is only[0] else OTHER


def _assign_lightning_roles(groups: Mapping[str, Group]) -> None:
    # Lightning's WeightAveraging callback stores the averages under `state_dict` and moves the live
    # weights aside.
    marks = groups.get("averaging_state")
    if (
        marks
        and "n_averaged" in marks.names()
        and {"state_dict", "current_model_state"} <= groups.keys()
    ):
        groups["state_dict"].role = EMA
        marks.role = OTHER


def _finish(groups: Sequence[Group], recorded: Mapping[str, int]) -> tuple[Tree, ...]:
    plain = {group.name: _plain_tree(group, recorded) for group in groups if group.role != EMA}
    trained = _stepped_names(groups)
    root = next((group for group in groups if not group.name), None)
    marks = next((group for group in groups if group.name == "averaging_state"), None)
    finished = []
    for group in groups:
        if group.role == EMA:
            extra = marks if group.name == "state_dict" else root
            finished.append(_average_tree(group, tuple(plain.values()), trained, extra))
        else:
            finished.append(plain[group.name])
    return tuple(finished)


def _plain_tree(group: Group, recorded: Mapping[str, int]) -> Tree:
    return Tree(
        group.name,
        group.role or OTHER,
        tuple(tensor for _, tensor in group.tensors),
        tuple(item for _, item in group.objects),
        dict(group.tensors),
        ordered=not group.tensors or _keeps_order(group.tensors[0][1], recorded),
    )


def _keeps_order(tensor: Tensor, recorded: Mapping[str, int]) -> bool:
    # Our own record in a safetensors file, known by its digests, restores the order.
    sorted_file = bool(tensor.chunks) and tensor.chunks[0].file.endswith(".safetensors")
    return not sorted_file or tensor.name in recorded


def _stepped_names(groups: Sequence[Group]) -> frozenset[str]:
    """Names of parameters that an optimizer's state mentions: `state.<fqn>.exp_avg`."""
    states = [name for group in groups if group.role == OPTIMIZER for name, _ in group.tensors]
    return frozenset(
        name[len("state.") :].rpartition(".")[0] for name in states if name.startswith("state.")
    )


def _average_tree(
    group: Group, others: Sequence[Tree], trained: frozenset[str], extra: Group | None
) -> Tree:
    found = find_averages(group.name, group.tensors, [name for name, _ in group.objects])
    live = _partner(group.name, found, others)
    ordered = live is None or live.ordered
    named = name_averages(group.name, found, live.named if live else {}, trained, ordered=ordered)
    weights = {id(tensor) for tensor in named.tensors.values()}
    settings = _settings(group, weights)
    last = group.name.rpartition(".")[2]
    if (
        not settings
        and extra is not None
        and last in ("shadow_params", "shadow", "ema_model", "state_dict")
    ):
        # The state dict of such an EMA was saved as the whole file: its settings lie beside the
        # list.
        settings = _settings(extra, set())
    return Tree(
        group.name,
        EMA,
        tuple(tensor for _, tensor in group.tensors),
        tuple(item for _, item in group.objects),
        named.tensors,
        settings,
        live.name if live else None,
        form=named.form,
        problem=named.problem,
    )


def _settings(group: Group, weights: set[int]) -> dict[str, Tensor | Object]:
    found: dict[str, Tensor | Object] = {
        name: tensor
        for name, tensor in group.tensors
        if is_setting(name, tensor) and id(tensor) not in weights
    }
    found.update((name, item) for name, item in group.objects if name.partition(".")[0] in SETTINGS)
    return found


def _partner(name: str, found: Averages, others: Sequence[Tree]) -> Tree | None:
    """The live tree that an EMA averages: by name, by name one level below the root, else the only
    one.
    """
    candidates = {tree.name: tree for tree in others if tree.role != OPTIMIZER and tree.tensors}
    partners = ("current_model_state",) if name == "state_dict" else live_partners(name)
    for partner in partners:
        if partner in candidates and partner != name:
            return candidates[partner]
    lives = [tree for tree in candidates.values() if tree.role == LIVE]
    for partner in partners:
        for tree in lives:
            part = _cut(tree, partner)
            if (
                part
                and matches(found.tensors, part.named)
                and not matches(found.tensors, tree.named)
            ):
                return part
    return lives[0] if len(lives) == 1 else None


def live_of(known: Sequence[Tree], ema: Tree) -> Tree | None:
    """The live tree paired with the EMA tree `ema`, or None if none is beside it.

    With a part of an EMA, that is the same part of the live tree, which may hold nothing.
    """
    live = None if ema.partner is None else _exact_or_below(known, ema.partner)
    if live is None or not ema.below:
        return live
    named = {canonical(name): tensor for name, tensor in live.named.items()}
    part = {
        name[len(ema.below) :]: tensor
        for name, tensor in named.items()
        if name.startswith(ema.below)
    }
    path = f"{live.name}.{ema.below}".strip(".")
    return Tree(path, live.role, tuple(part.values()), (), part, ordered=live.ordered)


def _exact_or_below(known: Sequence[Tree], name: str) -> Tree | None:
    for tree in known:
        if tree.name == name:
            return tree
    # The longest tree name first: `ema.online_model.layers` lies in `ema.online_model`, not in
    # `ema`.
    for tree in sorted(known, key=lambda tree: -len(tree.name)):
        part = _below(tree, name, known)
        if part is not None:
            return part
    return None


def _cut(tree: Tree, path: str) -> Tree | None:
    """What lies below the dotted `path` inside `tree`, under names without that path."""
    if tree.name and not path.startswith(f"{tree.name}."):
        return None
    head = f"{path}."
    tensors = tuple(tensor for tensor in tree.tensors if tensor.name.startswith(head))
    objects = tuple(item for item in tree.objects if item.name.startswith(head))
    if not tensors and not objects:
        return None
    named = {tensor.name[len(head) :]: tensor for tensor in tensors}
    return Tree(
        path, tree.role, tensors, objects, named, partner=tree.partner, ordered=tree.ordered
    )


def _below(tree: Tree, path: str, known: Sequence[Tree]) -> Tree | None:
    part = _cut(tree, path)
    if part is None:
        return None
    group = Group(path)
    group.tensors = list(part.named.items())
    group.objects = [(item.name[len(path) + 1 :], item) for item in part.objects]
    named_so = tree_role(path) == EMA and tree.role in (LIVE, OTHER)
    if group.has_weights() and (group.is_average() or named_so):
        siblings = [
            t for t in (_cut(tree, partner) for partner in live_partners(path)) if t is not None
        ]
        others = [*siblings, *(t for t in known if t.role != EMA and t is not tree)]
        return _average_tree(group, others, frozenset(), None)
    if tree.role != EMA:
        return part
    if tree.form == POSITIONS:  # a list by itself has no names
        held = {id(tensor) for tensor in part.tensors}
        named = {fqn: tensor for fqn, tensor in tree.named.items() if id(tensor) in held}
        partner, form, problem = tree.partner, tree.form, tree.problem
        return Tree(
            path,
            EMA,
            part.tensors,
            part.objects,
            named,
            tree.settings,
            partner,
            form=form,
            problem=problem,
        )
    below = _place_below(tree, part)
    partner = None if below is None else tree.partner
    return Tree(
        path,
        EMA,
        part.tensors,
        part.objects,
        part.named,
        tree.settings,
        partner,
        below or "",
        tree.form,
    )


def _place_below(tree: Tree, part: Tree) -> str | None:
    """How the averages of `tree` that lie in its `part` begin in the live tree; None if they are
    named otherwise.
    """
    fqns = {id(tensor): fqn for fqn, tensor in tree.named.items()}
    pairs = [(fqns[id(tensor)], name) for name, tensor in part.named.items() if id(tensor) in fqns]
    heads = {fqn[: -len(name)] if f".{fqn}".endswith(f".{name}") else None for fqn, name in pairs}
    head = heads.pop() if len(heads) == 1 else None
    return None if head is None else canonical(f"{head}x")[:-1]


def find_tree(known: Sequence[Tree], name: str, where: str = "the checkpoint") -> Tree:
    """The tree called `name`, or what lies below the dotted path `name` inside one.

    Raises:
        UsageError: `unknown-tree`, listing the trees there are, the nearest name first;
            `ambiguous-tree` if `name` fits several.
    """
    found = find_trees(known, name, where)
    if len(found) > 1:
        names = shown([tree.name for tree in found])
        raise UsageError(
            "ambiguous-tree", f"{where}: {name!r} may mean {names}; name one of them with --tree"
        )
    return found[0]


def find_trees(known: Sequence[Tree], name: str, where: str = "the checkpoint") -> tuple[Tree, ...]:
    """All that `name` stands for: one tree, a part of one, or every tree of a dictionary that holds
    trees.

    Raises:
        UsageError: `unknown-tree`, listing the trees there are, the nearest name first.
    """
    found = _exact_or_below(known, name)
    if found is not None:
        return (found,)
    inside = tuple(tree for tree in known if tree.name.startswith(f"{name}."))
    inside = inside or tuple(tree for tree in known if name and tree.name.endswith(f".{name}"))
    if inside:
        return inside
    names = nearest(name, [tree.name for tree in known])
    listed = f"it has {shown(names)}" if names else "it holds no tree"
    hint = "--tree takes any dotted path below one"
    raise UsageError("unknown-tree", f"{where} has no tree {name!r}: {listed}, and {hint}")


def default_tree(
    known: Sequence[Tree],
    command: str = "ema-ckpt consolidate PATH OUT",
    where: str = "",
    options: str = "",
) -> Tree:
    """The tree that one-tree verbs take when none is named: the only EMA, else the only live tree.

    `command` is the call so far and `options` what follows its paths, for the ready commands in the
    message. A checkpoint that holds nothing has an empty live tree.

    Raises:
        UsageError: `ambiguous-tree` if neither is unique, with one command per candidate.
    """
    averages = [tree for tree in known if tree.role == EMA]
    lives = [tree for tree in known if tree.role == LIVE]
    if len(averages) == 1 or (not averages and len(lives) == 1):
        return (averages or lives)[0]
    if not any(tree.tensors for tree in known):
        return Tree("", LIVE)
    candidates = [*averages, *lives] or [
        tree for tree in known if tree.tensors and tree.role != OPTIMIZER
    ]
    found = f"{counted(len(averages), 'EMA tree')} and {counted(len(lives), 'live tree')}"
    lead = f"{where or 'the checkpoint'} has {found}; name the one that is meant: "
    if not candidates:
        lead = f"{where or 'the checkpoint'} holds optimizer state alone, no weights; convert takes it whole: "
        return _refuse(lead, [command.replace(" consolidate ", " convert ") + options])
    import shlex

    return _refuse(
        lead, [f"{command} --tree {shlex.quote(tree.name)}{options}" for tree in candidates]
    )


def _refuse(lead: str, commands: Sequence[str]) -> Tree:
    raise UsageError("ambiguous-tree", lead + "; ".join(f"`{command}`" for command in commands))


def inner_names(tree: Tree) -> dict[str, str]:
    """The name inside its tree of every tensor, by full stored name; of an EMA's weights the plain
    fqn.
    """
    skip = len(tree.name) + 1 if tree.name else 0
    names = {tensor.name: tensor.name[skip:] for tensor in tree.tensors}
    if tree.role == EMA and tree.problem is None:
        names.update((tensor.name, fqn) for fqn, tensor in tree.named.items())
    return names
