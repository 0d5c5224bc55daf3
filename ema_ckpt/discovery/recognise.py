"""Which checkpoint a file or a directory is: format and files to open.

A file that is named is recognised by its content. In a directory the endings of names tell which
files are candidates, and the content of the one that is taken, which reader opens it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, filterfalse
from typing import NoReturn

from ema_ckpt.core.errors import AccessError, SourceError
from ema_ckpt.core.names import OPTIMIZER, OTHER, part_role, part_roles
from ema_ckpt.core.text import shown
from ema_ckpt.discovery.by_content import (
    format_by_name,
    index_format,
    is_foreign,
    is_superseded,
    judged_file,
)
from ema_ckpt.discovery.depth import PART_LEVELS, TooDeepError
from ema_ckpt.discovery.location import (
    DCP,
    RANK_FILES,
    SAFETENSORS,
    TORCH,
    TORCH_CHECKPOINTING,
    Location,
    ambiguous,
    join_located,
)
from ema_ckpt.discovery.step_names import split_suffix, step_order
from ema_ckpt.formats import content
from ema_ckpt.formats.rank_files.names import families, family_of, refuse_missing_ranks
from ema_ckpt.formats.sidecar import SIDECAR
from ema_ckpt.formats.torch_checkpointing.metadata import files_of, read_metadata
from ema_ckpt.storage.directories import (
    Folder,
    base_name,
    is_folder,
    join,
    list_folder,
    parent_of,
)
from ema_ckpt.storage.files import is_url, open_files
from ema_ckpt.storage.stage_names import is_stage_name

_PLACEMENTS = "metadata.pkl"  # of torch_checkpointing
_RANK_METADATA = re.compile(r"__(\d+)\.metadata", re.ASCII)
# `X.safetensors.index.json`; of a variant `X.safetensors.index.fp16.json`.
_INDEX = re.compile(r".+\.index(?:\.[^./]+)?\.json", re.DOTALL)
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(\.(?:safetensors|pt|pth|bin|ckpt))", re.ASCII | re.DOTALL)
# One rank's part of what torch's HuggingFaceStorageWriter saves with `save_distributed`.
_RANK_SHARD = re.compile(r"shard-\d+-(.+)-\d+-of-(\d+)\.safetensors", re.ASCII | re.DOTALL)
# State of a run that holds no state dict. The second line: Megatron-core, Lightning, accelerate.
_NO_STATE_DICT = re.compile(
    r"scheduler\..*|.*random_state.*|rng_state.*|training_args\.bin|.*trainer_state.*|"
    r"common\.pt|meta\.pt|scaler\.pt|(?:sampler|dl_state_dict)(?:_\d+)?\.bin",
    re.DOTALL,
)
_RANK_FOLDER = re.compile(r"(?:[a-z]{2}_)?rank[-_.]?\d+(?:_\d+)*", re.ASCII)
_ADAPTER = re.compile(r"adapter_model\..*", re.DOTALL)
_ZERO_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt", re.ASCII)
_ZERO_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt", re.ASCII)

Named = tuple[str, Location]  # a checkpoint, and the name that it has as a part


def list_directory(root: str) -> Folder:
    """List a directory without the stages of writers. Raises AccessError `unreadable`."""
    _, folders, files = list_folder(root)
    return Folder(
        root,
        tuple(filterfalse(is_stage_name, folders)),
        tuple(filterfalse(is_stage_name, files)),
    )


# A file.


def locate_file(path: str) -> Location:
    """Recognise the checkpoint that the file `path` is or belongs to.

    Raises:
        SourceError: `not-a-checkpoint` or `unsupported`, with what the file is; `incomplete` for
            one file of several ranks; `missing-metadata`.
        AccessError: `unreadable`.
    """
    root, name = parent_of(path), base_name(path)
    is_dcp = name == ".metadata" or name.endswith(".distcp")
    if is_dcp or _RANK_METADATA.fullmatch(name):
        return _dcp(list_directory(root)) or _refuse_missing_metadata(root)
    if _INDEX.fullmatch(name):
        return Location(index_format(root, name), root, (name,), path)
    location = _torch_checkpointing_of(root, name)
    if location is not None:
        return location
    if _sets_of_ranks([name]):
        for pattern, names in _sets_of_ranks(list_directory(root).files).items():
            if name in names:
                _refuse_one_of_several(path, pattern, names)
                return _of_ranks(root, names, path)
    return judged_file(Location(format_by_name(name), root, (name,), path))


def locate_pattern(path: str) -> Location | None:
    """Locate the files of all ranks that a pattern such as `run/ema_rank_*.pt` stands for."""
    root, pattern = parent_of(path), base_name(path)
    if "*" not in pattern or not is_folder(root):
        return None
    names = _sets_of_ranks(list_directory(root).files).get(pattern)
    return _of_ranks(root, names, path) if names else None


def refuse_one_rank_of_several(location: Location) -> None:
    """Refuse a file in the directory of one rank if those of others beside it have it as well.

    Megatron-LM writes `mp_rank_00/model_optim_rng.pt` so, with the rows of one rank in each.

    Raises:
        SourceError: `incomplete`.
    """
    is_file = location.format in (TORCH, SAFETENSORS) and len(location.names) == 1
    own = base_name(location.root)
    if not is_file or _RANK_FOLDER.fullmatch(own) is None:
        return
    parent, name = parent_of(location.root), location.names[0]
    beside = filter(_RANK_FOLDER.fullmatch, list_directory(parent).folders)
    ranks = [one for one in beside if is_folder(join(join(parent, one), name)) is False]
    # Runs that differ in a rank of another sort, such as LoRA's, do not begin with 0.
    if len(ranks) > 1 and any(int(re.findall(r"\d+", one)[0]) == 0 for one in ranks):
        problem = f"{location.resolved}: what one rank has of {len(ranks)}, which are"
        reason = "nothing in such files says where their rows belong"
        remedy = "put them together with the program that wrote them"
        message = f"{problem} {shown(ranks)}: {reason}; {remedy}"
        raise SourceError("incomplete", message, file=name)


def _sets_of_ranks(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the files of which each rank wrote one, by the pattern of their names."""
    listed = list(names)
    sets = {family.pattern: files for family, files in families(listed).items()}
    for name in listed:
        match = _RANK_SHARD.fullmatch(name)
        if match:
            sets.setdefault(f"shard-*-{match[1]}-*-of-{match[2]}.safetensors", []).append(name)
    return sets


