"""Group the entries of a checkpoint: what lies together, and what its contents alone show.

A tree is a top-level entry of the state dict that is a dictionary itself. Where the format records
nesting, the first element of a tensor's path names its tree, never the first dot of its name; names
decide only where nothing nests, and then on whole dot components. A dictionary of trees is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from ema_ckpt.core.catalog import Catalog, Object, Tensor
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import (
    EMA,
    LIVE,
    MOMENTS,
    OPTIMIZER,
    OTHER,
    first_components,
    role_of,
    tree_role,
)
from ema_ckpt.state_dicts.ema_weights import (
    LAYOUT_DICTIONARIES,
    Averages,
    find_averages,
    floating_among,
    has_weight,
    inside,
    is_weight,
    weights_among,
)

Item = Tensor | Object

CONTAINER = ""
"""Role of a dictionary whose name is that of bookkeeping, but which holds trees."""
COMPOSER_WEIGHTS = "ema_model.named_parameters_dict."
"""What Composer's `EMA` keeps, in a list."""
_TRAINED = frozenset({EMA, OPTIMIZER})


@dataclass
class Group:
    """The entries of one tree by name without its prefix, and its role once that is known.

    The cached properties are for groups that are complete.

    Attributes:
        depth: how many elements of a path its name stands for.
        partner: of an average that lies under a live name, the tree of the live weights; and
            of those the average.
        beside: of an average, the group that its settings lie in, if not in itself.
    """

    name: str
    role: str | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Object] = field(default_factory=dict)
    depth: int = 1
    partner: str | None = None
    beside: Group | None = None

    def add(self, name: str, item: Item) -> None:
        """Add an entry under its name inside the tree.

        Raises:
            SourceError: `name-collision` if another has that name.
        """
        if name in self.tensors or name in self.objects:
            message = f"{item.name!r} and another entry both have the name {name!r}"
            message = f"{message} in the tree {self.name!r}"
            raise SourceError("name-collision", message, tensor=item.name)
        if isinstance(item, Tensor):
            self.tensors[name] = item
        else:
            self.objects[name] = item

    def items(self) -> Iterator[tuple[str, Item]]:
        """Iterate over all entries by name."""
        return chain[tuple[str, Item]](self.tensors.items(), self.objects.items())

    def names(self) -> list[str]:
        """Return the names of all entries."""
        return [*self.tensors, *self.objects]

    def split(self, name_of: Callable[[str], str | None]) -> tuple[Group, list[Group]]:
        """Take entries out: `name_of` gives the path of a dictionary inside, or None to stay."""
        rest = Group(self.name, self.role, depth=self.depth)
        parts: dict[str, Group] = {}
        for name, item in self.items():
            path = name_of(name)
            if path is None:
                rest.add(name, item)
                continue
            if path not in parts:
                parts[path] = Group(f"{self.name}.{path}".lstrip("."))
            parts[path].add(name[len(path) + 1 :], item)
        return rest, list(parts.values())

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The tensors that can have been averaged, buffers among them."""
        return weights_among(self.tensors)

    @cached_property
    def has_weight(self) -> bool:
        """Whether a tensor in it is like a weight: counters and statistics are not."""
        return has_weight(self.tensors)

    @cached_property
    def averages(self) -> Averages:
        """The averaged weights, if this is an EMA."""
        return find_averages(self.name, self.tensors, self.objects)

    @cached_property
    def is_average(self) -> bool:
        """Whether the contents alone show that this is an EMA."""
        if not self.tensors:
            return False
        names = self.names()
        if "num_updates" in names and any(name.startswith("weights.") for name in names):
            return True
        own = {n: t for n, t in self.tensors.items() if not n.startswith("param_groups.")}
        weights = floating_among(own)
        states = inside(weights, "state.")
        return 0 < len(states) == len(weights) and are_ema_params(states)

    @property
    def is_averaged_model(self) -> bool:
        """Whether this has the form of torch's `AveragedModel`: a module beside a count."""
        count = self.tensors.get("n_averaged")
        names = first_components(self.tensors)
        return count is not None and not count.shape and names == {"module", "n_averaged"}

    @cached_property
    def is_optimizer(self) -> bool:
        """Whether the contents alone show that this is an optimizer's state."""
        if "param_groups" in first_components(self.names()):
            own = ("state.", "param_groups.")
            return not has_weight({n: t for n, t in self.tensors.items() if not n.startswith(own)})
        parameters, with_moments = set(), set()
        for name, tensor in self.tensors.items():
            parameter, _, last = name.rpartition(".")
            if last in MOMENTS:
                with_moments.add(parameter)
            if is_weight(name, tensor):
                if not name.startswith("state."):
                    return False
                parameters.add(parameter)
        return bool(parameters) and parameters <= with_moments

    @cached_property
    def children(self) -> dict[str, Group]:
        """The dictionaries in it by name, where the format records nesting."""
        children: dict[str, Group] = {}
        for name, item in self.items():
            child = self.child_of(item)
            if child is None:
                continue
            if child not in children:
                children[child] = Group(f"{self.name}.{child}", depth=self.depth + 1)
            children[child].add(_name_below(child, name, item, self.depth + 1), item)
        return children

    def child_of(self, item: Item) -> str | None:
        """Name the dictionary in it that holds an entry; None if that lies in it directly."""
        path = item.path[self.depth :]
        return path[0] if len(path) > 1 and isinstance(path[0], str) else None

    @property
    def known_role(self) -> str | None:
        """The role that name or contents tell; an EMA needs a weight, a live tree a tensor."""
        named = tree_role(self.name) if self.role is None else self.role
        if named != OTHER and self.is_optimizer and not self.is_average:
            return OPTIMIZER
        role = EMA if self.is_average else named
        if role == EMA and not self.has_weight:
            return OTHER
        if role == LIVE and not self.tensors:
            return OTHER
        return role or None

    @cached_property
    def kinds(self) -> frozenset[str | None]:
        """The roles of the trees in it, bookkeeping aside; None for an unknown one."""
        if not self.opens:
            return frozenset({self.known_role}) - {OTHER}
        return self.inner_kinds

    @cached_property
    def inner_kinds(self) -> frozenset[str | None]:
        """The roles of the dictionaries in it that hold weights, or describe an optimizer."""
        found: set[str | None] = set()
        for child in self.children.values():
            if child.has_weight or child.known_role == OPTIMIZER:
                found |= child.kinds
            if any(COMPOSER_WEIGHTS in name for name in child.tensors):
                found.add(EMA)
        return frozenset(found)

    @cached_property
    def opens(self) -> bool:
        """Whether this is a dictionary of trees, like `app` of `{"app": {"model": …, "optim": …}}`.

        All in it that hold weights are trees by name, whatever plain values lie beside them; or
        averages or an optimizer's state would lie in one tree with something else.
        """
        if not self.name or self.known_role in (OPTIMIZER, OTHER) or self.is_average:
            return False
        found = self.inner_kinds
        if self.known_role == EMA:
            return OPTIMIZER in found or are_averages(self.children)
        loose: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if self.child_of(tensor) is None:
                loose[name] = tensor
        is_mixed = None in found or has_weight(loose)
        if is_mixed or self.known_role == LIVE:
            return not found.isdisjoint(_TRAINED)
        return bool(found)

    def opened(self) -> list[Group]:
        """Return the trees that it consists of, in stored order; itself if it is one."""
        if not self.opens:
            return [self]
        stay = self._modules()
        rest = Group(self.name, self.role, depth=self.depth)
        trees: dict[str, Group] = {}
        for name, item in self.items():
            child = self.child_of(item)
            if child is None or child in stay:
                rest.add(name, item)
                trees[""] = rest
            else:
                trees[child] = self.children[child]
        opened: list[Group] = []
        for tree in trees.values():
            if self.known_role == EMA and tree.known_role in (LIVE, None):
                tree.role = EMA
            opened += [tree] if tree is rest else tree.opened()
        return opened

    def _modules(self) -> set[str]:
        """Name the dictionaries that are modules of a live tree, and so stay in it."""
        if self.known_role != LIVE:
            return set()
        modules = set()
        for name, child in self.children.items():
            if not child.opens and child.known_role in (None, OTHER):
                modules.add(name)
        return modules


