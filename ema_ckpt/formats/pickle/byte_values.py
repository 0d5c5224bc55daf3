"""Bytes of a pickle: where they lie, and those that Python 2 meant as text."""

from __future__ import annotations


class LocatedBytes(bytes):
    """Bytes that lie as they are at `position` of the pickle."""

    position: int


class LocatedByteArray(bytearray):
    """As `LocatedBytes`, from the opcode of bytearrays."""

    position: int


def text_or_bytes(data: bytes) -> str | bytes:
    """Return a `str` of Python 2 as text, as torch does; bytes where it is none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
