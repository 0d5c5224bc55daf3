"""Check a checkpoint without its payload: files, sizes, coverage, headers, and what they say.

A checksum in a header tells nothing of the bytes behind it. It does tell whose they are: where it
differs from the one that was recorded when the checkpoint was written, the file is another save's.
"""

from __future__ import annotations

from ema_ckpt.analysis.audit import (
    Audit,
    check_digests,
    check_files,
    check_metadata,
    load_objects,
)
from ema_ckpt.analysis.records import RecordList
from ema_ckpt.core.catalog import Catalog, Payload
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.formats.sidecar import OTHER_BYTES

# An object above this is payload; settings are far smaller.
_MAX_OBJECT_NBYTES = 64 << 10


def audit_structure(catalog: Catalog) -> Audit:
    """Check what metadata, headers and small objects tell. No payload counts as checked."""
    audit = Audit(catalog)
    check_files(audit)
    check_metadata(audit)
    _check_headers(audit)
    load_objects(audit, _MAX_OBJECT_NBYTES)
    check_digests(audit, None)
    return audit


def _check_headers(audit: Audit) -> None:
    """Locate every chunk by the header before it, and compare the checksums that stand there."""

    def on_error(error: EmaCkptError, _nbytes: int) -> None:
        audit.error(error)

    records = RecordList(audit.catalog, audit.sizes, on_error)
    audit.payloads = records.payloads
    records.locate_payloads()
    for name, payloads in records.payloads.items():
        for payload in payloads:
            if payload is not None and payload.nbytes:
                audit.unchecked[payload.file, payload.offset] = payload.nbytes
                _note_checksum(audit, name, payload)
    for record in (*records.object_records(), *records.file_records()):
        if record.is_payload:
            audit.unchecked[record.key] = record.nbytes


def _note_checksum(audit: Audit, name: str, payload: Payload) -> None:
    found = payload.own_crc if payload.is_recorded else payload.crc
    audit.crcs[payload.file, payload.offset] = found
    if found is None:
        return
    if payload.is_recorded and found != payload.crc:
        values = f"expected CRC-32 {payload.crc:08x}, its header says {found:08x}"
        message = f"{payload.file}: {name!r}: {values}: {OTHER_BYTES}; use another copy"
        audit.report("checksum", message, name, payload.file)
