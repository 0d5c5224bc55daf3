"""Read the directory of a zip archive that `torch.save` wrote: where each record's bytes lie.

Records are stored, never deflated, so a tensor's bytes are a range of the file. The central
directory at the end has sizes and CRC-32s (torch leaves them zero in the local headers); the local
header says where the bytes begin. Layout of zip and zip64: APPNOTE.TXT 6.3.10, sections 4.3.7 to
4.3.16.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ema_ckpt.core.catalog import Diagnostic, Files
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import counted, shown

LOCAL = struct.Struct("<4sHHHHHLLLHH")
CENTRAL = struct.Struct("<4sHHHHHHLLLHHHHHLL")
END = struct.Struct("<4sHHHHLLH")
END64 = struct.Struct("<4sQHHLLQQQQ")
LOCATOR64 = struct.Struct("<4sLQL")
LOCAL_CRC, CENTRAL_CRC = 14, 16  # byte of the checksum in these records
MAX_U32, MAX_U16 = 0xFFFFFFFF, 0xFFFF
_IS_FOLDER = 0x10  # among the external attributes
# Flags of records that are encrypted, patches, strongly encrypted, or have masked headers: torch
# loads none of them.
_UNREAD_FLAGS = 0x2061
_END_MAGIC = b"PK\5\6"
_PEEK_NBYTES = 4096
_MAX_DIRECTORY_NBYTES = 1 << 30


class Record(NamedTuple):
    """One record: its range in the file, and its CRC-32 (None if checksums are switched off)."""

    name: str
    offset: int
    nbytes: int
    crc: int | None


class CentralRecord(NamedTuple):
    """An entry of the central directory; `position` is its first byte in the directory."""

    name: str
    nbytes: int
    crc: int
    header: int
    flags: int
    method: int
    position: int


class Window:
    """A range of a file, read in as few calls as its shape allows: most archives need two."""

    def __init__(self, source: Files, file: str, offset: int, nbytes: int) -> None:
        self.source = source
        self.file = file
        self.offset = offset
        self.nbytes = nbytes
        if nbytes <= 2 * _PEEK_NBYTES:
            self.head = self.tail = source.read(file, offset, nbytes)
        else:
            self.tail = source.read(file, offset + nbytes - _PEEK_NBYTES, _PEEK_NBYTES)
            self.head = source.read(file, offset, _PEEK_NBYTES // 2)

    def read(self, start: int, nbytes: int) -> bytes:
        """Read bytes at `start` of the window. Raises SourceError `bad-header` outside it."""
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise self.bad(f"a record lies outside the archive of {self.nbytes} bytes")
        if start + nbytes <= len(self.head):
            return self.head[start : start + nbytes]
        into_tail = start - (self.nbytes - len(self.tail))
        if into_tail >= 0:
            return self.tail[into_tail : into_tail + nbytes]
        return self.source.read(self.file, self.offset + start, nbytes)

    def bad(self, why: str) -> SourceError:
        """Return the error of a damaged archive."""
        message = f"{self.file}: damaged zip archive at byte {self.offset}: {why}"
        return SourceError("bad-header", message, file=self.file)


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive's records by name, without the folder that torch puts before all of them."""

    file: str
    records: Mapping[str, Record]
    window: Window
    trailing_nbytes: int = 0

    def warnings(self) -> list[Diagnostic]:
        """Warn of bytes after the end, which torch passes over and no checksum covers."""
        if not self.trailing_nbytes:
            return []
        extra = counted(self.trailing_nbytes, "byte")
        message = f"{self.file}: {extra} after the end of the archive: torch passes over them"
        return [Diagnostic("unchecked", f"{message}; they are not read, nor written again")]

    def record(self, name: str) -> Record:
        """Return a record. Raises SourceError `bad-header` if there is none."""
        record = self.records.get(name)
        if record is None:
            raise self.window.bad(f"it has no record {name!r}: not written by torch.save")
        return record

    def storage(self, key: str, nbytes: int, tensor: str) -> Record:
        """Return a tensor's storage. Raises SourceError `bad-header` unless it has `nbytes`."""
        record = self.record(f"data/{key}")
        if record.nbytes != nbytes:
            problem = f"its storage has {record.nbytes} bytes, the pickle says {nbytes}"
            message = f"{self.file}: tensor {tensor!r}: {problem}"
            raise SourceError("bad-header", message, tensor=tensor, file=self.file)
        return record

    def is_torchs(self) -> bool:
        """Whether it has the record that torch reads before all others."""
        return "version" in self.records or ".data/version" in self.records

    def read(self, name: str) -> bytes:
        """Read a small record. Raises SourceError `checksum` if its bytes do not match."""
        record = self.record(name)
        data = self.window.read(record.offset - self.window.offset, record.nbytes)
        if record.crc is not None and crc32(data) != record.crc:
            place = f"the record {name!r} at byte {record.offset}"
            message = f"{self.file}: {place} does not match its CRC-32"
            raise SourceError("checksum", message, file=self.file)
        return data


