"""A destination behind an fsspec URL: no rename, so what makes it complete is written last.

    OUT.safetensors                one object, there when it is complete
    OUT/__0_0.distcp … .metadata   a DCP: `.metadata` comes last
    OUT/model-00001-of-… .index    Hugging Face: always with an index, which comes last

A run that replaces a checkpoint gives its data files new names, writes the marker over the old one,
and then deletes the old files.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import NamedTuple

from ema_ckpt.core.catalog import Diagnostic
from ema_ckpt.core.display import displayed
from ema_ckpt.core.errors import (
    AccessError,
    EmaCkptError,
    SourceError,
    TargetError,
    UsageError,
)
from ema_ckpt.core.text import counted, shown
from ema_ckpt.runtime.held_signals import HeldSignals
from ema_ckpt.storage.directories import Folder, base_name, is_folder, join, list_folder, parent_of
from ema_ckpt.storage.files import is_url
from ema_ckpt.storage.multipart import check_bucket, has_multipart
from ema_ckpt.storage.object_store import ObjectStore
from ema_ckpt.storage.remote import open_filesystem, refuse_empty_component
from ema_ckpt.storage.stage_names import is_stage_name
from ema_ckpt.writing.destination import Draft, WriteRequest
from ema_ckpt.writing.leftovers import SIDECAR, Leftovers, LostUploads
from ema_ckpt.writing.options import WriteOptions
from ema_ckpt.writing.part_files import PartFiles, PartSizes, divide_memory, whole_memory
from ema_ckpt.writing.preflight import is_checkpoint_file
from ema_ckpt.writing.publish_order import PublishOrder, marker_crc
from ema_ckpt.writing.streamed_files import StreamedFiles
from ema_ckpt.writing.upload_note import NoteFile, UploadNote

_GENERATION = re.compile(r"__\d+_(\d+)\.distcp|.*-v(\d+)-\d{5}-of-\d{5}\.safetensors")
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")


class ObjectDestination:
    """A place behind a URL; the URL stays text."""

    is_local = False

    def __init__(self, url: str) -> None:
        """Raises UsageError `usage` for HTTP and the root of a bucket, and as `ObjectStore`."""
        self.url = url.rstrip("/")
        self.name = base_name(self.url)
        if not self.name or parent_of(self.url).endswith(":/"):
            raise UsageError("usage", f"{url}: name a place inside the bucket")
        self._inside = ObjectStore(self.url)
        refuse_empty_component(url)  # at its end

    def __str__(self) -> str:
        return self.url

    @property
    def suffix(self) -> str:
        stem, dot, ending = self.name.rpartition(".")
        return dot + ending if stem else ""

    @cached_property
    def generation(self) -> int:
        """One more than that of the data files that are there."""
        for left in self.leftovers.unpublished.values():
            return left
        present = self._folder.files
        numbers = [0] if any(_SHARD.fullmatch(name) for name in present) else []
        for name in present:
            match = _GENERATION.fullmatch(name)
            if match:
                numbers.append(int(match[1] or match[2]))
        return max(numbers) + 1 if numbers else 0

    @cached_property
    def leftovers(self) -> Leftovers:
        """What killed runs left."""
        parent = ObjectStore(parent_of(self.url))
        return Leftovers(parent, self._inside, self.name, self.url)

    @cached_property
    def _folder(self) -> Folder:
        """What is below the URL now, without what killed runs left, and what is a writer's own."""
        if not is_folder(self.url):
            return Folder(self.url, (), ())
        folder = list_folder(self.url)
        left = self.leftovers.unpublished
        present = [name for name in folder.files if not is_stage_name(name)]
        return folder._replace(files=tuple(name for name in present if name not in left))

    def _kind(self) -> bool | None:
        """Whether a directory is there, or a file (False), or nothing (None).

        A directory that holds nothing but what writers leave counts as nothing: stores that have
        directories keep it where a write has failed.
        """
        kind = is_folder(self.url)
        if kind and not self._folder.files + self._folder.folders:
            return None
        return kind

    def check(self, request: WriteRequest) -> list[Diagnostic]:
        store = self._store(request)
        self.leftovers.refuse_living()
        self.check_replaceable(store, request)
        message = f"{self.url}: neither free space nor the right to write is checked at a URL"
        return [Diagnostic("unchecked", message)]

    @contextlib.contextmanager
    def open(self, request: WriteRequest) -> Iterator[Draft]:
        store = self._store(request)
        begun = self._begin(store, request)
        order, left, note = begun.order, begun.left, begun.note
        options, sizes, lost = begun.options, begun.sizes, begun.lost
        files: PartFiles | StreamedFiles
        if has_multipart(store):
            files = PartFiles(store, order, sizes, note, left.uploads if left else {})
        else:
            files = StreamedFiles(store, order, sizes.nbytes)
        draft = Draft(files, options)
        is_published = False
        try:
            yield draft
            files.finish()
            note.refuse_loss()
            self.refuse_made(store, order, request)
            files.publish_early()
            # An interrupted wait does not stop the request: the marker would appear all the same,
            # after what it names was deleted.
            with HeldSignals():
                self.publish(store, order, files.publish_late)
                is_published = True
                draft.warnings += self._clear_lost(lost)
                draft.warnings += self._delete_note(note)
            leftover = [name for name in begun.old if name not in order.names.values()]
            draft.warnings += self.delete_old(store, leftover)
        except BaseException as error:
            # What a damaged source gave is not gone on from: nobody knows which parts hold it.
            if is_published:
                self.say_complete(has_old=bool(begun.old))
            elif request.options.resume and not isinstance(error, SourceError):
                files.close()
                note.end()
            else:
                self._give_up(files, note, lost, error)
            raise
        if isinstance(files, PartFiles) and files.found:
            there = f"{files.found} of {counted(files.found + files.sent, 'part')} were there"
            logging.getLogger("ema_ckpt").info(displayed(f"{self.url}: {there}"))

    def _begin(self, store: ObjectStore, request: WriteRequest) -> _Begun:
        """Check everything, settle what is left of killed runs, and leave a note of this one."""
        self._refuse_changes()
        left = self.leftovers.settle(request)
        old = self.check_replaceable(store, request)
        order = self.publish_order(request)
        if has_multipart(store):
            given = left[1].part_nbytes if left else 0
            options, sizes = divide_memory(request.options, request.files, given)
        else:
            options, sizes = whole_memory(request.options)
        lost = self.lost_uploads(store, order, request)
        if left is not None:  # nobody else has begun any of these
            lost = lost._replace(others=frozenset())
        note = self.note(order, request, sizes.nbytes)
        try:
            if left is not None:
                self.leftovers.forget(left[0])
        except BaseException:
            note.end()
            raise
        return _Begun(order, old, options, sizes, note, left[1] if left else None, lost)

    def _refuse_changes(self, own: str = "") -> None:
        """Refuse a target that another run has begun to write, or written, since it was looked at.

        Of two runs that begin at the same time, at least the later one finds the other's note.

        Raises:
            TargetError: `busy`.
        """
        now = ObjectDestination(self.url)
        now.leftovers.refuse_living(own)
        if now._folder != self._folder:
            raise TargetError("busy", f"{self.url}: others have just written there; run this again")

    def note(self, order: PublishOrder, request: WriteRequest, part_nbytes: int) -> NoteFile:
        """Leave the note of this run beside the target. Raises TargetError `busy` beside others."""
        written = list[str]()
        if request.is_directory:
            written = [name for name in order.names.values() if name not in order.existing]
        generation = self.generation if request.is_directory else 0
        content = UploadNote(
            request.identity, part_nbytes, generation, written, order.marker, order.before
        )
        note = NoteFile(ObjectStore(parent_of(self.url)), self.name, content)
        try:
            self._refuse_changes(note.name)
        except BaseException:
            note.delete()
            raise
        return note

    def lost_uploads(
        self, store: ObjectStore, order: PublishOrder, request: WriteRequest
    ) -> LostUploads:
        """What will be in progress at the end of this run without its knowledge."""
        prefix = "" if request.is_directory else order.marker
        return LostUploads.from_now_on(store, frozenset(order.names.values()), prefix)

    def _store(self, request: WriteRequest) -> ObjectStore:
        store = self._inside if request.is_directory else ObjectStore(parent_of(self.url))
        if has_multipart(store):
            check_bucket(store)
        return store

    def check_replaceable(self, store: ObjectStore, request: WriteRequest) -> list[str]:
        """Check that the target may be written; return the names of old files, markers first.

        Raises:
            TargetError: `target-is-source target-exists foreign-files busy`.
        """
        self._check_apart(request)
        self._refuse_old_listing(request)
        kind = self._kind()
        if kind is None:
            return []
        if not request.options.overwrite:
            reason = "already exists; name another path, or pass --overwrite (overwrite=True)"
            raise TargetError("target-exists", f"{self.url}: {reason}")
        if kind != request.is_directory:
            what = "a directory" if kind else "a file"
            raise TargetError("target-exists", f"{self.url}: is {what}; name another path")
        if not kind:
            return []
        foreign = list(self._folder.folders)
        old = []
        for name in self._folder.files:
            if is_checkpoint_file(name, partial(store.read_head, name)):
                old.append(name)
            elif name not in request.replaces:
                foreign.append(name)
        if foreign and not request.keep_foreign:
            listed = f"{shown(foreign)}; move it away or name another path"
            message = f"{self.url}: --overwrite would mix with what is no checkpoint: {listed}"
            raise TargetError("foreign-files", message)
        return sorted(old, key=lambda name: (not _is_marker(name), name))

    def _refuse_old_listing(self, request: WriteRequest) -> None:
        """Refuse a target whose marker the store has, and does not list: others may be unseen too.

        Raises:
            TargetError: `busy`.
        """
        marker = request.marker
        if not request.is_directory or marker in self._folder.files:
            return
        if is_folder(join(self.url, marker)) is False:
            reason = f"the store does not list {marker}, which is there; try again when it does"
            raise TargetError("busy", f"{self.url}: {reason}")

    def _check_apart(self, request: WriteRequest) -> None:
        filesystem, path = open_filesystem(self.url)
        for source in request.sources:
            if not is_url(source):
                continue
            other, place = open_filesystem(source)
            if type(other) is not type(filesystem):
                continue
            if f"{place}/".startswith(f"{path}/") or f"{path}/".startswith(f"{place}/"):
                reason = f"is the source {source}, inside it or around it; write beside it instead"
                raise TargetError("target-is-source", f"{self.url}: {reason}")

    def publish_order(self, request: WriteRequest) -> PublishOrder:
        """Say which objects are to appear, and which of them last."""
        names = {file: file or self.name for file in request.files}
        existing = set(self._folder.files) if request.is_directory else set()
        if not request.is_directory and is_folder(self.url) is not None:
            existing = {self.name}
        marker = names[request.marker]
        late = [name for name in names.values() if name in existing and name != marker]
        before = None
        if request.is_directory and marker in existing:
            before = marker_crc(self._inside, marker)
        return PublishOrder(request.files, names, [*late, marker], existing, before)

    def refuse_made(self, store: ObjectStore, order: PublishOrder, request: WriteRequest) -> None:
        """Refuse a target that has become complete. Raises TargetError `target-exists`."""
        if not request.options.overwrite and is_folder(join(store.url, order.marker)) is not None:
            reason = "somebody else has made it meanwhile; name another path"
            raise TargetError("target-exists", f"{self.url}: {reason}")

    def publish(
        self, store: ObjectStore, order: PublishOrder, publish_late: Callable[[], None]
    ) -> None:
        """Let the last objects appear; put the old digests back if the marker could not."""
        old = store.read(SIDECAR) if SIDECAR in order.existing else None
        old_marker = store.read(order.marker) if old is not None else None
        try:
            publish_late()
        except BaseException:
            if old is not None and store.read(order.marker) == old_marker:
                store.put(SIDECAR, old)
            raise

    def _give_up(
        self,
        files: PartFiles | StreamedFiles,
        note: NoteFile,
        lost: LostUploads,
        error: BaseException,
    ) -> None:
        """Delete what was written, and then the note; say what could not be deleted."""
        if self.is_silent():
            files.close()
            note.end()
            return
        is_lost = False
        with contextlib.suppress(EmaCkptError):
            is_lost = note.is_lost()
        try:
            files.abort(is_lost=is_lost)
            if not is_lost:
                lost.clear()
            note.delete()
        except EmaCkptError as failure:
            text = f"{self.url}: left behind, some of it could not be deleted: {failure}"
            if failure is not error:
                logging.getLogger("ema_ckpt").warning(displayed(text))
        finally:
            note.end()  # whatever is left: the next run deletes it

    def is_silent(self) -> bool:
        """Whether the store does not answer, so that what was written stays; it is told then."""
        if self._inside.answers():
            return False
        reason = (
            "left behind, for the store does not answer; the next run that writes it deletes it"
        )
        logging.getLogger("ema_ckpt").warning(displayed(f"{self.url}: {reason}"))
        return True

    def _clear_lost(self, lost: LostUploads) -> Iterator[Diagnostic]:
        """Abort what was begun in vain; the target is in place whether that works or not."""
        try:
            lost.clear()
        except EmaCkptError as error:
            message = f"{self.url}: is complete, but an upload could not be aborted: {error}"
            yield Diagnostic("stale-file", message)

    def _delete_note(self, note: NoteFile) -> Iterator[Diagnostic]:
        """Delete the note of this run, whose target is in place whether that works or not."""
        try:
            note.delete()
        except AccessError as error:
            message = f"{self.url}: is complete, but this run's note could not be deleted: {error}"
            yield Diagnostic("stale-file", message)

    def say_complete(self, *, has_old: bool) -> None:
        """Say what an interrupt leaves that came when the target was in place."""
        left = "; files of the old checkpoint may be left" if has_old else ""
        text = displayed(f"{self.url}: is complete, it was interrupted too late{left}")
        logging.getLogger("ema_ckpt").warning(text)

    def delete_old(self, store: ObjectStore, names: list[str]) -> Iterator[Diagnostic]:
        """Delete the files of the checkpoint that was replaced."""
        try:
            store.delete(names)
        except AccessError as error:
            message = f"{self.url}: files of the old checkpoint could not be deleted: {error}"
            yield Diagnostic("stale-file", message)


class _Begun(NamedTuple):
    """A target that is about to be written.

    Attributes:
        old: files of a checkpoint that is replaced. left: the note of a run that is continued.
        lost: uploads that are in progress at the end without its knowledge.
    """

    order: PublishOrder
    old: list[str]
    options: WriteOptions
    sizes: PartSizes
    note: NoteFile
    left: UploadNote | None
    lost: LostUploads


def _is_marker(name: str) -> bool:
    return name.endswith(".metadata") or ".index." in name
