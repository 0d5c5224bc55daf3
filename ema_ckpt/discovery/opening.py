"""From a path to a catalog: find the checkpoint, open it with its format, join parts that belong
together.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ema_ckpt.core.catalog import Catalog, Files
from ema_ckpt.discovery.found import DCP, PARTS, SAFETENSORS, TORCH, Location
from ema_ckpt.discovery.locate import locate_checkpoint
from ema_ckpt.storage.files import open_files


def open_catalog(path: str | os.PathLike[str], *, lenient: bool = False) -> Catalog:
    """Open the checkpoint that `path`, a local path or an fsspec URL, stands for. Reads metadata
    only.

    Which of several checkpoints was chosen, and why, is logged to `ema_ckpt` (level info).

    Args:
        lenient: turn a missing or short data file into a warning where the format reads it at once.

    Raises:
        SourceError: `not-found not-a-checkpoint unreadable incomplete missing-metadata unsupported
            …`.
        UnsafeError: `unsafe-pickle`, `unsafe-path`.
        UsageError: `ambiguous-path`.
    """
    text = os.fspath(path)
    found = locate_checkpoint(text)
    if found.note:
        logging.getLogger("ema_ckpt").info(found.note)
    return open_found(found, text, lenient=lenient)


@contextmanager
def opened(path: str | os.PathLike[str], *, lenient: bool = False) -> Iterator[Catalog]:
    """`open_catalog` for the length of a `with` block: its files are closed at the end, whatever
    happened.

    Raises:
        EmaCkptError: as `open_catalog`.
    """
    catalog = open_catalog(path, lenient=lenient)
    try:
        yield catalog
    finally:
        catalog.source.close()


def open_found(found: Location, path: str, *, lenient: bool = False) -> Catalog:
    """Open what a search for `path` came upon."""
    if found.format == PARTS:
        from ema_ckpt.discovery.joined import join_parts

        parts = [
            (name, part, open_found(part, path, lenient=lenient)) for name, part in found.parts
        ]
        return join_parts(found, path, parts)
    source = open_files(found.root)
    try:
        return _open(found, path, source, lenient)
    except BaseException:
        source.close()
        raise


def _open(found: Location, path: str, source: Files, lenient: bool) -> Catalog:
    if found.format == DCP:
        from ema_ckpt.formats.dcp.reader import open_dcp

        return open_dcp(source, found.names, path, found.resolved)
    if found.format == SAFETENSORS:
        from ema_ckpt.formats.safetensors.reader import open_safetensors

        return open_safetensors(source, found.names, path, found.resolved, lenient=lenient)
    if found.format == TORCH:
        from ema_ckpt.formats.torch_file.reader import open_torchfile

        if found.names[0].endswith(".index.json"):
            from ema_ckpt.discovery.joined import open_torch_index

            return open_torch_index(source, found, path)
        return open_torchfile(source, found.names, path, found.resolved)
    from ema_ckpt.formats.rank_files.reader import open_rankfiles

    return open_rankfiles(source, found.names, path, found.resolved)
