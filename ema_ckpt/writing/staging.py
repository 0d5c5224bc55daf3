"""Write beside, then switch: whenever a run ends, a target is the old one or the complete new one.

    with stage(target, sources=[path], is_directory=True, nbytes=total) as staged:
        ...write below staged.path...
    # here the target is in place; on any exception it is as it was, and the stage is gone

A writer holds `flock` on its stage. The kernel drops that with the process, so a stage nobody holds
is left over from a crash: it is deleted, or continued under `resume`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ema_ckpt.core.catalog import Diagnostic
from ema_ckpt.core.display import displayed
from ema_ckpt.core.errors import EmaCkptError, SourceError, TargetError, about
from ema_ckpt.storage.files import close_read, is_gone, is_there
from ema_ckpt.storage.stage_names import JOURNAL, OLD, interrupted_switch, stage_path, stages_of
from ema_ckpt.writing.foreign_files import Carried, rescue
from ema_ckpt.writing.journal import Journal, check_identity
from ema_ckpt.writing.open_inside import open_directory
from ema_ckpt.writing.preflight import (
    OverwritePolicy,
    check_place,
    check_replaceable,
    check_space,
    make_parents,
    remove_empty,
    resolve_target,
    write_error,
)
from ema_ckpt.writing.stage_files import (
    allocated,
    close_as,
    delete_stage,
    find_lost,
    find_stranger,
    kept_open,
    refuse_losses,
    take_permissions,
)
from ema_ckpt.writing.stage_locks import lock_parent, lock_stage
from ema_ckpt.writing.switch import (
    exchange,
    finish,
    fsync_path,
    fsync_tree,
    may_hold_target,
    put,
    take_back,
)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_SWITCH_ATTEMPTS = 8
_CLOSE_ATTEMPTS = 8
_SPARE_FILES = 3


@dataclass(slots=True)
class Staged:
    """A target being written in its stage.

    Attributes:
        target: the resolved target. root: the stage directory.
        policy, fsync, plain_rename: as given to `stage`.
        resumed: this is the stage of an interrupted run; `journal` lists its finished ranges.
        published: the target is in place. warnings: failures that did no harm to it.
        carried: foreign files of the old directory that the new one has.
        expected: files that the target has to have, of at least so many bytes.
    """

    target: Path
    root: Path
    policy: OverwritePolicy
    journal: Journal
    fsync: bool = True
    plain_rename: bool = False
    resumed: bool = False
    published: bool = False
    warnings: list[Diagnostic] = field(default_factory=list)
    carried: Carried = field(default_factory=Carried)
    expected: Mapping[str, int] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where to write: the file itself (not there yet), or the directory (there)."""
        return self.root / self.target.name

    def publish(self) -> None:
        """Make everything durable and rename it to the target, unless that is done.

        Raises:
            TargetError: `target-exists` if somebody else made the target meanwhile; `foreign-files`
                if somebody put other files into the directory to be replaced; `no-space` and others
                from the file system.
        """
        if self.published:
            return
        with _explained(self.target):
            if self.fsync:  # which may take most of the time: a run that is killed here is resumed
                with self.journal.ends_on_failure():
                    fsync_tree(self.path)
                    fsync_path(self.root)
            for _ in range(_SWITCH_ATTEMPTS):
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    self._switch()
                    break
            else:
                message = f"{self.target}: something else keeps creating and deleting it"
                raise TargetError("busy", message)
            self.published = True
        if self.fsync:
            self._sync_parent()

    def _sync_parent(self) -> None:
        """Make the switch durable; the target is in place, whether that works or not."""
        try:
            fsync_path(self.target.parent)
        except OSError as error:
            message = f"{self.target}: is in place, but a power cut may still undo that"
            reason = f"{self.target.parent}: {error.strerror}"
            self.warnings.append(Diagnostic("not-durable", f"{message}: {reason}"))

    def _switch(self) -> None:
        """Rename to the target, or exchange with it if it exists at that moment."""
        foreign = check_replaceable(self.target, self.policy)
        # Here and not before all was made durable: that may take minutes.
        refuse_losses(self.path, self.expected, self.target)
        if not is_there(self.target):
            self._discard_journal()
            put(self.path, self.target, plain=self.plain_rename)
            return
        if foreign:  # what is carried now may be old when a later run goes on
            self._discard_journal()
            self.carried.carry(foreign, self.target, self.path)
            if self.fsync:
                fsync_tree(self.path, has_links=True)
            refuse_losses(self.path, self.expected, self.target)
        self._discard_journal()
        self.carried.note_new(self.path)
        with kept_open(self.path) as payload:
            self._take_permissions()
            exchange(self.path, self.target, plain=self.plain_rename, fsync=self.fsync)
            if payload is not None:
                self._take_back_losses(payload)

    def _take_back_losses(self, payload: int) -> None:
        """Take the switch back if something goes on to empty the stage that became the target.

        One that is gone by now, or another one, is somebody's will.
        """
        try:
            refuse_losses(self.target, self.expected, self.target)
        except TargetError:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(self.target), os.fstat(payload)):
                    if take_back(self.path, self.target):
                        self.carried.give_back(self.path, self.target)
                    raise
        except OSError:
            return  # it cannot be looked at any more, and is in place

    def _take_permissions(self) -> None:
        if failure := take_permissions(self.path, self.target):
            message = f"{self.target}: does not have the permissions of the one it replaced"
            self.warnings.append(Diagnostic("permissions", f"{message}: {failure}"))

    def _discard_journal(self) -> None:
        """Delete the journal: a stage that may come to hold the old target is never resumed."""
        is_recorded = os.path.exists(self.root / JOURNAL)
        self.journal.discard()
        if self.fsync and is_recorded:
            fsync_path(self.root)


