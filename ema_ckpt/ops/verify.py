"""`verify`: check that every element, file and stored byte of a checkpoint is there and intact."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from ema_ckpt.analysis.audit import Audit, audit_checkpoint
from ema_ckpt.analysis.exchangeable import exchangeable_files, warning_of
from ema_ckpt.analysis.structure import audit_structure
from ema_ckpt.analysis.value_scan import ABSURD, Scanner, ValueCounts, has_values
from ema_ckpt.core.catalog import Catalog, Diagnostic, Problem, refuse_problems
from ema_ckpt.core.errors import AccessError, EmaCkptError, SourceError, UsageError
from ema_ckpt.core.limits import parse_workers
from ema_ckpt.core.names import TORCH_SUFFIXES
from ema_ckpt.core.text import counted, path_text, shown
from ema_ckpt.discovery.completeness import with_metadata
from ema_ckpt.discovery.locate import locate_checkpoint
from ema_ckpt.discovery.location import SAFETENSORS, TORCH, LeftOut, Location, is_index
from ema_ckpt.discovery.opening import log_choice, open_location, refuse_vanished
from ema_ckpt.ops.results.verify import GateResult, ManifestResult, VerifyResult
from ema_ckpt.ops.stale_files import stale_files
from ema_ckpt.reading.box_reader import BoxReader, LocatedBox, locate
from ema_ckpt.reading.overlaps import BlockRange, block_ranges
from ema_ckpt.reading.unchanged import FileStates, unchanged
from ema_ckpt.runtime import executor
from ema_ckpt.runtime.executor import Workers, dump_json
from ema_ckpt.state_dicts.ema_health import check_averages
from ema_ckpt.state_dicts.hidden_averages import find_hidden
from ema_ckpt.state_dicts.rules.chosen import chosen_rules
from ema_ckpt.state_dicts.tree import list_trees
from ema_ckpt.storage.directories import join, list_folder
from ema_ckpt.storage.files import is_url

if TYPE_CHECKING:
    from ema_ckpt.ops.verify_against import Origin
    from ema_ckpt.state_dicts.rules.rules import Rules

# Opening fails with these if there is no checkpoint to judge, or none that can be judged.
_NO_VERDICT = frozenset(
    "not-found not-a-checkpoint usage ambiguous-path ambiguous-tree"
    " missing-extra unsupported".split()
)
# The audit reports these with more detail.
_AUDITED = frozenset({"missing-file", "truncated-file", "unsafe-pickle"})
_BLOCK_NBYTES = 512 << 10
_SECONDS_PER_BYTE, _LOCKED_SECONDS_PER_BYTE = 0.4e-9, 0.1e-9  # of one worker that scans values


def verify(
    path: str | os.PathLike[str],
    values: bool = False,
    against: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
    quick: bool = False,
    manifest: str | os.PathLike[str] | None = None,
    check: bool = False,
    rules: str | os.PathLike[str] | Rules | None = None,
    rule_values: Sequence[str] | Mapping[str, int] = (),
    inverse: bool = False,
) -> VerifyResult:
    """Check structure, sizes, coverage and every stored checksum of a checkpoint.

    Nothing is repaired, and nothing stops at the first problem.

    Args:
        path: a checkpoint, a directory that holds one, or an fsspec URL of either.
        values: also look for NaN, infinities, tensors of nothing but zeros and absurd magnitudes.
        against: the checkpoint that this one was made from; each tensor's digest must be equal
            there.
        threads: maximum number of workers; by default the usable processors, at most 8.
        progress: called with the bytes read since the last call. If it has a method `expect`, that
            is called first, with the bytes to come.
        quick: read metadata, headers and objects of up to 64 KiB, and no payload. The result is a
            `GateResult`; its status is never `sound` unless a manifest covers all payload.
        manifest: a file of SHA-256 sums as `sha256sum` writes it, with names relative to the
            checkpoint. One that is there is compared with the files; else it is written, if the
            checkpoint is not damaged. The result is a `GateResult`.
        check: refuse to write the manifest: it has to be there.
        rules, rule_values, inverse: with `against`: the rules by which this checkpoint was made
            from that one, as the writing verbs take them.

    Raises:
        EmaCkptError: if at `path` there is nothing, no checkpoint, one of a kind that is not
            supported, or one that the system refuses to read; or if `against` cannot be opened.
            Damage is a result, and metadata of `path` that is missing, unreadable or hostile is
            damage.
    """
    workers = parse_workers(threads)
    _check_options(quick, values or against is not None, manifest is not None, check)
    sums = None if manifest is None else _manifest_path(manifest, check)
    report = _Report(path_text(path), workers, quick=quick, is_gate=sums is not None)
    origin = _origin(against, chosen_rules(rules, rule_values, inverse=inverse))
    for catalog, is_whole in report.open():
        try:
            with unchanged(catalog) as states:
                report.states.append(states)
                if quick:
                    audit = audit_structure(catalog)
                else:
                    source = origin if is_whole else None
                    audit = _audit_payload(catalog, values, source, workers, progress)
                if audit.problems:
                    states.refuse_changes(suspicious=True)
            report.warnings += [w for w in catalog.warnings if w.code not in _AUDITED]
            report.warnings += stale_files(catalog)
            report.warnings += averages(catalog)
            report.warnings += lone_codes(catalog) if is_whole else ()
            report.add(audit)
        finally:
            catalog.source.close()
    if sums is not None:
        report.compare_or_write(sums, Workers(workers), progress)
    return report.result()


def _check_options(quick: bool, needs_payload: bool, has_manifest: bool, check: bool) -> None:
    if quick and needs_payload:
        raise UsageError("usage", "--quick reads no payload; leave out --values and --against")
    if check and not has_manifest:
        raise UsageError("usage", "--check needs a --manifest FILE to check")


def _manifest_path(manifest: str | os.PathLike[str], check: bool) -> Path:
    from ema_ckpt.ops.verify_manifest import check_manifest_path

    return check_manifest_path(manifest, check)


def _origin(path: str | os.PathLike[str] | None, rules: Rules | None) -> Origin | None:
    if path is not None:
        from ema_ckpt.ops.verify_against import Origin

        return Origin(path, rules)
    if rules is not None:
        raise UsageError("usage", "--rules goes with --against, the checkpoint that they change")
    return None


def _audit_payload(
    catalog: Catalog,
    values: bool,
    origin: Origin | None,
    workers: int,
    progress: Callable[[int], None] | None,
) -> Audit:
    """Read all payload, once more for its values, and once more to compare it with another's."""
    passes = 1 + values + (origin is not None)
    executor.expect(progress, passes * payload_nbytes(catalog))
    audit = audit_checkpoint(catalog, workers, progress)
    if values:
        scan_values(audit, workers, progress)
    if origin is not None:
        from ema_ckpt.ops.verify_against import compare_with

        compare_with(audit, origin, workers, progress)
    return audit


