"""Steps as a file of rules writes them: one table each, `{ concatenate = 0, sizes = [2, 1] }`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.nearest_names import nearest
from ema_ckpt.state_dicts.rules.steps import (
    Concatenate,
    Flatten,
    Order,
    Permute,
    Split,
    Stack,
    Step,
    Transpose,
    Unflatten,
    Unstack,
)


class Table(NamedTuple):
    """A table of a file, and the numbers that may be written by name."""

    table: Mapping[str, Any]
    values: Mapping[str, int]

    def raw(self, key: str) -> Any:
        """Return what is written, or None."""
        return self.table.get(key)

    def text(self, key: str) -> str:
        """Return a text. Raises UsageError `usage`."""
        value = self.table.get(key)
        if not isinstance(value, str):
            raise UsageError("usage", f"{key}: expected a text, found {value!r}")
        return value

    def number(self, key: str) -> int:
        """Return a number, written as one or by name. Raises UsageError `usage`."""
        return self._number(key, self.table.get(key))

    def positive(self, key: str) -> int | None:
        """Return a number from 1 on, or None if the key is not there. Raises UsageError `usage`."""
        if key not in self.table:
            return None
        value = self.number(key)
        if value < 1:
            raise UsageError("usage", f"{key}: expected 1 or more, found {value}")
        return value

    def numbers(self, key: str, least: int) -> tuple[int, ...]:
        """Return a list of numbers, each at least `least`. Raises UsageError `usage`."""
        written = self.table.get(key)
        if not isinstance(written, list):
            raise UsageError("usage", f"{key}: expected a list of numbers, found {written!r}")
        numbers = tuple([self._number(key, value) for value in written])
        for number in numbers:
            if number < least:
                raise UsageError("usage", f"{key}: expected {least} or more, found {number}")
        return numbers

    def _number(self, key: str, value: Any) -> int:
        if isinstance(value, str):
            if value not in self.values:
                message = f"{key}: {value!r} is neither a number nor one of [values]"
                raise UsageError("usage", message)
            return self.values[value]
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError("usage", f"{key}: expected a number, found {value!r}")
        return value


def parse_step(table: Any, values: Mapping[str, int], columns: int, targets: int) -> Step:
    """Parse one step that gets `columns` tensors, in a rule that makes `targets`.

    Raises:
        UsageError: `usage`, naming the key.
    """
    if not isinstance(table, Mapping):
        raise UsageError("usage", f"expected a table such as {{ stack = 'x' }}, found {table!r}")
    verbs = [key for key in table if key in _STEPS]
    if len(verbs) != 1:
        known = ", ".join(_STEPS)
        unknown = [key for key in table if key not in _STEPS]
        hint = f"; did you mean {nearest(unknown[0], list(_STEPS))[0]!r}?" if unknown else ""
        raise UsageError("usage", f"expected one of {known}{hint}")
    verb = verbs[0]
    keys, parse = _STEPS[verb]
    for key in table:
        if key != verb and key not in keys:
            near = f"; did you mean {nearest(key, keys)[0]!r}?" if keys else ""
            raise UsageError("usage", f"{verb} has no key {key!r}{near}")
    return parse(Table(table, values), columns, targets)


def _stack(table: Table, _columns: int, _targets: int) -> Step:
    return Stack(table.text("stack"), _dim(table), table.positive("count"))


def _unstack(table: Table, _columns: int, _targets: int) -> Step:
    return Unstack(table.text("unstack"), _dim(table), table.positive("count"))


def _dim(table: Table) -> int:
    return table.number("dim") if "dim" in table.table else 0


def _concatenate(table: Table, columns: int, _targets: int) -> Step:
    sizes = _sizes(table, columns)
    return Concatenate(table.number("concatenate"), sizes, table.positive("groups") or 1)


def _split(table: Table, _columns: int, targets: int) -> Step:
    sizes = _sizes(table, table.positive("parts") or targets)
    return Split(table.number("split"), sizes, table.positive("groups") or 1)


def _sizes(table: Table, parts: int) -> tuple[int, ...]:
    if "sizes" not in table.table:
        return (1,) * parts
    sizes = table.numbers("sizes", least=1)
    if not sizes:
        raise UsageError("usage", "sizes: expected one number or more")
    return sizes


def _order(table: Table, _columns: int, _targets: int) -> Step:
    return Order(table.numbers("order", least=0))


def _permute(table: Table, _columns: int, _targets: int) -> Step:
    return Permute(table.numbers("permute", least=0))


def _transpose(table: Table, _columns: int, _targets: int) -> Step:
    axes = table.numbers("transpose", least=-64)
    if len(axes) != 2:
        raise UsageError("usage", f"transpose: expected two axes, found {list(axes)}")
    return Transpose(*axes)


def _unflatten(table: Table, _columns: int, _targets: int) -> Step:
    sizes = table.numbers("sizes", least=-1)
    if len(sizes) < 2 or sizes.count(-1) > 1 or 0 in sizes:
        message = "expected two numbers or more, of which one may be -1"
        raise UsageError("usage", f"sizes: {message}; found {list(sizes)}")
    return Unflatten(table.number("unflatten"), sizes)


def _flatten(table: Table, _columns: int, _targets: int) -> Step:
    axes = table.numbers("flatten", least=0)
    if len(axes) != 2 or axes[0] >= axes[1]:
        message = f"expected the first and the last axis, found {list(axes)}"
        raise UsageError("usage", f"flatten: {message}")
    count = axes[1] - axes[0] + 1
    sizes = None
    if "sizes" in table.table:
        sizes = table.numbers("sizes", least=-1)
        if len(sizes) != count or sizes.count(-1) > 1 or 0 in sizes:
            message = f"expected {count} numbers, of which one may be -1; found {list(sizes)}"
            raise UsageError("usage", f"sizes: {message}")
    return Flatten(axes[0], count, sizes)


_STEPS: Mapping[str, tuple[tuple[str, ...], Callable[[Table, int, int], Step]]] = {
    "stack": (("dim", "count"), _stack),
    "unstack": (("dim", "count"), _unstack),
    "concatenate": (("sizes", "groups"), _concatenate),
    "split": (("sizes", "parts", "groups"), _split),
    "order": ((), _order),
    "transpose": ((), _transpose),
    "permute": ((), _permute),
    "unflatten": (("sizes",), _unflatten),
    "flatten": (("sizes",), _flatten),
}
