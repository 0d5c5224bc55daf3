"""Rules applied to an optimizer's state that is stored under names of parameters.

State of a parameter's shape (`exp_avg`, `momentum_buffer`) takes the steps that its parameter
takes. One value for a parameter (`step`, an option of its group) goes with its name: parameters
that become one have it alike, and those that come from one all get it. What has another shape, as
factored moments have, goes with a new name, and not into a new layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ema_ckpt.core.catalog import Catalog, Object, Tensor
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.names import canonical, rename_path
from ema_ckpt.core.text import shown
from ema_ckpt.state_dicts.ema_config import read_scalar
from ema_ckpt.state_dicts.rules.optimizer_entries import (
    Entry,
    OptimizerEntries,
    ParamGroup,
    Slot,
)
from ema_ckpt.state_dicts.rules.ruled_tree import RuledTree, drop_reason
from ema_ckpt.state_dicts.rules.rules import Item, Rules
from ema_ckpt.state_dicts.rules.views import StoredViews, View, view_of
from ema_ckpt.state_dicts.tree import Tree

_REMEDY = "leave the optimizer out (--tree names what is written)"


def apply_to_optimizer(
    rules: Rules,
    tree: Tree,
    entries: OptimizerEntries,
    weights: Mapping[str, Tensor],
    catalog: Catalog,
    views: StoredViews,
) -> RuledTree:
    """Apply rules to the state of an optimizer, and to its options.

    Args:
        entries: what the tree holds. weights: those that it steps.
        catalog: what single values are read from.

    Raises:
        UsageError: `unsupported` if parameters that become one differ in what they have once; as
            rules raise.
    """
    work = _OptimizerWork(rules, tree, entries, _Parameters(rules, weights), catalog, views)
    for slot, items in entries.slots.items():
        work.carry(slot, items)
    for before in dict.fromkeys([group.before for group in entries.groups]):
        work.carry_groups([group for group in entries.groups if group.before == before])
    return work.finish()


class _Parameters:
    """What rules make of an optimizer's parameters.

    Attributes:
        weights: the parameters before. used: numbers of the rules that some fitted.
        changed: what rules made, by name.
        origins: which parameters are in each of these. became: the reverse, empty for what is gone.
        groups: which parameters a rule takes together to make each of these.
        dropped: the numbers of the rules that dropped a parameter, or a part of it.
        mixed: those of `changed` that are a constant in part. constants: those that are one.
    """

    def __init__(self, rules: Rules, weights: Mapping[str, Tensor]) -> None:
        state = rules.apply(weights)
        self.weights, self.used, self.groups = weights, state.used, state.origins
        self.changed: dict[str, Item] = {name: state.items[name] for name in state.origins}
        self.dropped = dict(state.dropped)
        self.mixed: set[str] = set()
        self.constants: list[str] = []
        self.origins: dict[str, tuple[str, ...]] = {}
        self.became: dict[str, list[str]] = {name: [] for name in self.dropped}
        owners = {id(tensor): name for name, tensor in weights.items()}
        for name, item in self.changed.items():
            self.origins[name] = self._origins(name, item, owners)
            for origin in self.origins[name]:
                self.became.setdefault(origin, []).append(name)

    def _origins(self, name: str, item: Item, owners: Mapping[int, str]) -> tuple[str, ...]:
        sources = [item] if isinstance(item, Tensor) else [piece.source for piece in item.pieces]
        found = dict.fromkeys(map(id, sources))
        own = [owners[source] for source in found if source in owners]
        if not found:
            return self.groups[name]
        if not own:
            self.constants.append(name)
        elif len(own) < len(found):
            self.mixed.add(name)
        return tuple(own)


class _OptimizerWork:
    """The entries of an optimizer's tree, and what rules make of them."""

    def __init__(
        self,
        rules: Rules,
        tree: Tree,
        entries: OptimizerEntries,
        parameters: _Parameters,
        catalog: Catalog,
        views: StoredViews,
    ) -> None:
        self.result = RuledTree(tree, used=parameters.used, constants=parameters.constants)
        self._rules, self._entries, self._parameters = rules, entries, parameters
        self._catalog, self._views = catalog, views
        self._misfits: set[tuple[str, str]] = set()  # with what the names of their state begin
        for slot, items in entries.slots.items():
            self._note_misfits(slot, items)

    def _note_misfits(self, slot: Slot, items: Mapping[str, Entry]) -> None:
        """Note new parameters that some state of another shape than the old ones' is left out of.

        The rest of their state goes with it: moments in a basis that is stored beside them, say,
        mean nothing alone.
        """
        known = self._parameters
        for name, item in known.changed.items():
            for origin in () if isinstance(item, Tensor) else known.origins[name]:
                entry = items.get(origin)
                if entry is None or slot.is_single(entry):
                    continue
                if not slot.is_shaped(entry, known.weights[origin]):
                    self._misfits.add((slot.before, name))

    def carry(self, slot: Slot, items: Mapping[str, Entry]) -> None:
        """Apply rules to the entries of one kind."""
        known = self._parameters
        for origin, item in items.items():
            if origin in known.became:
                self._take(item)
                if not known.became[origin]:
                    reason = drop_reason(self._rules, known.dropped[origin])
                    self.result.dropped.append((item, reason))
        carried = self._carried(slot, items)
        made = self._laid_out(slot, items, carried)
        for name in carried:
            first, *others = known.origins[name]
            if others and name not in made:
                entries = {origin: {slot.after[1:]: items[origin]} for origin in (first, *others)}
                self._refuse_differing(name, entries)
            self._add(slot, name, items[first], made.get(name))

    def _carried(self, slot: Slot, items: Mapping[str, Entry]) -> list[str]:
        """List the new parameters that get an entry, and note what is left out of the others."""
        carried = []
        for name, origins in self._parameters.origins.items():
            members = [origin for origin in origins if origin in items]
            if members and (slot.before, name) in self._misfits:
                reason = "some of the state has not its parameter's shape, and takes no new layout"
                self.result.left_out += [(items[origin], reason) for origin in members]
            elif members:
                self._refuse_gap(name, slot.after[1:], members)
                carried.append(name)
        return carried

    def _laid_out(
        self, slot: Slot, items: Mapping[str, Entry], names: Iterable[str]
    ) -> dict[str, View]:
        """Return state in the layout of its new parameters, where it has the old ones' shape."""
        known = self._parameters
        shaped: dict[str, Tensor] = {}
        for origin, entry in items.items():
            if isinstance(entry, Tensor) and slot.is_shaped(entry, known.weights[origin]):
                shaped[origin] = entry
        wanted = []
        for name in names:
            if isinstance(known.changed[name], View) and shaped.keys() >= {*known.origins[name]}:
                wanted.append(name)
        # Rules see the same names as before; of what is not wanted the shapes will do.
        inputs: dict[str, Tensor] = {}
        for origin in dict.fromkeys([origin for name in wanted for origin in known.groups[name]]):
            dtype = next(iter(shaped.values())).dtype
            blank = Tensor(origin, (origin,), known.weights[origin].shape, dtype, ())
            inputs[origin] = shaped.get(origin, blank)
        made = self._rules.apply(inputs).items
        return {name: view for name in wanted if isinstance(view := made[name], View)}

    def _take(self, item: Entry) -> None:
        """Let what is made of an entry stand in its place."""
        places = self.result.replaced if isinstance(item, Tensor) else self.result.objects
        places.setdefault(item.name, [])

    def _add(self, slot: Slot, name: str, item: Entry, view: View | None) -> None:
        """Put an entry, or what was made of it and others, under the name of a new parameter."""
        known = self._parameters
        first, *others = known.origins[name]
        old, new = self._entries.keys[first], self._stored(name, first)
        full, path = f"{slot.before}{new}{slot.after}", item.path
        if old != new:
            path = rename_path(path, slot.before + old, slot.before + new)
        if view is None and isinstance(item, Tensor):
            self.result.moved[full] = item.name
            if len(known.became[first]) > 1:  # copies of one value are no ties
                view = view_of(item)
        changed: Entry = replace(item, name=full, path=path)
        if view is not None:
            changed = self._views.add(view, full, path)
        items = self._entries.slots[slot]
        self._put(item, changed, [items[origin] for origin in others])

    def _put(self, old: Entry, new: Entry, others: Sequence[Entry] = ()) -> None:
        """Put a new entry in the place of an old one, which it comes from with others."""
        result, sources = self.result, (old, *others)
        if isinstance(new, Tensor):
            result.replaced.setdefault(old.name, []).append(new)
            result.sources[new.name] = tuple([s for s in sources if isinstance(s, Tensor)])
        else:
            result.objects.setdefault(old.name, []).append(new)
            if new.name != old.name:
                origins = tuple([s for s in sources if isinstance(s, Object)])
                result.object_sources[new.name] = origins
        if new.path != old.path:
            result.paths.append((old.path, new.path))

    def _stored(self, name: str, origin: str) -> str:
        """Return a new name behind the wrapper prefix that its origin begins with."""
        key = self._entries.keys[origin]
        return key[: len(key) - len(origin)] + name if key.endswith(origin) else name

    def carry_groups(self, groups: Sequence[ParamGroup]) -> None:
        """Apply rules to the parameters that groups list; groups that have none left go."""
        owners = {canonical(key): group for group in groups for key in group.params}
        gone = 0
        for group in groups:
            names = self._listed(group, owners)
            if group.params and not names:
                gone += 1
                self._drop_group(group)
                continue
            number = group.number - gone
            for item in group.lists if number != group.number or names != [*group.params] else ():
                self._renumber(group, replace(item, inline=names, is_inline=True), number)
            for option in group.options.values() if gone else ():
                self._renumber(group, option, number)

    def _drop_group(self, group: ParamGroup) -> None:
        """Leave out a group without parameters; one that joined another is like that."""
        became = self._parameters.became
        is_dropped = not any(became[canonical(key)] for key in group.params)
        for item in (*group.lists, *group.options.values()):
            self._take(item)
            if is_dropped:
                self.result.dropped.append((item, "all parameters of its group are dropped"))

    def _renumber(self, group: ParamGroup, item: Entry, number: int) -> None:
        """Put an entry of a group under another number, or under the same."""
        old, new = f"{group.before}{group.number}", f"{group.before}{number}"
        depth = item.path.index(group.number, group.before.count("."))
        path = (*item.path[:depth], number, *item.path[depth + 1 :])
        self._put(item, replace(item, name=new + item.name[len(old) :], path=path))

    def _listed(self, group: ParamGroup, owners: Mapping[str, ParamGroup]) -> list[str]:
        """Return the names that a group lists after rules."""
        known = self._parameters
        names = []
        for key in group.params:
            origin = canonical(key)
            if origin not in known.became:
                names.append(key)
                continue
            for name in known.became[origin]:
                members = [other for other in known.origins[name] if other in owners]
                if members[0] != origin:  # listed where the first of them was
                    continue
                self._refuse_gap(name, "params", members)
                if len({owners[member].number for member in members}) > 1:
                    options = {member: owners[member].options for member in members}
                    self._refuse_differing(name, options)
                names.append(self._stored(name, origin))
        return names

    def _refuse_gap(self, name: str, kind: str, members: Sequence[str]) -> None:
        """Refuse a new parameter of which some parts have state of a kind and others have none."""
        absent = [origin for origin in self._parameters.origins[name] if origin not in members]
        if not absent and name not in self._parameters.mixed:
            return
        other = shown(absent) if absent else "a constant"
        message = f"{self._rules.name}: the optimizer has {kind!r} of {members[0]!r} and not of"
        message += f" {other}, and {name!r} is made of both"
        raise UsageError("unsupported", f"{message}; {_REMEDY}", tensor=name)

    def _refuse_differing(self, name: str, entries: Mapping[str, Mapping[str, Entry]]) -> None:
        """Refuse a new parameter whose parts differ in what they have once.

        Args:
            entries: that by the part and what it is called.
        """
        first, *others = entries
        expected = {key: self._value(entry) for key, entry in entries[first].items()}
        for other in others:
            found = {key: self._value(entry) for key, entry in entries[other].items()}
            for key in [*expected, *found]:
                if expected.get(key) == found.get(key):
                    continue
                message = f"{self._rules.name}: {name!r} is made of {first!r} and {other!r}, whose"
                message += f" {key!r} in the optimizer differ: {expected.get(key, 'none')} and"
                message += f" {found.get(key, 'none')}"
                raise UsageError("unsupported", f"{message}; {_REMEDY}", tensor=name)

    def _value(self, entry: Entry) -> str:
        """Return what tells a single value from others."""
        if isinstance(entry, Object):
            return repr(self._catalog.reader.load(entry))
        value = read_scalar(self._catalog, entry)
        return f"{entry.dtype.name} {entry.name if value is None else value}"

    def finish(self) -> RuledTree:
        """Return the tree that rules made."""
        result, tree = self.result, self.result.tree
        tensors: list[Tensor] = []
        for tensor in tree.tensors:
            tensors += result.replaced.get(tensor.name, [tensor])
        objects: list[Object] = []
        for item in tree.objects:
            objects += result.objects.get(item.name, [item])
        named = {tensor.name.removeprefix(tree.prefix): tensor for tensor in tensors}
        result.tree = replace(tree, tensors=tuple(tensors), objects=tuple(objects), named=named)
        return result