def _of_ranks(root: str, names: Sequence[str], resolved: str) -> Location:
    if family_of(names[0]) is None:
        return Location(SAFETENSORS, root, tuple(names), resolved)
    return Location(RANK_FILES, root, tuple(names), resolved)


def _refuse_one_of_several(path: str, pattern: str, names: Sequence[str]) -> None:
    name = base_name(path)
    if len(names) > 1:
        problem = f"{path}: the file of one rank of {len(names)}, which are {pattern}"
        remedy = f"name the directory, or '{join(parent_of(path), pattern)}'"
        raise SourceError("incomplete", f"{problem}; {remedy}", file=name)
    if family_of(name) is not None:
        refuse_missing_ranks(names, join(parent_of(path), pattern))


# A directory.


def locate_directory(folder: Folder, levels: int = PART_LEVELS) -> Location | None:
    """Recognise the checkpoint that a directory is by itself or by the parts in it.

    Args:
        levels: how deep directories of parts may lie in one another. One that goes deeper is
            passed over as a part of `folder` itself, and an error below it.

    Raises:
        SourceError: `missing-metadata` for data files of a DCP or shards alone; `unreadable`.
        UsageError: `ambiguous-path`.
    """
    location = _dcp(folder) or _torch_checkpointing(folder) or _indexed(folder)
    if location is not None:
        return location
    single, parts = _single(folder), _parts(folder, levels)
    # One file or family that could be a part is no part if it is alone.
    if len(parts) > 1 or (parts and single is None):
        return join_located(folder.root, folder.root, parts)
    return single


def loose_files(folder: Folder) -> list[Location]:
    """List files that are checkpoints by themselves, those with weights before all others."""
    named = files_in(folder)
    weights = [item for item in named if not is_state(item[0])]
    named = _full_weights(named) or weights or named
    if len(named) > 1:
        named = [(name, location) for name, location in named if not is_foreign(location)]
    return [location for _, location in named]


def _full_weights(named: Sequence[Named]) -> list[Named]:
    """Keep what is neither a run's state nor an adapter."""
    full = []
    for name, location in named:
        if not is_state(name) and not _is_adapter(location):
            full.append((name, location))
    return full


