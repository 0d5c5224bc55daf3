"""What a record says of the items of DCP files, of which there may be millions: in parts."""

from __future__ import annotations

import json
from collections.abc import Iterable

FileChunks = tuple[str, Iterable[tuple[int, int]]]
"""A file, and offset and CRC-32 of each item in it."""


def with_chunks(text: str, chunks: Iterable[FileChunks]) -> list[bytes]:
    """Add the entry `chunks` to the text of a JSON object that has entries, file by file.

    Returns:
        The text in parts, of which the last has its end.
    """
    parts = [text[:-1].encode("utf-8")]
    for file, items in chunks:
        listed = ",".join([f'[{offset},"crc32:{crc:08x}"]' for offset, crc in items])
        opening = ',"chunks":{' if len(parts) == 1 else ","
        parts.append(f"{opening}{json.dumps(file)}:[{listed}]".encode("ascii"))
    parts.append(b"}}" if len(parts) > 1 else b"}")
    return parts