def are_ema_params(names: Iterable[str]) -> bool:
    """Check whether all tensors are averages in an optimizer's form, `<fqn>.ema_params`."""
    return all(f".{name}".endswith(".ema_params") for name in names)


def are_averages(children: Mapping[str, Group]) -> bool:
    """Check whether the dictionaries of an EMA are several averages of one model."""
    if not children:
        return False
    if all(child.is_average for child in children.values()):
        return True
    if len(children) == 1 or not LAYOUT_DICTIONARIES.isdisjoint(children):
        return False
    first, *others = (child.tensors.keys() for child in children.values())
    return bool(first) and all(names == first for names in others)


def collect(catalog: Catalog, tree_of: Callable[[Item], str]) -> dict[str, Group]:
    """Group all entries by the name of their tree, in stored order."""
    groups: dict[str, Group] = {}
    for item in chain[Item](catalog.tensors, catalog.objects):
        name = tree_of(item)
        if name not in groups:
            groups[name] = Group(name, depth=1 if name else 0)
        inner = _name_below(name, item.name, item, 1) if name else item.name
        groups[name].add(inner, item)
    return groups


def _name_below(tree: str, name: str, item: Item, depth: int) -> str:
    """Take the name of a tree off that of an entry in it.

    A planner of a user's own may store under names that do not come from the path.
    """
    if name.startswith(f"{tree}."):
        return name[len(tree) + 1 :]
    return ".".join(map(str, item.path[depth:])) or name


