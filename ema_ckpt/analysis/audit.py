"""Check a checkpoint against all that it records: sizes, coverage, checksums, digests, replicas.

Nothing stops at the first problem: every tensor, object and file is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from ema_ckpt.analysis.checksum_pass import ChecksumPass
from ema_ckpt.analysis.items import ItemList
from ema_ckpt.analysis.records import RecordList, StoredRecord
from ema_ckpt.core.catalog import Catalog, Chunk, Diagnostic, Object, Payload, Problem, Tensor
from ema_ckpt.core.coverage import HOLE_REMEDY, prove
from ema_ckpt.core.errors import EmaCkptError, SourceError, about
from ema_ckpt.core.text import shown
from ema_ckpt.formats.pickle.safe_globals import opaque_within
from ema_ckpt.formats.sidecar import CHANGED_BYTES, OTHER_BYTES
from ema_ckpt.reading.box_reader import BoxReader, locate
from ema_ckpt.reading.digests import compute_digest, explain_mismatch, join_storage_crcs
from ema_ckpt.state_dicts.tree import list_trees

_BLOCK_NBYTES = 512 << 10

Place = tuple[str, int]  # file and offset
Spans = dict[str, tuple[int, int]]  # bytes [first, end) in a file, by name


@dataclass(slots=True)
class Audit:
    """Findings about one checkpoint, in the order in which they were made.

    Attributes:
        checked: bytes of payload with a checksum. unchecked: of those without, by place.
        crcs: CRC-32 of every payload that has no checksum or another one, by place; None of one
            that could not be read.
        damaged: tensors with a problem.
        sizes: bytes of every file that is there.
        payloads: those of each tensor's chunks; None for one that could not be located. Those of
            tensors that consist of `items` are there.
    """

    catalog: Catalog
    problems: dict[Problem, None] = field(default_factory=dict)
    warnings: list[Diagnostic] = field(default_factory=list)
    checked: int = 0
    unchecked: dict[Place, int] = field(default_factory=dict)
    crcs: dict[Place, int | None] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    payloads: dict[str, tuple[Payload | None, ...]] = field(default_factory=dict)
    items: ItemList | None = None

    def report(
        self, code: str, message: str, tensor: str | None = None, file: str | None = None
    ) -> None:
        """Add a problem, once."""
        self.problems[Problem(code, tensor, file, message)] = None
        if tensor:
            self.damaged.add(tensor)

    def warn(self, code: str, message: str) -> None:
        """Add a warning."""
        self.warnings.append(Diagnostic(code, message))

    def error(self, error: EmaCkptError) -> None:
        """Add an error as a problem, or as a warning if it only says that nothing was checked."""
        if error.code == "unsupported":
            self.warn("unchecked", f"{error}: not checked")
            return
        self.report(error.code, str(error), error.tensor, error.file)

    def payloads_of(self, tensor: Tensor) -> tuple[Payload, ...] | None:
        """Payloads of the tensor's chunks, or None if one could not be located."""
        payloads = self.located(tensor)
        return None if None in payloads else cast("tuple[Payload, ...]", payloads)

    def located(self, tensor: Tensor) -> tuple[Payload | None, ...]:
        """Payloads of the tensor's chunks; None for one that could not be located."""
        payloads = self.items.payloads(tensor) if self.items is not None else None
        return self.payloads.get(tensor.name, ()) if payloads is None else payloads

    def crc_of(self, payload: Payload) -> int | None:
        """CRC-32 of a payload's bytes, or None if they could not be read."""
        return self.crcs.get((payload.file, payload.offset), payload.crc)

    def unproven(self) -> list[str]:
        """Names of tensors of which some payload has no checksum, and of objects without one."""
        names = [item.name for item in self.catalog.objects if item.is_bare]
        for tensor in self.catalog.tensors if self.unchecked else ():
            for payload in self.located(tensor):
                if payload is not None and (payload.file, payload.offset) in self.unchecked:
                    names.append(tensor.name)
                    break
        return names

    def digest(
        self, tensor: Tensor, payloads: Sequence[Payload], reader: BoxReader | None
    ) -> int | None:
        """Digest of a tensor, from `crcs` if they suffice, else by `reader` if there is one.

        None after an error.
        """
        try:
            chunks = prove(tensor)
            digest = join_storage_crcs(tensor, payloads, chunks, self.crc_of)
            if digest is None and reader is not None:
                digest = compute_digest(locate(self.catalog, tensor, payloads), reader)
        except SourceError as error:
            self.error(error)
            return None
        return digest

    def mark_checked(self, payloads: Iterable[Payload]) -> None:
        """Count payloads as checked."""
        for payload in payloads:
            nbytes = self.unchecked.pop((payload.file, payload.offset), None)
            self.checked += nbytes or 0


