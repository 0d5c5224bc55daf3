"""The zip archives that `torch.save` writes: where each record's bytes lie, and how to frame new
ones.

Records are stored, never deflated, so a tensor's bytes are a range of the file. The central
directory at the end has sizes and CRC-32s (torch leaves them zero in the local headers); the local
header tells where the bytes begin. Layout of zip and zip64: APPNOTE.TXT 6.3.10, sections 4.3.7 to
4.3.16. Payloads begin at multiples of 64 from the start of the archive, as torch pads them, by an
`FB` extra field.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ema_ckpt.core.catalog import Files
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import shown

ALIGNMENT = 64
_LOCAL = struct.Struct("<4sHHHHHLLLHH")
_CENTRAL = struct.Struct("<4sHHHHHHLLLHHHHHLL")
_END = struct.Struct("<4sHHHHLLH")
_END64 = struct.Struct("<4sQHHLLQQQQ")
_LOCATOR64 = struct.Struct("<4sLQL")
_CRC = struct.Struct("<L")
_LOCAL_CRC, _CENTRAL_CRC = 14, 16  # where in these records the checksum is
_Blank = tuple[int, bytes, tuple[tuple[int, int], ...]]
_U32 = 0xFFFFFFFF
_U16 = 0xFFFF
_PEEK_NBYTES = 4096
_MAX_DIRECTORY_NBYTES = 1 << 30


class Record(NamedTuple):
    """One record: its absolute range in the file and its recorded CRC-32 (None if checksums are
    switched off).
    """

    name: str
    offset: int
    nbytes: int
    crc: int | None


@dataclass(slots=True)
class _Window:
    """A span of a file, read in as few calls as its shape allows: most archives need two."""

    source: Files
    file: str
    offset: int
    nbytes: int
    head: bytes = b""
    tail: bytes = b""

    def load(self) -> None:
        if self.nbytes <= 2 * _PEEK_NBYTES:
            self.head = self.tail = self.source.read(self.file, self.offset, self.nbytes)
            return
        self.tail = self.source.read(
            self.file, self.offset + self.nbytes - _PEEK_NBYTES, _PEEK_NBYTES
        )
        self.head = self.source.read(self.file, self.offset, _PEEK_NBYTES // 2)

    def read(self, at: int, nbytes: int) -> bytes:
        """`nbytes` bytes at `at`, relative to the archive. Raises SourceError `bad-header` outside
        it.
        """
        if at < 0 or nbytes < 0 or at + nbytes > self.nbytes:
            raise self.bad(f"a record lies outside the archive of {self.nbytes} bytes")
        if at + nbytes <= len(self.head):
            return self.head[at : at + nbytes]
        into_tail = at - (self.nbytes - len(self.tail))
        if into_tail >= 0:
            return self.tail[into_tail : into_tail + nbytes]
        return self.source.read(self.file, self.offset + at, nbytes)

    def bad(self, why: str) -> SourceError:
        return SourceError(
            "bad-header",
            f"{self.file}: damaged zip archive at byte {self.offset}: {why}",
            file=self.file,
        )


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive opened: records by name, without the leading folder that torch puts before all of
    them.
    """

    file: str
    records: Mapping[str, Record]
    window: _Window

    def record(self, name: str) -> Record:
        """A record by name. Raises SourceError `bad-header` if there is none."""
        found = self.records.get(name)
        if found is None:
            raise self.window.bad(f"it has no record {name!r}: not written by torch.save")
        return found

    def is_torchs(self) -> bool:
        """Whether it has the record that torch asks for before all others."""
        return "version" in self.records or ".data/version" in self.records

    def read(self, name: str) -> bytes:
        """The bytes of a small record, checked. Raises SourceError `checksum` if they do not
        match.
        """
        found = self.record(name)
        data = self.window.read(found.offset - self.window.offset, found.nbytes)
        if found.crc is not None and crc32(data) != found.crc:
            message = (
                f"{self.file}: the record {name!r} at byte {found.offset} does not match its CRC-32"
            )
            raise SourceError("checksum", message, file=self.file)
        return data


