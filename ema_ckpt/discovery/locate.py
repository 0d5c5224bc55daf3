"""Which checkpoint a path stands for: itself, its parts, its newest complete step, or one below it.

The order is fixed and the first hit wins: the path itself, recognised parts in it, the complete
step with the highest number, exactly one of these one or two levels down. Anything else is an error
that lists what is there. An average alone, or another weight file, that lies beside steps is passed
over for them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import AccessError, EmaCkptError, SourceError, UsageError
from ema_ckpt.core.names import LIVE, part_role
from ema_ckpt.core.text import counted, shown
from ema_ckpt.discovery.recognise import (
    DCP,
    INDEX_SUFFIX,
    PARTS,
    SAFETENSORS,
    Location,
    ambiguous,
    list_directory,
    locate_directory,
    locate_file,
    loose_files,
)
from ema_ckpt.formats.rank_files.names import check_ranks
from ema_ckpt.storage.directories import Folder, base_name, is_folder, join, parent_of
from ema_ckpt.storage.files import is_mangled_url, is_url, open_files
from ema_ckpt.storage.stage_names import find_interrupted_switch

_STEP = re.compile(
    r"(?:^|.*[-_=])(?:step|checkpoint|global_step|iter|iteration|epoch|ckpt)[-_=]?(\d+)", re.ASCII
)
_PUBLISHED_WEIGHTS = re.compile(r"(?:diffusion_pytorch_|pytorch_|adapter_)?model\.safetensors")
_LEVELS_BELOW = 2


def locate_checkpoint(path: str) -> Location:
    """Locate the checkpoint that `path`, a local path or an fsspec URL, stands for.

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
        return locate_file(path)
    folder = list_directory(path)
    return _in_directory(folder) or _in_children(folder, _LEVELS_BELOW).only(folder)


