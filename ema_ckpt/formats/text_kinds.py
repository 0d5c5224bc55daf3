"""What a file is that holds text where tensors were expected: mostly an answer of a server."""

from __future__ import annotations

_SHOWN = 40  # letters
_BLANK = b"\xef\xbb\xbf \t\r\n"  # a byte order mark, too
_TEXTS = (
    (b"version https://git-lfs", "a Git LFS pointer; fetch the file with `git lfs pull`"),
    (b"<", "a page of markup; a failed download?"),
)


def text_in(first: bytes) -> str | None:
    """Say what a file is that begins with `first`; None if it is no text."""
    for begin, words in _TEXTS:
        if first.lstrip(_BLANK).startswith(begin):
            return words
    text = first.decode("utf-8", "replace").rstrip("\ufffd")  # the last letter may be cut
    printed = "".join(text.split())
    if not printed or not printed.isprintable() or "\ufffd" in text:
        return None
    return f"text, {' '.join(text.split())[:_SHOWN]!r}"
