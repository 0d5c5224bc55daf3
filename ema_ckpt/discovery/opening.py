"""Open the checkpoint that a path stands for: locate it, read its metadata, join its parts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ema_ckpt.core.catalog import Catalog, Diagnostic, refuse_problems
from ema_ckpt.core.display import displayed
from ema_ckpt.core.errors import EmaCkptError, SourceError
from ema_ckpt.core.limits import parse_workers
from ema_ckpt.core.names import is_flat_parameter
from ema_ckpt.core.text import path_text, shown
from ema_ckpt.discovery.joined import join_parts, open_torch_index
from ema_ckpt.discovery.locate import locate_checkpoint
from ema_ckpt.discovery.location import (
    DCP,
    PARTS,
    RANK_FILES,
    SAFETENSORS,
    TORCH_CHECKPOINTING,
    Location,
    is_index,
)
from ema_ckpt.storage.directories import is_folder
from ema_ckpt.storage.files import is_url, open_files


def open_catalog(
    path: str | os.PathLike[str], *, lenient: bool = False, workers: int | None = None
) -> Catalog:
    """Open the checkpoint that a local path or fsspec URL stands for; read metadata only.

    Which of several checkpoints was chosen, and why, is logged to `ema_ckpt` (level info).

    Args:
        lenient: turn a missing or short data file into a warning where the format reads it at once.
        workers: the largest number of processes that read files; by default the usable processors,
            at most 8.

    Raises:
        SourceError: `not-found not-a-checkpoint unreadable incomplete missing-metadata unsupported
            …`.
        UnsafeError: `unsafe-pickle`, `unsafe-path`.
        UsageError: `ambiguous-path`.
    """
    text = path_text(path)
    location = locate_checkpoint(text)
    log_choice(location)
    may_be_one_rank = location.format == RANK_FILES and location.resolved == text
    is_one_rank = may_be_one_rank and is_folder(text) is False
    try:
        catalog = open_location(location, text, lenient=lenient, workers=workers)
    except EmaCkptError as error:
        refuse_vanished(location, error)
        raise
    if is_one_rank:
        _refuse_one_rank(catalog)
    return catalog


def refuse_vanished(location: Location, cause: EmaCkptError | None = None) -> None:
    """Refuse a checkpoint of which something that was there when it was located is gone.

    Raises:
        SourceError: `source-changed`: it was removed, or replaced by one of another format.
    """
    is_gone = is_folder(location.root) is None
    for part in (location, *[part for _, part in location.parts]):
        for name in part.names[:1]:
            is_gone |= not is_url(part.root) and not os.path.lexists(os.path.join(part.root, name))
    if is_gone:
        message = f"{location.resolved}: removed while it was being opened; name the run again"
        raise SourceError("source-changed", message, file=location.resolved) from cause


def _refuse_one_rank(catalog: Catalog) -> None:
    """Refuse a file that was named itself, and that tells of the files of other ranks."""
    try:
        refuse_problems([problem for problem in catalog.problems if problem.code == "incomplete"])
    except SourceError:
        catalog.source.close()
        raise


def log_choice(location: Location) -> None:
    """Log which of several checkpoints was chosen, to `ema_ckpt`, level info."""
    if location.note:
        logging.getLogger("ema_ckpt").info(displayed(location.note))


@contextmanager
def opened(
    path: str | os.PathLike[str], *, lenient: bool = False, workers: int | None = None
) -> Iterator[Catalog]:
    """Open a catalog as `open_catalog` does and close its files at the end of a `with` block."""
    catalog = open_catalog(path, lenient=lenient, workers=workers)
    try:
        yield catalog
    finally:
        catalog.source.close()


def open_location(
    location: Location, path: str, *, lenient: bool = False, workers: int | None = None
) -> Catalog:
    """Open the checkpoint at `location` as `open_catalog` does; `path` is what the user named."""
    catalog = _open(location, path, parse_workers(workers), lenient=lenient)
    left_out = location.left_out
    flat = _flat_parameters(catalog) if location.format == DCP else []
    if not left_out and not location.warnings and not flat:
        return catalog
    found = (*location.warnings, *(item.diagnostic() for item in left_out), *flat)
    weights = tuple(item.path for item in left_out if item.is_weights)
    return replace(
        catalog,
        warnings=(*found, *catalog.warnings),
        left_out=(*weights, *catalog.left_out),
    )


def _flat_parameters(catalog: Catalog) -> list[Diagnostic]:
    """Warn of flat parameters of FSDP1, as LOCAL_STATE_DICT saves them."""
    flat = [t.name for t in catalog.tensors if len(t.shape) == 1 and is_flat_parameter(t.name)]
    if not flat:
        return []
    message = f"flat parameters of FSDP1, from LOCAL_STATE_DICT: {shown(flat)}; the names and"
    message += " shapes of what is in them are recorded nowhere, and parameters beside them may be"
    message += " one rank's part of the whole; save with SHARDED_STATE_DICT or FULL_STATE_DICT"
    return [Diagnostic("flat-parameter", message)]


def _open(location: Location, path: str, workers: int, *, lenient: bool) -> Catalog:
    if location.format == PARTS:
        parts = []
        for name, part in location.parts:
            catalog = open_location(part, path, lenient=lenient, workers=workers)
            parts.append((name, part, catalog))
        return join_parts(location, path, parts)
    source, names, resolved = open_files(location.root), location.names, location.resolved
    try:
        if location.metadata is not None and not is_url(location.root):
            source.size(names[0])  # so that it is noticed if all is deleted from now on
        if location.format == DCP:
            from ema_ckpt.formats.dcp.reader import open_dcp

            return open_dcp(source, names, path, resolved, location.metadata, lenient=lenient)
        if location.format == SAFETENSORS:
            from ema_ckpt.formats.safetensors.reader import open_safetensors

            return open_safetensors(source, names, path, resolved, lenient=lenient)
        if location.format == RANK_FILES:
            from ema_ckpt.formats.rank_files.reader import open_rankfiles

            return open_rankfiles(source, names, path, resolved, lenient=lenient, workers=workers)
        if location.format == TORCH_CHECKPOINTING:
            from ema_ckpt.formats.torch_checkpointing.reader import open_torch_checkpointing

            return open_torch_checkpointing(source, names, path, resolved, lenient=lenient)
        if is_index(names[0]):
            return open_torch_index(source, location, path, lenient=lenient)
        from ema_ckpt.formats.torch_file.reader import open_torchfile

        return open_torchfile(source, names, path, resolved)
    except BaseException:
        source.close()
        raise
