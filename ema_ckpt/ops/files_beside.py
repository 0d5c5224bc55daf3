"""Files beside the weights that the format's owner needs: copied within the format, unopened.

Across formats one is copied too: the settings of quantised weights, whose values depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.ops.results.write import Skipped
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
    if not is_directory:
        return {}
    root = catalog.source.root
    is_whole = catalog.resolved.rstrip("/") == root.rstrip("/")
    if catalog.format != form or not is_whole:
        return quantization_settings(catalog)
    sizes = {}
    for name in list_folder(root).files:
        if is_needed(name) and name not in catalog.files:
            sizes[name] = catalog.source.size(name)
    return sizes


def quantization_settings(catalog: Catalog) -> dict[str, int]:
    """Return the files, with their sizes, that say how the weights are quantised, if they are.

    Without them codes and scales that are copied could not always be read as values.
    """
    from ema_ckpt.reading.quantized.quantization_config import files_with_settings

    names = files_with_settings(catalog)
    if not names:
        return {}
    from ema_ckpt.reading.quantized.recognise import recognise

    found = recognise(catalog, lenient=True)
    if not found.tensors and not found.refused:  # the settings of other weights beside them
        return {}
    return {name: catalog.source.size(name) for name in names}


def settings_beside(catalog: Catalog, is_directory: bool) -> tuple[dict[str, int], list[Skipped]]:
    """Return the settings of quantised weights that go along, and those for which is no place."""
    settings = quantization_settings(catalog)
    if is_directory:
        return settings, []
    reason = "says how these weights are quantised: put it beside the file that is written"
    return {}, [Skipped(name, name, reason) for name in settings]


def copy_files(catalog: Catalog, files: Mapping[str, int], outputs: Outputs) -> None:
    """Copy files of a checkpoint, given with their sizes, byte for byte."""
    for name, nbytes in files.items():
        for offset in range(0, nbytes, _PIECE_NBYTES):
            piece = min(_PIECE_NBYTES, nbytes - offset)
            outputs.write(name, offset, catalog.source.read(name, offset, piece))
