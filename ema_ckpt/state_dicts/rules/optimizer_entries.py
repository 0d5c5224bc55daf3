"""What an optimizer's tree holds, by parameter: state, and options of groups.

    state.<fqn>.exp_avg, param_groups.0.params = [<fqn>, …]   torch's nested form
    state.<fqn>.exp_avg, param_groups.<fqn>.lr                flattened, as torchtitan's

Either may lie below names of its own, as composer's `optimizers.<class>.state`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ema_ckpt.core.catalog import Object, Path, Tensor
from ema_ckpt.core.names import EMA, LIVE, OTHER, canonical
from ema_ckpt.state_dicts.tree import Tree, of_role

Entry = Tensor | Object

_HEAD = re.compile(r"(?:[^.]+\.){0,3}?(state|param_groups)\.")
_NAMES = ("params", "param_names")  # options that list parameters
_NONE_FITS = 1 << 62
_POSITIONS = "it is stored by position, not under names of parameters"


class Slot(NamedTuple):
    """What stands before and after a parameter's name in the names of entries of one kind."""

    before: str
    after: str

    @property
    def is_state(self) -> bool:
        """Whether these entries are state, and not options."""
        return self.before.endswith("state.")

    def is_single(self, entry: Entry) -> bool:
        """Whether an entry is one value for its parameter, whatever shape that has."""
        if isinstance(entry, Object) or not self.is_state:
            return True
        return entry.shape == () or (self.after == ".step" and entry.numel == 1)

    def is_shaped(self, entry: Entry, weight: Tensor) -> bool:
        """Whether an entry has a value for each element of its parameter."""
        if isinstance(entry, Object) or not self.is_state or self.after == ".step":
            return False
        return entry.shape == weight.shape


@dataclass(slots=True)
class ParamGroup:
    """One parameter group.

    Attributes:
        before: what the names of its entries begin with, up to its number.
        params: names of its parameters, as stored.
        lists: entries that list these names. options: other entries, by name.
    """

    before: str
    number: int
    params: tuple[str, ...] = ()
    lists: list[Object] = field(default_factory=list)
    options: dict[str, Entry] = field(default_factory=dict)


@dataclass(slots=True)
class OptimizerEntries:
    """Entries of an optimizer's tree.

    Attributes:
        slots: entries of one kind by parameter, under names without wrapper prefixes.
        keys: parameters as stored, by those names.
        groups: those that list their parameters, in order.
        problem: why nothing can be said of its parameters, or "".
    """

    slots: dict[Slot, dict[str, Entry]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    groups: list[ParamGroup] = field(default_factory=list)
    problem: str = ""

    def misfits(self, weights: Mapping[str, Tensor]) -> int:
        """Count the entries of state that have another shape than their parameter."""
        count = 0
        for slot, items in self.slots.items():
            for name, item in items.items():
                count += not slot.is_single(item) and not slot.is_shaped(item, weights[name])
        return count


def list_entries(
    tree: Tree, trees: Sequence[Tree], load: Callable[[Object], object]
) -> tuple[OptimizerEntries, Tree | None]:
    """List the entries of an optimizer by parameter, with the tree of the weights that it steps.

    Of several trees, as a generator's and a critic's, the one that fits best is meant.

    Args:
        trees: all of the checkpoint. load: reads an object.
    """
    problem = OptimizerEntries(problem="the checkpoint holds no weights that it steps")
    best: tuple[int, OptimizerEntries, Tree | None] = _NONE_FITS + 1, problem, None
    candidates = of_role(trees, LIVE) + of_role(trees, EMA, OTHER)
    candidates.sort(key=lambda other: other.name != tree.name.removesuffix("_optimizer"))
    for other in candidates:
        if other.problem is not None or not other.named:
            continue
        weights = weights_of(other)
        entries = _Listing(tree, weights, load).entries
        misfits = _NONE_FITS if entries.problem else entries.misfits(weights)
        if misfits < best[0]:
            best = misfits, entries, other
        if misfits == 0:
            break
    return best[1], best[2]


def weights_of(tree: Tree) -> dict[str, Tensor]:
    """Return the weights of a tree under names without wrapper prefixes."""
    return {canonical(name): tensor for name, tensor in tree.named.items()}


class _Listing:
    """The entries of a tree, parameter by parameter."""

    def __init__(
        self, tree: Tree, weights: Mapping[str, Tensor], load: Callable[[Object], object]
    ) -> None:
        self.entries = OptimizerEntries()
        self._weights = weights
        self._load = load
        self._groups: dict[tuple[str, int], ParamGroup] = {}
        for item in tree.entries:
            head = _HEAD.match(item.name, len(tree.prefix))
            if head is not None:
                self._add(item, item.name[: head.end()])
            if self.entries.problem:
                return
        self.entries.groups = [group for _, group in sorted(self._groups.items())]
        for group in self.entries.groups:
            for name in group.params:
                self._key(name)

    def _add(self, item: Entry, before: str) -> None:
        number = _element_after(item.path, before)
        if isinstance(number, int):
            self._add_option(item, before, number)
            return
        rest = item.name[len(before) :]
        key = next(filter(self._known, _beginnings(rest)), None)
        if key is None:
            name = rest.rpartition(".")[0]
            positions = _POSITIONS if name.isdecimal() else ""
            reason = f"the checkpoint has no weight {name!r}, which its optimizer steps"
            self.entries.problem = positions or reason
            return
        slot = self.entries.slots.setdefault(Slot(before, rest[len(key) :]), {})
        slot[self._key(key)] = item

    def _known(self, name: str) -> bool:
        return canonical(name) in self._weights

    def _key(self, key: str) -> str:
        """Return a parameter's name without wrapper prefixes, and note how it is stored."""
        name = canonical(key)
        if name not in self._weights:
            reason = f"the checkpoint has no weight {key!r}, which its optimizer steps"
            self.entries.problem = reason
        if self.entries.keys.setdefault(name, key) != key:
            self.entries.problem = f"its optimizer names one parameter {key!r} and in another way"
        return name

    def _add_option(self, item: Entry, before: str, number: int) -> None:
        group = self._groups.setdefault((before, number), ParamGroup(before, number))
        option = item.name[len(f"{before}{number}.") :]
        if option not in _NAMES or isinstance(item, Tensor):
            group.options[option] = item
            return
        names = _texts(self._load(item))
        if option == "params":
            group.params = names or ()
            self.entries.problem = _POSITIONS if names is None else ""
        if names is None:
            group.options[option] = item
        else:
            group.lists.append(item)


def _texts(value: object) -> tuple[str, ...] | None:
    """Return a list of texts as a tuple; None for anything else."""
    if not isinstance(value, list):
        return None
    texts = tuple([item for item in value if isinstance(item, str)])
    return texts if len(texts) == len(value) else None


def _beginnings(rest: str) -> Iterator[str]:
    """Yield what ends at a dot of a name, the longest first."""
    name = rest.rpartition(".")[0]
    while name:
        yield name
        name = name.rpartition(".")[0]


def _element_after(path: Path, before: str) -> str | int | None:
    """Return the element of a path that follows `before`; None if that ends inside of one."""
    reached = 0
    for element in path:
        if reached >= len(before):
            return element if reached == len(before) else None
        reached += len(str(element)) + 1
    return None
