"""Write beside, then switch: a target is either the old one or the complete new one, whenever a run
ends.

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
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ema_ckpt.core.catalog import Diagnostic
from ema_ckpt.core.errors import SourceError, TargetError
from ema_ckpt.storage.stage_names import JOURNAL, LOCK, interrupted_switch, stage_path, stages_of
from ema_ckpt.writing.journal import Journal, check_identity
from ema_ckpt.writing.preflight import (
    OverwritePolicy,
    check_place,
    check_replaceable,
    check_space,
    resolve_target,
    write_error,
)
from ema_ckpt.writing.publish import carry, exchange, finish, fsync_path, fsync_tree, put

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)
_SWITCH_ATTEMPTS = 8
_CLOSE_ATTEMPTS = 8


@dataclass(slots=True)
class Staged:
    """A target that is being written in its stage.

    Attributes:
        target: the resolved target. root: the stage directory.
        terms, fsync, plain_rename: as given to `stage`.
        resumed: this is the stage of an interrupted run, and `journal` says what of it is done.
        published: the target is in place. warnings: what went wrong without harm to it.
    """

    target: Path
    root: Path
    terms: OverwritePolicy
    journal: Journal
    fsync: bool = True
    plain_rename: bool = False
    resumed: bool = False
    published: bool = False
    warnings: list[Diagnostic] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Where to write: the file itself (not there yet), or the directory (there)."""
        return self.root / self.target.name

    def publish(self) -> None:
        """Make everything durable and give it the target's name. Leaving the `with` block does it
        if nobody did.

        Raises:
            TargetError: `target-exists` if somebody else made the target meanwhile; `foreign-files`
                if somebody put other files into the directory to be replaced; `no-space` and others
                from the file system.
        """
        if self.published:
            return
        with _explained(self.target):
            if self.fsync:  # which may take most of the time: a run that ends here is resumed
                fsync_tree(self.path)
                fsync_path(self.root)
            self._switch()
            self.published = True
            if self.fsync:
                fsync_path(self.target.parent)

    def _begin_switch(self) -> None:
        """From here on the stage may come to hold the old target, which must never be resumed
        into.
        """
        is_recorded = os.path.exists(self.root / JOURNAL)
        self.journal.discard()
        if self.fsync and is_recorded:
            fsync_path(self.root)

    def _switch(self) -> None:
        """Rename in, whichever of absent and present the target is at that moment."""
        for _ in range(_SWITCH_ATTEMPTS):
            foreign = check_replaceable(self.target, self.terms)
            try:
                if not os.path.lexists(self.target):
                    self._begin_switch()
                    put(self.path, self.target, plain=self.plain_rename)
                else:
                    if foreign:  # what is carried now may be old when a later run goes on
                        self._begin_switch()
                    carry(foreign, self.target, self.path)
                    if foreign and self.fsync:
                        fsync_tree(self.path)
                    self._begin_switch()
                    exchange(self.path, self.target, plain=self.plain_rename, fsync=self.fsync)
            except (FileExistsError, FileNotFoundError):
                continue
            return
        raise TargetError("busy", f"{self.target}: something else keeps creating and deleting it")


@contextlib.contextmanager
def stage(
    target: str | os.PathLike[str],
    *,
    is_directory: bool,
    sources: Iterable[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    keep_foreign: bool = False,
    nbytes: int = 0,
    fsync: bool = True,
    resume: bool = False,
    identity: Mapping[str, str] | None = None,
    plain_rename: bool = False,
    journal_after: float = 0.0,
) -> Iterator[Staged]:
    """Write a target beside its place and switch it in when the block ends without an exception.

    Whoever writes below the stage has to be done, its threads joined and its copies ended, when the
    block ends.

    Args:
        target: file or directory to make.
        is_directory: which of the two.
        sources: what is read; none may be the target, inside it or around it.
        overwrite: replace what is there, if it is a checkpoint.
        keep_foreign: carry files that are no checkpoint's from the old directory into the new one.
        nbytes: bytes that will be written.
        fsync: make all durable before the switch, and the switch itself.
        resume: go on with the stage of an interrupted run; keep this one's if it fails.
        identity: what is written from what, by name (`source`, `plan`); a resumed run must have the
            same.
        plain_rename: do without rename flags, as on a file system that lacks them.
        journal_after: seconds after which a run that keeps no stage when it fails has a journal on
            the disk.

    Raises:
        TargetError: `target-exists target-is-source foreign-files no-space busy resume-mismatch
            not-found usage`.
        UsageError: `usage` for a target that nothing may replace.
    """
    path, terms = resolve_target(target), OverwritePolicy(is_directory, overwrite, keep_foreign)
    claim = _Claim(path, resume)
    with contextlib.closing(claim):
        with _explained(path):
            check_place(path, sources)
            check_replaceable(path, terms)
            with _alone(path.parent):
                claim.take(dict(identity or {}))
                check_replaceable(path, terms)
                check_space(path, nbytes - claim.allocated)
                staged = claim.begin(
                    terms,
                    dict(identity or {}),
                    fsync=fsync,
                    plain_rename=plain_rename,
                    journal_after=journal_after,
                )
        try:
            with _explained(path, only=_FULL):
                yield staged
        except SourceError:
            # What was written came from a damaged source, and the journal does not tell which part
            # of it.
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
    nbytes: int = 0,
) -> Path:
    """Every check that `stage` makes, and no write: for `--dry-run`.

    Returns:
        The resolved target.

    Raises:
        TargetError, UsageError: as `stage`.
    """
    path, freed = resolve_target(target), 0
    with _explained(path):
        check_place(path, sources)
        check_replaceable(path, OverwritePolicy(is_directory, overwrite, keep_foreign))
        for left in stages_of(path):
            with contextlib.suppress(FileNotFoundError):  # its writer has just ended
                for fd in _hold(left, path):
                    os.close(fd)
            if interrupted_switch(left) and not os.path.lexists(path) and not overwrite:
                raise TargetError(
                    "target-exists",
                    f"{path}: exists, in {left.name}; pass --overwrite to replace it",
                )
            freed += _allocated(left)
        check_space(path, nbytes - freed)
    return path