def check(path: str | os.PathLike[str]) -> GateResult:
    """Raise an error for an incomplete checkpoint, before a run resumes from it or it is copied.

    Checks what `verify --quick` does: structure, sizes, coverage, headers and settings, without
    reading payload. Needs no torch.

    Args:
        path: a checkpoint, a directory that holds one, or an fsspec URL of either.

    Returns:
        The verdict, `unproven`, with its warnings: that payload is intact only `verify` can tell.

    Raises:
        EmaCkptError: the first problem by its code, with up to ten in the message; and as `verify`.
    """
    result = verify(path, quick=True)
    refuse_problems(result.problems)
    return cast("GateResult", result)


class _Report:
    """Problems, warnings and counts of all parts of a checkpoint."""

    def __init__(
        self, path: str, workers: int, *, quick: bool = False, is_gate: bool = False
    ) -> None:
        self.path = self.resolved = self.root = path
        self.workers = workers
        self.quick = quick
        self.is_gate = is_gate or quick
        self.files: set[str] = set()  # all that belong to the checkpoint, relative to `root`
        self.states: list[FileStates] = []  # of the files when they were opened
        self.manifest: ManifestResult | None = None
        self.problems: dict[Problem, None] = {}
        self.warnings: list[Diagnostic] = []
        self.checked = 0
        self.unchecked: dict[tuple[str, str], int] = {}  # bytes by a root and a file below it
        self.unproven: list[str] = []  # tensors of which some payload has no checksum
        self.alike: list[list[str]] = []  # files that could be exchanged without a trace
        self.unlisted: list[str] = []  # files of the checkpoint that a manifest leaves out

    def open(self) -> Iterator[tuple[Catalog, bool]]:
        """Yield the checkpoint and True, or each part of it that opens and False."""
        try:
            location = locate_checkpoint(self.path)
        except EmaCkptError as error:
            self.add_error(error)
            return
        log_choice(location)
        self.root, self.resolved = location.root, location.resolved
        before = []
        for part in (location, *[part for _, part in location.parts]):
            self.files |= {self.name_below(self.root, (part.root, name)) for name in part.names}
            before.append(FileStates.now(part.root, part.resolved, part.names))
        self.warnings += location.warnings
        bare = location._replace(left_out=(), warnings=())
        if self.quick:  # metadata that is kept is not read twice
            bare = with_metadata(bare)
        for catalog in self.open_parts(bare):
            yield catalog, catalog.resolved == location.resolved and not self.problems
        for states in before:  # what could not be opened may have been half written
            states.refuse_changes(suspicious=bool(self.problems))
        if self.problems:
            refuse_vanished(location)
        for item in location.left_out:
            self.add_left_out(item)

    def open_parts(self, location: Location) -> Iterator[Catalog]:
        """Open a location; if that fails, what it consists of: parts, or files beside an index."""
        try:
            yield open_location(location, self.path, lenient=True, workers=self.workers)
            return
        except EmaCkptError as error:
            self.add_error(error)
        for part in self.parts_of(location):
            yield from self.open_parts(part)

    def parts_of(self, location: Location) -> list[Location]:
        """Return the parts, or the files beside an index."""
        parts = [part for _, part in location.parts]
        kind = location.format
        if kind in (SAFETENSORS, TORCH) and is_index(location.names[0]):
            suffixes = (".safetensors",) if kind == SAFETENSORS else TORCH_SUFFIXES
            for name in list_folder(location.root).files:
                if name.endswith(suffixes):
                    file = join(location.root, name)
                    parts.append(Location(kind, location.root, (name,), file))
        return parts

    def add_error(self, error: EmaCkptError) -> None:
        """Add an error as a problem; raise one that says nothing of damage."""
        if error.code in _NO_VERDICT or isinstance(error, AccessError):
            raise error
        self.problems[Problem(error.code, error.tensor, error.file, str(error))] = None

    def add_left_out(self, item: LeftOut) -> None:
        """Add what lies beside the checkpoint; a newer step that is not complete is damage."""
        error = item.error
        if error is None or item.is_fresh:
            self.warnings.append(item.diagnostic())
            return
        file = item.path if error.file is None else join(item.path, error.file)
        message = f"{item.path}: {item.why}"
        self.problems[Problem(error.code, error.tensor, file, message)] = None

    def add(self, audit: Audit) -> None:
        """Add the findings of an audit."""
        self.problems |= audit.problems
        self.warnings += audit.warnings
        self.checked += audit.checked
        root = audit.catalog.source.root
        self.files |= {self.name_below(self.root, (root, name)) for name in audit.sizes}
        for (file, _), nbytes in audit.unchecked.items():
            self.unchecked[root, file] = self.unchecked.get((root, file), 0) + nbytes
        self.unproven += audit.unproven()
        if not self.quick:
            self.alike += exchangeable_files(audit)

    def compare_or_write(
        self, manifest: Path, workers: Workers, progress: Callable[[int], None] | None
    ) -> None:
        """Compare the files with the manifest, or write it; what matches needs no checksum."""
        from ema_ckpt.ops.verify_manifest import compare_manifest, files_of, write_manifest

        files = files_of(self.resolved, self.root, self.files, manifest)
        states = [*self.states, FileStates.now(files.root, self.resolved, files.names)]
        if manifest.exists():
            hashed = compare_manifest(files, manifest, workers, progress, states)
        elif self.problems:
            message = f"{manifest}: not written, because the checkpoint is damaged"
            self.warnings.append(Diagnostic("unchecked", message))
            return
        else:
            hashed = write_manifest(files, manifest, workers, progress, states)
        self.manifest = hashed.result
        self.problems |= dict.fromkeys(hashed.problems)
        self.warnings += hashed.warnings
        if hashed.result.written:
            return
        for place in list(self.unchecked):
            if self.name_below(files.root, place) in hashed.matching:
                self.checked += self.unchecked.pop(place)
        own = {self.name_below(files.root, (self.root, file)) for file in self.files}
        self.unlisted = [name for name in hashed.result.uncovered if name in own]
        if self.unlisted:
            these = f"{shown(self.unlisted)} of the checkpoint itself"
            reason = "so that pieces that were changed or exchanged together with them go unseen"
            message = f"{manifest}: does not list {these}, {reason}; write a new manifest"
            self.warnings.append(Diagnostic("unchecked", message))
        else:
            self.alike.clear()

    def name_below(self, root: str, place: tuple[str, str]) -> str:
        """Name of a file, given as another root and a name below it, relative to `root`."""
        inner, file = place[0].removeprefix(root).strip("/"), place[1]
        return f"{inner}/{file}" if inner else file

    def result(self) -> VerifyResult:
        """Return the verdict."""
        unchecked = sum(self.unchecked.values())
        status = "unproven" if unchecked or self.unlisted else "sound"
        if self.problems:
            status = "damaged"
        if unchecked and not self.quick:
            payload = f"{counted(unchecked, 'byte')} of payload without a checksum"
            names = f" ({shown(self.unproven)})" if self.unproven else ""
            message = f"{payload}{names} may be damaged without a trace"
            self.warnings.append(Diagnostic("unchecked", message))
        self.warnings += map(warning_of, self.alike)
        verdict = VerifyResult(
            path=self.path,
            resolved=self.resolved,
            status=status,
            checked_bytes=self.checked,
            unchecked_bytes=unchecked,
            problems=tuple(self.problems),
            warnings=tuple(dict.fromkeys(self.warnings)),
        )
        return GateResult.of(verdict, self.quick, self.manifest) if self.is_gate else verdict


