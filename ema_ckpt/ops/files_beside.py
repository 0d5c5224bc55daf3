"""Files beside the weights that the format's owner needs: copied within the format, unopened."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.storage.directories import list_folder
from ema_ckpt.writing.output_files import Outputs

# Lightning's and Megatron-core's state beside a DCP, Megatron-core's description of its format, and
# the configurations of Hugging Face models.
_NEEDED = ("meta.pt", "common.pt", "metadata.json", "config.json", "*_config.json")
_PIECE_NBYTES = 4 << 20


def is_needed(name: str) -> bool:
    """Check whether a file of this name belongs to the weights that it lies beside."""
    return any(fnmatchcase(name, pattern) for pattern in _NEEDED)


def needed_files(catalog: Catalog, form: str, is_directory: bool) -> dict[str, int]:
    """Return the files, with their sizes, that a target of the same format has to have as well.

    Those of a part of a checkpoint lie where the target has no place for them.
    """
    root = catalog.source.root
    is_whole = catalog.resolved.rstrip("/") == root.rstrip("/")
    if catalog.format != form or not is_directory or not is_whole:
        return {}
    sizes = {}
    for name in list_folder(root).files:
        if is_needed(name) and name not in catalog.files:
            sizes[name] = catalog.source.size(name)
    return sizes


def copy_files(catalog: Catalog, files: Mapping[str, int], outputs: Outputs) -> None:
    """Copy files of a checkpoint, given with their sizes, byte for byte."""
    for name, nbytes in files.items():
        for offset in range(0, nbytes, _PIECE_NBYTES):
            piece = min(_PIECE_NBYTES, nbytes - offset)
            outputs.write(name, offset, catalog.source.read(name, offset, piece))
