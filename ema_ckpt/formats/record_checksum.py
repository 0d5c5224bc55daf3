"""The checksum of a record itself: its last entry, the CRC-32 of the text without that entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ema_ckpt.core.crc import crc32

KEY = "crc32"
_NBYTES = len(',"crc32":"crc32:00000000"}')


def with_checksum(text: str) -> str:
    """Add its checksum to the text of a JSON object that has entries."""
    return f'{text[:-1]},"{KEY}":"{_crc_text(_encoded(text))}"}}'


def with_checksum_in_parts(parts: list[bytes]) -> list[bytes]:
    """Add its checksum to the text of a JSON object that has entries, the last part its end."""
    crc = 0
    for part in parts:
        crc = crc32(part, crc)
    return [*parts[:-1], parts[-1][:-1], f',"{KEY}":"crc32:{crc:08x}"}}'.encode("ascii")]


def is_changed(
    text: str | bytes, document: Mapping[str, Any], dump: Callable[[Mapping[str, Any]], str]
) -> bool:
    """Whether a record that has a checksum is another than it was made of.

    Args:
        text: the record, `document` when parsed.
        dump: writes a document as `with_checksum` was given it; spaces and line breaks that another
            program has put into the text change nothing.
    """
    recorded = document[KEY]
    raw = text if isinstance(text, bytes) else _encoded(text)
    before = crc32(memoryview(raw)[: max(len(raw) - _NBYTES, 0)])
    if recorded == _crc_text(b"}", before):
        return False
    rest = {key: value for key, value in document.items() if key != KEY}
    try:
        return bool(recorded != _crc_text(_encoded(dump(rest))))
    except (ValueError, RecursionError):  # numbers too large, lists nested too deeply
        return True


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _crc_text(raw: bytes, before: int = 0) -> str:
    return f"crc32:{crc32(raw, before):08x}"
