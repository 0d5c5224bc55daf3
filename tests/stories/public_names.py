"""Print the public names of the package as JSON: signatures, members of classes, bases.

Annotations that speak of a class of ours which is not public are left out: such a class may be moved or renamed.
"""

from __future__ import annotations

import builtins
import collections.abc
import inspect
import json
import os
import re
import typing

import ema_ckpt

_KNOWN = {
    *dir(builtins),
    *dir(typing),
    *dir(collections.abc),
    *ema_ckpt.__all__,
    "os",
    *dir(os),
    "Path",
    "torch",
    "nn",
}
_SPECIAL = (
    "__call__",
    "__contains__",
    "__enter__",
    "__exit__",
    "__getitem__",
    "__iter__",
    "__len__",
)


class _Text:
    """An annotation that is shown as it was written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _shown(annotation: object) -> object:
    if annotation is inspect.Parameter.empty:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    words = re.findall(r"[A-Za-z_][\w.]*", text)
    return _Text(text if all(word.split(".")[0] in _KNOWN for word in words) else "…")


def _signature(function: typing.Any) -> str:
    found = inspect.signature(function)
    parameters = [p.replace(annotation=_shown(p.annotation)) for p in found.parameters.values()]
    return str(
        found.replace(parameters=parameters, return_annotation=_shown(found.return_annotation))
    )


def _member(value: object) -> str:
    if isinstance(value, property):
        return "property" + _signature(value.fget)
    if isinstance(value, classmethod | staticmethod):
        return type(value).__name__ + _signature(value.__func__)
    return _signature(value) if inspect.isfunction(value) else "attribute"


def _described(name: str, value: object) -> dict[str, str]:
    if not inspect.isclass(value):
        return {name: _signature(value) if callable(value) else type(value).__name__}
    bases = ", ".join(
        base.__name__ for base in value.__mro__[1:] if not base.__name__.startswith("_")
    )
    members: dict[str, str] = {}
    for kind in reversed(value.__mro__):
        if kind.__module__.startswith("ema_ckpt"):
            members |= {
                key: _member(item)
                for key, item in vars(kind).items()
                if key[0] != "_" or key in _SPECIAL
            }
    return {
        name: f"class({bases}){_signature(value)}",
        **{f"{name}.{key}": text for key, text in members.items()},
    }


if __name__ == "__main__":
    told: dict[str, str] = {}
    for public in ema_ckpt.__all__:
        told |= _described(f"ema_ckpt.{public}", getattr(ema_ckpt, public))
    print(json.dumps(told))
