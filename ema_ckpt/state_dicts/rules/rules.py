"""Rules: what each does to a state dict, and its inverse.

A rule takes the names that fit its `from` patterns, in groups whose placeholders stand for the same
text, and puts the tensors of a group under the names that its `to` patterns give. Rules are applied
one after the other, each to what the one before it left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import EmaCkptError, UsageError
from ema_ckpt.core.text import counted, shown
from ema_ckpt.state_dicts.rules.constants import constant_tensor
from ema_ckpt.state_dicts.rules.name_patterns import Fields, Matcher, NamePattern
from ema_ckpt.state_dicts.rules.steps import Column, Stack, Step, Unstack
from ema_ckpt.state_dicts.rules.views import View, view_of

Item = Tensor | View


@dataclass(slots=True)
class StateDict:
    """A state dict on its way through the rules.

    Attributes:
        items: its tensors, and what rules made, by name.
        origins: the names before any rule of whatever is in an item, where a rule touched it.
        dropped: what is left out, with the number of the rule.
        used: numbers of the rules that some name fitted.
        inexact: rules whose inverse would not lead back, and why.
    """

    items: dict[str, Item]
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dropped: list[tuple[str, int]] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    inexact: dict[int, str] = field(default_factory=dict)

    def origins_of(self, name: str) -> tuple[str, ...]:
        """Return the names before any rule of what is called `name` now."""
        return self.origins.get(name, (name,))

    def view(self, name: str) -> View:
        """Return an item as a view."""
        item = self.items[name]
        return view_of(item) if isinstance(item, Tensor) else item


class Rule(Protocol):
    """One rule of a file."""

    @property
    def number(self) -> int:
        """Place in the file, from 1 on."""
        ...

    @property
    def optional(self) -> bool:
        """Whether it may fit no name."""
        ...

    @property
    def title(self) -> str:
        """The patterns in short, for messages."""
        ...

    def apply(self, state: StateDict) -> None:
        """Change `state`.

        Raises:
            UsageError: `name-collision incomplete usage`.
        """
        ...

    def inverse(self) -> Rule:
        """Return the rule that leads back.

        Raises:
            UsageError: `usage` if there is none.
        """
        ...


class _Group:
    """Names that fit one rule and whose placeholders agree: by column, then by member."""

    def __init__(self, columns: int) -> None:
        self.columns: list[dict[int | None, str]] = [{} for _ in range(columns)]

    def names(self) -> list[str]:
        return [name for column in self.columns for name in column.values()]


@dataclass(frozen=True, slots=True)
class MapRule:
    """Puts tensors that fit `sources` under the names of `targets`, changed by `steps`.

    Attributes:
        expressions: what each placeholder stands for.
        one_way: why it has no inverse, or "".
    """

    number: int
    sources: tuple[NamePattern, ...]
    targets: tuple[NamePattern, ...]
    steps: tuple[Step, ...]
    expressions: Mapping[str, str]
    one_way: str = ""
    optional: bool = False

    @property
    def title(self) -> str:
        """The patterns, with an arrow between both sides."""
        sides = [", ".join([p.text for p in side]) for side in (self.sources, self.targets)]
        return " -> ".join(sides)

    @property
    def stack(self) -> Stack | None:
        """The step that joins members, if there is one."""
        return next((step for step in self.steps if isinstance(step, Stack)), None)

    def inverse(self) -> MapRule:
        """Return the rule with both sides exchanged and its steps undone in reverse."""
        steps = []
        for step in reversed(self.steps):
            undone = step.inverse()
            if undone is not None:
                steps.append(undone)
        if self.one_way:
            message = f"rule {self.number} ({self.title}) is one-way: {self.one_way}"
            raise UsageError("usage", f"{message}; it has no inverse")
        return MapRule(
            self.number,
            self.targets,
            self.sources,
            tuple(steps),
            self.expressions,
            "",
            self.optional,
        )

    def apply(self, state: StateDict) -> None:
        """Change `state`. Raises UsageError as steps do, each message with the group's name."""
        if len(self.sources) == 1 and not self.steps:
            self._rename(state)
            return
        groups = self._groups(state.items)
        if not groups:
            return
        state.used.add(self.number)
        self._check_members(groups)
        placed: dict[str, dict[str, Item]] = {}
        origins: dict[str, tuple[str, ...]] = {}
        gone: set[str] = set()
        for fields, group in groups.items():
            made = self._made(state, dict(fields), group)
            names = group.names()
            placed[names[0]] = made
            gone.update(names)
            before = dict.fromkeys([n for name in names for n in state.origins_of(name)])
            origins |= dict.fromkeys(made, tuple(before))
        self._replace(state, placed, gone)
        for name in gone:
            state.origins.pop(name, None)
        state.origins |= origins
        if not self.one_way:
            self._check_inverse(state, origins)

    def _rename(self, state: StateDict) -> None:
        """Change names alone, each for itself: without groups, which count with 100 000 names."""
        matcher, target = self.sources[0].matcher(self.expressions), self.targets[0]
        items: dict[str, Item] = {}
        origins: dict[str, tuple[str, ...]] = {}
        gone: list[str] = []
        for name, item in state.items.items():
            fields = matcher.match(name)
            if fields is None:
                _add(items, name, item)
                continue
            new = target.format(fields)
            _add(items, new, item)
            origins[new] = state.origins_of(name)
            gone.append(name)
        if not gone:
            return
        state.used.add(self.number)
        state.items = items
        for name in gone:
            state.origins.pop(name, None)
        state.origins |= origins
        if not self.one_way:
            self._check_inverse(state, origins)

    def _groups(self, names: Iterable[str]) -> dict[tuple[tuple[str, str], ...], _Group]:
        """Group the names that fit by what the placeholders stand for, the stacked one aside."""
        matchers = [pattern.matcher(self.expressions) for pattern in self.sources]
        stacked = None if self.stack is None else self.stack.field
        groups: dict[tuple[tuple[str, str], ...], _Group] = {}
        for name in names:
            place, fields = _first_match(matchers, name)
            if fields is None:
                continue
            member = None if stacked is None else int(fields.pop(stacked))
            key = tuple(sorted(fields.items()))
            group = groups.setdefault(key, _Group(len(matchers)))
            group.columns[place][member] = name
        return groups

    def _check_members(self, groups: Mapping[tuple[tuple[str, str], ...], _Group]) -> None:
        """Refuse groups that lack a tensor; where members are numbered, all have as many."""
        stack = self.stack
        if stack is None and len(self.sources) == 1:
            return
        count = 1 if stack is None else stack.members or _highest(groups.values()) + 1
        for key, group in groups.items():
            for pattern, column in zip(self.sources, group.columns, strict=True):
                if len(column) > count:
                    message = f"{counted(len(column), 'tensor')} found where count = {count}"
                    raise UsageError("usage", f"{pattern.shown(dict(key))!r}: {message}")
                if len(column) < count:
                    raise self._lack(pattern, dict(key), column, count)

    def _lack(
        self,
        pattern: NamePattern,
        fields: Fields,
        column: Mapping[int | None, str],
        expected: int,
    ) -> UsageError:
        """Return the error of a column that lacks members, the first of them by name."""
        stack = self.stack
        if stack is None:
            name = pattern.shown(fields)
            message = f"{name!r} is missing, and tensors that go with it are there"
            return UsageError("incomplete", message, tensor=name)
        absent = (member for member in range(expected) if member not in column)
        numbered = ({**fields, stack.field: str(member)} for member in islice(absent, 10))
        names = [pattern.shown(filled) for filled in numbered]
        message = f"{expected - len(column)} of {expected} members are missing: {shown(names)}"
        return UsageError("incomplete", message, tensor=names[0])

    def _made(self, state: StateDict, fields: dict[str, str], group: _Group) -> dict[str, Item]:
        """Return what becomes of a group, by name."""
        if not self.steps:
            named = zip(self.targets, group.columns, strict=True)
            return {target.format(fields): state.items[column[None]] for target, column in named}
        columns: list[Column] = [
            {member: state.view(name) for member, name in names.items()} for names in group.columns
        ]
        try:
            for step in self.steps:
                columns = step.apply(columns)
        except EmaCkptError as error:
            first = group.names()[0]
            raise type(error)(error.code, f"{first!r}: {error}", tensor=first) from None
        unstacked = next((step.field for step in self.steps if isinstance(step, Unstack)), "")
        made: dict[str, Item] = {}
        for target, column in zip(self.targets, columns, strict=True):
            for member, view in column.items():
                numbered = fields if member is None else {**fields, unstacked: str(member)}
                made[target.format(numbered)] = view
        return made

    def _replace(
        self, state: StateDict, placed: Mapping[str, Mapping[str, Item]], gone: set[str]
    ) -> None:
        """Put what was made in the place of the first name of each group."""
        items: dict[str, Item] = {}
        for name, item in state.items.items():
            for new, made in placed[name].items() if name in placed else ():
                _add(items, new, made)
            if name not in gone:
                _add(items, name, item)
        state.items = items

    def _check_inverse(self, state: StateDict, made: Mapping[str, object]) -> None:
        """Note names that the inverse would take, or take apart, in another way."""
        matchers = [pattern.matcher(self.expressions) for pattern in self.targets]
        for name in state.items:
            place, fields = _first_match(matchers, name)
            if name in made:
                wrong = fields is None or self.targets[place].format(fields) != name
            else:
                wrong = fields is not None
            if wrong:
                state.inexact[self.number] = name
                return


