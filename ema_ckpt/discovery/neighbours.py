"""What lies beside an opened checkpoint and is not read: nothing is passed over in silence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Set
from itertools import chain
from typing import NamedTuple

from ema_ckpt.core.errors import AccessError, EmaCkptError
from ema_ckpt.discovery.by_content import is_foreign, lacks_all_shards, shards_in
from ema_ckpt.discovery.depth import PART_LEVELS
from ema_ckpt.discovery.location import LeftOut, Location, is_index
from ema_ckpt.discovery.recognise import (
    files_in,
    indices_in,
    is_shard,
    is_state,
    list_directory,
    locate_directory,
    loose_files,
)
from ema_ckpt.discovery.step_names import step_order
from ema_ckpt.storage.directories import Folder, base_name, join
from ema_ckpt.storage.files import is_url

_WEIGHTS = "a checkpoint of its own; name it to read it"
_STATE = "state beside the weights; name it to read it"
_NO_SHARDS = "none of the shards that it names is here; delete it if an earlier save left it"
_REGISTERED = "state of an object that accelerate saved, perhaps an average; name it to read it"
_REGISTERED_NAME = re.compile(r"custom_checkpoint_\d+\.pkl")
_OF_FILE_SYSTEM = "lost+found"  # root's, in the first directory of a disk


class _Beside(NamedTuple):
    """Something beside a checkpoint: its path, its name as a part, and what hides it, if so."""

    path: str
    name: str
    why: str = ""


def neighbours_of(location: Location) -> Iterator[LeftOut]:
    """List what a located directory, and those of its parts, hold besides what is opened."""
    inner = [part for _, part in location.parts]
    if not _is_step_beside_others(location):
        yield from left_out_of(list_directory(location.root), _used(location))
    for part in inner:
        if part.root != location.root:
            yield from neighbours_of(part)


def left_out_of(folder: Folder, used: Set[str]) -> Iterator[LeftOut]:
    """List the checkpoints in a directory under other names than `used`."""
    targets = {_real(join(folder.root, name)) for name in used}
    for path, name, why in chain(_files_beside(folder, used), _folders_beside(folder, used)):
        if _real(path) not in targets:  # a link such as `latest` leads to what is read
            is_weights = not is_state(name) and not why
            yield LeftOut(path, why or (_STATE if is_state(name) else _WEIGHTS), is_weights)


def _files_beside(folder: Folder, used: Set[str]) -> Iterator[_Beside]:
    """List unused indices, files that are checkpoints, and state that accelerate was told of."""
    indices = [name for name in indices_in(folder) if name not in used]
    for name in indices:
        why = _NO_SHARDS if lacks_all_shards(folder, name) else ""
        yield _Beside(join(folder.root, name), name, why)
    has_index = indices or any(map(is_index, used))
    for name, location in files_in(folder):
        is_claimed = bool(has_index) and is_shard(location.names[0])
        if not is_claimed and used.isdisjoint(location.names) and not is_foreign(location):
            yield _Beside(location.resolved, name)
    for name in sorted({*filter(_REGISTERED_NAME.fullmatch, folder.files)} - used):
        yield _Beside(join(folder.root, name), name, _REGISTERED)


def _folders_beside(folder: Folder, used: Set[str]) -> Iterator[_Beside]:
    """List unused directories that hold a checkpoint, or that nobody may look into."""
    for name in folder.folders:
        if name in used or name.startswith(".") or name == _OF_FILE_SYSTEM:
            continue
        path = join(folder.root, name)
        try:
            if _holds_checkpoint(path):
                yield _Beside(path, name)
        except AccessError as error:
            yield _Beside(path, name, f"whether it holds a checkpoint is not known: {error}")


def _used(location: Location) -> set[str]:
    """Names in a location's directory that it reads, or that belong to what it reads."""
    used = {name.partition("/")[0] for name in location.names}
    for _, part in location.parts:
        below = part.root.removeprefix(location.root).strip("/")
        used |= {below.partition("/")[0]} if below else set(part.names)
    for name in location.names:
        if is_index(name):
            used |= shards_in(location.root, name)
    return used


def _is_step_beside_others(location: Location) -> bool:
    """Whether the directory is that of a run, of which this is one step: `run/step_500.pt`."""
    is_step = step_order(base_name(location.resolved)) is not None
    return is_step and location.resolved != location.root


def _holds_checkpoint(root: str) -> bool:
    try:
        folder = list_directory(root)
        if any(step_order(name) is not None for name in folder.folders):
            return True
        location = locate_directory(folder, PART_LEVELS - 1)  # as deep as it is followed as a part
        return location is not None or bool(loose_files(folder))
    except AccessError:
        raise
    except EmaCkptError:  # a damaged one, or several
        return True


def _real(path: str) -> str:
    try:
        return path if is_url(path) else os.path.realpath(path)
    except ValueError:  # a name that no file can have; whoever reads it says so
        return path
