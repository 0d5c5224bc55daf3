"""The note beside a target behind a URL: what a run has sent there, while it is not complete.

`.NAME.ema-ckpt-<8 hex digits>.note` is a small JSON object in the target's parent, there from
before the first byte is sent until the target is complete. By it the next run finds what a killed
one left: it deletes that, or goes on from it with `--resume`. What a store has no locks for is
decided by the note too: while its process lives, or on another machine touches it, nobody else
writes the target.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields

from ema_ckpt.core.errors import EmaCkptError, RefusedError, TargetError
from ema_ckpt.storage.directories import changed_within, is_folder, join, list_folder
from ema_ckpt.storage.object_store import ObjectStore
from ema_ckpt.storage.stage_names import stage_name

_VERSION = 1
_TOUCHED_EVERY_SECONDS = 60.0
_FRESH_SECONDS = 600.0
_LIVING: set[str] = set()  # names of the notes of this process whose runs have not ended


@dataclass(slots=True)
class UploadNote:
    """What one run writes.

    Attributes:
        identity: digests of source and plan. part_nbytes: how it cuts files.
        generation: number in the names of its data files.
        written: objects that are its own, and were not there before it.
        marker: the object that completes the target. before: CRC-32 of it when the run began.
        uploads: id of the upload of each object that is sent in parts.
        machine, pid, started: its process.
    """

    identity: Mapping[str, str]
    part_nbytes: int
    generation: int
    written: list[str]
    marker: str
    before: int | None
    uploads: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    pid: int = 0
    started: str = ""
    version: int = _VERSION

    def is_alive(self) -> bool | None:
        """Whether its process lives; None if that was on another machine."""
        if self.machine != _machine():
            return None
        return self.started != "" and _started(self.pid) == self.started


class NoteFile:
    """The note of this run; told of every upload that is begun, and touched until the run ends."""

    def __init__(self, parent: ObjectStore, target: str, note: UploadNote) -> None:
        """Write it; a note that is continued is written anew, under a name of this run."""
        self.name = f"{stage_name(target, os.urandom(4).hex())}.note"
        self._parent = parent
        self._url = join(parent.url, target)
        self._note = note
        self._lock = threading.Lock()
        self._ended = threading.Event()
        note.machine, note.pid, note.started = _machine(), os.getpid(), _started(os.getpid())
        _LIVING.add(self.name)
        try:
            self._write()
        except BaseException:
            self.end()
            raise
        threading.Thread(target=self._touch_until_ended, name="ema_ckpt-note", daemon=True).start()

    def _write(self) -> None:
        self._parent.put(self.name, json.dumps(asdict(self._note)).encode())

    def _touch_until_ended(self) -> None:
        """Show other machines that this run goes on, however long it sends nothing."""
        while not self._ended.wait(_TOUCHED_EVERY_SECONDS):
            with self._lock, contextlib.suppress(EmaCkptError):
                if not self._ended.is_set() and not self.is_lost():
                    self._write()

    def begun(self, name: str, upload_id: str) -> None:
        """Record an upload before its first part is sent. Raises as `refuse_loss`."""
        with self._lock:
            if self._note.uploads.get(name) != upload_id:
                self.refuse_loss()
                self._note.uploads[name] = upload_id
                self._write()

    def is_lost(self) -> bool:
        """Whether another run has deleted it, as far as the store tells: it writes the target now.

        Raises:
            AccessError: as `ObjectStore.read`.
        """
        try:
            return self._parent.read(self.name) is None
        except RefusedError:
            return False

    def refuse_loss(self) -> None:
        """Raise TargetError `busy` if another run has taken this one for dead."""
        if self.is_lost():
            reason = "another run has taken this one for dead and deleted its note"
            raise TargetError("busy", f"{self._url}: {reason}; look with verify who has written it")

    def delete(self) -> None:
        """Delete it: there is nothing left to go on from."""
        self.end()
        with self._lock:
            self._parent.delete([self.name])

    def end(self) -> None:
        """Touch it no more: the run has ended, and what it has left is for the next one."""
        self._ended.set()
        _LIVING.discard(self.name)


def notes_of(parent: ObjectStore, target: str) -> Iterator[tuple[str, UploadNote]]:
    """Yield name and contents of the notes beside a target; what is no note is passed over."""
    if not is_folder(parent.url):
        return
    own = re.compile(re.escape(f".{target}.ema-ckpt-") + r"[0-9a-f]{8}\.note")
    for name in list_folder(parent.url).files:
        if own.fullmatch(name):
            note = _parsed(parent.read(name) or b"")
            if note is not None:
                yield name, note


def refuse_living(parent: ObjectStore, name: str, note: UploadNote, target: str) -> None:
    """Refuse to write what another run is writing. Raises TargetError `busy`."""
    url = join(parent.url, name)
    is_alive = note.is_alive()
    if is_alive and note.pid == os.getpid():
        is_alive = name in _LIVING
    if is_alive is None:
        is_alive = changed_within(url, _FRESH_SECONDS)
        hint = "wait ten minutes from its last sign of life, or delete that note"
    else:
        hint = "wait for it to end"
    if is_alive:
        message = f"{target}: another run is writing it, by its note {name}; {hint}"
        raise TargetError("busy", message)


def _parsed(data: bytes) -> UploadNote | None:
    try:
        values = json.loads(data)
        note = UploadNote(**{one.name: values[one.name] for one in fields(UploadNote)})
        texts = [*note.identity.values(), *note.written, note.marker, *note.uploads.values()]
        numbers = [note.part_nbytes, note.generation, note.pid, note.before or 0]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    is_sane = all(type(text) is str and ".." not in text.split("/") for text in texts)
    is_sane = is_sane and all(type(number) is int and number >= 0 for number in numbers)
    return note if is_sane and note.version == _VERSION else None


def _machine() -> str:
    """Digest of what tells this machine, and this container, from others."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read()
        container = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        boot, container = os.uname().nodename, ""
    return hashlib.sha256(f"{boot}\0{container}".encode()).hexdigest()[:16]


def _started(pid: int) -> str:
    """When a process was started, by the system's clock; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