def payload_nbytes(catalog: Catalog) -> int:
    """Return the bytes of payload, those that several names share once."""
    sizes: dict[object, int] = {}
    for tensor in catalog.tensors:
        for chunk in tensor.chunks:
            place = tensor.storage or (chunk.file, chunk.offset)
            nbytes = prod(chunk.sizes) * tensor.dtype.itemsize
            sizes[place] = max(nbytes, sizes.get(place, 0))
    for item in catalog.objects:
        if not item.is_inline:
            sizes[item.file, item.offset] = item.nbytes
    return sum(sizes.values())


def averages(catalog: Catalog) -> Iterator[Diagnostic]:
    """Warn of averages that never moved or do not fit their model, as far as they can be read."""
    with suppress(SourceError, UsageError):  # the audit reports it
        trees = list_trees(catalog)
        yield from find_hidden(trees)
        yield from check_averages(catalog, trees)


def lone_codes(catalog: Catalog) -> Iterator[Diagnostic]:
    """Warn of codes of quantised weights without scales, as far as trees can be told."""
    if not catalog.tensors:
        return
    from ema_ckpt.reading.quantized.lone_codes import warn_of_lone_codes

    with suppress(SourceError, UsageError):  # the audit reports it
        yield from warn_of_lone_codes(catalog)


