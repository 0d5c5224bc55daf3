"""Paths, sizes, counts, names and ranks, as people write and read them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ema_ckpt.core.arguments import one_text
from ema_ckpt.core.display import NAME_LENGTH, shortened
from ema_ckpt.core.errors import UsageError

_SHOWN_NAMES = 10
_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}


def path_text(path: object) -> str:
    """Return the text of a path or URL.

    Raises:
        UsageError: `usage` for what is neither text nor a path.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        message = f"a path is a str or os.PathLike of text; found {type(path).__name__}"
        raise UsageError("usage", message)
    return text


def parse_size(text: str | float) -> int:
    """Parse a size: a number of bytes, or with a unit, as `5GB` (1000³) or `16MiB` (1024²).

    Raises:
        UsageError: `usage` if `text` is no size, or less than one byte.
    """
    if isinstance(text, float) and text.is_integer():
        text = int(text)  # as from Python, where 5e9 is one
    if isinstance(text, int):
        nbytes = text
    else:
        text = one_text(text, "a size")
        stripped = text.strip()
        digits = stripped.rstrip("abgikmtABGIKMT ")
        scale = _UNITS.get(stripped[len(digits) :].strip().lower())
        whole, dot, fraction = digits.partition(".")
        number = whole + fraction
        is_number = number.isascii() and number.isdigit() and not (dot and not fraction)
        if scale is None or not is_number or len(digits) > 30:
            expected = "write a number and kB, MB, GB, KiB, MiB or GiB, like 5GB"
            raise UsageError("usage", f"{text!r} is not a size: {expected}")
        nbytes = int(number) * scale // 10 ** len(fraction)
    if nbytes < 1:
        message = f"{str(text)!r} is not a size: it must be at least one byte"
        raise UsageError("usage", message)
    return nbytes


def format_size(nbytes: int) -> str:
    """Format bytes with three significant digits and a power-of-1000 unit."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value, unit = float(nbytes), "B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):  # noqa: B007
        value /= 1000
        if value < 999.5:
            break
    return f"{value:.3g} {unit}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Format a count: `1 tensor`, `1,200 tensors`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {plural or f'{noun}s'}"


def shown(names: Sequence[str]) -> str:
    """List at most ten names, long ones without their middle, and how many more there are."""
    head = ", ".join([repr(shortened(name, NAME_LENGTH)) for name in names[:_SHOWN_NAMES]])
    rest = len(names) - _SHOWN_NAMES
    return f"{head} and {rest} more" if rest > 0 else head


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks: `rank 1`, `ranks 1–3`, `ranks 0, 2–5`."""
    spans: list[str] = []
    first = last = -2
    for rank in sorted(ranks):
        if rank == last + 1:
            spans[-1] = f"{first}–{rank}"
        else:
            first = rank
            spans.append(str(rank))
        last = rank
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(spans)}"