def read_archive(source: Files, file: str, offset: int, nbytes: int) -> Archive:
    """Read the directory of the archive that fills `nbytes` bytes of `file` from `offset`.

    Raises:
        SourceError: `bad-header` for anything that is no whole torch archive, a name that stands
            twice included; `unsupported` for compressed or encrypted records; `truncated-file`.
    """
    window = _Window(source, file, offset, nbytes)
    window.load()
    start, size, count = _directory_span(window)
    raw = [_Central(*fields) for fields in _central_records(window, start, size, count)]
    unchecked = all(entry.crc == 0 for entry in raw)
    folders = {entry.name.partition("/")[0] for entry in raw}
    if len(folders) > 1:
        raise window.bad(f"its records lie in several folders: {shown(sorted(folders))}")
    records: dict[str, Record] = {}
    for entry in raw:
        name = entry.name.partition("/")[2] or entry.name
        if name in records:
            raise window.bad(f"the record {name!r} stands twice")
        records[name] = Record(
            name,
            offset + _data_start(window, entry),
            entry.nbytes,
            None if unchecked else entry.crc,
        )
    return Archive(file, records, window)


class _Central(NamedTuple):
    name: str
    nbytes: int
    crc: int
    header: int
    flags: int
    method: int


def _directory_span(window: _Window) -> tuple[int, int, int]:
    """Start, size and entry count of the central directory (zip64 followed)."""
    if window.nbytes < _END.size:
        raise window.bad("it is shorter than an empty zip")
    at = window.nbytes - _END.size
    end = _END.unpack(window.read(at, _END.size))
    if end[0] != b"PK\5\6" or end[7] != 0:
        raise window.bad("its end record is missing: not a zip, or truncated")
    count, size, start = end[4], end[5], end[6]
    if count == _U16 or _U32 in (size, start):
        locator = _LOCATOR64.unpack(window.read(at - _LOCATOR64.size, _LOCATOR64.size))
        if locator[0] != b"PK\6\7":
            raise window.bad("its zip64 locator is missing")
        end64 = _END64.unpack(window.read(locator[2], _END64.size))
        if end64[0] != b"PK\6\6":
            raise window.bad("its zip64 end record is missing")
        count, size, start = end64[7], end64[8], end64[9]
    if size > _MAX_DIRECTORY_NBYTES or count * _CENTRAL.size > size:
        raise window.bad("its directory has an impossible size")
    return start, size, count


def _central_records(
    window: _Window, start: int, size: int, count: int
) -> Iterator[tuple[str, int, int, int, int, int]]:
    """Name, size, CRC-32, local header offset, flags and method of each record."""
    data, at = window.read(start, size), 0
    for _ in range(count):
        if at + _CENTRAL.size > size:
            raise window.bad("its directory is cut short")
        fields = _CENTRAL.unpack_from(data, at)
        flags, method, crc, packed, nbytes, name_size, extra_size, comment_size = (
            fields[3:5] + fields[7:13]
        )
        header = fields[16]
        body = at + _CENTRAL.size
        at = body + name_size + extra_size + comment_size
        if fields[0] != b"PK\1\2" or at > size:
            raise window.bad("its directory is malformed")
        name = data[body : body + name_size].decode("utf-8", "backslashreplace")
        extra = data[body + name_size : body + name_size + extra_size]
        nbytes, packed, header = _wide(window, extra, nbytes, packed, header)
        if nbytes != packed and not method:
            raise window.bad(f"the record {name!r} is stored but has two sizes")
        yield name, nbytes, crc, header, flags, method


def _wide(
    window: _Window, extra: bytes, nbytes: int, packed: int, header: int
) -> tuple[int, int, int]:
    """Replace each 32-bit field that says "too large" by its zip64 extra field, in the order of
    APPNOTE 4.5.3.
    """
    values = [nbytes, packed, header]
    if _U32 not in values:
        return nbytes, packed, header
    at = 0
    while at + 4 <= len(extra):
        tag, size = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            values = [next(wide, _U32) if value == _U32 else value for value in values]
            return values[0], values[1], values[2]
        at += 4 + size
    raise window.bad("a zip64 field is missing")