# Values.


def scan_values(audit: Audit, threads: int, progress: Callable[[int], None] | None = None) -> None:
    """Scan all tensors that can be read; report NaN and infinities, warn of zeros and extremes."""
    scan = _ValueScan(audit)
    executor.run(scan, [scan.jobs()], scan.workers(threads), progress)
    for tensor in audit.catalog.tensors:
        counts = scan.counts.get(tensor.name)
        if counts is None:
            continue
        label = f"tensor {tensor.name!r}:"
        if counts.nan or counts.inf:
            values = f"{counts.nan} NaN and {counts.inf} infinite"
            message = f"{label} {values} of {counted(tensor.numel, 'value')}"
            audit.report("non-finite", message, tensor.name, tensor.first_file)
        elif counts.largest == 0 and tensor.numel > 1:
            audit.warn("all-zero", f"{label} all of its {tensor.numel} values are zero")
        if counts.largest >= ABSURD:
            audit.warn("overflow", f"{label} magnitudes up to {counts.largest:.3g} are no weights")


class _ScanBlocks(NamedTuple):
    """Scan the values of blocks of a tensor."""

    located: LocatedBox
    range: BlockRange

    @property
    def nbytes(self) -> int:
        return self.range.numel * self.located.tensor.dtype.itemsize


class _ValueScan:
    """The work of scanning every value of every tensor that can be read."""

    def __init__(self, audit: Audit) -> None:
        self.counts: dict[str, ValueCounts] = {}
        self._audit = audit
        self._lock = threading.Lock()

    def workers(self, threads: int) -> Workers:
        """Choose the workers; numpy is imported before children are forked, which share it."""
        import numpy  # noqa: F401

        if is_url(self._audit.catalog.source.root):
            return Workers(threads)
        nbytes = sum([tensor.nbytes for tensor in self._audit.catalog.tensors])
        return Workers.fit(threads, nbytes * _SECONDS_PER_BYTE, nbytes * _LOCKED_SECONDS_PER_BYTE)

    def jobs(self) -> Iterator[_ScanBlocks]:
        """Cut all tensors into jobs; report those whose bytes cannot be located."""
        for tensor in self._audit.catalog.tensors:
            payloads = self._audit.payloads_of(tensor)
            if not tensor.numel or not has_values(tensor.dtype) or payloads is None:
                continue
            try:
                located = locate(self._audit.catalog, tensor, payloads)
            except SourceError as error:
                self._audit.error(error)
                continue
            for blocks in block_ranges(tensor.shape, tensor.dtype.itemsize, _BLOCK_NBYTES):
                yield _ScanBlocks(located, blocks)

    def add(self, name: str, part: ValueCounts) -> None:
        """Add the counts of a part of a tensor; may be called by several threads."""
        with self._lock:
            self.counts.setdefault(name, ValueCounts()).add(part)

    def start_worker(self) -> Callable[[_ScanBlocks], int]:
        reader = BoxReader(_BLOCK_NBYTES)

        def scan(job: _ScanBlocks) -> int:
            tensor = job.located.tensor
            scanner, part = Scanner(tensor.dtype), ValueCounts()
            for block in reader.blocks(job.located, *job.range):
                part.add(scanner.scan(block))
            self.add(tensor.name, part)
            return job.nbytes

        return scan

    def dump(self) -> bytes:
        return dump_json([[name, *astuple(counts)] for name, counts in self.counts.items()])

    def merge(self, dumped: bytes) -> None:
        for name, *numbers in json.loads(dumped):
            self.add(name, ValueCounts(*numbers))

    def reset(self) -> None:
        self.counts.clear()
