"""What a path means: the checkpoint at it, in its parts, in its newest complete step, or a little
further down.

The order is fixed and the first hit wins: the path itself, recognised parts in it, the complete
step with the highest number, exactly one of these one or two levels down. Anything else is an error
that lists what was found.
An average alone, or another weight file, that lies beside steps is passed over for them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ema_ckpt.core.errors import EmaCkptError, SourceError, UsageError, counted, shown
from ema_ckpt.core.names import LIVE, OPTIMIZER, OTHER, part_role
from ema_ckpt.discovery.completeness import check_complete
from ema_ckpt.discovery.found import DCP, PARTS, RANK_FILES, SAFETENSORS, TORCH, Location
from ema_ckpt.formats.rank_files.names import families, family_of
from ema_ckpt.storage.directories import Folder, base_name, is_folder, join, list_folder, parent_of
from ema_ckpt.storage.files import is_mangled_url, is_url
from ema_ckpt.storage.stage_names import is_stage_name, recovered

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_INDEX = ".index.json"
_STEP = re.compile(
    r"(?:^|.*[-_=])(?:step|checkpoint|global_step|iter|iteration|epoch|ckpt)[-_=]?(\d+)", re.ASCII
)
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(\.(?:safetensors|pt|pth|bin|ckpt))", re.ASCII | re.DOTALL)
_RANK_METADATA = re.compile(r"__(\d+)\.metadata", re.ASCII)
_NEVER = re.compile(
    r"scheduler\..*|.*random_state.*|rng_state.*|training_args\.bin|.*trainer_state.*|common\.pt",
    re.DOTALL,
)
_ZERO_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt", re.ASCII)
_ZERO_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt", re.ASCII)
_WEIGHTS = re.compile(r"(?:diffusion_pytorch_|pytorch_|adapter_)?model\.safetensors")
_LEVELS_BELOW = 2


def locate_checkpoint(path: str) -> Location:
    """The checkpoint that `path`, a local path or an fsspec URL, stands for.

    Raises:
        SourceError: `not-found`, `not-a-checkpoint`, `unreadable`, `incomplete` if no step is
            complete, `missing-metadata` for a DCP directory without any or shards without an index,
            `missing-extra`.
        UsageError: `ambiguous-path` if several checkpoints are there.
    """
    path = path if is_url(path) else path.rstrip("/") or path[:1]
    is_directory = is_folder(path)
    if is_directory is None:
        return _interrupted_switch(path)
    if not is_directory:
        return _file(path)
    folder = _list(path)
    return _in_directory(folder) or _in_children(folder, _LEVELS_BELOW).only(folder)


def _interrupted_switch(path: str) -> Location:
    """A target whose writer crashed between two renames is read from its stage."""
    stage = None if is_url(path) or not path else recovered(path)
    if stage is None:
        hint = (
            " (a URL loses a slash when it becomes a Path: pass it as text)"
            if is_mangled_url(path)
            else ""
        )
        raise SourceError("not-found", f"{path}: no such file or directory{hint}", file=path)
    note = f"{path} was being replaced when its writer died; reading the complete new checkpoint in {stage}"
    return locate_checkpoint(str(stage))._replace(note=note)


def _list(root: str) -> Folder:
    listed = list_folder(root)
    return Folder(
        root,
        *(
            tuple(n for n in names if not is_stage_name(n))
            for names in (listed.folders, listed.files)
        ),
    )


# One file.


def _file(path: str) -> Location:
    root, name = parent_of(path), base_name(path)
    if name.endswith(_INDEX):
        return Location(_index_format(name), root, (name,), path)
    if name.endswith(".safetensors"):
        return Location(SAFETENSORS, root, (name,), path)
    if name == ".metadata" or _RANK_METADATA.fullmatch(name) or name.endswith(".distcp"):
        return _distributed(_list(root)) or _no_metadata(root)
    if not name.endswith(TORCH_SUFFIXES):
        kinds = ", ".join((".safetensors", *TORCH_SUFFIXES, _INDEX))
        raise SourceError(
            "not-a-checkpoint", f"{path}: not a file of a known kind ({kinds})", file=path
        )
    family = family_of(name)
    if family is None:
        return Location(TORCH, root, (name,), path)
    return Location(RANK_FILES, root, tuple(families(_list(root).files)[family]), path)


def _index_format(name: str) -> str:
    return TORCH if name.removesuffix(_INDEX).endswith(TORCH_SUFFIXES) else SAFETENSORS


# A directory.


def _in_directory(folder: Folder) -> Location | None:
    whole = _directory_itself(folder)
    if whole is None:
        return _newest(folder)
    return (_newest(folder, stray) if (stray := _may_be_misplaced(whole)) else None) or whole


def _may_be_misplaced(found: Location) -> str:
    """What makes a directory count as a checkpoint, if somebody may have put it into that of a run;
    else nothing.

    That is parts without live weights, or one file that has not the name of published weights. They
    must not take the place of the run's steps.
    """
    if found.format == PARTS:
        return (
            ""
            if any(part_role(name) == LIVE for name, _ in found.parts)
            else shown([n for n, _ in found.parts])
        )
    is_one = (
        found.format == SAFETENSORS
        and len(found.names) == 1
        and not found.names[0].endswith(_INDEX)
    )
    return found.names[0] if is_one and not _WEIGHTS.fullmatch(found.names[0]) else ""


def _directory_itself(folder: Folder) -> Location | None:
    """The directory itself, or the parts in it. One file or family that could be a part is no part
    if alone.
    """
    found = _distributed(folder) or _indexed(folder)
    if found is not None:
        return found
    alone, parts = _alone(folder), _parts(folder)
    if len(parts) > 1 or (parts and alone is None):
        return Location(PARTS, folder.root, (), folder.root, tuple(parts))
    return alone


def _distributed(folder: Folder) -> Location | None:
    if ".metadata" in folder.files:
        return Location(DCP, folder.root, (".metadata",), folder.root)
    ranks = [
        (int(match[1]), name) for name in folder.files if (match := _RANK_METADATA.fullmatch(name))
    ]
    if ranks:
        return Location(DCP, folder.root, tuple(name for _, name in sorted(ranks)), folder.root)
    if any(name.endswith(".distcp") for name in folder.files):
        return _no_metadata(folder.root)
    return None


def _no_metadata(root: str) -> Location:
    raise SourceError(
        "missing-metadata",
        f"{root}: .distcp files without a .metadata: the save did not end, or the file was not copied",
        file=".metadata",
    )


def _indexed(folder: Folder) -> Location | None:
    names = [name for name in folder.files if name.endswith(_INDEX)]
    # Repositories often hold the same weights in both formats.
    best = [name for name in names if _index_format(name) == SAFETENSORS] or names
    if len(best) > 1:
        raise _ambiguous(folder.root, best)
    if not best:
        _refuse_shards(folder)
        return None
    return Location(_index_format(best[0]), folder.root, (best[0],), folder.root)


def _refuse_shards(folder: Folder) -> None:
    """Refuse shards without an index: neither one of them nor all that are here need be the whole
    checkpoint.
    """
    sets: dict[tuple[str, str, int], set[int]] = {}
    for name in folder.files:
        match = _SHARD.fullmatch(name)
        if match and int(match[3]) > 1:
            sets.setdefault((match[1], match[4], int(match[3])), set()).add(int(match[2]))
    for (stem, suffix, count), numbers in sets.items():
        index = f"{stem}{suffix}{_INDEX}"
        here = f"{len(numbers)} of the {count} shards {stem}-*-of-*{suffix}"
        message = f"{folder.root}: {here} without {index}, which names the tensors in each"
        remedy = (
            f"copy {index} beside them"
            if len(numbers) == count
            else f"copy {index} and the missing shards here"
        )
        raise SourceError("missing-metadata", f"{message}; {remedy}, or name one shard", file=index)


def _alone(folder: Folder) -> Location | None:
    """The one safetensors file, or the one family of rank files, of a directory that holds just one
    of these.
    """
    singles = [(name,) for name in folder.files if name.endswith(".safetensors")]
    grouped = [tuple(names) for names in families(_candidates(folder)).values()]
    if len(singles) + len(grouped) != 1:
        return None
    return Location(
        SAFETENSORS if singles else RANK_FILES, folder.root, (singles or grouped)[0], folder.root
    )


def _candidates(folder: Folder) -> list[str]:
    names = [name for name in folder.files if not _NEVER.fullmatch(name)]
    # ZeRO's optimizer files hold the weights in full precision; the model's file beside them is
    # read along.
    partitioned = any(_ZERO_OPTIMIZER.fullmatch(name) for name in names)
    return [name for name in names if not (partitioned and _ZERO_MODEL.fullmatch(name))]


def _parts(folder: Folder) -> list[tuple[str, Location]]:
    parts: list[tuple[str, Location]] = []
    for name in folder.folders:
        inside = _part_folder(join(folder.root, name)) if part_role(name) else None
        if inside:
            parts.append((name, inside))
    for family, files in families(_candidates(folder)).items():
        if part_role(family.name):
            found = Location(RANK_FILES, folder.root, tuple(files), join(folder.root, files[0]))
            parts.append((family.name, found))
    for file in _candidates(folder):
        name = file.removesuffix(".safetensors")
        if name != file and part_role(name):
            parts.append(
                (name, Location(SAFETENSORS, folder.root, (file,), join(folder.root, file)))
            )
    names = [name for name, _ in parts]
    twice = [
        _relative(found.resolved, folder.root) for name, found in parts if names.count(name) > 1
    ]
    if twice:
        raise _ambiguous(folder.root, twice)
    return parts


def _part_folder(root: str) -> Location | None:
    folder = _list(root)
    found = _directory_itself(folder)
    loose = [] if found else _loose(folder)
    return loose[0] if len(loose) == 1 else found


# Steps.


def step_number(name: str) -> int | None:
    """The number in a step's directory name (`step_500`, `checkpoint-500`, `epoch=3-step=500`), or
    None.
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def latest_step(parent: str) -> str | None:
    """Path of the complete step with the highest number among the children of `parent`, or None.

    Raises:
        SourceError: `unreadable`.
        UsageError: `ambiguous-path` if two complete steps have that number.
    """
    steps = _Steps(_list(parent)) if is_folder(parent) else None
    return join(parent, steps.newest[0]) if steps and steps.newest else None


