"""Read a file of rules: TOML with a table `[[rule]]` for each, checked down to every key."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ema_ckpt.core.dtypes import DType, by_name
from ema_ckpt.core.errors import EmaCkptError, UsageError
from ema_ckpt.core.nearest_names import nearest
from ema_ckpt.core.text import shown
from ema_ckpt.state_dicts.rules.constants import encode
from ema_ckpt.state_dicts.rules.name_patterns import (
    COMPONENT,
    NUMBER,
    NamePattern,
    check_width,
    parse_pattern,
)
from ema_ckpt.state_dicts.rules.rules import ConstantRule, DropRule, MapRule, Rule, Rules
from ema_ckpt.state_dicts.rules.step_tables import Table, parse_step
from ema_ckpt.state_dicts.rules.steps import Stack, Step, Unstack

_SHIPPED = Path(__file__).parent / "shipped"
_MAX_NBYTES = 1 << 20
_MAX_DIGITS = 18  # of 64 bits
_FILE_KEYS = ("about", "values", "rule")
_KEYS = {
    "from": ("from", "to", "steps", "one_way", "optional"),
    "drop": ("drop", "optional"),
    "constant": ("constant", "to", "shape", "dtype", "like", "optional"),
}


def shipped_names() -> list[str]:
    """Return the names of the files of rules that come with the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def load_rules(
    file: str | os.PathLike[str],
    values: Iterable[str] | Mapping[str, int] = (),
    *,
    inverse: bool = False,
) -> Rules:
    """Read a file of rules, or one that comes with the package by its name.

    Args:
        values: numbers that the file leaves open, as `NAME=NUMBER` or a mapping.
        inverse: return the rules that lead back.

    Raises:
        UsageError: `usage` for what is no rule, with file and number; `not-found`.
    """
    import tomllib

    name, text = _read(file)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError("usage", f"{name}: not TOML: {error}") from None
    rules = parse_rules(document, name, parse_values(values))
    return rules.inverse if inverse else rules


