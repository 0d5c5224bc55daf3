"""Tell a checkpoint that is written while it is read from a damaged one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from ema_ckpt.core.catalog import Catalog, Files
from ema_ckpt.core.errors import AccessError, SourceError
from ema_ckpt.core.text import shown
from ema_ckpt.storage.directories import stamps_of
from ema_ckpt.storage.files import LocalFiles, RemoteFiles
from ema_ckpt.storage.stamp import Stamp


class FileStates(NamedTuple):
    """Stamps of files below the directory or URL `root`; `resolved` is what messages name."""

    root: str
    resolved: str
    stamps: dict[str, Stamp]

    @classmethod
    def now(cls, root: str, resolved: str, files: Iterable[str]) -> FileStates:
        """Take the present stamps."""
        return cls(root, resolved, stamps_of(root, files))

    @classmethod
    def opened(cls, catalog: Catalog) -> FileStates:
        """Take the stamps of a checkpoint's files, from when they were first opened if they were.

        They may lie behind files that pass calls on.
        """
        source: object = catalog.source
        states = cls.now(catalog.source.root, catalog.resolved, sorted(catalog.files))
        while source is not None and not isinstance(source, LocalFiles | RemoteFiles):
            source = getattr(source, "inner", None)
        if source is not None:
            states.stamps.update(source.seen)
        return states

    def refuse_changes(self, *, suspicious: bool = False) -> None:
        """Compare the files with their stamps.

        Args:
            suspicious: damage was found: whatever may have caused it is a change.

        Raises:
            SourceError: `source-changed`, naming those that are other ones now, or gone.
            AccessError: `unreadable`: it cannot be told any more.
        """
        self._compare(stamps_of(self.root, self.stamps), suspicious=suspicious)

    @contextmanager
    def same(self, source: Files, files: Iterable[str]) -> Iterator[None]:
        """Read some of the files in the block, after which more may be read.

        One that stays open is whole though another one has its name by now. Raises as
        `refuse_changes`.
        """
        try:
            yield
        except SourceError:
            self.refuse_changes(suspicious=True)
            raise
        known = [file for file in files if file in self.stamps]
        if not isinstance(source, LocalFiles):
            self._compare(stamps_of(self.root, known))
            return
        now = {}
        for file in known:
            try:
                now[file] = source.stamp(file)
            except OSError as error:
                now[file] = Stamp("?", failure=error.strerror or str(error))
        self._compare(now)

    def _compare(self, now: Mapping[str, Stamp], *, suspicious: bool = False) -> None:
        changed = []
        for file in now:
            before = self.stamps[file]
            if before.failure:
                continue
            if now[file].failure:
                message = f"{file}: {now[file].failure} (in {self.resolved})"
                raise AccessError("unreadable", message, file=file)
            if before.is_other(now[file], suspicious=suspicious):
                changed.append(file)
        if changed:
            hint = "changed while being read; let the writer finish and try again"
            message = f"{self.resolved}: {shown(changed)} {hint}"
            raise SourceError("source-changed", message, file=changed[0])


@contextmanager
def unchanged(catalog: Catalog, before: FileStates | None = None) -> Iterator[FileStates]:
    """Read a checkpoint in the block: what is found in files that changed meanwhile is no damage.

    Yields the files' states at the beginning, which are `before` where that is given.

    Raises:
        SourceError: `source-changed` at the end of the block, or in place of another SourceError.
    """
    before = before or FileStates.opened(catalog)
    try:
        yield before
    except SourceError:
        before.refuse_changes(suspicious=True)
        raise
    before.refuse_changes()


@contextmanager
def told_from_damage(catalog: Catalog) -> Iterator[None]:
    """Use a checkpoint in the block: what is wrong with files that changed meanwhile is no damage.

    Raises:
        SourceError: `source-changed` in place of another one.
    """
    try:
        yield
    except SourceError as error:
        if error.code != "source-changed":
            FileStates.opened(catalog).refuse_changes(suspicious=True)
        raise