def _newest(folder: Folder, stray: str = "") -> Location | None:
    """The newest complete step; with something stray beside them, None also where no step is
    complete.
    """
    steps = _Steps(folder)
    if steps.newest is None:
        if steps.broken and not stray:
            several = counted(len(steps.broken), "step")
            message = f"{folder.root}: none of its {several} is complete ({_listed(steps.broken)})"
            raise SourceError("incomplete", message, file=folder.root)
        return None
    name, found = steps.newest
    skipped = f"; not complete: {_listed(steps.broken)}" if steps.broken else ""
    beside = f"; {stray}, which lies beside them, is not read" if stray else ""
    several = counted(steps.count, "step")
    return found._replace(
        note=f"reading {name}, the newest complete of {several} in {folder.root}{skipped}{beside}"
    )


def _listed(broken: Sequence[tuple[str, EmaCkptError]]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in broken[:10])


class _Steps:
    """The numbered children of a directory: the newest complete one, and those above it that are
    not.
    """

    def __init__(self, folder: Folder) -> None:
        numbered: dict[int, list[str]] = {}
        for name in folder.folders:
            number = step_number(name)
            if number is not None:
                numbered.setdefault(number, []).append(name)
        self.count = sum(map(len, numbered.values()))
        self.broken: list[tuple[str, EmaCkptError]] = []
        self.newest: tuple[str, Location] | None = None
        for number in sorted(numbered, reverse=True):
            complete = [
                (n, found)
                for n in numbered[number]
                if (found := self._complete(join(folder.root, n), n))
            ]
            if len(complete) > 1:
                raise _ambiguous(folder.root, [name for name, _ in complete])
            if complete:
                self.newest = complete[0]
                return

    def _complete(self, root: str, name: str) -> Location | None:
        try:
            folder = _list(root)
            hits = (
                [found]
                if (found := _in_directory(folder))
                else _in_children(folder, _LEVELS_BELOW - 1).hits
            )
            if len(hits) > 1:
                raise _ambiguous(root, [_relative(hit.resolved, root) for hit in hits])
            for hit in hits:
                check_complete(hit)
        except UsageError:
            raise
        except EmaCkptError as error:
            self.broken.append((name, error))
            return None
        return hits[0] if hits else None