class DropRule(NamedTuple):
    """Leaves out what fits."""

    number: int
    patterns: tuple[NamePattern, ...]
    expressions: Mapping[str, str]
    optional: bool = False

    @property
    def title(self) -> str:
        """The patterns that are dropped."""
        return "drop " + ", ".join([pattern.text for pattern in self.patterns])

    def inverse(self) -> Rule:
        """Raise UsageError: what is dropped cannot be had back."""
        message = f"rule {self.number} ({self.title}) is one-way: what is dropped is lost"
        raise UsageError("usage", f"{message}; it has no inverse")

    def apply(self, state: StateDict) -> None:
        """Remove what fits from `state`."""
        matchers = [pattern.matcher(self.expressions) for pattern in self.patterns]
        for name in list(state.items):
            if _first_match(matchers, name)[1] is not None:
                state.used.add(self.number)
                state.dropped += [(origin, self.number) for origin in state.origins_of(name)]
                del state.items[name]
                state.origins.pop(name, None)


class ConstantRule(NamedTuple):
    """Adds tensors of one value; `like` says for which names, and gives shape and type."""

    number: int
    target: NamePattern
    value: float
    shape: tuple[int, ...] | None
    dtype: DType | None
    like: NamePattern | None
    expressions: Mapping[str, str]
    optional: bool = False

    @property
    def title(self) -> str:
        """The value and the pattern of the name."""
        return f"constant {self.value} -> {self.target.text}"

    def inverse(self) -> Rule:
        """Return the rule that drops what was added."""
        return DropRule(self.number, (self.target,), self.expressions, self.optional)

    def apply(self, state: StateDict) -> None:
        """Add the tensors to `state`; names that are there already are a collision."""
        added: dict[str, Item] = {}
        for name, item in self._models(state).items():
            shape = self.shape if self.shape is not None or item is None else item.shape
            dtype = self.dtype if self.dtype is not None or item is None else item.dtype
            if shape is None or dtype is None:
                message = f"{name!r}: a constant without `like` needs `shape` and `dtype`"
                raise UsageError("usage", message)
            added[name] = constant_tensor(name, shape, dtype, self.value)
        if added:
            state.used.add(self.number)
        for name, item in added.items():
            _add(state.items, name, item)
            state.origins[name] = ()

    def _models(self, state: StateDict) -> dict[str, Item | None]:
        """Return the names to add, each with the tensor it is like."""
        if self.like is None:
            return {self.target.format({}): None}
        matcher = self.like.matcher(self.expressions)
        models: dict[str, Item | None] = {}
        for name, item in state.items.items():
            fields = matcher.match(name)
            if fields is not None:
                models[self.target.format(fields)] = item
        return models


