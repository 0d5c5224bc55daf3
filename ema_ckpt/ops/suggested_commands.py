"""Command lines that messages suggest."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping

from ema_ckpt.core.text import path_text


def suggested_command(verb: str, *places: str | os.PathLike[str]) -> str:
    """Return the command of `verb` on some paths, quoted for a shell."""
    return shlex.join(["ema-ckpt", verb, *(path_text(place) for place in places)])


def suggested_options(
    given: Mapping[str, object], defaults: Mapping[str, object] | None = None
) -> str:
    """Return every option that is not at its default, quoted for a shell, after a space each.

    Args:
        given: keyword arguments of a verb; each is the option of that name, except `progress`.
    """
    words: list[str] = []
    usual = {"dtype": "keep", "progress": given.get("progress"), **(defaults or {})}
    for name, value in given.items():
        if value == usual.get(name):
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else []
        elif value is not None:
            for text in _texts(value):
                words += [flag, text]
    return " ".join(["", *map(shlex.quote, words)])


def _texts(value: object) -> list[str]:
    """Return the values to give to one option, repeated for each."""
    if isinstance(value, Mapping):
        return [f"{old}={new}" for old, new in value.items()]
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [str(value)]
    items = list(value)
    if all(isinstance(item, str) for item in items):
        return items
    return [",".join(str(item).removesuffix(".0") for item in items)]