def group_by_nesting(catalog: Catalog) -> list[Group]:
    """Group by the first element of each path, and open the dictionaries of trees."""
    groups = collect(catalog, first_element)
    whole = _whole_state(groups)
    if whole:
        tops = {name: "" if name in whole else name for name in groups}
        return list(collect(catalog, lambda item: tops[first_element(item)]).values())
    roles = catalog.part_roles
    for name in groups.keys() & roles.keys():
        groups[name].role = roles[name]
    open_bookkeeping(groups.values())
    return list(chain.from_iterable(group.opened() for group in groups.values()))


def open_bookkeeping(groups: Collection[Group]) -> None:
    """Let bookkeeping that holds all the weights, live ones among them, count as a dictionary.

    That is a whole run under `train_state`, say.
    """
    books = []
    for group in groups:
        if group.role is None and tree_role(group.name) == OTHER:
            books.append(group)
        elif group.has_weight:
            return
    for group in books:
        if LIVE in map(role_of, first_components(group.tensors)):
            group.role = CONTAINER


def first_element(item: Item) -> str:
    """Name the tree of a nested entry: the first element of its path, "" for one at the top."""
    if len(item.path) == 1:
        return ""
    # A list at the top is a tree only where its name says so: `shadow_params`, `optimizer_states`.
    first = str(item.path[0])
    return first if isinstance(item.path[1], str) or role_of(first) is not None else ""


def _whole_state(groups: Mapping[str, Group]) -> frozenset[str]:
    """Name the top-level entries that together are the state dict of one EMA or optimizer."""
    names = groups.get("", Group("")).names()
    if "weights" in groups and "num_updates" in names:
        return frozenset({"weights", "residual", "config"})
    weighty = [name for name, group in groups.items() if group.has_weight and name != "state"]
    if "state" not in groups or weighty:
        return frozenset()
    weights = floating_among(groups["state"].tensors)
    is_average = bool(weights) and are_ema_params(weights)
    if is_average or "param_groups" in first_components(names):
        return frozenset({"state", "param_groups"})
    return frozenset()