def read_archive(source: Files, file: str, offset: int, nbytes: int) -> Archive:
    """Read the directory of the archive that fills `nbytes` bytes of `file` from `offset`.

    Raises:
        SourceError: `bad-header` for anything that is no whole torch archive, a name that stands
            twice included; `unsupported` for compressed or encrypted records; `truncated-file`.
    """
    window = archive_in(Window(source, file, offset, nbytes))
    end = window.nbytes
    directory_start, entries = read_directory(window)
    _check_names(window, entries)
    has_checksums = any(entry.crc for entry in entries)
    records: dict[str, Record] = {}
    spans: list[tuple[int, int]] = []
    for entry in entries:
        start = _data_start(window, entry)
        spans.append((entry.header, start + entry.nbytes))
        name, crc = _inner_name(entry), entry.crc if has_checksums else None
        records[name] = Record(name, offset + start, entry.nbytes, crc)
    spans.sort()
    ends = [0, *(stop for _, stop in spans)]
    starts = [*(first for first, _ in spans), directory_start]
    # Records that share bytes would be far more to read and to write than the file has.
    if any(start < stop for start, stop in zip(starts, ends, strict=True)):
        raise window.bad("its records overlap")
    return Archive(file, records, window, nbytes - end)


def _inner_name(entry: CentralRecord) -> str:
    return entry.name.partition("/")[2] or entry.name


def _check_names(window: Window, entries: Sequence[CentralRecord]) -> None:
    folders = {entry.name.partition("/")[0] for entry in entries}
    if len(folders) > 1:
        raise window.bad(f"its records lie in several folders: {shown(sorted(folders))}")
    exact: set[str] = set()
    folded: set[str] = set()
    for name in map(_inner_name, entries):
        if any("\udc80" <= letter <= "\udcff" for letter in name):  # bytes that are no UTF-8
            raise window.bad(f"a record has the name {name!r}, which torch cannot decode")
        if name in exact:
            raise window.bad(f"the record {name!r} stands twice")
        # torch looks names up without regard to case: another name would be another's bytes.
        if name.lower() in folded:
            raise window.bad(f"the record {name!r} stands twice, in other letter case")
        exact.add(name)
        folded.add(name.lower())


def archive_in(window: Window) -> Window:
    """Return the archive that begins the window, without bytes that follow it.

    Raises:
        SourceError: `bad-header` if it has no end record.
    """
    end = _end_of_archive(window)
    if end == window.nbytes:
        return window
    return Window(window.source, window.file, window.offset, end)


def _end_of_archive(window: Window) -> int:
    """Return where the end record ends; bytes may follow it, as torch's own reader allows.

    Raises:
        SourceError: `bad-header` if there is none, as where the file was cut.
    """
    if window.tail[-END.size :].startswith(_END_MAGIC):
        return window.nbytes
    nbytes = min(window.nbytes, END.size + MAX_U16)
    tail = window.read(window.nbytes - nbytes, nbytes)
    found = tail.rfind(_END_MAGIC, 0, max(nbytes - END.size + len(_END_MAGIC), 0))
    if found < 0:
        problem = "its end record is missing: it was cut short, or is no zip"
        raise window.bad(problem)
    return window.nbytes - nbytes + found + END.size


def _directory_span(window: Window) -> tuple[int, int, int]:
    """Locate the central directory (zip64 followed): its start, size and number of entries."""
    end_start = window.nbytes - END.size
    end = END.unpack(window.read(end_start, END.size))
    disks, counts, span = end[1:3], end[3:5], end[5:7]
    locator_start = end_start - LOCATOR64.size
    locator = window.read(locator_start, LOCATOR64.size) if locator_start >= 0 else b""
    if locator.startswith(b"PK\6\7"):
        # Readers differ on which of the two end records they follow, so both must say the same.
        wide = _end64(window, locator)
        fields = zip((*disks, *counts, *span), wide, (MAX_U16,) * 4 + (MAX_U32,) * 2, strict=True)
        if any(narrow not in (value, most) for narrow, value, most in fields):
            raise window.bad("its two end records contradict each other")
        disks, counts, span = wide[:2], wide[2:4], wide[4:]
    elif MAX_U16 in counts or MAX_U32 in span:
        raise window.bad("its zip64 locator is missing")
    if any(disks) or counts[0] != counts[1]:
        raise window.bad("its end record speaks of other parts: not written by torch.save")
    (size, start), count = span, counts[1]
    if size > _MAX_DIRECTORY_NBYTES or count * CENTRAL.size > size:
        raise window.bad("its directory has an impossible size")
    return start, size, count


