"""The command line that stands for a call of a verb, for messages that offer one to run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping


def suggested_command(verb: str, *places: str | os.PathLike[str]) -> str:
    """The command of `verb` on some paths, quoted for a shell."""
    return shlex.join(["ema-ckpt", verb, *(os.fspath(place) for place in places)])


def suggested_options(
    given: Mapping[str, object], defaults: Mapping[str, object] | None = None
) -> str:
    """Every option that is not at its default, quoted for a shell, each with a space before it.

    Args:
        given: keyword arguments of a verb; each is the option of that name, but for `progress`.
    """
    words: list[str] = []
    usual = {"dtype": "keep", **(defaults or {})}
    for name, value in given.items():
        if name != "progress" and value != usual.get(name):
            words += _option(f"--{name.replace('_', '-')}", value)
    return "".join(f" {shlex.quote(word)}" for word in words)


def _option(flag: str, value: object) -> list[str]:
    if value is None or isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, Mapping):
        value = [f"{old}={new}" for old, new in value.items()]
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [flag, str(value)]
    items = list(value)
    if items and not all(isinstance(item, str) for item in items):
        return [flag, ",".join(str(item).removesuffix(".0") for item in items)]
    return [word for item in items for word in (flag, item)]