def preallocate(fd: int, nbytes: int) -> None:
    """Give an open file its final size in bytes, with its blocks where the file system can reserve
    them.

    Raises:
        OSError: ENOSPC and the like, before a byte of payload is written.
    """
    if not nbytes:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        os.ftruncate(fd, nbytes)


class _Claim:
    """The right to write one target: its stage, the locks on it, and what becomes of it in the end.

    It exists before its stage does, so that an exception at any moment finds somebody to clean up.
    An exception that a signal handler raises between two bytecodes can skip the end of any `with`;
    for that one there is `atexit`.
    """

    def __init__(self, target: Path, resume: bool) -> None:
        self.target = target
        self.resume = resume
        self.allocated = 0
        self._root: Path | None = None
        self._resumed = False
        self._locks: list[int] = []
        self._staged: Staged | None = None
        self._owner = os.getpid()
        atexit.register(self.close)

    def take(self, identity: Mapping[str, str]) -> None:
        """Deal with stages of the target that are there: end their switch, continue one, delete the
        rest.
        """
        for left in stages_of(self.target):
            try:
                locks = _hold(left, self.target)
            except FileNotFoundError:
                continue  # its writer has just ended
            try:
                finish(left, self.target)
                if (
                    self.resume
                    and self._root is None
                    and check_identity(left, self.target, identity)
                ):
                    self._root, self._resumed, self._locks = left, True, locks
                    self.allocated = _allocated(left)
                    locks = []
                elif left.exists():
                    shutil.rmtree(left)
            finally:
                for fd in locks:
                    os.close(fd)

    def begin(
        self,
        terms: OverwritePolicy,
        identity: Mapping[str, str],
        *,
        fsync: bool,
        plain_rename: bool,
        journal_after: float,
    ) -> Staged:
        """Make the stage, unless one is continued, and open its journal."""
        if self._root is None:
            self._root = stage_path(self.target, os.urandom(4).hex())
            self._root.mkdir()
            self._locks = _hold(self._root, self.target)
        payload = self._root / self.target.name
        if terms.is_directory:
            payload.mkdir(exist_ok=True)
        journal = Journal(
            self._root, payload, identity, after=0.0 if self.resume else journal_after
        )
        self._staged = Staged(
            self.target, self._root, terms, journal, fsync, plain_rename, self._resumed
        )
        return self._staged

    def close(self) -> None:
        """Delete the stage, and with it the old target, unless it is left for `--resume`; then
        unlock it.

        A signal that comes meanwhile waits until that is done.
        """
        interruption: BaseException | None = None
        for _ in range(_CLOSE_ATTEMPTS):
            try:
                self._close()
                break
            except BaseException as error:
                interruption = _stopped_by(error)
                if interruption is None:
                    raise
        if interruption is not None:
            raise interruption

    def _close(self) -> None:
        if self._owner == os.getpid():  # a forked child has no say
            if self._staged is not None:
                self._staged.journal.close()
            if self._root is not None:
                self._clear(self._root)
                self._root = None
        while self._locks:
            os.close(self._locks.pop())
        atexit.unregister(self.close)

    def _clear(self, root: Path) -> None:
        finish(root, self.target)
        # A journal is there until the switch begins: without one there is nothing to go on from.
        if self.resume and os.path.exists(root / JOURNAL):
            return
        shutil.rmtree(root, ignore_errors=True)
        if os.path.exists(root) and self._staged is not None:
            message = f"{root}: left behind, some of it could not be deleted; {self.target} is not affected"
            self._staged.warnings.append(Diagnostic("stale-file", message))


def _stopped_by(error: BaseException | None) -> BaseException | None:
    """What a signal raised, also where it made something else fail: `rmtree` then closes a
    descriptor twice.
    """
    while isinstance(error, Exception):
        error = error.__context__
    return error


@contextlib.contextmanager
def _explained(path: Path, only: tuple[int, ...] | None = None) -> Iterator[None]:
    """Turn the file system's errors (or `only` some) into one line about the target."""
    try:
        yield
    except OSError as error:
        if only is not None and error.errno not in only:
            raise
        raise write_error(path, error) from error


@contextlib.contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """Keep other writers from looking for leftovers in `parent` while this one makes its stage.

    Best effort, for a second at most: without it a race is still decided by the stage's lock and
        the switch.
    """
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(100):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in _HELD:
                    break  # no such locks here
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _hold(root: Path, target: Path) -> list[int]:
    """Lock the stage `root`: descriptors that hold the lock until they are closed.

    Raises:
        TargetError: `busy` if a process holds it.
    """
    fds = [os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        if not _locked(fds[0]):
            # NFS locks only what is open for writing, which a directory never is.
            fds.append(os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
            fcntl.flock(fds[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        for fd in fds:
            os.close(fd)
        if error.errno not in _HELD:
            raise
        message = f"{target}: another process is writing it, in {root.name}; wait for it to end"
        raise TargetError("busy", message) from None
    return fds


def _locked(fd: int) -> bool:
    """Take `flock` on `fd`; False if its file system has none for directories."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise
        return False
    return True


def _allocated(root: Path) -> int:
    """Bytes that the files below `root` occupy on the disk."""
    found = [os.path.join(parent, name) for parent, _, files in os.walk(root) for name in files]
    return sum(os.lstat(name).st_blocks * 512 for name in found)
