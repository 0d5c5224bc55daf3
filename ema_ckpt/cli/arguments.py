"""Arguments that click cannot tell apart by itself: options with several values, and one with an
optional value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MANY = ("--match", "--exclude", "--rename", "--keep-dtype")
_OPTIONAL = ("--fill",)


def spread(argv: Sequence[str], positionals: int, with_value: Iterable[str]) -> list[str]:
    """Repeat a flag before each of its values (`--match A B` → `--match A --match B`).

    Values beyond the first are recognised only once all positional arguments stand before the flag;
    till then a bare word is a positional argument. In the same way `--fill` takes a word only when
    none is missing.
    """
    takes = set(with_value)
    result: list[str] = []
    seen, many = 0, ""
    words = iter(argv)
    for word in words:
        flag, joined, _ = word.partition("=")
        if word == "--":
            return [*result, word, *words]
        if not word.startswith("-") or word == "-":
            result += [many, word] if many else [word]
            seen += not many
            continue
        many = flag if flag in _MANY and seen >= positionals else ""
        if flag in _OPTIONAL and not joined:
            result.append(f"{flag}=" if seen < positionals else flag)
        elif flag in takes and not joined:
            value = next(words, None)
            result += [word] if value is None else [word, value]
        else:
            result.append(word)
    return result
