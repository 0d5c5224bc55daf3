"""Find data files that lie among those of a checkpoint, and belong to no checkpoint any more."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ema_ckpt.core.catalog import Catalog, Diagnostic
from ema_ckpt.discovery.by_content import shards_in
from ema_ckpt.discovery.recognise import indices_in, is_shard, list_directory
from ema_ckpt.storage.directories import is_folder, join

_DCP, _SAFETENSORS = ".distcp", ".safetensors"
_MESSAGE = "the checkpoint does not use it; left by an earlier save? It can be removed"


def stale_files(catalog: Catalog) -> Iterator[Diagnostic]:
    """Warn of data files in the checkpoint's folders that it does not use, left by another save.

    A file that is a checkpoint of its own, or part of one, is named with what lies beside.
    """
    if not _lists_its_files(catalog):
        return
    known = {*catalog.files, *catalog.left_out}
    suffixes: dict[str, set[str]] = {}  # of the data files of each folder
    for file in catalog.files:
        for suffix in (_DCP, _SAFETENSORS):
            if file.endswith(suffix):
                suffixes.setdefault(file.rpartition("/")[0], set()).add(suffix)
    for folder, used in suffixes.items():
        root = join(catalog.source.root, folder) if folder else catalog.source.root
        for name in _unclaimed_in(root):
            file = f"{folder}/{name}" if folder else name
            if file in known or not name.endswith(tuple(used)):
                continue
            if os.path.getsize(join(root, name)):  # idle ranks leave empty files
                yield Diagnostic("stale-file", f"{file}: {_MESSAGE}")


def _lists_its_files(catalog: Catalog) -> bool:
    """Whether the checkpoint is a local directory whose index, if any, is right about its files."""
    is_wrong = any(problem.code == "index-mismatch" for problem in catalog.problems)
    return os.path.isdir(catalog.resolved) and not is_wrong


def _unclaimed_in(root: str) -> Iterator[str]:
    """Name the data files in a folder that are no checkpoint, and that no index there names.

    A folder that is missing has none: the audit reports that.
    """
    if not is_folder(root):
        return
    folder = list_directory(root)
    claimed = {shard for index in indices_in(folder) for shard in shards_in(root, index)}
    for name in folder.files:
        if name.endswith(_DCP) or (is_shard(name) and name not in claimed):
            yield name