def _data_start(window: _Window, entry: _Central) -> int:
    """Where a record's bytes begin, relative to the archive."""
    local = _LOCAL.unpack(window.read(entry.header, _LOCAL.size))
    if local[0] == b"PK\3\4" and (local[3] != entry.method or (local[2] ^ entry.flags) & 1):
        raise window.bad(
            f"the directory and the record {entry.name!r} disagree on how it is stored"
        )
    if entry.method or entry.flags & 1:
        message = f"{window.file}: record {entry.name!r} is compressed or encrypted"
        raise SourceError("unsupported", message, file=window.file)
    start: int = entry.header + _LOCAL.size + local[9] + local[10]
    if local[0] != b"PK\3\4" or start + entry.nbytes > window.nbytes:
        raise window.bad(
            f"the record {entry.name!r} has no local header, or lies outside the archive"
        )
    return start


class ArchiveTemplate(NamedTuple):
    """The bytes around one record that all archives of the same content but that record's share.

    Items of equally shaped tensors differ in payload, serialization id and checksums alone. An
    archive that equals the mould everywhere else needs no second parsing.
    """

    record: Record
    head: bytes
    directory_at: int
    cuts: tuple[tuple[int, int, bytes], ...]
    crc_at: int

    def crc(self, directory: bytes) -> int | None:
        """CRC-32 of the record in another archive's directory, or None if it differs elsewhere
        too.
        """
        for start, stop, expected in self.cuts:
            if directory[start:stop] != expected:
                return None
        crc = int.from_bytes(directory[self.crc_at : self.crc_at + 4], "little")
        return crc or None  # a real zero is rare: let the full reading tell it from "switched off"


def mould_of(archive: Archive, name: str) -> ArchiveTemplate | None:
    """The mould of `archive` for the record `name`; None where checksums are switched off."""
    record, window = archive.record(name), archive.window
    if record.crc is None:
        return None
    start, _, count = _directory_span(window)
    directory = window.read(start, window.nbytes - start)
    free, crc_at, at = [], 0, 0
    for _ in range(count):
        fields = _CENTRAL.unpack_from(directory, at)
        body = at + _CENTRAL.size
        found = directory[body : body + fields[10]].decode("utf-8", "replace").partition("/")[2]
        if found in (name, ".data/serialization_id"):
            free.append(at + 16)
            crc_at = at + 16 if found == name else crc_at
        at = body + fields[10] + fields[11] + fields[12]
    starts, stops = [0, *(f + 4 for f in free)], [*free, len(directory)]
    cuts = tuple((a, b, directory[a:b]) for a, b in zip(starts, stops, strict=True))
    return ArchiveTemplate(
        record, window.read(0, record.offset - window.offset), start, cuts, crc_at
    )


class Member(NamedTuple):
    """A record to be written: its bytes, or None if `nbytes` bytes of payload are copied in by the
    engine.
    """

    name: str
    nbytes: int
    data: bytes | None = None


