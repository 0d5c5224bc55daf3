"""What runs that were killed left at a target behind a URL: uploads in progress, objects, notes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Set
from functools import cached_property
from typing import NamedTuple

from ema_ckpt.core.errors import RefusedError
from ema_ckpt.storage.directories import is_folder, list_folder
from ema_ckpt.storage.multipart import abort_upload, has_multipart, uploads_below
from ema_ckpt.storage.object_store import PROBE, ObjectStore
from ema_ckpt.writing.destination import WriteRequest
from ema_ckpt.writing.journal import check_recorded
from ema_ckpt.writing.publish_order import marker_crc
from ema_ckpt.writing.upload_note import UploadNote, notes_of, refuse_living

_NONE: Mapping[str, str] = {}
SIDECAR = "ema_ckpt.json"


class Leftovers:
    """The notes beside a target, and what they tell.

    Args:
        parent: the directory of the target, where the notes are. store: that of its objects, which
            is the target itself where that is a directory.
    """

    def __init__(self, parent: ObjectStore, store: ObjectStore, name: str, url: str) -> None:
        self._parent = parent
        self._store = store
        self._name = name
        self._url = url

    @cached_property
    def notes(self) -> list[tuple[str, UploadNote]]:
        """Names and contents of the notes."""
        return list(notes_of(self._parent, self._name))

    @cached_property
    def unpublished(self) -> dict[str, int]:
        """Objects that nothing refers to, each with the generation of its run."""
        found: dict[str, int] = {}
        for _, note in self.notes:
            if note.written and marker_crc(self._store, note.marker) == note.before:
                found |= dict.fromkeys(note.written, note.generation)
        return found

    def refuse_living(self, own: str = "") -> None:
        """Raise TargetError `busy` if a run other than that of note `own` writes the target."""
        for name, note in self.notes:
            if name != own:
                refuse_living(self._parent, name, note, self._url)

    def settle(self, request: WriteRequest) -> tuple[str, UploadNote] | None:
        """Delete what is left; with `resume` return the note of a run to go on from.

        Raises:
            TargetError: `busy`; `resume-mismatch` if that was another source or other options.
        """
        self.refuse_living()
        kept: tuple[str, UploadNote] | None = None
        for name, note in self.notes:
            if request.options.resume and kept is None and not self._has_published(note):
                check_recorded(note.identity, self._url, request.identity)
                kept = name, note
                self._delete_temporaries(note)
            else:
                self._clear(name, note)
        return kept

    def _has_published(self, note: UploadNote) -> bool:
        """Whether a run was killed only after its directory was complete, as far as is known."""
        return bool(note.written) and marker_crc(self._store, note.marker) != note.before

    def forget(self, name: str) -> None:
        """Delete the note of a run that is continued under another one."""
        self._parent.delete([name])

    def _clear(self, name: str, note: UploadNote) -> None:
        """Delete what one run left, its note last."""
        if note.written:
            names = {*note.written, note.marker, *note.uploads}
            clear_uploads(self._store, names, "", note.uploads)
        else:
            clear_uploads(self._parent, {note.marker}, note.marker, note.uploads)
        self._delete_temporaries(note)
        if self.unpublished:
            self._store.delete([one for one in note.written if one in self.unpublished])
        self._parent.delete([name])

    def _delete_temporaries(self, note: UploadNote) -> None:
        """Delete objects that the run had not closed, which nobody can go on with."""
        store = self._store if note.written else self._parent
        names = {*note.written, note.marker, *note.uploads, PROBE}
        if note.written:  # where it replaces one, it is none of those
            names.add(SIDECAR)
        store.delete(_temporaries(store, names))


def clear_uploads(
    store: ObjectStore, names: Collection[str], prefix: str, known: Mapping[str, str] = _NONE
) -> None:
    """Abort the uploads in progress of these objects, whose names begin with `prefix`.

    `known`: ids of some, by name; who may not list uploads aborts those.
    """
    if not has_multipart(store):
        return
    LostUploads(store, names, prefix, frozenset()).clear()
    for name, upload_id in known.items():
        abort_upload(store, name, upload_id)


def _temporaries(store: ObjectStore, names: Collection[str]) -> list[str]:
    """List what these objects are called before they are complete, where files show before that."""
    if has_multipart(store) or not is_folder(store.url):
        return []
    own = re.compile(rf"\.({'|'.join(map(re.escape, names))})\.ema-ckpt-[0-9a-f]{{8}}")
    return [name for name in list_folder(store.url).files if own.fullmatch(name)]


class LostUploads(NamedTuple):
    """Uploads of a run that it does not know: the store has begun them, and the answer was lost.

    Attributes:
        others: those that were there before the run, by name and id; None: they cannot be told.
    """

    store: ObjectStore
    names: Collection[str]
    prefix: str
    others: Set[tuple[str, str]] | None

    @classmethod
    def from_now_on(cls, store: ObjectStore, names: Collection[str], prefix: str) -> LostUploads:
        """Take all that are there now for those of others."""
        return cls(store, names, prefix, _uploads(store, names, prefix))

    def clear(self) -> None:
        """Abort them; who may not list them cannot, and leaves that to the bucket's own rules."""
        if self.others is None:
            return
        for name, upload_id in sorted((_uploads(*self[:3]) or frozenset()) - self.others):
            abort_upload(self.store, name, upload_id)


def _uploads(
    store: ObjectStore, names: Collection[str], prefix: str
) -> Set[tuple[str, str]] | None:
    """Name and id of the uploads in progress of these objects; None if the store does not tell."""
    if not has_multipart(store):
        return None
    try:
        return {one for one in uploads_below(store, prefix) if one[0] in names}
    except RefusedError:
        return None
