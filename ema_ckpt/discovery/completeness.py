"""Whether a checkpoint is complete: its metadata is there, and every file that it names, whole."""

from __future__ import annotations

from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import AccessError, EmaCkptError, SourceError
from ema_ckpt.discovery.by_content import judged, shards_in
from ema_ckpt.discovery.location import (
    DCP,
    PARTS,
    RANK_FILES,
    SAFETENSORS,
    TORCH_CHECKPOINTING,
    Location,
    is_index,
)
from ema_ckpt.discovery.recognise import has_marker
from ema_ckpt.storage.directories import changed_within, is_folder, join, list_folder
from ema_ckpt.storage.files import open_files

_FRESH_SECONDS = 600.0


def check_complete(location: Location) -> Location:
    """Check that every file is there with at least its size; return `location` with its metadata.

    Raises:
        SourceError: `missing-file`, `truncated-file`, `incomplete`, and whatever reading the
            metadata may raise.
    """
    if location.format == PARTS:
        parts = tuple((name, check_complete(part)) for name, part in location.parts)
        return location._replace(parts=parts)
    location = judged(location)
    source = open_files(location.root)
    try:
        if location.format == DCP:
            return _check_dcp(source, location)
        if location.format == SAFETENSORS:
            from ema_ckpt.formats.safetensors.reader import open_safetensors

            open_safetensors(source, location.names, location.resolved, location.resolved)
        elif location.format in (RANK_FILES, TORCH_CHECKPOINTING):
            _check_rank_files(source, location)
        else:
            _check_torch_files(source, location)
        return location
    finally:
        source.close()


def with_metadata(location: Location) -> Location:
    """Return `location` with the metadata of DCP checkpoints, as far as it can be read."""
    if location.format == PARTS:
        parts = tuple((name, with_metadata(part)) for name, part in location.parts)
        return location._replace(parts=parts)
    if location.format != DCP or location.metadata is not None:
        return location
    from ema_ckpt.formats.dcp.reader import read_metadata

    source = open_files(location.root)
    try:
        return location._replace(metadata=read_metadata(source, location.names))
    except SourceError:
        return location  # who opens it will say so
    finally:
        source.close()


def _check_dcp(source: Files, location: Location) -> Location:
    from ema_ckpt.formats.dcp.reader import read_metadata, required_files

    metadata = location.metadata or read_metadata(source, location.names)
    for name, nbytes in required_files(metadata).items():
        size = source.size(name)
        if size < nbytes:
            message = f"expected {nbytes} bytes, found {size}: the file is truncated"
            raise SourceError("truncated-file", f"{name}: {message}", file=name)
    return location._replace(metadata=metadata)


def _check_rank_files(source: Files, location: Location) -> None:
    from ema_ckpt.formats.rank_files.reader import open_rankfiles
    from ema_ckpt.formats.torch_checkpointing.reader import open_torch_checkpointing

    read = open_rankfiles if location.format == RANK_FILES else open_torch_checkpointing
    try:
        read(source, location.names, location.resolved, location.resolved)
    except SourceError as error:
        if error.code != "unsupported":  # all there, though no verb will read it
            raise


def _check_torch_files(source: Files, location: Location) -> None:
    names = set(location.names)
    if is_index(location.names[0]):
        names = shards_in(location.root, location.names[0])
    for name in sorted(names):
        nbytes = source.size(name)
        if not nbytes:
            raise SourceError("truncated-file", f"{name}: the file is empty", file=name)
        if source.read(name, 0, min(4, nbytes)) == b"PK\x03\x04":
            from ema_ckpt.formats.torch_zip.reader import read_archive

            read_archive(source, name, 0, nbytes)


def may_be_written(path: str, error: EmaCkptError) -> bool:
    """Whether a step that is not complete, by `error`, may still be on its way to the disk.

    That is one that lacks its `.metadata` or index and in which something changed within ten
    minutes. Where modification times are not known, as behind some URLs, none is.
    """
    try:
        if not is_folder(path):
            return _is_fresh(path)
        lacks_marker = error.code == "missing-metadata" or not _has_marker(path, 1)
        return lacks_marker and _changed_below(path, 1)
    except AccessError:
        return False


def _has_marker(root: str, levels: int) -> bool:
    folder = list_folder(root)
    if has_marker(folder):
        return True
    return levels > 0 and any(_has_marker(join(root, name), levels - 1) for name in folder.folders)


def _changed_below(root: str, levels: int) -> bool:
    folder = list_folder(root)
    if not folder.files and not folder.folders:
        return _is_fresh(root)
    if any(_is_fresh(join(root, name)) for name in folder.files):
        return True
    if levels <= 0:
        return False
    return any(_changed_below(join(root, name), levels - 1) for name in folder.folders)


def _is_fresh(path: str) -> bool:
    return changed_within(path, _FRESH_SECONDS)
