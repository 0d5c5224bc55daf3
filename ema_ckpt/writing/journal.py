"""The journal of a stage: ranges of the output that are written, for `--resume`.

One JSON document a line. The first names what is being written (digests of source and plan), each
other one is `[file, offset, nbytes, "crc32 in hex"]`, a further element `{name: count}` where a
cast made finite values infinite, and at the end the CRC-32 of the line itself: with another offset
it could vouch for the zeros of a range that is not written yet. No line is believed on resume
before its range has been read back, from the disk: data that a power cut kept from it, or that a
full or failing one refused when Linux wrote its cache back, fails its CRC and is written once more.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from ema_ckpt.core.box import are_sizes
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import EmaCkptError, TargetError
from ema_ckpt.storage.files import close_read, safe_name
from ema_ckpt.storage.stage_names import JOURNAL
from ema_ckpt.writing.open_inside import open_below
from ema_ckpt.writing.switch import empty_cache

# File relative to the target ("" when the target is one file), offset and length in bytes.
Range = tuple[str, int, int]

_VERSION = 2
_READ_NBYTES = 1 << 20
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Finished:
    """CRC-32 of a written range, and by tensor how many finite values became infinite in it."""

    crc: int
    overflow: Mapping[str, int] = field(default_factory=dict)


class Journal:
    """Append-only record of finished ranges, from several threads and forked child processes."""

    def __init__(
        self, stage: Path, payload: Path, identity: Mapping[str, str], *, after: float = 0.0
    ) -> None:
        """Create the journal in `stage`, or reopen the one that an interrupted run left.

        Args:
            payload: the file or directory that is written.
            after: seconds for which a new journal stays in memory.
        """
        self._payload = payload
        self._path = stage / JOURNAL
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._recorded = _read_ranges(self._path)
        self._is_closed = False
        self._pid, self._is_child = os.getpid(), False
        self._pending: list[str] = []
        self._due = time.monotonic() + after
        if not after:
            self._open()
        if not self._has_first_line():
            self._append(_dumped({"journal": _VERSION, "identity": dict(identity)}))

    def done(self, file: str, offset: int, nbytes: int, finished: Finished) -> None:
        """Record that `nbytes` bytes at `offset` of `file` are written."""
        told = [file, offset, nbytes, f"{finished.crc:08x}"]
        text = _dumped([*told, dict(finished.overflow)] if finished.overflow else told)
        self._append(f'{text[:-1]},"{crc32(text.encode()):08x}"]')

    def completed(self) -> dict[Range, Finished]:
        """Read back the ranges of an earlier run; return those that are intact."""
        intact: dict[Range, Finished] = {}
        for file, ranges in groupby(sorted(self._recorded), key=lambda key: key[0]):
            try:
                fd = os.open(self._payload / file, _READ)
            except OSError:
                continue
            try:
                empty_cache(fd)
                for key in ranges:
                    if _crc(fd, key[1], key[2]) == self._recorded[key].crc:
                        intact[key] = self._recorded[key]
            except OSError:
                continue  # what cannot be read back is written again
            finally:
                close_read(fd)
        return intact

    def close(self) -> None:
        """Close the file; nothing can be recorded after.

        Lines that only now turn out to be lost harm nothing: their ranges are written once more.
        """
        with self._lock:
            self._is_closed = True
            fd, self._fd = self._fd, None
            if fd is not None:
                close_read(fd)

    def discard(self) -> None:
        """Close and delete: the stage must not be resumed."""
        try:
            self.close()
        finally:
            self._path.unlink(missing_ok=True)

    @contextmanager
    def ends_on_failure(self) -> Iterator[None]:
        """Discard the journal where the block, which makes all durable, raises an OSError.

        Such an error is told once. The cache goes on to hold what the disk does not, as if it had
        been stored: no later sync would write it.
        """
        try:
            yield
        except OSError:
            with suppress(OSError):
                self.discard()
            raise

    def _append(self, line: str) -> None:
        with self._lock:
            if self._is_closed:
                raise ValueError("the journal is closed")
            if os.getpid() != self._pid:  # a child: the parent writes what it keeps
                self._pid, self._is_child = os.getpid(), True
                self._pending.clear()
            self._pending.append(f"{line}\n")
            if time.monotonic() < self._due or (self._is_child and not self._has_first_line()):
                return
            try:
                os.write(self._open(), "".join(self._pending).encode())
            except OSError as error:
                error.filename = str(self._path)
                raise
            self._pending.clear()

    def _has_first_line(self) -> bool:
        return self._path.exists() and self._path.stat().st_size > 0

    def _open(self) -> int:
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._fd = open_below(self._path.parent, self._path.name, flags)
        return self._fd


def recorded_identity(stage: Path) -> dict[str, str] | None:
    """Read the digests of source and plan that a stage was begun with; None without a journal."""
    try:
        with open(stage / JOURNAL, "rb") as file:
            head = json.loads(file.readline())
        if head["journal"] != _VERSION:
            return None
        return {str(key): str(value) for key, value in head["identity"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def check_identity(stage: Path, target: Path, identity: Mapping[str, str]) -> bool:
    """Check that `stage` can be continued; False if it holds nothing to go on from.

    Raises:
        TargetError: `resume-mismatch` if it was begun from another source or with other options.
    """
    recorded = recorded_identity(stage)
    # `save` records nothing, and is not continued.
    if recorded is None or (identity and not recorded):
        return False
    check_recorded(recorded, str(target), identity)
    return True


def check_recorded(recorded: Mapping[str, str], target: str, identity: Mapping[str, str]) -> None:
    """Compare digests that an interrupted run recorded. Raises TargetError `resume-mismatch`."""
    keys = sorted({*recorded, *identity})
    differing = [key for key in keys if recorded.get(key) != identity.get(key)]
    if differing:
        remedy = "leave out --resume to start anew"
        if not differing[0].startswith("version"):
            cause = "options are the same, the metadata of the source"
            if "source" in differing:
                cause = "source is the same, its files, their times or permissions"
            remedy = f"if the {cause} changed; repeat the original command, or {remedy}"
        message = f"{target}: the interrupted run differs in its {' and '.join(differing)}"
        raise TargetError("resume-mismatch", f"{message}; {remedy}", file=target)


def _read_ranges(path: Path) -> dict[Range, Finished]:
    """Read a journal's ranges, if there is one, and cut off a torn last line."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
    ranges = {}
    for line in data[:end].splitlines()[1:]:
        try:
            key, finished = _parse_range(_checked(line))
        except (ValueError, TypeError, AttributeError, RecursionError, EmaCkptError):
            continue  # the range is written again
        ranges[key] = finished
    return ranges


def _dumped(document: object) -> str:
    return json.dumps(document, separators=(",", ":"))


def _checked(line: bytes) -> Any:
    """Return what a line tells, if its own CRC-32 is right: `[…,"crc32 in hex"]`."""
    told, crc = line[:-12] + b"]", line[-10:-2]
    if crc != b"%08x" % crc32(told):
        raise ValueError("the line is damaged")
    return json.loads(told)


def _parse_range(document: Any) -> tuple[Range, Finished]:
    """Read one line; anything else than `Journal.done` writes raises an error."""
    file, offset, nbytes, crc, overflow = document if len(document) == 5 else (*document, {})
    if file != "":
        safe_name(file)
    if not isinstance(overflow, dict) or not are_sizes(
        (offset, nbytes, offset + nbytes, *overflow.values())
    ):
        raise ValueError("a range or count is no number")
    return (file, offset, nbytes), Finished(int(crc, 16), overflow)


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
