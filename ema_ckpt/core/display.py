"""Text as it may be shown: one printable line of bounded length, without credentials.

Names, paths and messages come from files and servers. A terminal obeys escape sequences, a log
keeps passwords, and a name may have a million letters.
"""

from __future__ import annotations

import re

MESSAGE_LENGTH = 4000
NAME_LENGTH = 400

_HIDDEN = "***"
# A user, and a password, before the host; a password may hold what should have been escaped.
_USER = re.compile(r"(?<=://)(?:[^/?#\s'\"]*|(?!\[)[^/?#\s'\"]*?:(?!\d*[/?#])[^\s'\"]*)@")
_QUERY = re.compile(r"(?<=://)([^\s?#'\"]*)([?#])([^\s'\"]*)")
_VALUE = re.compile(r"(?<==)[^&;]*?(?=[&;]|[:,.)]*\Z)")


def displayed(text: str, length: int = MESSAGE_LENGTH) -> str:
    """Return `text` as one printable line of at most `length` characters, without credentials."""
    return inert(shortened(masked(text), length))


def masked(text: str) -> str:
    """Hide users, passwords and the values of queries (tokens, signatures) of all URLs in `text`.

    >>> masked("https://me:secret@host/a.pt?X-Signature=abc&part=2")
    'https://***@host/a.pt?X-Signature=***&part=***'
    """
    if "://" not in text:
        return text
    return _QUERY.sub(_hide_query, _USER.sub(f"{_HIDDEN}@", text))


def _hide_query(match: re.Match[str]) -> str:
    place, mark, query = match.groups()
    if "=" in query:
        return f"{place}{mark}{_VALUE.sub(_HIDDEN, query)}"
    return f"{place}{mark}{_HIDDEN if query and mark == '?' else query}"


def shortened(text: str, length: int) -> str:
    """Leave out the middle of a text of more than `length` characters, and say how much it was."""
    if len(text) <= length:
        return text
    half = max((length - 40) // 2, 1)
    return f"{text[:half]}…[{len(text) - 2 * half} characters left out]…{text[-half:]}"


def inert(text: str) -> str:
    """Escape everything that is not printable: control characters, line ends, lone surrogates."""
    if text.isprintable():
        return text
    escaped = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in escaped)