@contextlib.contextmanager
def stage(
    target: str | os.PathLike[str],
    *,
    is_directory: bool,
    sources: Iterable[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    keep_foreign: bool = False,
    replaces: Iterable[str] = (),
    nbytes: int = 0,
    fsync: bool = True,
    resume: bool = False,
    identity: Mapping[str, str] | None = None,
    files: Collection[str] | None = None,
    plain_rename: bool = False,
    journal_after: float = 0.0,
) -> Iterator[Staged]:
    """Write a target beside its place; rename it when the block ends without an exception.

    All threads and child processes that write have to be done when the block ends.

    Args:
        target: file or directory to make.
        is_directory: which of the two.
        sources: paths that are read; none may be the target, inside it or around it.
        overwrite: replace what is there, if it is a checkpoint.
        keep_foreign: carry files that are no checkpoint's from the old directory into the new one.
        replaces: names in the directory that are written anew, whatever files those are.
        nbytes: bytes that will be written.
        fsync: make all durable before the switch, and the switch itself.
        resume: go on with the stage of an interrupted run; keep this one's if it fails.
        identity: digests of source and plan; a resumed run must have the same.
        files: names in the directory that are written; a stage with others is not resumed. None:
            whatever names.
        plain_rename: do without rename flags, as on a file system that lacks them.
        journal_after: seconds after which the journal of a run without `resume` reaches the disk.

    Raises:
        TargetError: `target-exists target-is-source foreign-files no-space busy resume-mismatch
            usage`.
        UsageError: `usage` for a target that nothing may replace.
    """
    path = resolve_target(target)
    policy = OverwritePolicy(is_directory, overwrite, keep_foreign, frozenset(replaces))
    with _explained(path):
        claim = _Claim(path, resume)
    with _closing(claim):
        with _explained(path):
            check_place(path, sources)
            check_replaceable(path, policy)
            claim.make_parents(fsync)
            with lock_parent(path.parent):
                claim.clear_leftovers(identity or {}, files, policy)
                check_replaceable(path, policy)
                check_space(path, nbytes - claim.allocated)
                root = claim.open(is_directory)
            journal = Journal(
                root, root / path.name, identity or {}, after=0.0 if resume else journal_after
            )
            staged = Staged(path, root, policy, journal, fsync, plain_rename, claim.resumed)
            staged.warnings = claim.warnings
            claim.staged = staged
        try:
            with _explained(path, root):
                yield staged
        except SourceError:
            # A damaged source: the journal does not say which written ranges come from it.
            staged.journal.discard()
            raise
        staged.publish()


def check_target(
    target: str | os.PathLike[str],
    *,
    is_directory: bool,
    sources: Iterable[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    keep_foreign: bool = False,
    replaces: Iterable[str] = (),
    nbytes: int = 0,
) -> Path:
    """Make every check of `stage`, write nothing; return the resolved target. Raises as `stage`."""
    path, freed = resolve_target(target), 0
    with _explained(path):
        check_place(path, sources)
        policy = OverwritePolicy(is_directory, overwrite, keep_foreign, frozenset(replaces))
        check_replaceable(path, policy)
        for left in stages_of(path):
            with contextlib.suppress(FileNotFoundError):  # its writer has just ended
                for fd in lock_stage(left, path):
                    close_read(fd)
            if interrupted_switch(left) and not is_there(path) and not overwrite:
                message = f"{path}: exists, in {left.name}; pass --overwrite to replace it"
                raise TargetError("target-exists", message)
            freed += allocated(left)
        check_space(path, nbytes - freed)
    return path


class _Claim:
    """Exclusive claim on a target: owns the stage and its locks, and removes or keeps it on close.

    It exists before its stage does, so that an exception at any moment finds somebody to clean up.
    An exception that a signal handler raises between two bytecodes can skip the end of any `with`;
    for that one there is `atexit`.
    """

    def __init__(self, target: Path, resume: bool) -> None:
        self.allocated = 0
        self.resumed = False
        self.staged: Staged | None = None
        self.left_behind = ""  # what of the stage stays, and why
        self.warnings: list[Diagnostic] = []
        self._target = target
        self._resume = resume
        self._root: Path | None = None
        self._had_target = is_there(target)
        self._locks: list[int] = []
        self._spare: list[int] = []  # descriptors that deleting the stage may need
        self._made: list[Path] = []
        self._owner = os.getpid()
        atexit.register(self.close)

    def make_parents(self, fsync: bool) -> None:
        """Make the missing directories above the target; they go again if it is not published."""
        self._made = make_parents(self._target)
        for directory in self._made if fsync else ():
            fsync_path(directory.parent)

    def clear_leftovers(
        self,
        identity: Mapping[str, str],
        files: Collection[str] | None,
        policy: OverwritePolicy,
    ) -> None:
        """End the switch of stages that are left, continue one of them, delete the others."""
        for left in stages_of(self._target):
            try:
                locks = lock_stage(left, self._target)
            except FileNotFoundError:
                continue  # its writer has just ended
            try:
                finish(left, self._target)
                if self._goes_on(left, identity, files, policy.is_directory):
                    self._root, self._locks, self.resumed = left, locks, True
                    self.allocated = allocated(left)
                    locks = []
                elif may_hold_target(left, self._target):
                    raise TargetError("unreadable", _switch_is_unclear(left, self._target))
                elif left.exists():
                    self._delete(left, policy, Carried())
                    if self.left_behind:  # it keeps nobody from writing
                        self.warnings.append(Diagnostic("stale-file", self.left_behind))
                        self.left_behind = ""
            finally:
                for fd in locks:
                    close_read(fd)

    def _goes_on(
        self, left: Path, identity: Mapping[str, str], files: Collection[str] | None, is_dir: bool
    ) -> bool:
        """Whether `left` is to be continued."""
        if self._root is not None or not self._resume or not os.path.lexists(left / JOURNAL):
            return False
        if not self._is_own(left, None, is_dir):
            return False
        # Other options give other files, so the run is compared before their names are.
        same = check_identity(left, self._target, identity) and self._is_own(left, files, is_dir)
        return same and self._has_no(find_lost(left), left)

    def _is_own(self, left: Path, files: Collection[str] | None, is_directory: bool) -> bool:
        """Whether all in a stage is a writer's; says so where it is not."""
        if not os.path.exists(left):  # its switch has just been ended
            return False
        # In a directory that all may write to, a stage may be anybody's, checksums and all.
        trusted = (os.geteuid(), os.stat(left.parent).st_uid)
        is_foreign = os.lstat(left).st_uid not in trusted
        if not self._has_no("another user made it" if is_foreign else None, left):
            return False
        stranger = find_stranger(left, self._target.name, files, is_directory=is_directory)
        return self._has_no(stranger and f"no writer made {stranger!r} in it", left)

    def _has_no(self, flaw: str | None, left: Path) -> bool:
        if flaw:
            self.warnings.append(Diagnostic("stale-file", f"{left}: {flaw}; starting anew"))
        return not flaw

    def open(self, is_directory: bool) -> Path:
        """Make the stage, unless one is continued."""
        if is_new := self._root is None:
            self._root = stage_path(self._target, os.urandom(4).hex())
            self._root.mkdir()
        if self._had_target:  # which may let in fewer than when one that is continued was made
            close_as(self._root, self._target)
        if is_new:
            self._locks = lock_stage(self._root, self._target)
        self._spare += [open_directory(self._root) for _ in range(_SPARE_FILES)]
        if is_directory:
            (self._root / self._target.name).mkdir(exist_ok=True)
        return self._root

    def close(self) -> None:
        """Delete the stage, and with it the old target, or leave it for `--resume`; unlock it.

        A signal that comes meanwhile waits until that is done.
        """
        interruption: BaseException | None = None
        for _ in range(_CLOSE_ATTEMPTS):
            try:
                self._close()
                break
            except BaseException as error:
                cause = _interruption_in(error)
                if cause is None:
                    raise
                interruption = cause
        if interruption is not None:
            raise interruption

    def _close(self) -> None:
        if self._owner == os.getpid():  # a child process leaves the stage alone
            if self.staged is not None:
                with contextlib.suppress(OSError):  # no line of it is believed unchecked
                    self.staged.journal.close()
            while self._spare:
                close_read(self._spare.pop())
            if self._root is not None:
                self._clear(self._root)
                self._root = None
            remove_empty(self._made)
        while self._locks:
            close_read(self._locks.pop())
        atexit.unregister(self.close)

    def _clear(self, root: Path) -> None:
        with contextlib.suppress(OSError):
            finish(root, self._target)
        is_missing = not os.path.lexists(self._target)
        if interrupted_switch(root) and (is_missing or os.path.lexists(root / OLD)):
            return  # the old target and the new one are both in it, and nowhere else
        # A journal is there until the switch begins: without one there is nothing to go on from.
        if self._resume and os.path.exists(root / JOURNAL):
            return
        if self._had_target and may_hold_target(root, self._target):
            self.left_behind = _switch_is_unclear(root, self._target)
        elif self.staged is None:  # nothing has been switched
            self._delete(root, OverwritePolicy(False), Carried())
        else:
            self._delete(root, self.staged.policy, self.staged.carried)
        if self.left_behind:
            self.warnings.append(Diagnostic("stale-file", self.left_behind))

    def _delete(self, root: Path, policy: OverwritePolicy, carried: Carried) -> None:
        """Delete a stage, but nothing foreign in an old target that is in it."""
        kept, where = rescue(root, self._target, policy, carried)
        self.left_behind = kept or self.left_behind
        if where is not None and root in where.parents:
            return
        is_deleted = False
        try:
            is_deleted = delete_stage(root)
        except OSError as error:  # of a few calls it raises them all the same
            if _interruption_in(error) is not None:
                raise
        if not is_deleted and not is_gone(root):
            self.left_behind = "; ".join(filter(None, [kept, _left_behind(root, self._target)]))


def _interruption_in(error: BaseException) -> BaseException | None:
    """Return the interruption that an error is, or came of, if there was one.

    A signal can also make something else fail: `rmtree` then closes a descriptor twice.
    """
    cause: BaseException | None = error
    while isinstance(cause, Exception):
        cause = cause.__context__
    return cause


def _left_behind(stage: Path, target: Path) -> str:
    harmless = f"{target} is not affected; delete it by hand"
    return f"{stage}: left behind, some of it could not be deleted; {harmless}"


def _switch_is_unclear(stage: Path, target: Path) -> str:
    """Say that a stage is kept because the old target may be nowhere else."""
    hint = "look there; rename the one to keep, or repeat the command once the disk can be read"
    return f"{stage}: left behind: it may hold {target}, which is not in its place; {hint}"


@contextlib.contextmanager
def _closing(claim: _Claim) -> Iterator[None]:
    """Close a claim; an exception says as well if the stage could not be deleted."""
    try:
        with contextlib.closing(claim):
            yield
    except EmaCkptError as error:
        if claim.left_behind:
            raise about(error, remedy=claim.left_behind) from error
        raise
    except BaseException:
        if claim.left_behind:
            logging.getLogger("ema_ckpt").warning(displayed(claim.left_behind))
        raise


@contextlib.contextmanager
def _explained(path: Path, stage: Path | None = None) -> Iterator[None]:
    """Raise errors of the file system, or only those about files in `stage`, as one line."""
    try:
        yield
    except OSError as error:
        is_about = stage is None or str(error.filename).startswith(str(stage))
        if not is_about and error.errno not in _FULL:
            raise
        raise write_error(path, error) from error
