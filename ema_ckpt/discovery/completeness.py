"""Whether a checkpoint that a search came upon is whole, told from metadata and file sizes
alone.
"""

from __future__ import annotations

from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import SourceError, counted
from ema_ckpt.discovery.found import DCP, SAFETENSORS, Location
from ema_ckpt.formats.rank_files.names import missing_ranks
from ema_ckpt.storage.files import open_files


def check_complete(found: Location) -> None:
    """Check that every file of a checkpoint is there with at least the size it must have.

    Raises:
        SourceError: `missing-file`, `truncated-file`, `incomplete`, and whatever reading the
            metadata may raise.
    """
    for _, part in found.parts:
        check_complete(part)
    source = open_files(found.root)
    try:
        _check_files(found, source)
    finally:
        source.close()


def _check_files(found: Location, source: Files) -> None:
    if found.format == DCP:
        from ema_ckpt.formats.dcp.reader import required_files

        for name, nbytes in required_files(source, found.names).items():
            if source.size(name) < nbytes:
                message = f"{name}: expected {nbytes} bytes, found {source.size(name)}: the file is truncated"
                raise SourceError("truncated-file", message, file=name)
    elif found.format == SAFETENSORS:
        from ema_ckpt.formats.safetensors.reader import open_safetensors

        open_safetensors(source, found.names, found.resolved, found.resolved)
    else:
        for name in found.names:
            _check_archive(source, name)
        _check_ranks(found)


def _check_archive(source: Files, name: str) -> None:
    nbytes = source.size(name)
    if not nbytes:
        raise SourceError("truncated-file", f"{name}: the file is empty", file=name)
    if source.read(name, 0, min(4, nbytes)) == b"PK\x03\x04":
        from ema_ckpt.formats.torch_zip.archive import read_archive

        read_archive(source, name, 0, nbytes)


def _check_ranks(found: Location) -> None:
    world_size, missing = missing_ranks(found.names)
    if missing:
        listed = ", ".join(map(str, missing[:10])) + (" …" if len(missing) > 10 else "")
        message = f"{found.resolved}: {len(missing)} of {counted(world_size, 'rank file')} missing: rank {listed}"
        raise SourceError("incomplete", message)
