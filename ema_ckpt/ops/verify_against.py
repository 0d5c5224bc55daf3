"""`verify --against`: compare every tensor's digest with that in the checkpoint it was made from.

Digests that either side records are used as they are; the rest is computed. Names are matched in
full or through trees, as a verb may have written one tree under plain names; a renamed tensor is
matched by its digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ema_ckpt.analysis.audit import Audit
from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import AccessError, EmaCkptError
from ema_ckpt.core.names import EMA, OPTIMIZER, canonical
from ema_ckpt.core.text import counted, shown
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.ops.dequantize import as_written
from ema_ckpt.ops.rule_changes import RuledSource, listed, rule_all
from ema_ckpt.ops.spare_tensors import Naming, Spare, common_prefix
from ema_ckpt.reading.box_reader import BoxReader, locate
from ema_ckpt.reading.cast import Caster, import_all
from ema_ckpt.reading.digests import compute_digest, recorded_digest
from ema_ckpt.runtime import executor
from ema_ckpt.runtime.executor import Workers, dump_json
from ema_ckpt.state_dicts.ema_config import with_tied_names
from ema_ckpt.state_dicts.tree import Tree, inner_names, list_trees, of_role
from ema_ckpt.storage.files import is_url

if TYPE_CHECKING:
    from ema_ckpt.state_dicts.rules.rules import Rules

_BLOCK_NBYTES = 512 << 10
_SECONDS_PER_BYTE, _SECONDS_PER_TENSOR = 0.3e-9, 50e-6  # of one worker


class Origin(NamedTuple):
    """The checkpoint that another was made from, and the rules by which, if there were any."""

    path: str | os.PathLike[str]
    rules: Rules | None = None


def compare_with(
    audit: Audit,
    origin: Origin,
    threads: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Report every tensor that `origin` does not have, bit for bit or after its cast.

    `progress` is called with the bytes of `origin` that are done.

    Raises:
        EmaCkptError: if `origin` cannot be read, or its rules do not fit it.
    """
    catalog = open_catalog(origin.path, workers=threads)
    try:
        values = as_written(catalog, audit.catalog)
        source = listed(values, origin.rules, expand_ties=True)
        # What was written without its optimizer is compared without it.
        carried = bool(origin.rules) and of_role(list_trees(audit.catalog), OPTIMIZER)
        ruled = rule_all(origin.rules, source, optimizers=bool(carried))
        _warn_of_optimizers(audit, source, ruled, bool(carried))
        hint = "" if origin.rules else "; if --rules made the copy, pass them here too"
        _Comparison(audit, ruled.catalog, ruled.trees, threads, hint).run(progress)
    finally:
        catalog.source.close()


def _warn_of_optimizers(audit: Audit, origin: Catalog, ruled: RuledSource, carried: bool) -> None:
    """Say which optimizers of the source are not compared, as rules do not carry them."""
    if carried or ruled.rules is None:
        audit.warnings += [w for w in ruled.warnings if w.code == "left-out"]
        return
    for tree in of_role(list_trees(origin), OPTIMIZER):
        message = f"tree {tree.name!r} of {origin.resolved} is not compared: "
        message += f"{audit.catalog.resolved} has no optimizer state; `convert` says why, and "
        audit.warn("left-out", f"{message}without --rules copies it as it is")


class _Digest(NamedTuple):
    """Compute the digest of a source's tensor, after the cast to `dtype`."""

    tensor: Tensor
    dtype: DType

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def key(self) -> tuple[str, str]:
        return self.tensor.name, self.dtype.name


