"""Plain objects of a checkpoint: those of one container on a line, each with its value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from ema_ckpt.cli.output import clean
from ema_ckpt.core.text import counted

MAX_OBJECTS = 400
_MAX_LINES = 20
_MAX_ITEMS = 6
_MAX_TEXT = 48


def object_lines(names: Sequence[str], values: Mapping[str, object]) -> Iterator[str]:
    """Yield a line for each container: `optimizer.param_groups.0: lr 0.001, betas (0.9, 0.999)`.

    Objects at the top have lines of their own. What is beyond the first lines is counted.
    """
    containers: dict[str, list[str]] = {}
    for name in names:
        parent, _, key = name.rpartition(".")
        text = f"{clean(key)} {value_text(values[name])}" if name in values else clean(key)
        containers.setdefault(parent, []).append(text)
    for count, (parent, texts) in enumerate(containers.items()):
        if count == _MAX_LINES:
            left = sum(map(len, list(containers.values())[count:]))
            yield f"… and {counted(left, 'object')} more, which --json names"
            return
        if parent:
            yield f"{clean(parent)}: {', '.join(texts)}"
        else:
            yield from texts


def value_text(value: object) -> str:
    """Return a value as Python writes it; long lists are folded with their length."""
    if isinstance(value, Mapping):
        pairs = [
            f"{value_text(key)}: {value_text(item)}"
            for key, item in islice(value.items(), _MAX_ITEMS)
        ]
        return "{" + ", ".join([*pairs, *_more(len(value), len(pairs))]) + "}"
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        texts = list(_within(map(value_text, value[:_MAX_ITEMS])))
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return opening + ", ".join([*texts, *_more(len(value), len(texts))]) + comma + closing
    try:
        text = clean(repr(value))
    except ValueError:  # an integer of more digits than Python prints
        return f"({type(value).__name__} of too many digits to show)"
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[: _MAX_TEXT // 2]}…{text[-_MAX_TEXT // 4 :]} ({len(text):,} characters)"


def _within(texts: Iterable[str]) -> Iterator[str]:
    """Yield the first text, and others while all of them are short."""
    length = 0
    for count, text in enumerate(texts):
        length += len(text)
        if count and length > _MAX_TEXT:
            return
        yield text


def _more(count: int, shown: int) -> list[str]:
    return [f"… {count} in all"] if count > shown else []
