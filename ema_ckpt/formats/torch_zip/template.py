"""Recognise archives that differ from a parsed one in payload, identity and checksums alone.

One writer's items of equally shaped tensors differ in the payload, in the serialization id (a hash
that torch makes of the archive) and in the checksums of both. An archive that equals the template
everywhere else needs no second parsing, and its small records no second reading.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ema_ckpt.core.crc import crc32
from ema_ckpt.formats.torch_zip.reader import (
    CENTRAL_CRC,
    LOCAL_CRC,
    Archive,
    CentralRecord,
    read_directory,
)

_IDENTITY = ".data/serialization_id"
_CRC_NBYTES = 4
_MAX_FIXED_NBYTES = 16 << 10

Bytes = bytes | memoryview


class _Span(NamedTuple):
    """Bytes [start, stop) of an archive that vary; the `label` tells those that are looked at."""

    start: int
    stop: int
    label: str = ""


class _Pattern:
    """Bytes of which some spans may vary; `places` tells where among them a label is."""

    def __init__(self, data: bytes, first: int, spans: Sequence[_Span]) -> None:
        """Make the pattern of `data`, which begin at byte `first` of the archive."""
        lengths, position = [], first
        for start, stop, _ in spans:
            lengths += [start - position, stop - start]
            position = stop
        lengths.append(first + len(data) - position)
        self._pieces = struct.Struct("".join([f"{length}s" for length in lengths]))
        self._fixed = self._pieces.unpack(data)[::2]
        self.nbytes = len(data)
        self.places = {span.label: place for place, span in enumerate(spans)}

    def varying(self, data: Bytes) -> tuple[bytes, ...] | None:
        """Return what stands in the varying spans of as many bytes; None if others differ."""
        pieces = self._pieces.unpack(data)
        return pieces[1::2] if pieces[::2] == self._fixed else None


class Match(NamedTuple):
    """An archive that matched a template: its payload's CRC-32, if it records one."""

    crc: int | None


class ArchiveTemplate:
    """The bytes of an archive before its payload and after it, of which some spans may vary.

    Attributes:
        start, stop: first byte of the payload, and the one after it.
    """

    def __init__(self, data: tuple[bytes, bytes], start: int, stop: int, spans: list[_Span]):
        head, tail = data
        self.start, self.stop = start, stop
        self._head = _Pattern(head, 0, [span for span in spans if span.stop <= start])
        self._tail = _Pattern(tail, stop, [span for span in spans if span.start >= stop])
        places = self._tail.places
        self._crc = places.get("crc")
        self._identity: tuple[int, int] | None = None
        if "identity crc" in places:
            self._identity = places["identity"], places["identity crc"]

    def match(self, head: Bytes, tail: Bytes) -> Match | None:
        """Check the bytes before and after the payload of an archive of as many bytes.

        If it matches, its small records are those of the template, whose checksums matched.
        """
        varying = None if self._head.varying(head) is None else self._tail.varying(tail)
        if varying is None:
            return None
        if self._crc is None:
            return Match(None)
        if self._identity is not None:
            text, crc = self._identity
            if crc32(varying[text]) != int.from_bytes(varying[crc], "little"):
                return None
        return Match(int.from_bytes(varying[self._crc], "little"))


def template_of(archive: Archive, name: str) -> ArchiveTemplate | None:
    """Make the template of `archive` with the payload `name`.

    None where records do not lie in the order of the directory, where much is fixed, or where a
    small record does not match its checksum.
    """
    window, payload = archive.window, archive.record(name)
    start = payload.offset - window.offset
    stop = start + payload.nbytes
    directory_start, entries = read_directory(window)
    if archive.trailing_nbytes or start + window.nbytes - stop > _MAX_FIXED_NBYTES:
        return None
    spans = _varying_spans(archive, name, directory_start, entries)
    if spans is None or not _is_sound(archive, name):
        return None
    data = window.read(0, start), window.read(stop, window.nbytes - stop)
    return ArchiveTemplate(data, start, stop, spans)


def _varying_spans(
    archive: Archive, name: str, directory_start: int, entries: Sequence[CentralRecord]
) -> list[_Span] | None:
    """List what varies, in order: checksums, the identity, and what follows the two records.

    What follows a record before the next header is its checksum again (a "data descriptor").
    """
    varying = {name: "crc", _IDENTITY: "identity crc"}
    has_checksums = archive.record(name).crc is not None
    spans, checksums = list[_Span](), list[_Span]()
    end = 0
    headers = [entry.header for entry in entries] + [directory_start]
    for entry, following in zip(entries, headers[1:], strict=True):
        record_name = entry.name.partition("/")[2] or entry.name
        start = archive.record(record_name).offset - archive.window.offset
        if entry.header < end or start + entry.nbytes > following:
            return None
        end = start + entry.nbytes
        label = varying.get(record_name)
        if label is None:
            continue
        crc = entry.header + LOCAL_CRC
        spans.append(_Span(crc, crc + _CRC_NBYTES))
        if record_name == _IDENTITY:
            spans.append(_Span(start, end, "identity"))
        spans.append(_Span(end, following))
        if has_checksums:
            crc = directory_start + entry.position + CENTRAL_CRC
            checksums.append(_Span(crc, crc + _CRC_NBYTES, label))
    return spans + checksums


def _is_sound(archive: Archive, name: str) -> bool:
    """Check the checksums of the small records; one of them must tell that there are any."""
    payload = archive.record(name)
    if payload.crc is None:
        return True
    window, has_checksums = archive.window, False
    for record in archive.records.values():
        if record is payload:
            continue
        data = window.read(record.offset - window.offset, record.nbytes)
        if crc32(data) != record.crc:
            return False
        has_checksums = has_checksums or (record.crc != 0 and record.name != _IDENTITY)
    return has_checksums