def _read(file: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the name of the file in messages, and its text."""
    path = _path_of(file)
    shipped = _SHIPPED / f"{path}.toml"
    if path in shipped_names() and not os.path.exists(path):
        return path, shipped.read_text(encoding="utf-8")
    try:
        with open(path, "rb") as opened:
            data = opened.read(_MAX_NBYTES + 1)
    except FileNotFoundError:
        ready = ", ".join(shipped_names())
        raise UsageError(
            "not-found", f"{path}: no such file of rules; by name there are {ready}"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError("usage", f"{path}: cannot be read: {error}") from None
    if len(data) > _MAX_NBYTES:
        raise UsageError("usage", f"{path}: more than {_MAX_NBYTES} bytes are no file of rules")
    try:
        return path, data.decode("utf-8-sig")  # Windows' editors begin with a mark
    except UnicodeDecodeError:
        raise UsageError("usage", f"{path}: not TOML: it is no UTF-8 text") from None


def _path_of(file: object) -> str:
    """Return the path that a caller gave; UsageError `usage` for a list of them, for example."""
    if isinstance(file, (str, os.PathLike)):
        return os.fspath(file)
    wanted = "one file of rules, by path or name, or what load_rules returned"
    raise UsageError("usage", f"rules: expected {wanted}; found {type(file).__name__}")


def parse_values(values: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    """Parse `NAME=NUMBER` texts. Raises UsageError `usage` for anything else."""
    if isinstance(values, Mapping):
        return dict(values)
    parsed = {}
    for text in (values,) if isinstance(values, str) else values:
        name, equals, number = text.partition("=")
        digits = number.strip()
        if not equals or not (digits.isascii() and digits.isdecimal()) or len(digits) > _MAX_DIGITS:
            raise UsageError("usage", f"--rule-values {text!r}: expected NAME=NUMBER")
        parsed[name.strip()] = int(digits)
    return parsed


def parse_rules(document: Mapping[str, Any], name: str, values: Mapping[str, int]) -> Rules:
    """Check a document and return its rules.

    Raises:
        UsageError: `usage`, naming the file, the number of the rule and what is wrong.
    """
    _check_keys(document, _FILE_KEYS, name)
    _check_numbers(document, name)
    known = _check_values(document.get("values", {}), values, name)
    tables = document.get("rule", [])
    if not isinstance(tables, list) or not tables:
        raise UsageError("usage", f"{name}: it has no rule; write one or more tables [[rule]]")
    rules: list[Rule] = []
    for number, table in enumerate(tables, 1):
        try:
            rules.append(_parse_rule(number, table, known))
        except EmaCkptError as error:
            raise UsageError("usage", f"{name}: rule {number}: {error}") from None
    digest = hashlib.sha256(repr((tables, sorted(known.items()))).encode()).hexdigest()
    return Rules(name, tuple(rules), digest)


def _check_keys(table: Any, keys: Sequence[str], where: str = "") -> None:
    """Refuse what is no table, and unknown keys, each with the nearest that is known."""
    label = f"{where}: " if where else ""
    if not isinstance(table, Mapping):
        raise UsageError("usage", f"{label}expected a table, found {table!r}")
    for key in table:
        if key not in keys:
            near = nearest(key, keys)[0]
            raise UsageError("usage", f"{label}unknown key {key!r}; did you mean {near!r}?")


def _check_numbers(document: Mapping[str, Any], name: str) -> None:
    """Refuse integers beyond the 64 bits of TOML: its reader takes them, Python may not print."""
    todo: list[Any] = [document]
    while todo:
        value = todo.pop()
        if isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, list):
            todo += value
        elif isinstance(value, int) and value.bit_length() > 63:
            raise UsageError("usage", f"{name}: not TOML: an integer of more than 64 bits")


def _check_values(table: Any, given: Mapping[str, int], name: str) -> dict[str, int]:
    """Return the numbers that rules may name: those of the file, and those given instead.

    A text in place of a number says what has to be given.
    """
    if not isinstance(table, Mapping):
        raise UsageError("usage", f"{name}: [values] is no table")
    for key, value in table.items():
        if not isinstance(value, int | str) or isinstance(value, bool):
            message = f"[values] {key}: expected a number, or a text that says what it is"
            raise UsageError("usage", f"{name}: {message}; found {value!r}")
    unknown = [key for key in given if key not in table]
    if unknown:
        has = shown(list(table)) if table else "none"
        raise UsageError("usage", f"{name}: no value {unknown[0]!r} to set; it has {has}")
    for key, value in table.items():
        if isinstance(value, str) and key not in given:
            message = f"give --rule-values {key}=N, with N the {value}"
            raise UsageError("usage", f"{name}: {message}")
    return {**table, **given}


def _parse_rule(number: int, table: Any, values: Mapping[str, int]) -> Rule:
    kinds = [kind for kind in _KEYS if isinstance(table, Mapping) and kind in table]
    if len(kinds) != 1:
        found = f"; found {' and '.join(kinds)}" if kinds else ""
        raise UsageError("usage", f"expected one of from, drop and constant{found}")
    kind = kinds[0]
    _check_keys(table, _KEYS[kind])
    optional = _flag(table, "optional")
    if kind == "drop":
        patterns = _patterns(table, "drop")
        return DropRule(number, patterns, _expressions(patterns, set()), optional)
    if kind == "constant":
        return _parse_constant(number, Table(table, values), optional)
    return _parse_map(number, table, values, optional)


def _parse_constant(number: int, table: Table, optional: bool) -> Rule:
    value = table.raw("constant")
    if not isinstance(value, int | float):
        raise UsageError("usage", f"constant: expected a number, found {value!r}")
    (target,) = _patterns(table.table, "to", most=1)
    like = None
    if "like" in table.table:
        (like,) = _patterns(table.table, "like", most=1)
    if target.fields != (like.fields if like else frozenset()):
        message = "`to` and `like` have different placeholders" if like else "there is no `like`"
        raise UsageError("usage", f"to: {target.text!r}: {message}")
    expressions = _expressions((target, like) if like else (target,), set())
    shape = table.numbers("shape", least=0) if "shape" in table.table else None
    dtype = _dtype(table, value) if "dtype" in table.table else None
    if like is None and (shape is None or dtype is None):
        raise UsageError("usage", "a constant without `like` needs `shape` and `dtype`")
    return ConstantRule(number, target, value, shape, dtype, like, expressions, optional)


def _dtype(table: Table, value: float) -> DType:
    """Return the dtype of a constant. Raises UsageError `usage` if it does not hold the value."""
    dtype = by_name(table.text("dtype"))
    encode(value, dtype)
    return dtype


def _parse_map(
    number: int, table: Mapping[str, Any], values: Mapping[str, int], optional: bool
) -> Rule:
    sources, targets = _patterns(table, "from"), _patterns(table, "to")
    steps = _steps(table, values, len(sources), len(targets))
    joined, taken = set[str](), set[str]()
    for step in steps:
        if isinstance(step, Stack):
            joined.add(step.field)
        elif isinstance(step, Unstack):
            taken.add(step.field)
    if len(joined) > 1 or len(taken) > 1:
        raise UsageError("usage", "a rule stacks and unstacks once; write two rules")
    expressions = _expressions((*sources, *targets), joined | taken)
    one_way = _one_way(table, steps)
    before = _fields(sources, "from", joined)
    after = _fields(targets, "to", taken)
    for name in sorted(after - before):
        raise UsageError("usage", f"to: nothing in `from` tells what {{{name}}} stands for")
    for name in sorted(before - after):
        if not _flag(table, "one_way"):
            hint = "put it there, or say one_way = true"
            raise UsageError("usage", f"to: {{{name}}} of `from` is not in it; {hint}")
    return MapRule(number, sources, targets, steps, expressions, one_way, optional)


def _one_way(table: Mapping[str, Any], steps: Iterable[Step]) -> str:
    if _flag(table, "one_way"):
        return "the file says so"
    if any(step.inverse() is None for step in steps):
        return "flatten without sizes"
    return ""


def _steps(
    table: Mapping[str, Any], values: Mapping[str, int], sources: int, targets: int
) -> tuple[Step, ...]:
    """Parse the steps; each gets as many tensors as the one before it leaves."""
    written = table.get("steps", [])
    if not isinstance(written, list):
        raise UsageError("usage", f"steps: expected a list, found {written!r}")
    steps: list[Step] = []
    width = sources
    for place, one in enumerate(written, 1):
        try:
            step = parse_step(one, values, width, targets)
            width = step.width(width)
        except EmaCkptError as error:
            raise UsageError("usage", f"step {place}: {error}") from None
        steps.append(step)
    if width != targets:
        message = f"`from` and the steps make {width} of each group, and `to` names {targets}"
        raise UsageError("usage", message)
    return tuple(steps)


def _patterns(table: Mapping[str, Any], key: str, most: int = 1000) -> tuple[NamePattern, ...]:
    written = table.get(key)
    texts = [written] if isinstance(written, str) else written
    if not isinstance(texts, list) or not texts or len(texts) > most:
        raise UsageError("usage", f"{key}: expected a pattern of names, found {written!r}")
    patterns = []
    for text in texts:
        if not isinstance(text, str) or not text:
            raise UsageError("usage", f"{key}: expected a pattern of names, found {text!r}")
        try:
            patterns.append(parse_pattern(text))
        except UsageError as error:
            raise UsageError("usage", f"{key}: {error}") from None
    return tuple(patterns)


def _expressions(patterns: Sequence[NamePattern], numbers: set[str]) -> dict[str, str]:
    """Return what each placeholder of a rule stands for, wherever that is written."""
    expressions: dict[str, str] = {}
    for pattern in patterns:
        for name, expression in pattern.expressions.items():
            if expressions.setdefault(name, expression) != expression:
                raise UsageError("usage", f"{{{name}}} has two expressions in one rule")
    for name in numbers & expressions.keys():
        raise UsageError("usage", f"{{{name}}} is stacked, so it is a number and has no expression")
    for pattern in patterns:
        for name in pattern.fields:
            expressions.setdefault(name, NUMBER if name in numbers else COMPONENT)
    check_width(patterns, expressions)
    return expressions


def _fields(patterns: Sequence[NamePattern], key: str, numbered: set[str]) -> set[str]:
    """Return the placeholders of one side, of which each pattern has all; without the numbered."""
    fields = patterns[0].fields
    for pattern in patterns:
        if pattern.fields != fields:
            both = f"{patterns[0].text!r} and {pattern.text!r}"
            raise UsageError("usage", f"{key}: {both} have different placeholders")
    for name in sorted(numbered - fields):
        raise UsageError("usage", f"{key}: no pattern has the placeholder {{{name}}} of the steps")
    return set(fields - numbered)


def _flag(table: Mapping[str, Any], key: str) -> bool:
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise UsageError("usage", f"{key}: expected true or false, found {value!r}")
    return value
