"""A checkpoint held against all it says about itself: sizes, coverage, checksums, digests,
replicas.

Nothing stops at the first problem: every tensor, object and file is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

from ema_ckpt.analysis.checksum_pass import checksum_all
from ema_ckpt.analysis.records import RecordList, StoredRecord
from ema_ckpt.core.catalog import Catalog, Chunk, Diagnostic, Object, Payload, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.errors import EmaCkptError, SourceError
from ema_ckpt.core.text import shown
from ema_ckpt.formats.pickle.safe_globals import opaque_within
from ema_ckpt.reading.box_reader import BoxReader, locate
from ema_ckpt.reading.digests import compute_digest, explain_mismatch, join_storage_crcs
from ema_ckpt.runtime.executor import Workers
from ema_ckpt.state_dicts.tree import list_trees

_BLOCK_NBYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem: its code, the tensor and file it concerns, and a message."""

    code: str
    tensor: str | None
    file: str | None
    message: str


class Audit:
    """One pass over a checkpoint.

    Attributes:
        problems, warnings: what was found, in the order in which it was found.
        checked, unchecked: bytes of payload by place (file, offset), with a checksum and without.
        crcs: CRC-32 of every payload that was read, by place.
    """

    def __init__(
        self, catalog: Catalog, threads: int, progress: Callable[[int], None] | None = None
    ) -> None:
        self.catalog = catalog
        self.threads = threads
        self._progress = progress
        self.problems: dict[Finding, None] = {}
        self.warnings: list[Diagnostic] = []
        self.checked: dict[tuple[str, int], int] = {}
        self.unchecked: dict[tuple[str, int], int] = {}
        self.crcs: dict[tuple[str, int], int] = {}
        self.damaged: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._inventory: RecordList | None = None

    def run(self) -> None:
        """Do it all, but for values."""
        self._sizes = self._check_files()
        self._check_names()
        self._check_coverage()
        self._inventory = RecordList(self.catalog, self._sizes, self._unlisted)
        records = self._inventory.listing()
        workers = Workers(self.threads)
        for record, crc in checksum_all(self.catalog.source, records, workers, self._progress):
            if isinstance(crc, SourceError):
                self._unread(record, crc)
            else:
                self._summed(record, crc)
        self._load_objects()
        reader = BoxReader(_BLOCK_NBYTES)
        self._check_digests(reader)
        self._compare_replicas(reader)

    def report(
        self, code: str, message: str, tensor: str | None = None, file: str | None = None
    ) -> None:
        """Note a problem, once."""
        self.problems[Finding(code, tensor, file, message)] = None
        if tensor:
            self.damaged.add(tensor)

    def error(self, error: EmaCkptError) -> None:
        """Note a problem that somebody raised."""
        self.report(error.code, str(error), error.tensor, error.file)

    # Files and boxes.

    def _check_files(self) -> dict[str, int]:
        """Sizes of the files that are there."""
        sizes: dict[str, int] = {}
        spans = self._spans()
        for file, expected in self.catalog.files.items():
            told, names = self._told(file), list(spans.get(file, ()))
            holds = f"; it holds {shown(names)}" if names else ""
            try:
                sizes[file] = self.catalog.source.size(file)
            except SourceError as error:
                message = told.message if told else f"{error}{holds}"
                self.report(error.code, message, names[0] if names else None, file)
                continue
            if sizes[file] < expected:
                self._short(file, expected, sizes[file], spans.get(file, {}))
            elif (
                told is not None
            ):  # cut off within its header, which would have said how long it is
                self.report(told.code, told.message, None, file)
        return sizes

    def _told(self, file: str) -> Diagnostic | None:
        """What the reader said of a file that is missing or cut off; of a part's, the part's name
        comes first.
        """
        starts = (f"{file}: ", f"{file.replace('/', ': ', 1)}: ")
        said = [
            w
            for w in self.catalog.warnings
            if w.code in _FILE_CODES and w.message.startswith(starts)
        ]
        return said[0] if said else None

    def _spans(self) -> dict[str, dict[str, tuple[int, int]]]:
        """For each file the tensors and objects in it, and of each the bytes [first, end) of its
        last piece there.
        """
        spans: dict[str, dict[str, tuple[int, int]]] = {}
        pieces = [
            (tensor.name, chunk) for tensor in self.catalog.tensors for chunk in tensor.chunks
        ]
        objects = [(item.name, item) for item in self.catalog.objects if not item.is_inline]
        for name, piece in chain[tuple[str, Chunk | Object]](pieces, objects):
            held = spans.setdefault(piece.file, {})
            span = (piece.offset, piece.offset + piece.nbytes)
            held[name] = max(held.get(name, span), span, key=lambda one: one[1])
        return spans

    def _short(
        self, file: str, expected: int, size: int, spans: Mapping[str, tuple[int, int]]
    ) -> None:
        lost = [name for name, (_, end) in spans.items() if end > size]
        message = f"{file}: expected at least {expected} bytes, found {size}: the file is truncated"
        if lost:
            first, end = spans[lost[0]]
            which = "" if len(lost) == 1 else f"{lost[0]!r} "
            message += f"; cut off: {shown(lost)} ({which}at bytes {first} to {end})"
        remedy = "copy the file again, or use another copy of the checkpoint"
        self.report("truncated-file", f"{message}; {remedy}", lost[0] if lost else None, file)

    def _check_names(self) -> None:
        try:
            list_trees(self.catalog)
        except SourceError as error:
            self.error(error)
        for entry in self.catalog.unknown_entries:
            # An entry without a place has an unknown size: counted as one byte.
            self.unchecked[entry.file or entry.name, entry.offset] = entry.nbytes or 1
        for name, message in self.catalog.find_mismatches():
            self.report("index-mismatch", message, name)

    def _check_coverage(self) -> None:
        for tensor in self.catalog.tensors:
            try:
                prove(tensor)
            except SourceError as error:
                self.error(error)

    # Checksums.

    def _unlisted(self, error: EmaCkptError, nbytes: int) -> None:
        """Something whose bytes cannot be found."""
        if error.code != "unsupported":
            self.error(error)
            return
        self.unchecked[error.file or "", len(self.unchecked)] = nbytes
        self.warnings.append(Diagnostic("unchecked", f"{error}: not checked"))

    def _unread(self, stored: StoredRecord, error: SourceError) -> None:
        self.report(error.code, f"{error} ({_owner(stored)})", stored.owner or None, stored.file)

    def _summed(self, stored: StoredRecord, crc: int) -> None:
        if stored.is_payload:
            self.crcs[stored.key] = crc
            (self.unchecked if stored.crc is None else self.checked)[stored.key] = stored.nbytes
        if stored.crc is not None and crc != stored.crc:
            message = f"expected CRC-32 {stored.crc:08x}, found {crc:08x}: the file is damaged; use another copy"
            self.report(
                "checksum",
                f"{stored.file}: {_owner(stored)}: {message}",
                stored.owner or None,
                stored.file,
            )

    def _load_objects(self) -> None:
        for item in self.catalog.objects:
            if not item.is_inline and not item.file:
                self.report("incomplete", f"object {item.name!r}: no file holds it", item.name)
                continue
            if not item.is_inline and item.offset + item.nbytes > self._sizes.get(item.file, -1):
                continue
            try:
                opaque = opaque_within(self.catalog.reader.load(item))
            except SourceError as error:
                if error.code == "unsupported":
                    self.warnings.append(Diagnostic("opaque", str(error)))
                else:
                    self.report(error.code, str(error), item.name, item.file)
                continue
            if (
                opaque is not None and not item.is_inline
            ):  # readers tell of values that they read along
                self.warnings.append(
                    Diagnostic("opaque", f"{item.name!r} holds a {opaque}, unknown to ema_ckpt")
                )

    # Digests and replicas.

    def _check_digests(self, reader: BoxReader) -> None:
        """Compare the recorded digest of each tensor whose bytes are otherwise in order."""
        for tensor in self.catalog.tensors:
            expected = self.catalog.digests.get(tensor.name)
            payloads = self.payloads_of(tensor)
            if expected is None or payloads is None or tensor.name in self.damaged:
                continue
            found = self.digest(tensor, payloads, reader)
            if found == expected:
                self.prove(payloads)
            elif found is not None:
                self._digest_differs(tensor, payloads, expected, found)

    def payloads_of(self, tensor: Tensor) -> tuple[Payload, ...] | None:
        """Where the tensor's chunks lie, or None if that could not be found."""
        known = self._inventory.payloads.get(tensor.name, ()) if self._inventory else ()
        return None if None in known else cast("tuple[Payload, ...]", known)

    def digest(self, tensor: Tensor, payloads: Sequence[Payload], reader: BoxReader) -> int | None:
        """The tensor's digest, from checksums of this pass where they suffice; None, and a problem,
        on failure.
        """
        try:
            known = join_storage_crcs(
                tensor, payloads, prove(tensor), lambda p: self.crcs.get((p.file, p.offset))
            )
            return (
                known
                if known is not None
                else compute_digest(locate(self.catalog, tensor, payloads), reader)
            )
        except SourceError as error:
            self.error(error)
            return None

    def prove(self, payloads: Iterable[Payload]) -> None:
        """Count payloads as checked."""
        for payload in payloads:
            nbytes = self.unchecked.pop((payload.file, payload.offset), None)
            if nbytes is not None:
                self.checked[payload.file, payload.offset] = nbytes

    def _digest_differs(
        self, tensor: Tensor, payloads: Sequence[Payload], expected: int, found: int
    ) -> None:
        files = list(dict.fromkeys(payload.file for payload in payloads))
        message = f"expected the digest crc32:{expected:08x}, found crc32:{found:08x}"
        where = ", ".join(files[:3])
        why = explain_mismatch(self.catalog)
        self.report(
            "checksum", f"{where}: tensor {tensor.name!r}: {message}: {why}", tensor.name, files[0]
        )

    def _compare_replicas(self, reader: BoxReader) -> None:
        for tensor in self.catalog.tensors:
            payloads = self.payloads_of(tensor)
            boxes: dict[tuple[object, object], list[int]] = {}
            for index, chunk in enumerate(tensor.chunks):
                if 0 not in chunk.sizes:
                    boxes.setdefault((chunk.offsets, chunk.sizes), []).append(index)
            if not payloads or tensor.name in self.damaged:
                continue
            for copies in boxes.values():
                if len(copies) > 1:
                    self._compare(tensor, [(tensor.chunks[i], payloads[i]) for i in copies], reader)

    def _compare(
        self, tensor: Tensor, copies: Sequence[tuple[Chunk, Payload]], reader: BoxReader
    ) -> None:
        crcs: dict[int, list[str]] = {}
        for chunk, payload in copies:
            alone = replace(
                tensor, shape=chunk.sizes, chunks=(chunk._replace(offsets=(0,) * len(chunk.sizes)),)
            )
            try:
                crc = compute_digest(locate(self.catalog, alone, (payload,)), reader)
                crcs.setdefault(crc, []).append(chunk.file)
            except SourceError as error:
                self.error(error)
        if len(crcs) > 1:
            sides = " and ".join(shown(files) for files in crcs.values())
            message = f"tensor {tensor.name!r}: copies of the same elements differ between {sides}"
            self.warnings.append(Diagnostic("replicas-differ", message))


_FILE_CODES = ("missing-file", "truncated-file")


def _owner(stored: StoredRecord) -> str:
    what = f"record {stored.record!r}" if stored.record else "its bytes"
    return f"{stored.owner!r}, {what}" if stored.owner else what
