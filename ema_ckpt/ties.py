"""Tied weights: names that a source shows to be one tensor, told by storage and never by equal values."""

from __future__ import annotations

from collections.abc import Iterable

from ema_ckpt.target import Entry

__all__ = ["keep_first"]


def keep_first(entries: Iterable[Entry]) -> tuple[list[Entry], dict[str, str]]:
    """Drop every entry whose storage, place, shape and strides an earlier one has.

    Returns what is left, and the kept name of each dropped one. Only torch files record storages.
    """
    kept: list[Entry] = []
    ties: dict[str, str] = {}
    owners: dict[object, str] = {}
    for entry in entries:
        source = entry.source
        identity = (source.storage, source.shape, source.dtype.name, entry.dtype.name)
        if source.storage is not None and source.numel and identity in owners:
            ties[entry.name] = owners[identity]
            continue
        owners.setdefault(identity, entry.name)
        kept.append(entry)
    return kept, ties
