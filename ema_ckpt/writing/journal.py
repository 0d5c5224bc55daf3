"""The journal of a stage: which ranges of the output are written, so that `--resume` need not write
them again.

One JSON document a line. The first names what is being written (source identity and plan hash),
each other one is `[file, offset, nbytes, "crc32 in hex"]`, and a fifth element `{name: count}`
where a cast made finite values infinite. No line is believed on resume before its range has been
read back: data that a power cut kept from the disk simply fails its CRC and is written once more.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import EmaCkptError, TargetError
from ema_ckpt.storage.files import safe_name
from ema_ckpt.storage.stage_names import JOURNAL

# File relative to the target ("" when the target is one file), offset and length in bytes.
Range = tuple[str, int, int]

_VERSION = 1
_READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Finished:
    """What is recorded of a range: its CRC-32, and how many finite values of each tensor became
    infinite in it.
    """

    crc: int
    overflow: Mapping[str, int] = field(default_factory=dict)


class Journal:
    """Append-only record of finished ranges, from several threads and forked child processes."""

    def __init__(
        self, stage: Path, payload: Path, identity: Mapping[str, str], *, after: float = 0.0
    ) -> None:
        """Start a journal in `stage`, or take up the one there; `payload` is what is being written.

        Args:
            after: seconds to keep a new journal in memory, for work that would rather be done anew.
        """
        self._payload = payload
        self._path = stage / JOURNAL
        self._lock = threading.Lock()
        self._fd: int | None = None
        _drop_torn_line(self._path)
        self._found = dict(_ranges(self._path))
        self._closed = False
        self._pid, self._is_child = os.getpid(), False
        self._kept: list[object] = []
        self._due = time.monotonic() + after
        if not after:
            self._open()
        if not self._is_begun():
            self._append({"journal": _VERSION, "identity": dict(identity)})

    def done(self, file: str, offset: int, nbytes: int, finished: Finished) -> None:
        """Record that `nbytes` bytes at `offset` of `file` are written."""
        entry = [file, offset, nbytes, f"{finished.crc:08x}"]
        self._append([*entry, dict(finished.overflow)] if finished.overflow else entry)

    def completed(self) -> dict[Range, Finished]:
        """Ranges of an earlier run that are there and intact. Reads each of them back."""
        sound: dict[Range, Finished] = {}
        for file, keys in groupby(sorted(self._found), key=lambda key: key[0]):
            sound.update(self._intact(file, list(keys)))
        return sound

    def close(self) -> None:
        """Close the file; nothing can be recorded after."""
        with self._lock:
            self._closed = True
            fd, self._fd = self._fd, None
            if fd is not None:
                os.close(fd)

    def discard(self) -> None:
        """Close and delete: the output is complete, and what is to be deleted next must never be
        resumed.
        """
        self.close()
        self._path.unlink(missing_ok=True)

    def _append(self, entry: object) -> None:
        with self._lock:
            if self._closed:
                raise ValueError("the journal is closed")
            if os.getpid() != self._pid:  # a child: the parent writes what it has kept
                self._pid, self._is_child = os.getpid(), True
                self._kept.clear()
            self._kept.append(entry)
            if time.monotonic() >= self._due and (not self._is_child or self._is_begun()):
                os.write(self._open(), b"".join(map(_line, self._kept)))
                self._kept.clear()

    def _is_begun(self) -> bool:
        return self._path.exists() and self._path.stat().st_size > 0

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
        return self._fd

    def _intact(self, file: str, keys: list[Range]) -> Iterator[tuple[Range, Finished]]:
        try:
            fd = os.open(self._payload / file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            for key in keys:
                if _crc(fd, key[1], key[2]) == self._found[key].crc:
                    yield key, self._found[key]
        finally:
            os.close(fd)


def _line(entry: object) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def recorded_identity(stage: Path) -> dict[str, str] | None:
    """What the writer that left `stage` behind was writing, or None if its journal does not
    tell.
    """
    try:
        with open(stage / JOURNAL, "rb") as file:
            head = json.loads(file.readline())
        if head["journal"] != _VERSION:
            return None
        return {str(key): str(value) for key, value in head["identity"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def check_identity(stage: Path, target: Path, identity: Mapping[str, str]) -> bool:
    """Whether `stage` can be continued: False if it holds nothing to go on from.

    Raises:
        TargetError: `resume-mismatch` if it was begun from another source or with other options.
    """
    found = recorded_identity(stage)
    if found is None:
        return False
    differing = sorted(key for key in {*found, *identity} if found.get(key) != identity.get(key))
    if differing:
        raise TargetError(
            "resume-mismatch",
            f"{target}: the interrupted run differs in its {' and '.join(differing)}; "
            "repeat the original command, or leave out --resume to start anew",
            file=str(target),
        )
    return True


def _drop_torn_line(path: Path) -> None:
    """Cut off what a kill left of the last line, so that the next one does not grow onto it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    if not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _ranges(path: Path) -> Iterator[tuple[Range, Finished]]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines()[1:]:
        try:
            file, offset, nbytes, crc, *rest = json.loads(line)
            if file:
                safe_name(file)
            overflow = {str(name): int(count) for name, count in rest[0].items()} if rest else {}
            yield (file, int(offset), int(nbytes)), Finished(int(crc, 16), overflow)
        except (ValueError, TypeError, AttributeError, EmaCkptError):
            continue  # unread lines only cost a rewrite of their range


def _crc(fd: int, offset: int, nbytes: int) -> int | None:
    """CRC-32 of a range of an open file, or None if the file ends before it does."""
    crc, end = 0, offset + nbytes
    while offset < end:
        data = os.pread(fd, min(_READ_NBYTES, end - offset), offset)
        if not data:
            return None
        crc = crc32(data, crc)
        offset += len(data)
    return crc