def files_in(folder: Folder) -> list[Named]:
    """List files that are checkpoints by their names, with the names they have as parts."""
    root, names = folder.root, _candidates(folder)
    named: list[Named] = []
    sets = _sets_of_ranks(names)
    for pattern, files in sets.items():
        label = files[0]
        family, shard = family_of(label), _RANK_SHARD.fullmatch(label)
        if family is not None:
            label = family.name  # `model` of `model_rank_0.pt`
        elif shard is not None:
            label = shard[1]
        resolved = join(root, files[0] if len(files) == 1 else pattern)
        named.append((label, _of_ranks(root, files, resolved)))
    taken = set(chain.from_iterable(sets.values()))
    for name in names:
        if name not in taken and format_by_name(name):
            stem, suffix = split_suffix(name)
            label = stem if suffix == ".safetensors" else name
            location = Location(format_by_name(name), root, (name,), join(root, name))
            named.append((label, location))
    return named


def is_state(name: str) -> bool:
    """Whether a part of this name, a file's stem for one, holds no weights but a run's state."""
    return part_role(split_suffix(name)[0]) in (OPTIMIZER, OTHER)


def indices_in(folder: Folder) -> list[str]:
    """List the indices of shards in a directory."""
    return list(filter(_INDEX.fullmatch, folder.files))


def has_marker(folder: Folder) -> bool:
    """Whether a directory has what a writer puts there last: `.metadata`, or an index."""
    if ".metadata" in folder.files or indices_in(folder):
        return True
    return any(map(_RANK_METADATA.fullmatch, folder.files))


def is_shard(name: str) -> bool:
    """Whether a file has the name of one of several shards, which an index names."""
    return _SHARD.fullmatch(name) is not None and _RANK_SHARD.fullmatch(name) is None


def _is_adapter(location: Location) -> bool:
    return _ADAPTER.fullmatch(location.names[0]) is not None


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


def _torch_checkpointing(folder: Folder) -> Location | None:
    """Recognise a checkpoint of torch_checkpointing by its metadata, whose content tells."""
    if _PLACEMENTS not in folder.files:
        return None
    source = open_files(folder.root)
    try:
        kind = content.kind_of(source, _PLACEMENTS)
        if kind is None or kind.reader != content.TORCH_CHECKPOINTING:
            return None
        metadata = read_metadata(source, _PLACEMENTS)
        files = [file.name for file in files_of(metadata, folder.files)]
    except SourceError:  # damaged: its reader says how
        files = []
    finally:
        source.close()
    names = (_PLACEMENTS, *files)
    return Location(TORCH_CHECKPOINTING, folder.root, names, folder.root)


def _has_placements(root: str) -> bool:
    try:
        return is_folder(join(root, _PLACEMENTS)) is False
    except AccessError:  # the file that was named may be read all the same
        return False


def _torch_checkpointing_of(root: str, name: str) -> Location | None:
    """Locate the checkpoint whose metadata a file is; refuse one rank's file of several.

    Raises:
        SourceError: `incomplete` for one rank's file of several.
    """
    places = [(root, name), (parent_of(root), f"{base_name(root)}/{name}")]
    for folder, below in places[:1] if is_url(root) else places:
        is_likely = name == _PLACEMENTS or any(map(str.isdigit, below))
        if not is_likely or not _has_placements(folder):
            continue
        location = _torch_checkpointing(list_directory(folder))
        if location is None or below not in location.names:
            continue
        if below == _PLACEMENTS:
            return location
        source = open_files(folder)
        try:
            world_size = read_metadata(source, _PLACEMENTS).world_size
        finally:
            source.close()
        if world_size > 1:
            problem = f"{join(root, name)}: the file of one rank of {world_size}, by {_PLACEMENTS}"
            raise SourceError("incomplete", f"{problem}; name the directory {folder}", file=name)
    return None


def _indexed(folder: Folder) -> Location | None:
    indices = indices_in(folder)
    if not indices:
        _refuse_shards_without_index(folder)
        return None
    indices = [name for name in indices if not is_superseded(folder, name)]
    if not indices:
        return None
    # Repositories often hold the same weights in both formats.
    formats = {name: index_format(folder.root, name) for name in indices}
    preferred = [name for name in indices if formats[name] == SAFETENSORS] or indices
    if len(preferred) > 1:
        raise ambiguous(folder.root, [join(folder.root, name) for name in preferred])
    return Location(formats[preferred[0]], folder.root, (preferred[0],), folder.root)


