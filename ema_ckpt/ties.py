"""Tied weights: names that a source shows to be one tensor, told by storage or by a record, never by equal values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ema_ckpt.catalog import Catalog
from ema_ckpt.target import Entry

__all__ = ["dropped_names", "keep_first"]


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


def dropped_names(catalog: Catalog, entries: Sequence[Entry]) -> list[tuple[Entry, str]]:
    """Names that the source says it dropped as tied to one of `entries` (`safetensors.torch.save_model` does).

    Each comes as the entry that would write it, under a name cut as that of the kept one was, with the kept name.
    """
    found = catalog.extra.get("ties")
    recorded = found if isinstance(found, Mapping) else {}
    written = {entry.source.name: entry for entry in entries}
    names = {entry.name for entry in entries}
    again = []
    for dropped, kept in recorded.items():
        entry = written.get(kept)
        if entry is None or dropped in written or not kept.endswith(entry.name):
            continue
        head = kept[: len(kept) - len(entry.name)]
        name = dropped[len(head) :]
        if dropped.startswith(head) and name not in names:
            path = (*entry.path[:-1], name) if len(entry.path) == 1 else tuple(name.split("."))
            again.append((replace(entry, name=name, path=path), entry.name))
    return again
