"""Recognise archives that differ from a parsed one in one record's payload alone.

Items of equally shaped tensors differ in payload, serialization id and checksums. An archive that
equals the template everywhere else needs no second parsing.
"""

from __future__ import annotations

from typing import NamedTuple

from ema_ckpt.formats.torch_zip.reader import CENTRAL_CRC, Archive, Record, read_directory


class ArchiveTemplate(NamedTuple):
    """The bytes before the payload of `record`, and those parts of the directory that are fixed.

    `fixed` holds (start, stop, bytes); `crc_start` is the byte of the record's checksum; both are
    relative to the directory, which begins at byte `directory_start` of the archive.
    """

    record: Record
    head: bytes
    directory_start: int
    fixed: tuple[tuple[int, int, bytes], ...]
    crc_start: int

    def crc(self, directory: bytes) -> int | None:
        """Return the record's CRC-32 in the directory of another archive; None if it differs."""
        for start, stop, expected in self.fixed:
            if directory[start:stop] != expected:
                return None
        crc = int.from_bytes(directory[self.crc_start : self.crc_start + 4], "little")
        return crc or None  # a real zero is rare: let the reader tell it from "switched off"


def template_of(archive: Archive, name: str) -> ArchiveTemplate | None:
    """Make the template of `archive` for the record `name`; None if checksums are switched off."""
    record, window = archive.record(name), archive.window
    if record.crc is None:
        return None
    directory_start, entries = read_directory(window)
    directory = window.read(directory_start, window.nbytes - directory_start)
    fixed, crc_start, fixed_start = [], 0, 0
    for entry in entries:
        entry_name = entry.name.partition("/")[2]
        if entry_name in (name, ".data/serialization_id"):
            field = entry.position + CENTRAL_CRC
            fixed.append((fixed_start, field, directory[fixed_start:field]))
            fixed_start = field + 4
            if entry_name == name:
                crc_start = field
    fixed.append((fixed_start, len(directory), directory[fixed_start:]))
    head = window.read(0, record.offset - window.offset)
    return ArchiveTemplate(record, head, directory_start, tuple(fixed), crc_start)
