"""Text as it may be shown: one printable line of bounded length, without credentials.

Names, paths and messages come from files and servers. A terminal obeys escape sequences, a log
keeps passwords, and a name may have a million letters.
"""

from __future__ import annotations

import re

MESSAGE_LENGTH = 4000
NAME_LENGTH = 400

_HIDDEN = "***"
_WORD = re.compile(r"[^\s'\"]+")
# A URL loses a slash when it becomes a `pathlib.Path`.
_SCHEME = re.compile(r"\A[\w+.-]*\w\w:/+|\w\w://+")
_AUTHORITY = re.compile(r"[^/?#]*")
# What follows the first colon is a password and no port.
_PASSWORD = re.compile(r":(?!\d*(?:[/?#]|\Z))")
_QUERY = re.compile(r"[?#]")
_PARAMETER = re.compile(r"(;[^;/=]*=)[^;/]*")
_VALUE = re.compile(r"=[^&;]*")


def displayed(text: str, length: int = MESSAGE_LENGTH) -> str:
    """Return `text` as one printable line of at most `length` characters, without credentials."""
    return inert(shortened(masked(text), length))


def masked(text: str) -> str:
    """Hide users, passwords and the values of queries and parameters of all URLs in `text`.

    >>> masked("https://me:secret@host/a.pt?X-Signature=abc&part=2")
    'https://***@host/a.pt?X-Signature=***&part=***'
    """
    if ":/" not in text:
        return text
    return _WORD.sub(_masked_word, text)


def _masked_word(match: re.Match[str]) -> str:
    """Mask the URLs in a text without spaces, in time linear in its length: files may hold any."""
    word = match.group()
    first = _SCHEME.search(word)
    if first is None:
        return word
    user_ends = word.rfind("@") + 1
    parts, done = [word[: first.end()]], first.end()
    for scheme in _SCHEME.finditer(word, first.start()):
        begin = scheme.end()
        if begin < done or begin >= user_ends:
            continue
        end = _end_of_user(word, begin, user_ends, is_whole=scheme.group().endswith("//"))
        if end:
            parts += [word[done:begin], f"{_HIDDEN}@"]
            done = end
    parts.append(word[done:])
    place, mark, query = _split_query("".join(parts))
    return _PARAMETER.sub(rf"\g<1>{_HIDDEN}", place) + mark + _hidden_query(mark, query)


def _end_of_user(word: str, begin: int, user_ends: int, *, is_whole: bool) -> int:
    """Return where the host begins behind a user and a password; 0 if there are none.

    A password may hold what should have been escaped, so that it reaches to the last `@`.
    """
    authority = _AUTHORITY.match(word, begin)
    end = authority.end() if authority is not None else begin
    at = word.rfind("@", begin, end)
    if at >= 0:
        return at + 1
    has_password = _PASSWORD.search(word[begin : end + 1]) is not None
    return user_ends if is_whole and has_password and word[begin] != "[" else 0


def _split_query(url: str) -> tuple[str, str, str]:
    found = _QUERY.search(url)
    if found is None:
        return url, "", ""
    return url[: found.start()], found.group(), url[found.end() :]


def _hidden_query(mark: str, query: str) -> str:
    end = len(query.rstrip(":,.)"))  # of the sentence around it
    if "=" in query:
        return _VALUE.sub(f"={_HIDDEN}", query[:end]) + query[end:]
    return _HIDDEN if query and mark == "?" else query


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
