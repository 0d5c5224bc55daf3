"""Lay out a zip archive as `torch.save` writes it, before its payloads are known.

Payloads begin at multiples of 64 from the start of the archive, as torch pads them, by an `FB`
extra field. Layout of zip and zip64: APPNOTE.TXT 6.3.10.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from ema_ckpt.core.crc import crc32
from ema_ckpt.formats.torch_zip.reader import (
    CENTRAL,
    CENTRAL_CRC,
    END,
    END64,
    LOCAL,
    LOCAL_CRC,
    LOCATOR64,
    MAX_U16,
    MAX_U32,
)

ALIGNMENT = 64
_CRC = struct.Struct("<L")


class Member(NamedTuple):
    """A record to be written: its bytes, or None if `nbytes` bytes of payload are copied later."""

    name: str
    nbytes: int
    data: bytes | None = None


class ZipLayout:
    """An archive laid out: places first, checksums last.

    Args:
        folder: the leading folder that torch expects before every name.
        members: the records in order.
    """

    def __init__(self, folder: str, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        self.offsets: list[int] = []
        self._headers: list[tuple[bytes, bytes]] = []  # local and central, the checksum blank
        position = 0
        for member in self.members:
            header = f"{folder}/{member.name}".encode(), member, position
            local = _local_header(*header)
            self._headers.append((local, _central_header(*header)))
            position += len(local)
            self.offsets.append(position)
            position += member.nbytes
        directory_nbytes = sum(len(central) for _, central in self._headers)
        self._end = _end(len(self.members), position, directory_nbytes)
        self.nbytes = position + directory_nbytes + len(self._end)

    def header_bytes(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Iterate over all bytes but the payloads, as (offset in the archive, bytes).

        `crcs` has one CRC-32 for each member without data, in order.
        """
        for payload, crc in enumerate(crcs):
            yield self.payload_header(payload, crc)
        yield self.end_bytes(crcs)

    def payload_header(self, payload: int, crc: int) -> tuple[int, bytes]:
        """Return all between a payload and the one before, as (offset in the archive, bytes)."""
        offset, blank, places = self._blanks[payload]
        filled = bytearray(blank)
        for position, _ in places:
            _CRC.pack_into(filled, position, crc)
        return offset, bytes(filled)

    def end_bytes(self, crcs: Sequence[int]) -> tuple[int, bytes]:
        """Return all after the last payload, as (offset in the archive, bytes)."""
        offset, blank, places = self._blanks[-1]
        filled = bytearray(blank)
        for position, payload in places:
            _CRC.pack_into(filled, position, crcs[payload])
        return offset, bytes(filled)

    @cached_property
    def _blanks(self) -> list[tuple[int, bytes, list[tuple[int, int]]]]:
        # (offset, bytes with zeros for checksums, [(place of a checksum in them, its payload)]).
        # Kept, for many items share a layout.
        blanks = []
        offset, data, places = 0, bytearray(), list[tuple[int, int]]()
        directory, directory_places, payloads = bytearray(), list[tuple[int, int]](), 0
        for member, (local, central), start in zip(
            self.members, self._headers, self.offsets, strict=True
        ):
            if member.data is None:
                places.append((len(data) + LOCAL_CRC, payloads))
                directory_places.append((len(directory) + CENTRAL_CRC, payloads))
                payloads += 1
                blanks.append((offset, bytes(data + local), places))
                offset, data, places = start + member.nbytes, bytearray(), []
            else:
                data += local + member.data
            directory += central
        places = places + [(len(data) + place, payload) for place, payload in directory_places]
        blanks.append((offset, bytes(data + directory + self._end), places))
        return blanks


def _local_header(name: bytes, member: Member, offset: int) -> bytes:
    nbytes, crc = member.nbytes, crc32(member.data or b"")
    wide = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= MAX_U32 else b""
    room = -(offset + LOCAL.size + len(name) + len(wide)) % ALIGNMENT
    if room < 4:  # of the `FB` field: its tag and length
        room += ALIGNMENT
    extra = wide + struct.pack("<2sH", b"FB", room - 4) + b"Z" * (room - 4)
    version, size = 45 if wide else 0, min(nbytes, MAX_U32)
    fields = version, 0x800, 0, 0, 0, crc, size, size, len(name), len(extra)
    return LOCAL.pack(b"PK\3\4", *fields) + name + extra


def _central_header(name: bytes, member: Member, offset: int) -> bytes:
    nbytes, crc = member.nbytes, crc32(member.data or b"")
    wide = [nbytes, nbytes] if nbytes >= MAX_U32 else []
    wide += [offset] if offset >= MAX_U32 else []
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version, size = 45 if wide else 0, min(nbytes, MAX_U32)
    fields = version, version, 0x800, 0, 0, 0, crc, size, size, len(name), len(extra)
    return CENTRAL.pack(b"PK\1\2", *fields, 0, 0, 0, 0, min(offset, MAX_U32)) + name + extra


def _end(count: int, start: int, size: int) -> bytes:
    """Return the end record of a directory of `count` entries and `size` bytes from `start`."""
    wide = b""
    if start >= MAX_U32 or count >= MAX_U16:
        wide = END64.pack(b"PK\6\6", END64.size - 12, 45, 45, 0, 0, count, count, size, start)
        wide += LOCATOR64.pack(b"PK\6\7", 0, start + size, 1)
    entries, size, start = min(count, MAX_U16), min(size, MAX_U32), min(start, MAX_U32)
    return wide + END.pack(b"PK\5\6", 0, 0, entries, entries, size, start, 0)