class _OriginDigests:
    """The work of computing digests; results by tensor and type, with what an error says."""

    def __init__(self, origin: Catalog) -> None:
        self.origin = origin
        self.results: dict[tuple[str, str], tuple[int | None, Sequence[Any] | None]] = {}

    def compute(
        self,
        jobs: Sequence[_Digest],
        threads: int,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Compute those digests that are not known yet."""
        new = {job.key: job for job in jobs if job.key not in self.results}
        if new:
            executor.run(self, [new.values()], self._workers(new.values(), threads), progress)

    def _workers(self, jobs: Collection[_Digest], threads: int) -> Workers:
        if is_url(self.origin.source.root):
            return Workers(threads)
        import_all((job.tensor.dtype, job.dtype) for job in jobs)
        free_seconds = sum([job.nbytes for job in jobs]) * _SECONDS_PER_BYTE
        return Workers.fit(min(threads, len(jobs)), free_seconds, len(jobs) * _SECONDS_PER_TENSOR)

    def start_worker(self) -> Callable[[_Digest], int]:
        reader = BoxReader(_BLOCK_NBYTES)

        def compute(job: _Digest) -> int:
            try:
                self.results[job.key] = (self.digest(job.tensor, job.dtype, reader), None)
            except AccessError:
                raise
            except EmaCkptError as error:
                failure = (error.code, str(error), error.tensor, error.file)
                self.results[job.key] = (None, failure)
            return job.nbytes

        return compute

    def digest(self, tensor: Tensor, dtype: DType, reader: BoxReader) -> int | None:
        """Return the recorded digest, or compute it; None for types that do not cast."""
        cast = None
        if dtype == tensor.dtype:
            recorded = recorded_digest(self.origin, tensor)
            if recorded is not None:
                return recorded
        elif dtype.is_castable and tensor.dtype.is_castable:
            cast = Caster(tensor.dtype, dtype).cast
        else:
            return None
        return compute_digest(locate(self.origin, tensor), reader, cast)

    def dump(self) -> bytes:
        return dump_json([[*key, *result] for key, result in self.results.items()])

    def merge(self, dumped: bytes) -> None:
        for name, dtype, digest, failure in json.loads(dumped):
            self.results[name, dtype] = (digest, failure)

    def reset(self) -> None:
        self.results.clear()


class _Match(NamedTuple):
    """What is wrong by one naming: names that it does not have, and whose bytes are others."""

    naming: Naming
    missing: list[str]
    differing: list[str]

    @property
    def problems(self) -> int:
        return len(self.missing) + len(self.differing)


class _Comparison:
    """Comparison of an audited checkpoint with its source."""

    def __init__(
        self, audit: Audit, origin: Catalog, trees: Sequence[Tree], threads: int, hint: str
    ) -> None:
        self.audit = audit
        self.hint = hint
        self.tensors = {tensor.name: tensor for tensor in audit.catalog.tensors}
        self.origin = origin
        self.origin_trees = trees
        self.reader = BoxReader(_BLOCK_NBYTES)
        self.threads = threads
        self.origin_digests = _OriginDigests(origin)

    def run(self, progress: Callable[[int], None] | None) -> None:
        """Try each naming until one matches every tensor; else report by the best.

        Where names do not decide, as all were changed, it is one whose tensors are all found by
        their bytes.
        """
        tried: list[_Match] = []
        best = len(self.tensors) + 1
        for matched, naming in self.namings():
            fewest = len(self.tensors) - matched
            if fewest > best and naming is not self.full:
                continue  # it cannot be better; full names may hold all bytes
            if fewest == best and len(naming.tensors) < len(self.tensors):
                continue  # nor can it hold all
            tried.append(self.match(naming, progress))
            best = min(best, tried[-1].problems)
            if not best:
                break
        self.report(*self.best(tried))

    def best(self, tried: Sequence[_Match]) -> _Match:
        """Return the best match; of those that do not know some names, one that holds all bytes."""
        match = min(tried, key=lambda match: match.problems)
        if not match.missing or match.differing:
            return match
        return next(filter(self.holds_all, tried), match)

    def match(self, naming: Naming, progress: Callable[[int], None] | None) -> _Match:
        """Compare the tensors with those that have their names."""
        jobs = []
        for name, tensor in self.tensors.items():
            other = naming.counterpart(name)
            if other is not None and other.shape == tensor.shape:
                jobs.append(_Digest(other, tensor.dtype))
        self.origin_digests.compute(jobs, self.threads, progress)
        missing, differing = [], []
        for name in self.tensors:
            if naming.counterpart(name) is None:
                missing.append(name)
            elif not self.is_equal(name, naming):
                differing.append(name)
        return _Match(naming, missing, differing)

    def namings(self) -> Sequence[tuple[int, Naming]]:
        """Return full names, and each tree under the names inside it, the likeliest first.

        Where no name is known, `--rename` may have changed what all begin with: each of them also
        with the prefix that names have here. With each the number of tensors that it matches.
        """
        namings = [self.full]
        for tree in self.origin_trees:
            names = _names_inside(with_tied_names(self.origin, tree))
            plain = {canonical(name): tensor for name, tensor in names.items()}
            namings.append(Naming(f", tree {tree.name!r}", plain | names))
        counts = self.count(namings)
        if not any(counts):
            prefix = common_prefix(self.tensors)
            namings += [naming.moved(prefix) for naming in namings]
            counts = self.count(namings)
        return sorted(zip(counts, namings, strict=True), key=itemgetter(0), reverse=True)

    @cached_property
    def full(self) -> Naming:
        """Full names; also without the wrapper prefixes, which writers strip inside a tree only."""
        full = {}
        for tree in self.origin_trees:
            skip = len(tree.prefix)
            for tensor in tree.tensors:
                full[tensor.name[:skip] + canonical(tensor.name[skip:])] = tensor
        return Naming("", full | {tensor.name: tensor for tensor in self.origin.tensors})

    def count(self, namings: Sequence[Naming]) -> list[int]:
        """Count the tensors that each naming matches."""
        matching: dict[str, set[str]] = {}  # names here by what a naming may call them
        for name in self.tensors:
            for key in (name, canonical(name)):
                matching.setdefault(key, set()).add(name)
        counts = []
        for naming in namings:
            matched = [matching[key] for key in naming.tensors if key in matching]
            counts.append(len(set().union(*matched)))
        return counts

    def is_equal(self, name: str, naming: Naming) -> bool:
        """Check whether shape and digest equal those in the source."""
        tensor, other = self.tensors[name], naming.counterpart(name)
        if other is None or other.shape != tensor.shape:
            return False
        digest = self.digest(tensor)
        return digest is not None and digest == self.origin_digest(other, tensor.dtype)

    def digest(self, tensor: Tensor) -> int | None:
        """Return the digest of an audited tensor, from the bytes that were read."""
        payloads = self.audit.payloads_of(tensor)
        return None if payloads is None else self.audit.digest(tensor, payloads, self.reader)

    def origin_digest(self, tensor: Tensor, dtype: DType) -> int | None:
        """Return the digest of a source's tensor, after the cast to `dtype`; cached.

        An error is reported, but for a tensor in a form that is not read: it is not compared.
        """
        job = _Digest(tensor, dtype)
        self.origin_digests.compute([job], 1)
        digest, failure = self.origin_digests.results[job.key]
        if failure is not None and tensor.refusal is None:
            code, message, name, file = failure
            self.audit.report(code, f"{self.origin.resolved}: {message}", name, file)
        return digest

    # Report.

    def report(self, naming: Naming, missing: list[str], differing: list[str]) -> None:
        """Report what is missing or differs, and what the source has more."""
        where = f"{self.origin.resolved}{naming.label}"
        spare = Spare(naming, self.tensors, self.digests_of, self.kept)
        missing, unnamed = self.take_renamed(missing, spare), missing
        renamed = sorted({*unnamed}.difference(missing))
        if renamed:
            found = f"{counted(len(renamed), 'tensor')} found by their bytes alone in {where}"
            doubt = "which of them has which name is not compared"
            self.audit.warn("renamed", f"{found}, under other names: {shown(renamed)}; {doubt}")
        for name in self.tensors.keys() - {*missing, *differing}:
            self.audit.mark_checked(self.audit.payloads_of(self.tensors[name]) or ())
        for name in missing:
            message = f"tensor {name!r}: {where} has no tensor of that name or of these bytes"
            self.audit.report("index-mismatch", message, name)
        for name in differing:
            self.report_difference(self.tensors[name], naming, where)
        self.report_spare(spare.left(), naming, where, missing)

    def report_difference(self, tensor: Tensor, naming: Naming, where: str) -> None:
        """Report a tensor that differs; one that is not read at all is not proven, and no more."""
        if self.digest(tensor) is None and tensor.name not in self.audit.damaged:
            self.audit.unchecked[tensor.name, -1] = 1  # the audit has said why
            return
        other = naming.counterpart(tensor.name) or tensor
        if other.refusal is not None:
            self.audit.unchecked[tensor.name, -1] = 1
            why = f"tensor {tensor.name!r} is not compared with {where}: {other.refusal.message}"
            self.audit.warn("unchecked", why)
            return
        message = f"tensor {tensor.name!r}: its bytes differ from those of {other.name!r}"
        if (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            message += f" ({other.dtype.name} {list(other.shape)})"
        self.audit.report("checksum", f"{message} in {where}", tensor.name, tensor.first_file)

    def report_spare(
        self, spare: Mapping[str, Tensor], naming: Naming, where: str, missing: Collection[str]
    ) -> None:
        """Report tensors that only the source has.

        If the source lacks some too (`missing`), rules may have made them, and a hint says so.
        """
        lost = self.lost(spare, naming)
        if lost:
            message = f"{where} has {counted(len(lost), 'tensor')} more: {shown(lost)}"
            message += self.hint if missing else ""
            self.audit.report("incomplete", message, lost[0])

    def lost(self, spare: Mapping[str, Tensor], naming: Naming) -> list[str]:
        """List tensors that only the source has, other than tied names and whole trees."""
        names = {id(tensor): name for name, tensor in spare.items()}  # of each tensor one
        lost = [name for name in names.values() if name not in self.ties]
        if lost and not naming.label and self.left_out_whole_trees(spare):
            return []
        return lost

    @cached_property
    def ties(self) -> set[str]:
        """Tied names of both sides."""
        return {*_tied_names(self.audit.catalog), *_tied_names(self.origin)}

    @cached_property
    def kept(self) -> set[int]:
        """Ids of the tensors of those trees of the source of which any full name is here."""
        here = {id(self.full.counterpart(name)) for name in self.tensors}
        trees = [{id(tensor) for tensor in tree.tensors} for tree in self.origin_trees]
        return set().union(*(tree for tree in trees if not tree.isdisjoint(here)))

    def take_renamed(self, missing: Sequence[str], spare: Spare) -> list[str]:
        """Take tensors of equal bytes, or of equal ones after a cast, out of `spare`.

        Returns:
            the names of those for which there is none.
        """
        for cast in (False, True):
            still = []
            for name in missing:
                tensor = self.tensors[name]
                digest = self.digest(tensor) if spare.may_have(tensor) else None
                if digest is None or not spare.take(tensor, digest, cast=cast):
                    still.append(name)
            missing = still
        return list(missing)

    def digests_of(self, tensors: Sequence[Tensor], dtype: DType) -> list[int | None]:
        """Return the digests of a source's tensors, after the cast to `dtype`."""
        self.look_at(tensors, dtype)
        return [self.origin_digest(tensor, dtype) for tensor in tensors]

    def look_at(self, tensors: Sequence[Tensor], dtype: DType) -> list[int | None]:
        """Return what `digests_of` does, and report no damage."""
        jobs = [_Digest(tensor, dtype) for tensor in tensors]
        self.origin_digests.compute(jobs, self.threads)
        return [self.origin_digests.results[job.key][0] for job in jobs]

    def holds_all(self, match: _Match) -> bool:
        """Check whether all tensors that a naming does not have by name were renamed."""
        naming, missing, differing = match
        spare = Spare(naming, self.tensors, self.look_at, self.kept)
        if differing or not all(spare.may_have(self.tensors[name]) for name in missing):
            return False
        return not self.take_renamed(missing, spare) and not self.lost(spare.left(), naming)

    def left_out_whole_trees(self, spare: Mapping[str, Tensor]) -> bool:
        """Check whether the spare tensors are those of whole trees, as `--tree` leaves them out."""
        left_out = {tensor.name for tensor in spare.values()}
        for tree in self.origin_trees:
            names = {tensor.name for tensor in tree.tensors}
            if not names.isdisjoint(left_out) and not names <= left_out:
                return False  # some are here, by their names or by their bytes
        return bool(self.kept)


def _names_inside(tree: Tree) -> dict[str, Tensor]:
    if tree.role == EMA and tree.problem is None:
        return dict(tree.named)
    inner = inner_names(tree)
    return {inner[tensor.name]: tensor for tensor in tree.tensors}


def _tied_names(catalog: Catalog) -> Iterator[str]:
    yield from catalog.ties
    first: dict[object, str] = {}
    for tensor in catalog.tensors:
        key = (tensor.storage, tensor.shape, tensor.dtype.name)
        if tensor.storage is not None and first.setdefault(key, tensor.name) != tensor.name:
            yield tensor.name