def audit_checkpoint(
    catalog: Catalog, threads: int, progress: Callable[[int], None] | None = None
) -> Audit:
    """Check everything but values; `progress` is called with the bytes that were read."""
    audit = Audit(catalog)
    check_files(audit)
    check_metadata(audit)
    _check_checksums(audit, threads, progress)
    load_objects(audit)
    reader = BoxReader(_BLOCK_NBYTES)
    check_digests(audit, reader)
    _compare_replicas(audit, reader)
    return audit


def check_files(audit: Audit) -> None:
    """Check that every file is there and long enough; what the reader found of one is enough."""
    audit.problems |= dict.fromkeys(audit.catalog.problems)
    audit.damaged |= {problem.tensor for problem in audit.catalog.problems if problem.tensor}
    told = {problem.file for problem in audit.catalog.problems}
    for file, expected in audit.catalog.files.items():
        try:
            size = audit.sizes[file] = audit.catalog.source.size(file)
        except SourceError as error:
            if file not in told:
                inside = _spans_in(audit.catalog, file)
                held = f"it holds {shown(list(inside))}" if inside else ""
                audit.error(about(error, tensor=next(iter(inside), None), remedy=held))
            continue
        if size < expected and file not in told:
            _report_truncated(audit, file, expected, _spans_in(audit.catalog, file))


def _spans_in(catalog: Catalog, file: str) -> Spans:
    """Return the tensors and objects in a file, with the span of their last chunk there."""
    items: list[tuple[str, Chunk | Object]] = []
    for tensor in catalog.tensors:
        items += [(tensor.name, chunk) for chunk in tensor.chunks if chunk.file == file]
    items += [(one.name, one) for one in catalog.objects if not one.is_inline and one.file == file]
    spans: Spans = {}
    for name, item in items:
        end = item.offset + item.nbytes
        if name not in spans or end > spans[name][1]:
            spans[name] = (item.offset, end)
    return spans


def _report_truncated(audit: Audit, file: str, expected: int, spans: Spans) -> None:
    size = audit.sizes[file]
    lost = [name for name, (_, end) in spans.items() if end > size]
    message = f"{file}: expected at least {expected} bytes, found {size}: the file is truncated"
    if lost:
        first, end = spans[lost[0]]
        name = "" if len(lost) == 1 else f"{lost[0]!r} "
        message += f"; cut off: {shown(lost)} ({name}at bytes {first} to {end})"
    remedy = "copy the file again, or use another copy of the checkpoint"
    audit.report("truncated-file", f"{message}; {remedy}", lost[0] if lost else None, file)


def check_metadata(audit: Audit) -> None:
    """Check names, what metadata contradicts, and that chunks cover each tensor once."""
    catalog = audit.catalog
    try:
        list_trees(catalog)
    except SourceError as error:
        audit.error(error)
    for entry in catalog.unknown_entries:
        # An entry without a place has an unknown size: counted as one byte.
        audit.unchecked[entry.file or entry.name, entry.offset] = entry.nbytes or 1
    for number, item in enumerate(catalog.objects):
        if item.is_bare:  # one byte too
            audit.unchecked[item.file, -1 - number] = 1
    for name, message in catalog.find_mismatches():
        audit.report("index-mismatch", message, name)
    for tensor in catalog.tensors:
        try:
            prove(tensor)
        except SourceError as error:
            audit.error(_explained(error, catalog))
            if error.code == "unsupported":
                audit.unchecked[tensor.name, -1] = tensor.nbytes or 1


def _explained(error: SourceError, catalog: Catalog) -> SourceError:
    """Say of a hole in a checkpoint of which whole files are missing that they may hold it."""
    lacks_files = any(p.code == "incomplete" and not p.tensor for p in catalog.problems)
    if error.code != "hole" or not lacks_files:
        return error
    cause = "follows from the missing files (`incomplete`), unless those do not hold it either"
    message = str(error).replace(HOLE_REMEDY, cause)
    return SourceError(error.code, message, tensor=error.tensor, file=error.file)


def _check_checksums(audit: Audit, threads: int, progress: Callable[[int], None] | None) -> None:
    """Read everything stored once and compare it with its CRC-32."""
    failures: list[tuple[EmaCkptError, int]] = []
    records = RecordList(audit.catalog, audit.sizes, lambda *failure: failures.append(failure))
    audit.items = items = ItemList(audit.catalog, audit.sizes)
    work = ChecksumPass(audit.catalog, items, records.listing())
    audit.payloads = records.payloads
    work.run(threads, progress)
    found = work.found
    for error, nbytes in [(one.error, one.nbytes) for one in found.failures] + failures:
        if error.code == "unsupported":
            audit.unchecked[error.file or "", len(audit.unchecked)] = nbytes
        audit.error(error)
    audit.checked += found.checked_nbytes
    for number, crc in found.bare.items():
        payload = items.payload(number)
        if payload is not None:
            audit.crcs[payload.file, payload.offset] = crc
            audit.unchecked[payload.file, payload.offset] = payload.nbytes
    for record, result in work.checked():
        _add_record(audit, record, result)