def _end64(window: Window, locator: bytes) -> tuple[int, ...]:
    """Return two numbers of disks, two of entries, size and start of the directory (zip64)."""
    _, disk, position, disks = LOCATOR64.unpack(locator)
    end64 = END64.unpack(window.read(position, END64.size))
    if end64[0] != b"PK\6\6" or disk or disks != 1:
        raise window.bad("its zip64 end record is missing, or in another part")
    if end64[1] < END64.size - 12:  # the bytes after this number
        raise window.bad("its zip64 end record is said to be shorter than it is")
    fields: tuple[int, ...] = end64[4:]
    return fields


def read_directory(window: Window) -> tuple[int, list[CentralRecord]]:
    """Read the central directory: its first byte in the archive, and its entries.

    Raises:
        SourceError: `bad-header` where it is malformed.
    """
    directory_start, size, count = _directory_span(window)
    data, position = window.read(directory_start, size), 0
    entries = []
    for _ in range(count):
        body = position + CENTRAL.size
        if body > size:
            raise window.bad("its directory is cut short")
        fields = CENTRAL.unpack_from(data, position)
        flags, method, crc, packed, nbytes = fields[3], fields[4], *fields[7:10]
        name_nbytes, extra_nbytes, comment_nbytes, header = *fields[10:13], fields[16]
        following = body + name_nbytes + extra_nbytes + comment_nbytes
        if fields[0] != b"PK\1\2" or fields[13] or following > size:
            raise window.bad("its directory is malformed")
        name = data[body : body + name_nbytes].decode("utf-8", "surrogateescape")
        extra = data[body + name_nbytes : body + name_nbytes + extra_nbytes]
        nbytes, packed, header = _zip64(window, extra, [nbytes, packed, header])
        if nbytes != packed and not method:
            raise window.bad(f"the record {name!r} is stored but has two sizes")
        if fields[15] & _IS_FOLDER and (nbytes or not name.endswith("/")):
            # torch reads nothing of it, and leaves memory as it was. `zip -r` writes real folders.
            raise window.bad(f"the record {name!r} has the mark of a folder")
        entries.append(CentralRecord(name, nbytes, crc, header, flags, method, position))
        position = following
    return directory_start, entries


def _zip64(window: Window, extra: bytes, fields: list[int]) -> list[int]:
    # Each 32-bit field that is full stands in the zip64 extra field, in the order of APPNOTE 4.5.3.
    if MAX_U32 not in fields:
        return fields
    position = 0
    while position + 4 <= len(extra):
        tag, size = struct.unpack_from("<HH", extra, position)
        if tag == 1:
            wide_bytes = extra[position + 4 : position + 4 + size]
            wide = iter(struct.unpack_from(f"<{len(wide_bytes) // 8}Q", wide_bytes))
            return [next(wide, MAX_U32) if field == MAX_U32 else field for field in fields]
        position += 4 + size
    raise window.bad("a zip64 field is missing")


def _data_start(window: Window, entry: CentralRecord) -> int:
    """Return where a record's bytes begin, relative to the archive."""
    magic, _, flags, method, *_, name_nbytes, extra_nbytes = LOCAL.unpack(
        window.read(entry.header, LOCAL.size)
    )
    is_header = magic == b"PK\3\4"
    if is_header and (method != entry.method or (flags ^ entry.flags) & _UNREAD_FLAGS):
        raise window.bad(f"directory and header of {entry.name!r} disagree on how it is stored")
    if entry.method or entry.flags & _UNREAD_FLAGS:
        message = f"{window.file}: record {entry.name!r} is compressed or encrypted"
        raise SourceError("unsupported", message, file=window.file)
    start: int = entry.header + LOCAL.size + name_nbytes + extra_nbytes
    if not is_header or start + entry.nbytes > window.nbytes:
        problem = "has no local header, or lies outside the archive"
        raise window.bad(f"the record {entry.name!r} {problem}")
    return start