def latest(parent: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint with the highest step number in the directory `parent`, or None.

    Complete means that its metadata is readable and every file it names is there with its size;
    numbers compare as integers (`step_2500` is newer than `step_500`). The command line finds the
    newest step in the same way.

    Raises:
        UsageError: `ambiguous-path` if two complete steps have the highest number.
    """
    step = latest_step(os.fspath(parent))
    return None if step is None else Path(step)


def latest_step(parent: str) -> str | None:
    """Find the path or URL of the complete step with the highest number in `parent`, or None.

    Raises:
        SourceError: `unreadable`.
        UsageError: `ambiguous-path` if two complete steps have that number.
    """
    steps = _find_steps(list_directory(parent)) if is_folder(parent) else None
    return join(parent, steps.newest[0]) if steps and steps.newest else None


def step_number(name: str) -> int | None:
    """Parse the number in the name of a step (`step_500`, `checkpoint-500`, `epoch=3-step=500`)."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def check_complete(location: Location) -> Location:
    """Check that every file is there with at least its size; return `location` with its metadata.

    Raises:
        SourceError: `missing-file`, `truncated-file`, `incomplete`, and whatever reading the
            metadata may raise.
    """
    if location.parts:
        parts = tuple((name, check_complete(part)) for name, part in location.parts)
        return location._replace(parts=parts)
    source = open_files(location.root)
    try:
        if location.format == DCP:
            from ema_ckpt.formats.dcp.reader import read_metadata, required_files

            metadata = location.metadata or read_metadata(source, location.names)
            for name, nbytes in required_files(metadata).items():
                size = source.size(name)
                if size < nbytes:
                    message = f"expected {nbytes} bytes, found {size}: the file is truncated"
                    raise SourceError("truncated-file", f"{name}: {message}", file=name)
            return location._replace(metadata=metadata)
        if location.format == SAFETENSORS:
            from ema_ckpt.formats.safetensors.reader import open_safetensors

            open_safetensors(source, location.names, location.resolved, location.resolved)
        else:
            for name in location.names:
                _check_torch_file(source, name)
            check_ranks(location.names, location.resolved)
        return location
    finally:
        source.close()


def _check_torch_file(source: Files, name: str) -> None:
    nbytes = source.size(name)
    if not nbytes:
        raise SourceError("truncated-file", f"{name}: the file is empty", file=name)
    if source.read(name, 0, min(4, nbytes)) == b"PK\x03\x04":
        from ema_ckpt.formats.torch_zip.reader import read_archive

        read_archive(source, name, 0, nbytes)


def _interrupted_switch(path: str) -> Location:
    """Read a target whose writer crashed between two renames from its stage."""
    stage = None if is_url(path) or not path else find_interrupted_switch(path)
    if stage is None:
        hint = ""
        if is_mangled_url(path):
            hint = " (a URL loses a slash when it becomes a Path: pass it as text)"
        elif steps := _steps_beside(path):
            hint = f"; the steps there are {shown(steps)}"
        raise SourceError("not-found", f"{path}: no such file or directory{hint}", file=path)
    note = f"{path} was being replaced when its writer died; reading the complete new checkpoint in"
    return locate_checkpoint(str(stage))._replace(note=f"{note} {stage}")


def _steps_beside(path: str) -> list[str]:
    """List the steps that lie where the step `path` does not, the newest first."""
    parent = parent_of(path)
    if step_number(base_name(path)) is None or not is_folder(parent):
        return []
    numbers = {name: step_number(name) for name in list_directory(parent).folders}
    steps = {name: number for name, number in numbers.items() if number is not None}
    return sorted(steps, key=lambda name: -steps[name])


def _in_directory(folder: Folder) -> Location | None:
    """Locate the checkpoint that a directory is, or the newest step of the run that it is."""
    location = locate_directory(folder)
    if location is None:
        return _newest_step(folder)
    stray = _may_be_misplaced(location)
    return (_newest_step(folder, stray) if stray else None) or location


def _may_be_misplaced(location: Location) -> str:
    """Name the files that somebody may have put into the directory of a run, or return "".

    Those are parts without live weights, or one file without a name of published weights. They must
    not take the place of the run's steps.
    """
    if location.format == PARTS:
        names = [name for name, _ in location.parts]
        return "" if LIVE in map(part_role, names) else shown(names)
    name = location.names[0]
    is_file = location.format == SAFETENSORS and len(location.names) == 1
    if not is_file or name.endswith(INDEX_SUFFIX) or _PUBLISHED_WEIGHTS.fullmatch(name):
        return ""
    return name


def _listed(broken: list[tuple[str, EmaCkptError]]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in broken[:10])


@dataclass(slots=True)
class _Steps:
    """Number of steps in a directory, the newest complete one, and newer ones that are broken."""

    count: int
    newest: tuple[str, Location] | None = None
    broken: list[tuple[str, EmaCkptError]] = field(default_factory=list)


def _find_steps(folder: Folder) -> _Steps:
    numbered: dict[int, list[str]] = {}
    for name in folder.folders:
        number = step_number(name)
        if number is not None:
            numbered.setdefault(number, []).append(name)
    steps = _Steps(sum(map(len, numbered.values())))
    for number in sorted(numbered, reverse=True):
        complete: list[tuple[str, Location]] = []
        for name in numbered[number]:
            try:
                location = _complete_step(join(folder.root, name))
            except (UsageError, AccessError):
                raise
            except EmaCkptError as error:
                steps.broken.append((name, error))
                continue
            if location is not None:
                complete.append((name, location))
        if len(complete) > 1:
            raise ambiguous(folder.root, [join(folder.root, name) for name, _ in complete])
        if complete:
            steps.newest = complete[0]
            break
    return steps


def _complete_step(root: str) -> Location | None:
    folder = list_directory(root)
    location = _in_directory(folder)
    if location is None:
        hits = _in_children(folder, _LEVELS_BELOW - 1).hits
        if len(hits) > 1:
            raise ambiguous(root, [hit.resolved for hit in hits])
        if not hits:
            return None
        location = hits[0]
    return check_complete(location)


def _newest_step(folder: Folder, stray: str = "") -> Location | None:
    """Locate the newest complete step.

    Raises SourceError `incomplete` if no step is complete, unless something `stray` lies beside
    them, which can be read instead.
    """
    steps = _find_steps(folder)
    broken = _listed(steps.broken)
    if steps.newest is None:
        if broken and not stray:
            several = counted(len(steps.broken), "step")
            message = f"{folder.root}: none of its {several} is complete ({broken})"
            raise SourceError("incomplete", message, file=folder.root)
        return None
    name, location = steps.newest
    several = counted(steps.count, "step")
    note = f"reading {name}, the newest complete of {several} in {folder.root}"
    if broken:
        note += f"; not complete: {broken}"
    if stray:
        note += f"; {stray}, which lies beside them, is not read"
    return location._replace(note=note)


@dataclass(slots=True)
class _Search:
    """Checkpoints below a directory, and directories that would be some were they complete."""

    hits: list[Location] = field(default_factory=list)
    broken: list[tuple[str, EmaCkptError]] = field(default_factory=list)

    def only(self, folder: Folder) -> Location:
        """Return the only checkpoint below `folder`. Raises an error that lists what is there."""
        root = folder.root
        if len(self.hits) > 1:
            raise ambiguous(root, [hit.resolved for hit in self.hits])
        if self.hits:
            hit = self.hits[0]
            note = f"reading {hit.resolved}, the only checkpoint found"
            if self.broken:
                note += f"; not complete: {_listed(self.broken)}"
            return hit._replace(note=hit.note or note)
        if self.broken:
            raise self.broken[0][1]
        names = [*(f"{name}/" for name in folder.folders), *folder.files]
        contents = f"it holds {shown(names)}" if names else "it is empty"
        kinds = "no .metadata, safetensors, index, torch or rank file"
        message = f"{root}: no checkpoint here or up to {_LEVELS_BELOW} levels down"
        raise SourceError("not-a-checkpoint", f"{message} ({kinds}); {contents}", file=root)


def _in_children(folder: Folder, levels: int) -> _Search:
    """Search `folder` to a depth of `levels`: loose files, and directories that are checkpoints."""
    search = _Search(loose_files(folder))
    for name in folder.folders:
        if name.startswith("."):
            continue
        try:
            child = list_directory(join(folder.root, name))
            location = _in_directory(child)
        except (SourceError, AccessError) as error:
            # Not to be listed, or not complete: no answer, but worth a word if there is no other.
            search.broken.append((name, error))
            continue
        if location is not None:
            search.hits.append(location)
        elif levels > 1:
            deeper = _in_children(child, levels - 1)
            search.hits += deeper.hits
            search.broken += deeper.broken
    return search
