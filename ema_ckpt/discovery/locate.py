"""Which checkpoint a path stands for: itself, its parts, its newest complete step, or one below it.

The order is fixed and the first hit wins: the path itself, recognised parts in it, the complete
step with the highest number, exactly one of these one or two levels down. Anything else is an error
that lists what is there. An average alone, or another weight file, that lies beside steps is passed
over for them. What a directory holds besides the checkpoint that is taken is listed with it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from ema_ckpt.core.display import displayed
from ema_ckpt.core.errors import AccessError, EmaCkptError, SourceError, UsageError
from ema_ckpt.core.names import LIVE
from ema_ckpt.core.text import counted, path_text, shown
from ema_ckpt.discovery.by_content import judged
from ema_ckpt.discovery.completeness import check_complete
from ema_ckpt.discovery.depth import Depth, TooDeepError
from ema_ckpt.discovery.location import PARTS, SAFETENSORS, LeftOut, Location, ambiguous, is_index
from ema_ckpt.discovery.neighbours import left_out_of, neighbours_of
from ema_ckpt.discovery.recognise import (
    list_directory,
    locate_directory,
    locate_file,
    locate_pattern,
    loose_files,
    refuse_one_rank_of_several,
    refuse_record_alone,
)
from ema_ckpt.discovery.step_names import step_order
from ema_ckpt.discovery.steps import (
    Steps,
    find_steps,
    locate_step,
    steps_beside,
    steps_between,
)
from ema_ckpt.storage.directories import Folder, base_name, is_folder, join, parent_of
from ema_ckpt.storage.files import is_chained_url, is_mangled_url, is_url
from ema_ckpt.storage.stage_names import find_interrupted_switch

_PUBLISHED_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_|pytorch_|adapter_)?model(?:\.[^.]+)?\.safetensors"
)
_LEVELS_BELOW = 2
_LISTINGS = 5  # of a run whose steps come and go meanwhile
_MOST_TOLD = 10  # steps, each in a line of the log


def locate_checkpoint(path: str) -> Location:
    """Locate the checkpoint that `path`, a local path or an fsspec URL, stands for.

    Raises:
        SourceError: `not-found`, `not-a-checkpoint`, `unreadable`, `incomplete` if no step is
            complete or for one rank's file of several, `missing-metadata` for a DCP directory
            without any or shards without an index, `unsupported` for a file of a kind that is not
            read, `missing-extra`.
        UsageError: `ambiguous-path` if several checkpoints are there.
    """
    path = path if is_url(path) else path.rstrip("/") or path[:1]
    is_directory = is_folder(path)
    if is_directory is None:
        return locate_pattern(path) or _interrupted_switch(path)
    _refuse_pipe(path)
    depth = Depth()
    if step_order(base_name(path)) is not None:
        location = locate_step(path, partial(_in_root, depth=depth))
    else:
        location = _in_root(path, depth) if is_directory else locate_file(path)
    if location is None:
        folder = list_directory(path)
        location = _in_children(folder, _LEVELS_BELOW, depth).only(folder)
    location = judged(location)
    refuse_one_rank_of_several(location)
    if not is_directory:
        return location
    # What lies beside it is listed too; places are given below `path`.
    listed = dict.fromkeys((*location.left_out, *neighbours_of(location)))
    below = [item._replace(path=item.path.removeprefix(path).lstrip("/")) for item in listed]
    return location._replace(left_out=tuple(below))


def _refuse_pipe(path: str) -> None:
    """Raise SourceError `not-a-checkpoint` for what is neither a file nor a directory."""
    if is_url(path):
        return
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # opening it tells what is wrong
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        reason = "is a pipe, a socket or a device, and no checkpoint; save it as a file first"
        raise SourceError("not-a-checkpoint", f"{path}: {reason}")


def _in_root(root: str, depth: Depth) -> Location | None:
    """Locate the checkpoint of a directory or below it, unless only other things are there.

    Raises TooDeepError if steps lie deeper than is followed, and nothing lies beside them.
    """
    folder = list_directory(root)
    try:
        return _in_directory(folder, depth)
    except TooDeepError as error:
        search = _in_children(folder, _LEVELS_BELOW, depth)
        search.broken.insert(0, (error.place or root, error))
        return search.only(folder)


# Latest.


def latest(parent: str | os.PathLike[str], incomplete: str = "raise") -> Path | str | None:
    """The complete checkpoint with the highest step number in the directory `parent`, or None.

    Complete means that its metadata is readable and every file it names is there with its size;
    numbers compare as integers (`step_2500` is newer than `step_500`). The command line finds the
    newest step in the same way. A path that is a checkpoint itself is returned as it is. A newer
    step that is not complete is passed over, and logged to `ema_ckpt` (level warning). So are
    checkpoints that are not named as steps, where no step is.

    Args:
        parent: a directory of steps, or a checkpoint.
        incomplete: what to do if there are steps and none is complete: `"raise"`, or `"ignore"` to
            return None, as if there were none. A script that then starts from the beginning would
            overwrite them.

    Returns:
        A path, or text for a URL; None if there is neither a checkpoint nor a step.

    Raises:
        SourceError: `incomplete`: there are steps, or `parent` is a checkpoint, and nothing is
            complete; `source-changed`: its steps come and go too fast.
        AccessError: `unreadable`: the system or the server refuses to tell.
        UsageError: `ambiguous-path` if two complete steps have the highest number; `usage`.
    """
    if incomplete not in ("raise", "ignore"):
        raise UsageError("usage", f"incomplete is 'raise' or 'ignore'; found {incomplete!r}")
    path = path_text(parent)
    try:
        found = latest_step(path)
    except SourceError as error:
        if incomplete == "raise" or error.code in ("missing-extra", "source-changed"):
            raise
        return None
    return found if found is None or is_url(found) else Path(found)


def latest_step(path: str) -> str | None:
    """Find the newest complete step in `path`, or `path` itself if it is a checkpoint, as `latest`.

    Raises:
        SourceError: what is wrong with steps of which none is complete, or with a checkpoint;
            `source-changed`: they come and go too fast.
        AccessError: `unreadable`.
        UsageError: `ambiguous-path` if two complete steps have that number.
    """
    if not is_folder(path):
        return _itself(path)
    for _ in range(_LISTINGS):
        folder = list_directory(path)
        try:
            found = _latest_in(folder, path)
        except SourceError:
            if not _has_other_steps(folder):
                raise
        else:
            if found is not None or not _has_other_steps(folder):
                return found
    # Not None, and not that none is complete: a script would begin anew, and overwrite them.
    message = f"{path}: its steps come and go faster than they can be looked into; try again"
    raise SourceError("source-changed", message, file=path)


def _has_other_steps(folder: Folder) -> bool:
    """Whether steps came or went since `folder` was listed, as where each replaces the one before.

    Those that were listed may have been deleted before they were looked into.
    """
    before = _step_names(folder)
    return bool(before) and _step_names(list_directory(folder.root)) != before


def _step_names(folder: Folder) -> set[str]:
    return {name for name in (*folder.folders, *folder.files) if step_order(name) is not None}


def _latest_in(folder: Folder, path: str) -> str | None:
    location = locate_directory(folder)
    if location is not None and not _may_be_misplaced(location):
        check_complete(location)
        return path
    steps = _find_steps(folder, Depth())
    if steps.newest:
        _tell(steps.broken, path)
        return join(path, steps.newest[0])
    if steps.too_deep and not steps.broken:
        raise steps.too_deep
    if steps.broken:
        names = shown([base_name(step.path) for step in steps.broken])
        raise steps.none_complete(f'; remove {names}, or pass incomplete="ignore" to start anew')
    if location is not None:
        return path
    _tell_of_others(folder)
    return None


def _tell_of_others(folder: Folder) -> None:
    """Log the checkpoints in a directory without steps: a run that looks for one starts anew."""
    hits = _in_children(folder, _LEVELS_BELOW, Depth()).hits
    if hits:
        names = shown([hit.resolved.removeprefix(folder.root).strip("/") for hit in hits])
        passed = f"{folder.root}: latest passes over {names}"
        message = f"{passed}: a checkpoint, but not named as a step is, such as step_500"
        logging.getLogger("ema_ckpt").warning(displayed(message))


def _tell(broken: list[LeftOut], path: str) -> None:
    """Log the steps in `path` that are not complete."""
    told = [step.diagnostic().message for step in broken[:_MOST_TOLD]]
    if len(broken) > _MOST_TOLD:
        more = counted(len(broken) - _MOST_TOLD, "further step")
        told.append(f"{path}: left out too, newer and not complete: {more}")
    for message in told:
        logging.getLogger("ema_ckpt").warning(displayed(message))


def _itself(path: str) -> str | None:
    """Return the path of a file that is a checkpoint."""
    if is_folder(path) is None:
        if why := _no_path(path):  # None would let a run begin anew
            raise UsageError("usage", f"{path}: no such file or directory ({why})")
        return None
    try:
        check_complete(locate_file(path))
    except SourceError as error:
        if error.code in ("not-a-checkpoint", "unsupported"):
            return None
        raise
    return path


# A directory.


def _interrupted_switch(path: str) -> Location:
    """Read a target whose writer crashed between two renames from its stage."""
    stage = None if is_url(path) or not path else find_interrupted_switch(path)
    if stage is None:
        if not is_url(path) and os.path.exists(path):  # its switch has just ended
            return locate_checkpoint(path)
        hint = ""
        if why := _no_path(path):
            hint = f" ({why})"
        elif steps := steps_beside(path):
            hint = f"; the steps there are {shown(steps)}"
        elif near := _nearest_beside(path):
            hint = f"; did you mean {near!r}?"
        raise SourceError("not-found", f"{path}: no such file or directory{hint}", file=path)
    note = f"{path} was being replaced when its writer died; reading the complete new checkpoint in"
    return locate_checkpoint(str(stage))._replace(note=f"{note} {stage}")


def _no_path(path: str) -> str:
    """Say what is wrong with text that was to be a URL and would be taken for a local path."""
    if is_mangled_url(path):
        return "a URL loses a slash when it becomes a Path: pass it as text"
    return "it is a chain of URLs; name the last one alone" if is_chained_url(path) else ""


def _nearest_beside(path: str) -> str | None:
    """Return the path whose name looks most like that of `path`, of those beside it on disk."""
    from difflib import get_close_matches

    parent = parent_of(path)
    if is_url(path) or not is_folder(parent):
        return None
    try:
        listed = list_directory(parent)
    except EmaCkptError:  # what is missing is the news, not that a directory cannot be read
        return None
    near = get_close_matches(base_name(path), [*listed.folders, *listed.files], n=1, cutoff=0.7)
    return os.path.join(os.path.dirname(path.rstrip("/")), near[0]) if near else None


def _in_directory(folder: Folder, depth: Depth) -> Location | None:
    """Locate the checkpoint that a directory is, or the newest step of the run that it is."""
    return depth.search("directory", folder.root, lambda: _itself_or_newest(folder, depth))


def _itself_or_newest(folder: Folder, depth: Depth) -> Location | None:
    location = locate_directory(folder)
    if location is None:
        step = _newest_step(folder, depth)
        if step is None:
            refuse_record_alone(folder)
        return step
    step = _newest_step(folder, depth, location) if _may_be_misplaced(location) else None
    return step or location


def _may_be_misplaced(location: Location) -> bool:
    """Whether somebody may have put the files of a location into the directory of a run.

    Those are parts without live weights, or one file without a name of published weights. They must
    not take the place of the run's steps.
    """
    if location.format == PARTS:
        return LIVE not in location.roles
    name = location.names[0]
    is_file = location.format == SAFETENSORS and len(location.names) == 1 and not is_index(name)
    return is_file and not _PUBLISHED_WEIGHTS.fullmatch(name)


def _find_steps(folder: Folder, depth: Depth) -> Steps:
    return find_steps(folder, partial(_locate_in_step, depth=depth))


def select_steps(
    path: str, *, count: int | None, first: int = 0, last: float = math.inf, stride: int = 1
) -> tuple[list[str], list[LeftOut]]:
    """List the complete steps of a run, the oldest first, and those that are not complete.

    Args:
        path: the directory of the run.
        count: how many at most, the newest; None for all.
        first, last: the smallest and the greatest number of a step.
        stride: take each `stride`-th, counted from the newest.

    Raises:
        SourceError: `not-found`. UsageError: `ambiguous-path`, `usage` if no step is there.
    """
    if not is_folder(path):
        raise SourceError("not-found", f"{path}: no such directory of steps", file=path)
    found, steps = steps_between(
        list_directory(path), partial(_locate_in_step, depth=Depth()), first, last
    )
    end = None if count is None else count * stride
    picked = [step for _, step in islice(found, 0, end, stride)]
    if not picked:
        beside = f"; {steps.too_deep}" if steps.too_deep else ""
        if steps.broken:
            beside = f"; not complete: {steps.described_broken()}"
        span = f"from {first} on" if last == math.inf else f"from {first} to {last:g}"
        raise UsageError("usage", f"{path}: no complete step {span}{beside}{_newest_of(path)}")
    return picked[::-1], steps.broken


def _steps_between(path: str, first: int, last: float) -> tuple[Iterator[tuple[int, str]], Steps]:
    locate_folder = partial(_locate_in_step, depth=Depth())
    return steps_between(list_directory(path), locate_folder, first, last)


def _newest_of(path: str) -> str:
    """Say which step of a run is its newest complete one; nothing if there is none."""
    found, _ = steps_between(
        list_directory(path), partial(_locate_in_step, depth=Depth()), 0, math.inf
    )
    newest = next(found, None)
    return "" if newest is None else f"; the newest complete one is {newest[0]}"


def _locate_in_step(root: str, depth: Depth) -> Location | None:
    inner = depth.below(root)
    return inner.search("step", root, lambda: _in_step(root, inner))


def _in_step(root: str, depth: Depth) -> Location | None:
    folder = list_directory(root)
    too_deep = None
    try:
        location = _in_directory(folder, depth)
    except TooDeepError as error:
        location, too_deep = None, error
    if location is None:
        hits = _in_children(folder, _LEVELS_BELOW - 1, depth).hits
        if len(hits) > 1:
            raise ambiguous(root, [hit.resolved for hit in hits])
        if too_deep and not hits:
            raise too_deep
        location = hits[0] if hits else None
    return location


def _newest_step(folder: Folder, depth: Depth, other: Location | None = None) -> Location | None:
    """Locate the newest complete step, and list what else the directory holds.

    Raises SourceError `incomplete` if no step is complete, or TooDeepError, unless something
    `other` lies beside them, which can be read instead.
    """
    steps = _find_steps(folder, depth)
    if steps.newest is None:
        if steps.broken and other is None:
            raise steps.none_complete()
        if steps.too_deep and other is None:
            raise steps.too_deep
        return None
    name, location = steps.newest
    several = counted(steps.count, "step")
    note = f"reading {name}, the newest complete of {several} in {folder.root}"
    beside = left_out_of(folder, steps.names)
    left_out = [*location.left_out, *steps.broken, *steps.hollow, *beside]
    return location._replace(note=note, left_out=tuple(left_out))


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
            broken = [LeftOut(path, _why_not(error)) for path, error in self.broken]
            return hit._replace(note=hit.note or note, left_out=(*hit.left_out, *broken))
        if self.broken:
            raise self.broken[0][1]
        names = [*(f"{name}/" for name in folder.folders), *folder.files]
        contents = f"it holds {shown(names)}" if names else "it is empty"
        kinds = "no .metadata, safetensors, index, torch or rank file"
        message = f"{root}: no checkpoint here or up to {_LEVELS_BELOW} levels down"
        raise SourceError("not-a-checkpoint", f"{message} ({kinds}); {contents}", file=root)


def _why_not(error: EmaCkptError) -> str:
    return str(error) if isinstance(error, TooDeepError) else f"not complete: {error}"


def _in_children(folder: Folder, levels: int, depth: Depth) -> _Search:
    """Search `folder` to a depth of `levels`: loose files, and directories that are checkpoints."""
    search = _Search(loose_files(folder))
    for name in folder.folders:
        if name.startswith(".") or step_order(name) is not None:
            continue  # steps were looked into as such
        path = join(folder.root, name)
        try:
            child = list_directory(path)
            location = _in_directory(child, depth)
        except (SourceError, AccessError) as error:
            # Not to be listed, or not complete: no answer, but worth a word if there is no other.
            search.broken.append((path, error))
            continue
        if location is not None:
            search.hits.append(location)
        elif levels > 1:
            deeper = _in_children(child, levels - 1, depth)
            search.hits += deeper.hits
            search.broken += deeper.broken
    return search