def _refuse_shards_without_index(folder: Folder) -> None:
    # Neither one shard nor all that are here need be the whole checkpoint.
    sets: dict[tuple[str, str, int], set[int]] = {}
    for name in filter(is_shard, folder.files):
        match = _SHARD.fullmatch(name)
        if match and int(match[3]) > 1:
            sets.setdefault((match[1], match[4], int(match[3])), set()).add(int(match[2]))
    for (stem, suffix, count), numbers in sets.items():
        index = f"{stem}{suffix}.index.json"
        remedy = f"copy {index} and the missing shards here"
        if len(numbers) == count:
            remedy = f"copy {index} beside them"
        message = (
            f"{folder.root}: {len(numbers)} of the {count} shards {stem}-*-of-*{suffix} without "
            f"{index}, which names the tensors in each; {remedy}, or name one shard"
        )
        raise SourceError("missing-metadata", message, file=index)


def _single(folder: Folder) -> Location | None:
    """Return the only safetensors file, or the only files of ranks, in a directory."""
    named = files_in(folder)
    single = [location for _, location in named if location.format != TORCH]
    if indices_in(folder):  # a whole file took the place of their shards
        single = [location for location in single if not is_shard(location.names[0])]
    if _full_weights(named):
        single = [location for location in single if not _is_adapter(location)]
    return single[0]._replace(resolved=folder.root) if len(single) == 1 else None


def _candidates(folder: Folder) -> list[str]:
    names = [name for name in folder.files if not _NO_STATE_DICT.fullmatch(name)]
    # ZeRO's optimizer files hold the weights in full precision; the model's file beside them is
    # read along.
    if any(map(_ZERO_OPTIMIZER.fullmatch, names)):
        return [name for name in names if not _ZERO_MODEL.fullmatch(name)]
    return names


def _parts(folder: Folder, levels: int) -> list[tuple[str, Location, str]]:
    """List the parts of a checkpoint in a directory: name, location and role of each."""
    found = _likely_parts(folder if levels else folder._replace(folders=()), levels)
    names = [name for name, _ in found]
    roles = part_roles(names)  # what is one only by another is none if that holds no checkpoint
    parts = [(name, of, roles[name]) for name, of in found if name in roles]
    twice = [of.resolved for name, of, _ in parts if names.count(name) > 1]
    if twice:
        raise ambiguous(folder.root, twice)
    return parts


def _likely_parts(folder: Folder, levels: int) -> list[Named]:
    """Locate what has the name of a part: directories, then files."""
    files: list[Named] = []
    for name, location in files_in(folder):
        if location.format != TORCH and step_order(location.names[0]) is None:
            files.append((name, location))
    folders = [name for name in folder.folders if step_order(name) is None]
    likely = part_roles([*folders, *(name for name, _ in files)])
    found: list[Named] = []
    for name in folders:
        part = _followed_part(join(folder.root, name), levels) if name in likely else None
        if part is not None:
            found.append((name, part))
    found += [(name, location) for name, location in files if name in likely]
    return found


def _followed_part(root: str, levels: int) -> Location | None:
    try:
        return _part_in(root, levels - 1)
    except TooDeepError:
        if levels < PART_LEVELS:
            raise
        return None  # it is listed with what lies beside the others


def _part_in(root: str, levels: int) -> Location | None:
    folder = list_directory(root)
    location = locate_directory(folder, levels)
    if location is None:
        loose = loose_files(folder)
        if not loose:
            refuse_record_alone(folder)
            _refuse_deeper_parts(folder, levels)
        return loose[0] if len(loose) == 1 else None
    return location


def _refuse_deeper_parts(folder: Folder, levels: int) -> None:
    if levels == 0 and part_roles([one for one in folder.folders if step_order(one) is None]):
        problem = f"{folder.root}: parts in parts are followed {PART_LEVELS} levels deep"
        raise TooDeepError("not-a-checkpoint", f"{problem}; name it to read it", file=folder.root)


def refuse_record_alone(folder: Folder) -> None:
    """Refuse a directory of which nothing is left but our record of the files that were there.

    Raises:
        SourceError: `missing-file`.
    """
    if SIDECAR in folder.files:
        message = f"{folder.root}: {SIDECAR} is there without the checkpoint that it goes with"
        remedy = f"copy the other files again, or delete {SIDECAR}"
        raise SourceError("missing-file", f"{message}; {remedy}", file=folder.root)
