"""Tied tensors: entries that are the same view of the same memory in a source that records it (torch files)."""

from __future__ import annotations

from collections.abc import Iterable

from ema_ckpt.target import Entry

__all__ = ["drop_ties", "identity"]


def identity(entry: Entry) -> object:
    """Equal for tied entries that are also written in the same dtype: storage, start, shape and strides agree."""
    if entry.source.storage is None:
        return entry.name
    return (entry.source.storage, entry.source.shape, entry.source.dtype.name, entry.dtype.name)


def drop_ties(entries: Iterable[Entry]) -> tuple[list[Entry], dict[str, str]]:
    """The first entry of each tie, in order, and dropped name → kept name for the rest."""
    first: dict[object, Entry] = {}
    ties: dict[str, str] = {}
    for entry in entries:
        kept = first.setdefault(identity(entry), entry)
        if kept is not entry:
            ties[entry.name] = kept.name
    return list(first.values()), ties
