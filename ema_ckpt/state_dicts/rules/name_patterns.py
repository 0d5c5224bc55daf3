"""Patterns of names: literal text with placeholders, `layers.{layer}.{part:gate|up}.weight`.

A placeholder without an expression stands for one component of a dotted name. The same pattern
takes a name apart and puts one together, so that the two sides of a rule can change places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ema_ckpt.core.errors import SourceError, UsageError

Fields = Mapping[str, str]
"""What the placeholders of a pattern stand for in one name."""

COMPONENT = "[^.]+"
NUMBER = "0|[1-9][0-9]?[0-9]?[0-9]?[0-9]?[0-9]?"
"""What a placeholder stands for that is stacked: the index of one member."""

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::([^{}]*))?\}")
_MAX_LOOSE = 3
_MAX_TRIALS = 10**8  # of one name, about a second; three loose repetitions may have 464 letters
_SKIPPED = re.compile(r"\\.|\[\]?[^\]]*\]", re.DOTALL)  # escaped characters and classes
_REPETITION = re.compile(r"[*+?]")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A parsed pattern.

    Attributes:
        text: as it was written. expressions: of each placeholder, if it has one.
        literals: the text before, between and after the placeholders, whose names are `order`.
    """

    text: str
    order: tuple[str, ...]
    literals: tuple[str, ...]
    expressions: Mapping[str, str]

    @property
    def fields(self) -> frozenset[str]:
        """Names of its placeholders."""
        return frozenset(self.order)

    def format(self, fields: Fields) -> str:
        """Return the name in which the placeholders stand for `fields`."""
        parts = [self.literals[0]]
        for name, literal in zip(self.order, self.literals[1:], strict=True):
            parts += [fields[name], literal]
        return "".join(parts)

    def shown(self, fields: Fields) -> str:
        """Return the pattern with what is known of its placeholders filled in."""
        return self.format({name: fields.get(name, f"{{{name}}}") for name in self.order})

    def matcher(self, expressions: Mapping[str, str]) -> Matcher:
        """Return what takes names apart, with the expressions of all patterns of a rule."""
        return Matcher(self, expressions)


class Matcher:
    """Takes names apart. A name that lacks the pattern's first or last text costs a comparison."""

    def __init__(self, pattern: NamePattern, expressions: Mapping[str, str]) -> None:
        self.pattern = pattern
        self._head, self._tail = pattern.literals[0], pattern.literals[-1]
        parts, seen = [re.escape(self._head)], set[str]()
        for name, literal in zip(pattern.order, pattern.literals[1:], strict=True):
            group = f"(?P={name})" if name in seen else f"(?P<{name}>{expressions[name]})"
            parts += [group, re.escape(literal)]
            seen.add(name)
        self._match = re.compile("".join(parts), re.DOTALL).fullmatch
        self._loose = _count_loose(pattern, expressions)

    def match(self, name: str) -> dict[str, str] | None:
        """Return what the placeholders stand for in `name`, or None if it does not fit.

        Raises:
            SourceError: `unsupported` for a name so long that to tell could take for ever.
        """
        if not name.startswith(self._head) or not name.endswith(self._tail):
            return None
        if len(name) ** self._loose > _MAX_TRIALS:
            problem = f"it has {len(name)} letters, too many for {self.pattern.text!r}"
            message = f"tensor {name[:60]!r}…: {problem}, with {self._loose} repetitions"
            remedy = "write rules with fewer of these"
            raise SourceError("unsupported", f"{message} that may end anywhere; {remedy}")
        found = self._match(name)
        return None if found is None else found.groupdict()


def parse_pattern(text: str) -> NamePattern:
    """Parse a pattern.

    Raises:
        UsageError: `usage` for braces that are no placeholder, an expression with parentheses or
            back references, one that is no regular expression, or too many that cross dots.
    """
    order, literals, expressions = [], [], dict[str, str]()
    end = 0
    for found in _PLACEHOLDER.finditer(text):
        name, expression = found.groups()
        literals.append(text[end : found.start()])
        order.append(name)
        if expression is not None and expressions.setdefault(name, expression) != expression:
            raise UsageError("usage", f"{text!r} gives {{{name}}} two expressions")
        end = found.end()
    literals.append(text[end:])
    for literal in literals:
        if "{" in literal or "}" in literal:
            message = (
                f"{text!r} has a brace that is no placeholder; write {{name}} or {{name:REGEX}}"
            )
            raise UsageError("usage", message)
    for name, expression in expressions.items():
        _check_expression(text, name, expression)
    return NamePattern(text, tuple(order), tuple(literals), expressions)


def check_width(patterns: Sequence[NamePattern], expressions: Mapping[str, str]) -> None:
    """Refuse patterns that a long name could keep busy for minutes.

    Repetitions are harmless in a placeholder that stays in its part of a name and has a dot behind
    it. Any other may end anywhere, and a name is searched once more for each.

    Raises:
        UsageError: `usage` for more than three repetitions of that kind.
    """
    for pattern in patterns:
        loose = _count_loose(pattern, expressions)
        if loose > _MAX_LOOSE:
            message = f"{pattern.text!r} has {loose} repetitions that may end anywhere in a name"
            raise UsageError("usage", f"{message}; at most {_MAX_LOOSE} are allowed")


def _count_loose(pattern: NamePattern, expressions: Mapping[str, str]) -> int:
    """Count the repetitions of a pattern that may end anywhere in a name."""
    loose = 0
    for name, literal in zip(pattern.order, pattern.literals[1:], strict=True):
        expression = expressions[name]
        if expression == NUMBER:
            continue
        crosses_dots = re.fullmatch(expression, ".", re.DOTALL) is not None
        repetitions = len(_REPETITION.findall(_SKIPPED.sub("", expression)))
        if crosses_dots or repetitions > 1 or not literal.startswith("."):
            loose += repetitions
    return loose


def _check_expression(text: str, name: str, expression: str) -> None:
    """Without groups nothing can be repeated inside a repetition, which could take for ever."""
    reason = ""
    if "(" in expression or ")" in expression:
        reason = "parentheses are not allowed"
    elif re.search(r"\\[1-9]", expression):
        reason = "back references are not allowed"
    else:
        try:
            re.compile(expression)
        except re.error as error:
            reason = str(error)
    if reason:
        raise UsageError("usage", f"{text!r}: {{{name}:{expression}}}: {reason}")
