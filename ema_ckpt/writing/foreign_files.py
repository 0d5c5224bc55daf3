"""Files in a directory that is replaced which belong to no checkpoint: none is ever deleted.

They are carried into the new directory before the switch, so that it has them from its first
moment. What somebody makes or replaces between that and the switch is looked for afterwards, when
nobody finds the old directory under the target's name any more, and before it is deleted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ema_ckpt.core.text import shown
from ema_ckpt.storage.stage_names import NEW, OLD
from ema_ckpt.writing.open_inside import create_inside
from ema_ckpt.writing.preflight import OverwritePolicy, foreign_entries, foreign_parts
from ema_ckpt.writing.switch import fsync_tree, put

_DRAFT = ".ema-ckpt.carried"
_NOTE_NBYTES = 64


class _State(NamedTuple):
    """What tells one state of a directory entry from another."""

    kind: int
    inode: int
    nbytes: int
    changed: int

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.kind)


class Carried:
    """Foreign entries of an old directory, as they were when they were carried into the new one."""

    def __init__(self) -> None:
        # By path below the directory. No second state: the new directory had the name already.
        self._states: dict[str, tuple[_State, _State | None]] = {}
        self._new_inode = 0
        self.has_late = False  # something was carried after the switch

    def note_new(self, new: Path) -> None:
        """Note which the new target is; what has its name in the stage later on is the old one.

        A later run has to know that too, if this one is killed in between.
        """
        self._new_inode = os.lstat(new).st_ino
        with contextlib.suppress(OSError), create_inside(new.parent, NEW) as note:
            note.write(str(self._new_inode).encode())

    def old_in(self, stage: Path, target: Path) -> Path | None:
        """The old target, if the stage has it."""
        if inode := self._new_inode or _noted_inode(stage):
            payload = _state_of(stage / target.name)
            if payload and payload.inode != inode:
                return stage / target.name
        return stage / OLD if os.path.lexists(stage / OLD) else None

    def carry(self, names: Iterable[str], old: Path, new: Path, below: str = "") -> None:
        """Link or copy entries of the directory `old` into `new`; entries of `new` stay."""
        for name in names:
            key = below + name
            before = _state_of(old / name)
            if before is None:
                continue
            is_new = _state_of(new / name) is None
            if not before.is_directory:
                if is_new:
                    _copy(old / name, new / name)
                self._states.setdefault(key, (before, _state_of(new / name) if is_new else None))
                continue
            if is_new:
                (new / name).mkdir(0o700)
                self._states[key] = before, before
            if key in self._states:  # made now, or by an attempt that was cut short
                self.carry(sorted(os.listdir(old / name)), old / name, new / name, f"{key}/")
                _copy_state(old / name, new / name)  # the old one may be read-only

    def carry_late(self, names: Iterable[str], old: Path, new: Path, below: str = "") -> list[str]:
        """Carry what is new in `old` or was replaced; return what has no place in `new`."""
        left: list[str] = []
        for name in names:
            try:
                left += self._carry_late(name, old, new, below)
            except OSError:
                left.append(below + name)
        return left

    def give_back(self, new: Path, old: Path) -> None:
        """Carry what was made in `new`, which had the target's name for a moment, into `old`."""
        with contextlib.suppress(OSError):
            if _is_directory(new) and _is_directory(old):
                self.carry_late(foreign_entries(new, old), new, old)

    def _carry_late(self, name: str, old: Path, new: Path, below: str) -> list[str]:
        key = below + name
        theirs, ours = _state_of(old / name), _state_of(new / name)
        was, made = self._states.get(key, (None, None))
        if theirs is None:
            return []
        are_directories = _is_directory(old / name) and _is_directory(new / name)
        if are_directories and (made or not was):
            inner = sorted(os.listdir(old / name))
            return self.carry_late(inner, old / name, new / name, f"{key}/")
        if theirs == was or (ours and _alike(theirs, ours, old / name, new / name)):
            return []
        if ours is None:
            self.has_late = True
            self._states.pop(key, None)
            self.carry([name], old, new, below)
            return []
        if ours != made or theirs.is_directory:  # the checkpoint's, or made since
            return [key]
        self._replace(old / name, new / name)
        self._states[key] = theirs, _state_of(new / name)
        return []

    def _replace(self, old: Path, new: Path) -> None:
        self.has_late = True
        draft = new.with_name(_DRAFT)
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        _copy(old, draft)
        os.replace(draft, new)