class ZipLayout:
    """An archive laid out before its payloads are known: places first, checksums last.

    Args:
        folder: the leading folder that torch expects before every name.
        members: the records in order.
    """

    def __init__(self, folder: str, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        self._names = tuple(f"{folder}/{member.name}".encode() for member in members)
        self._headers: list[int] = []
        self._blank: list[_Blank] | None = None
        self.offsets: list[int] = []
        at = 0
        for member, name in zip(self.members, self._names, strict=True):
            self._headers.append(at)
            start = at + _LOCAL.size + len(name) + len(_zip64_local(member.nbytes))
            start += _padding(start)
            self.offsets.append(start)
            at = start + member.nbytes
        self.directory_offset = at
        self.nbytes = at + sum(map(self._central_nbytes, range(len(members)))) + self._end_nbytes()

    def frames(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """All bytes but the payloads, as (offset from the archive's start, bytes), none next to
        another.

        `crcs` has one CRC-32 for each member without data, in order.
        """
        if self._blank is None:
            self._blank = self._blanks()
        for at, blank, gaps in self._blank:
            filled = bytearray(blank)
            for gap, payload in gaps:
                _CRC.pack_into(filled, gap, crcs[payload])
            yield at, bytes(filled)

    def _blanks(self) -> list[_Blank]:
        """The frames with zeros for the checksums of payloads, and where these go. Many items share
        a layout.
        """
        payloads = {
            index: n
            for n, index in enumerate(i for i, m in enumerate(self.members) if m.data is None)
        }
        out: list[_Blank] = []
        data, gaps, at = bytearray(), list[tuple[int, int]](), 0
        for index, member in enumerate(self.members):
            if member.data is None:
                gaps.append((len(data) + _LOCAL_CRC, payloads[index]))
            data += self._local(index, crc32(member.data or b"")) + (member.data or b"")
            if member.data is None:
                out.append((at, bytes(data), tuple(gaps)))
                data, gaps, at = bytearray(), [], self.offsets[index] + member.nbytes
        start = len(data)
        for index, member in enumerate(self.members):
            if member.data is None:
                gaps.append((len(data) + _CENTRAL_CRC, payloads[index]))
            data += self._central(index, crc32(member.data or b""))
        data += self._end(len(data) - start)
        out.append((at, bytes(data), tuple(gaps)))
        return out

    def _local(self, index: int, crc: int) -> bytes:
        nbytes, name = self.members[index].nbytes, self._names[index]
        wide = _zip64_local(nbytes)
        room = self.offsets[index] - self._headers[index] - _LOCAL.size - len(name) - len(wide)
        extra = wide + struct.pack("<2sH", b"FB", room - 4) + b"Z" * (room - 4)
        size = min(nbytes, _U32)
        return (
            _LOCAL.pack(
                b"PK\3\4", 45 if wide else 0, 0x800, 0, 0, 0, crc, size, size, len(name), len(extra)
            )
            + name
            + extra
        )

    def _central(self, index: int, crc: int) -> bytes:
        nbytes, name, extra = (
            self.members[index].nbytes,
            self._names[index],
            self._central_extra(index),
        )
        size, header = min(nbytes, _U32), min(self._headers[index], _U32)
        version = 45 if extra else 0
        fields = (
            version,
            version,
            0x800,
            0,
            0,
            0,
            crc,
            size,
            size,
            len(name),
            len(extra),
            0,
            0,
            0,
            0,
            header,
        )
        return _CENTRAL.pack(b"PK\1\2", *fields) + name + extra

    def _central_extra(self, index: int) -> bytes:
        nbytes, header = self.members[index].nbytes, self._headers[index]
        wide = [nbytes, nbytes] if nbytes >= _U32 else []
        wide += [header] if header >= _U32 else []
        return struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""

    def _central_nbytes(self, index: int) -> int:
        return _CENTRAL.size + len(self._names[index]) + len(self._central_extra(index))

    def _is_wide(self) -> bool:
        return self.directory_offset >= _U32 or len(self.members) >= _U16

    def _end_nbytes(self) -> int:
        return _END.size + (_END64.size + _LOCATOR64.size if self._is_wide() else 0)

    def _end(self, size: int) -> bytes:
        count, start = len(self.members), self.directory_offset
        wide = b""
        if self._is_wide():
            wide = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
            wide += _LOCATOR64.pack(b"PK\6\7", 0, start + size, 1)
        entries = min(count, _U16)
        return wide + _END.pack(
            b"PK\5\6", 0, 0, entries, entries, min(size, _U32), min(start, _U32), 0
        )


def _zip64_local(nbytes: int) -> bytes:
    return struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= _U32 else b""


def _padding(start: int) -> int:
    """Bytes of `FB` extra field (4 at least) that bring a payload to the next multiple of 64."""
    room = -start % ALIGNMENT
    return room if room >= 4 else room + ALIGNMENT
