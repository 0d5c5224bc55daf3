"""Which reader opens a file: its content decides, its ending only where the content is damaged."""

from __future__ import annotations

from ema_ckpt.core.errors import EmaCkptError, SourceError
from ema_ckpt.core.names import TORCH_SUFFIXES
from ema_ckpt.discovery.location import (
    DCP,
    RANK_FILES,
    SAFETENSORS,
    TORCH,
    TORCH_CHECKPOINTING,
    Location,
    is_index,
)
from ema_ckpt.formats import content
from ema_ckpt.formats.sidecar import load_json
from ema_ckpt.storage.directories import Folder, join
from ema_ckpt.storage.files import open_files

FILE_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
"""Endings of the files in a directory that may be checkpoints; a named file may have any."""


def format_by_name(name: str) -> str:
    """Return the format that an ending promises; "" for any other."""
    if name.endswith(".safetensors"):
        return SAFETENSORS
    return TORCH if name.endswith(TORCH_SUFFIXES) else ""


def index_format(root: str, name: str) -> str:
    """Return the format of the shards that an index names."""
    stem = name.partition(".index.")[0]
    if stem.endswith(FILE_SUFFIXES):
        return format_by_name(stem)
    files = shards_in(root, name)
    return TORCH if any(file.endswith(TORCH_SUFFIXES) for file in files) else SAFETENSORS


def shards_in(root: str, index: str) -> set[str]:
    """Return the files that an index names; none if it is no index, which its reader will say."""
    source = open_files(root)
    try:
        document = load_json(source.read(index, 0, source.size(index)), index)
    except SourceError:
        return set()
    finally:
        source.close()
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    files = weight_map.values() if isinstance(weight_map, dict) else ()
    return {file for file in files if isinstance(file, str)}


def lacks_all_shards(folder: Folder, index: str) -> bool:
    """Whether an index names shards of which a directory holds none."""
    shards = {shard.partition("/")[0] for shard in shards_in(folder.root, index)}
    return bool(shards) and shards.isdisjoint((*folder.files, *folder.folders))


def is_superseded(folder: Folder, index: str) -> bool:
    """Whether a whole file in a directory is read in place of the shards that an index names.

    Loaders of Hugging Face prefer the plain file to the shards of a variant, and safetensors to
    torch files. Where no shard is left, the index is what an earlier save of transformers left
    when a later one wrote one file.
    """
    stem, _, rest = index.partition(".index.")
    base, _, suffix = stem.rpartition(".")
    variant, is_torch = rest.removesuffix("json").rstrip("."), f".{suffix}" in TORCH_SUFFIXES
    preferred = {stem} if variant else set()
    if is_torch and not variant:
        preferred = {f"{base}.safetensors", f"{base.removeprefix('pytorch_')}.safetensors"}
    if not preferred.isdisjoint(folder.files):
        return True
    whole = f"{base}.{variant}.{suffix}" if variant else stem
    return whole in folder.files and lacks_all_shards(folder, index)


def judged(location: Location) -> Location:
    """Return a location whose single file is opened by the reader that its content asks for.

    Raises:
        SourceError: `unsupported` if the content is of a kind that is not read; `not-a-checkpoint`
            if it is of none, under a name that promises none.
    """
    if location.parts:
        parts = tuple((name, judged(part)) for name, part in location.parts)
        return location._replace(parts=parts)
    name = location.names[0]
    is_settled = location.format in (DCP, RANK_FILES, TORCH_CHECKPOINTING)
    if len(location.names) > 1 or is_settled or is_index(name):
        return location
    return judged_file(location)


def judged_file(location: Location) -> Location:
    """Return the location of one file with the format of its content. Raises as `judged`."""
    name, words = location.names[0], ""
    path = join(location.root, name)
    source = open_files(location.root)
    try:
        kind = content.kind_of(source, name)
        if kind is None and not location.format:
            words = content.in_words(source, name)
    finally:
        source.close()
    if kind is None:
        if location.format:
            return location
        endings = ", ".join((*FILE_SUFFIXES, ".index.json"))
        message = f"{path}: {words}, no checkpoint; files are recognised by their content, and"
        message = f"{message} usual endings are {endings}"
        raise SourceError("not-a-checkpoint", message, file=path)
    if kind.reader == content.INDEX:
        return location._replace(format=index_format(location.root, name))
    if kind.reader == content.NOT_READ:
        remedy = f"; {kind.remedy}" if kind.remedy else ""
        raise SourceError("unsupported", f"{path}: {kind.what}{remedy}", file=path)
    return location._replace(format=kind.reader)


def is_foreign(location: Location) -> bool:
    """Whether a file with the ending of torch's is certainly none: TorchScript, say."""
    if location.format != TORCH:
        return False
    source = open_files(location.root)
    try:
        kind = content.kind_of(source, location.names[0])
    except EmaCkptError:
        return False
    finally:
        source.close()
    return kind is not None and kind.reader == content.NOT_READ