# Further down.


@dataclass(slots=True)
class _Search:
    """Checkpoints found below a directory, and directories that would be some were they
    complete.
    """

    hits: list[Location] = field(default_factory=list)
    broken: list[tuple[str, EmaCkptError]] = field(default_factory=list)

    def only(self, folder: Folder) -> Location:
        """The one checkpoint that there is."""
        if len(self.hits) > 1:
            raise _ambiguous(
                folder.root, [_relative(hit.resolved, folder.root) for hit in self.hits]
            )
        if self.hits:
            skipped = f"; not complete: {_listed(self.broken)}" if self.broken else ""
            hit = self.hits[0]
            return hit._replace(
                note=hit.note or f"reading {hit.resolved}, the only checkpoint found{skipped}"
            )
        if self.broken:
            raise self.broken[0][1]
        names = [*(f"{name}/" for name in folder.folders), *folder.files]
        listed = f"it holds {shown(names)}" if names else "it is empty"
        kinds = "no .metadata, safetensors, index, torch or rank file"
        message = f"{folder.root}: no checkpoint here or up to {_LEVELS_BELOW} levels down ({kinds}); {listed}"
        raise SourceError("not-a-checkpoint", message, file=folder.root)


def _in_children(folder: Folder, levels: int) -> _Search:
    """Checkpoints inside `folder`, down to `levels` levels: loose files, and directories that are
    some.
    """
    search = _Search(_loose(folder))
    for name in folder.folders:
        if name.startswith("."):
            continue
        root = join(folder.root, name)
        try:
            child = _list(root)
            here = _in_directory(child)
        except SourceError as error:
            # Not to be listed, or not complete: no answer, but worth a word if there is no other.
            search.broken.append((name, error))
            continue
        if here is not None:
            search.hits.append(here)
        elif levels > 1:
            deeper = _in_children(child, levels - 1)
            search.hits += deeper.hits
            search.broken += deeper.broken
    return search


def _loose(folder: Folder) -> list[Location]:
    """Files of a directory that are checkpoints by themselves; optimizer files only if nothing else
    is there.
    """
    names = _candidates(folder)
    ranked = families(names)
    grouped = {name for files in ranked.values() for name in files}
    found = [
        Location(RANK_FILES, folder.root, tuple(files), join(folder.root, files[0]))
        for files in ranked.values()
    ]
    for name in names:
        if name.endswith((".safetensors", *TORCH_SUFFIXES)) and name not in grouped:
            kind = SAFETENSORS if name.endswith(".safetensors") else TORCH
            found.append(Location(kind, folder.root, (name,), join(folder.root, name)))
    return [
        one for one in found if part_role(one.names[0].partition(".")[0]) not in (OPTIMIZER, OTHER)
    ] or found


def _relative(path: str, root: str) -> str:
    return path[len(root) :].lstrip("/") if path.startswith(root) else path


def _ambiguous(root: str, names: Sequence[str]) -> UsageError:
    return UsageError(
        "ambiguous-path",
        f"{root}: holds {len(names)} checkpoints, {shown(names)}; name one of them",
    )