def _highest(groups: Iterable[_Group]) -> int:
    """Return the highest number of a member."""
    highest = 0
    for group in groups:
        for column in group.columns:
            for member in column:
                highest = max(highest, member or 0)
    return highest


def _add(items: dict[str, Item], name: str, item: Item) -> None:
    if name in items:
        message = f"two tensors would be called {name!r}; rename or drop one of them first"
        raise UsageError("name-collision", message, tensor=name)
    items[name] = item


def _first_match(matchers: Sequence[Matcher], name: str) -> tuple[int, dict[str, str] | None]:
    """Return which pattern a name fits first, and what its placeholders stand for."""
    for place, matcher in enumerate(matchers):
        fields = matcher.match(name)
        if fields is not None:
            return place, fields
    return 0, None


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a file, in order.

    Attributes:
        name: the file, as messages name it.
        text: a digest of what they say, by which an interrupted run is told from another.
        is_inverse: whether they lead back.
    """

    name: str
    rules: tuple[Rule, ...]
    digest: str = ""
    is_inverse: bool = False

    @property
    def inverse(self) -> Rules:
        """The rules that lead back, the last one first.

        Raises:
            UsageError: `usage`, naming the first rule that is one-way.
        """
        undone = []
        for rule in reversed(self.rules):
            try:
                undone.append(rule.inverse())
            except UsageError as error:
                raise UsageError(error.code, f"{self.name}: {error}") from None
        return Rules(self.name, tuple(undone), self.digest, not self.is_inverse)

    def apply(self, named: Mapping[str, Tensor]) -> StateDict:
        """Apply every rule to a state dict; no byte of it is read.

        Raises:
            UsageError: `name-collision incomplete usage`, naming file, rule and tensor.
        """
        state = StateDict(dict(named))
        for rule in self.rules:
            try:
                rule.apply(state)
            except EmaCkptError as error:
                message = f"{self.name}: rule {rule.number}: {error}"
                raise type(error)(error.code, message, tensor=error.tensor) from None
        return state

    def refuse_idle(self, used: set[int], where: str) -> None:
        """Raise UsageError `empty-selection` if a rule fits nothing, or all that are optional."""
        idle = [rule for rule in self.rules if rule.number not in used]
        needed = [rule for rule in idle if not rule.optional]
        if needed or (idle and not used):
            first = (needed or idle)[0]
            fits = f"and {len(needed) - 1} more fit" if len(needed) > 1 else "fits"
            message = f"{self.name}: rule {first.number} ({first.title}) {fits} no name"
            raise UsageError("empty-selection", f"{message} of {where}; {self._hint(used)}")

    def _hint(self, used: set[int]) -> str:
        """Say why rules may fit no name: the other direction, or names that a rule has changed."""
        if used:
            return "rules apply in their order, and each sees the names that those before it made"
        if self.is_inverse:
            return "these are the inverse; names of the other layout need the rules as they are"
        return "names of the other layout need the inverse (--inverse, load_rules(…, inverse=True))"
