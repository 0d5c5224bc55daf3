"""Which checkpoint a file or a directory is: format and files to open, recognised by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ema_ckpt.core.errors import SourceError, UsageError
from ema_ckpt.core.names import OPTIMIZER, OTHER, TORCH_SUFFIXES, part_role
from ema_ckpt.core.text import shown
from ema_ckpt.formats.rank_files.names import families, family_of
from ema_ckpt.storage.directories import Folder, base_name, join, list_folder, parent_of
from ema_ckpt.storage.stage_names import is_stage_name

if TYPE_CHECKING:
    from ema_ckpt.formats.dcp.metadata import Metadata

DCP, SAFETENSORS, TORCH, RANK_FILES, PARTS = "dcp", "safetensors", "torch", "rank-files", "parts"
INDEX_SUFFIX = ".index.json"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata", re.ASCII)
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(\.(?:safetensors|pt|pth|bin|ckpt))", re.ASCII | re.DOTALL)
_NO_STATE_DICT = re.compile(
    r"scheduler\..*|.*random_state.*|rng_state.*|training_args\.bin|.*trainer_state.*|common\.pt",
    re.DOTALL,
)
_ZERO_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt", re.ASCII)
_ZERO_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt", re.ASCII)


class Location(NamedTuple):
    """A checkpoint on disk or behind a URL.

    Attributes:
        format: `dcp`, `safetensors`, `torch`, `rank-files`, or `parts` for several that belong
            together.
        root: the directory (or its URL) that holds `names`.
        names: the files to open there, in order; an index alone stands for its shards.
        resolved: the directory or file that a person would name.
        parts: for `parts`, each part's name, which is also that of its tree, and its location.
        note: a remark for the user about the choice, or None.
        metadata: of a DCP, the contents of `names` if they were parsed already.
    """

    format: str
    root: str
    names: tuple[str, ...]
    resolved: str
    parts: tuple[tuple[str, Location], ...] = ()
    note: str | None = None
    metadata: Sequence[Metadata] | None = None


def list_directory(root: str) -> Folder:
    """List a directory without the stages of writers. Raises SourceError `unreadable`."""
    _, folders, files = list_folder(root)
    return Folder(
        root,
        tuple(name for name in folders if not is_stage_name(name)),
        tuple(name for name in files if not is_stage_name(name)),
    )


def locate_file(path: str) -> Location:
    """Recognise the checkpoint that the file `path` is or belongs to.

    Raises:
        SourceError: `not-a-checkpoint`, `missing-metadata`, `unreadable`.
    """
    root, name = parent_of(path), base_name(path)
    if name.endswith(INDEX_SUFFIX):
        return Location(_index_format(name), root, (name,), path)
    if name.endswith(".safetensors"):
        return Location(SAFETENSORS, root, (name,), path)
    if name == ".metadata" or _RANK_METADATA.fullmatch(name) or name.endswith(".distcp"):
        return _dcp(list_directory(root)) or _refuse_missing_metadata(root)
    if not name.endswith(TORCH_SUFFIXES):
        kinds = ", ".join((".safetensors", *TORCH_SUFFIXES, INDEX_SUFFIX))
        message = f"{path}: not a file of a known kind ({kinds})"
        raise SourceError("not-a-checkpoint", message, file=path)
    family = family_of(name)
    if family is None:
        return Location(TORCH, root, (name,), path)
    names = families(list_directory(root).files)[family]
    return Location(RANK_FILES, root, tuple(names), path)


def locate_directory(folder: Folder) -> Location | None:
    """Recognise the checkpoint that a directory is by itself or by the parts in it.

    Raises:
        SourceError: `missing-metadata` for data files of a DCP or shards alone; `unreadable`.
        UsageError: `ambiguous-path`.
    """
    location = _dcp(folder) or _indexed(folder)
    if location is not None:
        return location
    single, parts = _single(folder), _parts(folder)
    # One file or family that could be a part is no part if it is alone.
    if len(parts) > 1 or (parts and single is None):
        return Location(PARTS, folder.root, (), folder.root, tuple(parts))
    return single


def loose_files(folder: Folder) -> list[Location]:
    """List files that are checkpoints by themselves; those of optimizers only if alone."""
    locations = [location for _, location in _files(folder)]
    roles = [part_role(location.names[0].partition(".")[0]) for location in locations]
    weights = [role not in (OPTIMIZER, OTHER) for role in roles]
    return list(compress(locations, weights)) or locations


def _files(folder: Folder) -> Iterator[tuple[str, Location]]:
    """List files that are checkpoints by themselves, with the names they have as parts."""
    root, names = folder.root, _candidates(folder)
    ranked = families(names)
    for family, files in ranked.items():
        yield family.name, Location(RANK_FILES, root, tuple(files), join(root, files[0]))
    in_families = set(chain.from_iterable(ranked.values()))
    for name in names:
        if name.endswith(".safetensors"):
            location = Location(SAFETENSORS, root, (name,), join(root, name))
            yield name.removesuffix(".safetensors"), location
        elif name.endswith(TORCH_SUFFIXES) and name not in in_families:
            yield name, Location(TORCH, root, (name,), join(root, name))


def ambiguous(root: str, paths: Sequence[str]) -> UsageError:
    """Make the error for a directory `root` that holds several checkpoints, at `paths` below it."""
    names = [path.removeprefix(root).lstrip("/") for path in paths]
    message = f"{root}: holds {len(names)} checkpoints, {shown(names)}; name one of them"
    return UsageError("ambiguous-path", message)


def _index_format(name: str) -> str:
    return TORCH if name.removesuffix(INDEX_SUFFIX).endswith(TORCH_SUFFIXES) else SAFETENSORS


def _dcp(folder: Folder) -> Location | None:
    root = folder.root
    if ".metadata" in folder.files:
        return Location(DCP, root, (".metadata",), root)
    ranks = []
    for name in folder.files:
        match = _RANK_METADATA.fullmatch(name)
        if match:
            ranks.append((int(match[1]), name))
    if ranks:
        return Location(DCP, root, tuple(name for _, name in sorted(ranks)), root)
    if any(name.endswith(".distcp") for name in folder.files):
        _refuse_missing_metadata(root)
    return None


def _refuse_missing_metadata(root: str) -> NoReturn:
    message = f"{root}: .distcp files without a .metadata: the save did not end, or the file was"
    raise SourceError("missing-metadata", f"{message} not copied", file=".metadata")


def _indexed(folder: Folder) -> Location | None:
    indices = [name for name in folder.files if name.endswith(INDEX_SUFFIX)]
    if not indices:
        _refuse_shards_without_index(folder)
        return None
    # Repositories often hold the same weights in both formats.
    preferred = [name for name in indices if _index_format(name) == SAFETENSORS] or indices
    if len(preferred) > 1:
        raise ambiguous(folder.root, [join(folder.root, name) for name in preferred])
    return Location(_index_format(preferred[0]), folder.root, (preferred[0],), folder.root)


def _refuse_shards_without_index(folder: Folder) -> None:
    # Neither one shard nor all that are here need be the whole checkpoint.
    sets: dict[tuple[str, str, int], set[int]] = {}
    for name in folder.files:
        match = _SHARD.fullmatch(name)
        if match and int(match[3]) > 1:
            sets.setdefault((match[1], match[4], int(match[3])), set()).add(int(match[2]))
    for (stem, suffix, count), numbers in sets.items():
        index = f"{stem}{suffix}{INDEX_SUFFIX}"
        remedy = f"copy {index} and the missing shards here"
        if len(numbers) == count:
            remedy = f"copy {index} beside them"
        message = (
            f"{folder.root}: {len(numbers)} of the {count} shards {stem}-*-of-*{suffix} without "
            f"{index}, which names the tensors in each; {remedy}, or name one shard"
        )
        raise SourceError("missing-metadata", message, file=index)


def _single(folder: Folder) -> Location | None:
    """Return the only safetensors file or family of rank files in a directory."""
    root = folder.root
    files = [name for name in folder.files if name.endswith(".safetensors")]
    ranked = list(families(_candidates(folder)).values())
    if len(files) + len(ranked) != 1:
        return None
    if files:
        return Location(SAFETENSORS, root, (files[0],), root)
    return Location(RANK_FILES, root, tuple(ranked[0]), root)


def _candidates(folder: Folder) -> list[str]:
    names = [name for name in folder.files if not _NO_STATE_DICT.fullmatch(name)]
    # ZeRO's optimizer files hold the weights in full precision; the model's file beside them is
    # read along.
    if any(_ZERO_OPTIMIZER.fullmatch(name) for name in names):
        return [name for name in names if not _ZERO_MODEL.fullmatch(name)]
    return names


def _parts(folder: Folder) -> list[tuple[str, Location]]:
    parts: list[tuple[str, Location]] = []
    for name in folder.folders:
        location = _part_in(join(folder.root, name)) if part_role(name) else None
        if location is not None:
            parts.append((name, location))
    files = [item for item in _files(folder) if item[1].format != TORCH]
    parts += [(name, location) for name, location in files if part_role(name)]
    names = [name for name, _ in parts]
    twice = [location.resolved for name, location in parts if names.count(name) > 1]
    if twice:
        raise ambiguous(folder.root, twice)
    return parts


def _part_in(root: str) -> Location | None:
    folder = list_directory(root)
    location = locate_directory(folder)
    if location is None:
        loose = loose_files(folder)
        return loose[0] if len(loose) == 1 else None
    return location
