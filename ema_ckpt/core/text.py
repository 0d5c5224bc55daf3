"""Sizes as people write them: `5GB` is 5 × 1000³ bytes, `16MiB` is 16 × 1024² bytes."""

from __future__ import annotations

from collections.abc import Sequence

from ema_ckpt.core.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}


def parse_size(text: str | int) -> int:
    """Bytes meant by `text`: digits, perhaps a fraction, perhaps one of `B kB MB GB TB KiB MiB GiB
    TiB`.

    Units are read without regard to case. A number alone is bytes.

    Raises:
        UsageError: `usage` if `text` is no size, or less than one byte.
    """
    if isinstance(text, int):
        return _positive(text, str(text))
    stripped = text.strip()
    digits = stripped.rstrip("abgikmtABGIKMT ")
    scale = _UNITS.get(stripped[len(digits) :].strip().lower())
    whole, dot, fraction = digits.partition(".")
    plain = (
        (whole + fraction).isascii()
        and (whole + fraction).isdigit()
        and (bool(fraction) or not dot)
    )
    if scale is None or not plain or len(digits) > 30:
        raise UsageError(
            "usage",
            f"{text!r} is not a size: write a number and kB, MB, GB, KiB, MiB or GiB, like 5GB",
        )
    return _positive(int(whole + fraction) * scale // 10 ** len(fraction), text)


def _positive(nbytes: int, text: str) -> int:
    if nbytes < 1:
        raise UsageError("usage", f"{text!r} is not a size: it must be at least one byte")
    return nbytes


def format_size(nbytes: int) -> str:
    """`nbytes` with three significant digits and a power-of-1000 unit, for people to read."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value, unit = float(nbytes), "B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):  # noqa: B007
        value /= 1000
        if value < 999.5:
            break
    return f"{value:.3g} {unit}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as messages name them: `rank 1`, `ranks 1–3`, `ranks 0, 2–5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