def _add_record(audit: Audit, record: StoredRecord, crc: int | EmaCkptError) -> None:
    """Add the CRC-32 of a record that was read, or the error of reading it."""
    owner, file = record.owner or None, record.file
    is_first = record.key not in audit.crcs
    if record.is_payload:
        audit.crcs[record.key] = None if isinstance(crc, EmaCkptError) else crc
    if isinstance(crc, EmaCkptError):
        audit.report(crc.code, f"{crc} ({_describe(record)})", owner, file)
        return
    if record.is_payload:
        if record.crc is None:
            audit.unchecked[record.key] = record.nbytes
        elif is_first:
            audit.checked += record.nbytes
    if record.crc is not None and crc != record.crc:
        cause = OTHER_BYTES if record.is_recorded else CHANGED_BYTES
        message = f"expected CRC-32 {record.crc:08x}, found {crc:08x}: {cause}"
        message = f"{file}: {_describe(record)}: {message}; use another copy"
        audit.report("checksum", message, owner, file)


def _describe(record: StoredRecord) -> str:
    text = f"record {record.record!r}" if record.record else "its bytes"
    return f"{record.owner!r}, {text}" if record.owner else text


def load_objects(audit: Audit, most_nbytes: int | None = None) -> None:
    """Read every object, or those of at most so many bytes."""
    for item in audit.catalog.objects:
        if most_nbytes is not None and item.nbytes > most_nbytes:
            continue
        if not item.is_inline:
            if not item.file:
                audit.report("incomplete", f"object {item.name!r}: no file holds it", item.name)
                continue
            if item.offset + item.nbytes > audit.sizes.get(item.file, -1):
                continue
        try:
            opaque = opaque_within(audit.catalog.reader.load(item))
        except SourceError as error:
            if error.code == "unsupported":
                audit.warn("opaque", str(error))
            else:
                audit.report(error.code, str(error), item.name, item.file)
            continue
        if opaque is not None and not item.is_inline:  # readers warn of inline values
            audit.warn("opaque", f"{item.name!r} holds a {opaque}, unknown to ema_ckpt")


def check_digests(audit: Audit, reader: BoxReader | None) -> None:
    """Compare the recorded digest of each tensor whose bytes are otherwise in order; without a
    reader those whose digest follows from the checksums that are known.
    """
    for tensor in audit.catalog.tensors:
        expected, payloads = audit.catalog.digests.get(tensor.name), audit.payloads_of(tensor)
        if expected is None or payloads is None or tensor.name in audit.damaged:
            continue
        digest = audit.digest(tensor, payloads, reader)
        if digest == expected:
            if reader is not None:
                audit.mark_checked(payloads)
        elif digest is not None:
            files = list(dict.fromkeys([payload.file for payload in payloads]))
            values = f"expected the digest crc32:{expected:08x}, found crc32:{digest:08x}"
            message = f"{', '.join(files[:3])}: tensor {tensor.name!r}: {values}"
            message = f"{message}: {explain_mismatch(audit.catalog)}"
            audit.report("checksum", message, tensor.name, files[0])


def _compare_replicas(audit: Audit, reader: BoxReader) -> None:
    """Compare chunks that hold the same elements."""
    for tensor in audit.catalog.tensors:
        if tensor.name in audit.damaged or not _has_replicas(tensor):
            continue
        payloads = audit.payloads_of(tensor)
        if not payloads:
            continue
        replicas: dict[tuple[object, object], list[int]] = {}
        for index, chunk in enumerate(tensor.chunks):
            if 0 not in chunk.sizes:
                replicas.setdefault((chunk.offsets, chunk.sizes), []).append(index)
        for indices in replicas.values():
            if len(indices) > 1:
                _compare_chunks(audit, tensor, payloads, indices, reader)


def _has_replicas(tensor: Tensor) -> bool:
    """Whether several chunks hold the same elements."""
    filled = [chunk for chunk in tensor.chunks if 0 not in chunk.sizes]
    return tensor.proven_chunks is None or len(filled) > len(tensor.proven_chunks)


def _compare_chunks(
    audit: Audit,
    tensor: Tensor,
    payloads: Sequence[Payload],
    indices: Sequence[int],
    reader: BoxReader,
) -> None:
    files: dict[int, list[str]] = {}
    for index in indices:
        chunk = tensor.chunks[index]
        at_origin = chunk._replace(offsets=(0,) * len(chunk.sizes))
        alone = replace(tensor, shape=chunk.sizes, chunks=(at_origin,))
        try:
            digest = compute_digest(locate(audit.catalog, alone, (payloads[index],)), reader)
        except SourceError as error:
            audit.error(error)
        else:
            files.setdefault(digest, []).append(chunk.file)
    if len(files) > 1:
        sides = " and ".join([shown(names) for names in files.values()])
        message = f"tensor {tensor.name!r}: copies of the same elements differ between {sides}"
        audit.warn("replicas-differ", message)
