"""Fields that some results have and others lack.

They are fields of a class derived for them, so that `dataclasses.asdict` of each result, and its
JSON, has exactly those that say something.
"""

from __future__ import annotations

from dataclasses import fields, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Result = TypeVar("Result", bound=DataclassInstance)


def with_fields(result: Result, **values: object) -> Result:
    """Return a frozen result with further fields: those of `values` that are not None.

    Its class declares them as class variables, None where a result lacks them.
    """
    further = {name: value for name, value in values.items() if value is not None}
    if not further:
        return result
    plain = getattr(type(result), "plain_class", type(result))
    own, before = _values(result, plain)
    further = before | further
    return cast("Result", _class_with(plain, tuple(further))(**own, **further))


def _values(result: Any, plain: type[Any]) -> tuple[dict[str, object], dict[str, object]]:
    """Return the values of the fields of the plain class, and those of the others."""
    further = {field.name: getattr(result, field.name) for field in fields(result)}
    own = {field.name: further.pop(field.name) for field in fields(plain)}
    return own, further


@cache
def _class_with(plain: type[Any], names: tuple[str, ...]) -> type[Any]:
    members = {"plain_class": plain, "__reduce__": _reduce}
    added = [(name, object) for name in names]
    name = plain.__name__
    made = make_dataclass(
        name, added, bases=(plain,), namespace=members, repr=False, frozen=True, slots=True
    )
    # From Python 3.12 on `make_dataclass` sets the module itself.
    made.__module__, made.__doc__ = plain.__module__, plain.__doc__
    return made


def _reduce(result: Any) -> tuple[Any, ...]:
    """Pickle by the plain class, as the derived one has no name of its own to be found by."""
    plain = type(result).plain_class
    return _rebuilt, (plain, *_values(result, plain))


def _rebuilt(plain: type[Any], own: dict[str, object], further: dict[str, object]) -> Any:
    return with_fields(plain(**own), **further)