def rescue(
    stage: Path, target: Path, policy: OverwritePolicy, carried: Carried
) -> tuple[str, Path | None]:
    """Save what is foreign in the old target that a stage may hold, before the stage is deleted.

    It is carried into the new directory, or else kept beside it.

    Returns:
        What to tell about that, and where things are kept: in `stage` only if they cannot be moved.
    """
    try:
        old = carried.old_in(stage, target)
    except OSError as error:
        problem = f"it cannot be told whether it holds files of no checkpoint: {error.strerror}"
        return f"{stage}: left behind: {problem}", stage / target.name
    if old is None:
        return "", None
    try:
        left = foreign_parts(old, policy, target)
        if left and policy.keep_foreign and _is_directory(old) and _is_directory(target):
            left = carried.carry_late(left, old, target)
            if carried.has_late:
                fsync_tree(target, has_links=True)
    except OSError as error:
        left = [f"{old.name}: {error.strerror}"]
    if not left:
        return "", None
    what = f"{target}: the old one had files of no checkpoint that have no place in the new one"
    place = target.with_name(f"{target.name}.kept-{stage.name[-8:]}")
    try:
        if _is_directory(old):
            _delete_checkpoint(old, target)
        put(old, place)
    except OSError:
        return f"{what}: {shown(left)}; they are in {old}; move them before you write again", old
    return f"{what}: {shown(left)}; they are in {place}", place


def _noted_inode(stage: Path) -> int:
    """Return the inode that an earlier run noted; 0 if it noted none."""
    try:
        fd = os.open(stage / NEW, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as note:
            return int(note.read(_NOTE_NBYTES))
    except (FileNotFoundError, ValueError):
        return 0


def _delete_checkpoint(directory: Path, place: Path) -> None:
    """Delete what is not foreign in a directory, which was at `place`."""
    names = set(os.listdir(directory))  # before the other list: what comes in between stays
    for name in names.difference(foreign_entries(directory, place)):
        os.unlink(directory / name)


def _state_of(path: Path) -> _State | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    kind = stat.S_IFMT(status.st_mode)
    return _State(kind, status.st_ino, status.st_size, status.st_mtime_ns)


def _is_directory(path: Path) -> bool:
    """Whether it is one itself; a link to one may lead anywhere."""
    state = _state_of(path)
    return state is not None and state.is_directory


def _alike(a: _State, b: _State, path_a: Path, path_b: Path) -> bool:
    """Whether an entry is a link to another one, or a copy that has not changed since."""
    if stat.S_ISLNK(a.kind) and stat.S_ISLNK(b.kind):
        return os.readlink(path_a) == os.readlink(path_b)
    return a.inode == b.inode or a._replace(inode=b.inode) == b


def _copy(old: Path, new: Path) -> None:
    if old.is_symlink():
        os.symlink(os.readlink(old), new)
        return
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:
        status = os.lstat(old)
        if stat.S_ISREG(status.st_mode):
            shutil.copyfile(old, new)
        else:  # a FIFO, a socket or a device: another one, unopened
            os.mknod(new, status.st_mode, status.st_rdev)
        _copy_state(old, new)


def _copy_state(old: Path, new: Path) -> None:
    """Give an entry owner and group, as far as the user may, and mode, times and attributes."""
    status = os.lstat(old)
    for ids in ((-1, status.st_gid), (status.st_uid, -1)):
        with contextlib.suppress(OSError):
            os.chown(new, *ids, follow_symlinks=False)
    shutil.copystat(old, new, follow_symlinks=False)
