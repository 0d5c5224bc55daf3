"""`verify --against`: compare every tensor's digest with that in the checkpoint it was made from.

Digests that either side records are used as they are; the rest is computed. Names are those of one
`Naming`: in full, or inside one tree, as a verb may have written it under plain names. The one that
leaves least unexplained is taken; a tensor whose name it does not know is matched by its digest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from ema_ckpt.analysis.audit import Audit
from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.names import OPTIMIZER, canonical
from ema_ckpt.core.text import counted, shown
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.ops.dequantize import as_written
from ema_ckpt.ops.origin_digests import BLOCK_NBYTES, DigestJob, OriginDigests
from ema_ckpt.ops.rule_changes import RuledSource, listed, rule_all
from ema_ckpt.ops.spare_tensors import (
    Naming,
    Spare,
    common_prefix,
    full_names,
    names_below,
    names_inside,
)
from ema_ckpt.reading.box_reader import BoxReader
from ema_ckpt.state_dicts.tree import Tree, list_trees, of_role

if TYPE_CHECKING:
    from ema_ckpt.state_dicts.rules.rules import Rules


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


class _Match(NamedTuple):
    """What is wrong by one naming.

    Attributes:
        pairs: the source's tensor of each name that the naming knows.
        unknown: how many names it does not know. differing: names whose bytes are others.
        lost: names that only the source has.
    """

    naming: Naming
    pairs: Mapping[str, Tensor]
    unknown: int
    differing: list[str]
    lost: list[str]

    @property
    def problems(self) -> int:
        return self.unknown + len(self.differing)


class _Comparison:
    """Comparison of an audited checkpoint with its source."""

    def __init__(
        self, audit: Audit, origin: Catalog, trees: Sequence[Tree], threads: int, hint: str
    ) -> None:
        self.audit = audit
        self.hint = hint
        self.tensors = {tensor.name: tensor for tensor in audit.catalog.tensors}
        self.dropped = {}  # as tied to tensors that are there: the bytes of those
        for name, kept in audit.catalog.ties.items():
            if kept in self.tensors and name not in self.tensors:
                self.dropped[name] = self.tensors[kept]
        self.digests: dict[str, int | None] = {}
        self.origin = origin
        self.origin_trees = trees
        self.reader = BoxReader(BLOCK_NBYTES)
        self.threads = threads
        self.origin_digests = OriginDigests(origin)

    def run(self, progress: Callable[[int], None] | None) -> None:
        """Try each naming until one leaves nothing unexplained; else report by the best."""
        tried: list[_Match] = []
        for namings in self.namings():
            if self.try_all(namings, tried, progress):
                break
        self.report(self.best(tried))

    def try_all(
        self,
        namings: Sequence[Naming],
        tried: list[_Match],
        progress: Callable[[int], None] | None,
    ) -> bool:
        """Add the matches of namings to `tried`, the likeliest first, until one explains all.

        Returns:
            whether one does.
        """
        best = min([match.problems for match in tried], default=len(self.tensors) + 1)
        counted_namings = zip(self.count(namings), namings, strict=True)
        for matched, naming in sorted(counted_namings, key=itemgetter(0), reverse=True):
            fewest = len(self.tensors) - matched
            if fewest > best and naming is not self.full:
                continue  # it cannot be better; full names may hold all bytes
            if fewest == best and len(naming.tensors) < len(self.tensors):
                continue  # nor can it hold all
            tried.append(self.match(naming, progress))
            best = min(best, tried[-1].problems)
            if not tried[-1].problems and not tried[-1].lost:
                return True
        return False

    def best(self, tried: Sequence[_Match]) -> _Match:
        """Return the best match; of those that do not know some names, by their bytes."""
        ranked = sorted(tried, key=lambda match: (match.problems, len(match.lost)))
        best, fewest = ranked[0], None
        for match in ranked if best.unknown and not best.differing else ():
            unexplained = self.unexplained(match)
            if fewest is None or unexplained < fewest:
                best, fewest = match, unexplained
            if not fewest:
                break
        return best

    def match(self, naming: Naming, progress: Callable[[int], None] | None) -> _Match:
        """Compare the tensors with those that have their names.

        The time is that of what the naming knows: there may be as many as there are tensors.
        """
        known = self.known(naming)
        pairs = naming.pair(sorted(known, key=self.positions.__getitem__))
        jobs = []
        for name, other in pairs.items():
            tensor = self.tensor_of(name)
            if other.shape == tensor.shape:
                jobs.append(DigestJob(other, tensor.dtype))
        self.origin_digests.compute(jobs, self.threads, progress)
        unknown = len(self.tensors) - sum([name in self.tensors for name in pairs])
        differing = [name for name, other in pairs.items() if not self.is_equal(name, other)]
        lost = self.lost(naming, set(map(id, pairs.values())))
        return _Match(naming, pairs, unknown, differing, lost)

    def missing(self, match: _Match) -> list[str]:
        """List the names that a naming does not know."""
        return [name for name in self.tensors if name not in match.pairs]

    def namings(self) -> Iterator[Sequence[Naming]]:
        """Yield the namings to try at first, then those to try where none of these explains all.

        Where no name is known, `--rename` may have changed what all begin with: the first ones
        also with the prefix that names have here.
        """
        namings = [self.full, *names_inside(self.origin, self.origin_trees)]
        yield namings
        below = names_below(self.origin, self.tensors)
        yield below
        if not any(self.count([*namings, *below])):
            prefix = common_prefix(self.tensors)
            rests = [canonical(name)[len(prefix) :] for name in self.tensors]
            moved = [naming.moved(prefix) for naming in namings]
            yield moved + (names_below(self.origin, rests, prefix) if prefix else [])

    @cached_property
    def full(self) -> Naming:
        """Full names."""
        return full_names(self.origin, self.origin_trees)

    @cached_property
    def positions(self) -> dict[str, int]:
        """The place of each name of a tensor, then of those that were dropped as tied."""
        return {name: place for place, name in enumerate([*self.tensors, *self.dropped])}

    @cached_property
    def matching(self) -> dict[str, set[str]]:
        """Names here by what a naming may call them."""
        matching: dict[str, set[str]] = {}
        for name in self.positions:
            for key in (name, canonical(name)):
                matching.setdefault(key, set()).add(name)
        return matching

    def known(self, naming: Naming) -> set[str]:
        """Return the names that a naming may know."""
        names = [self.matching[key] for key in naming.tensors if key in self.matching]
        return set().union(*names)

    def count(self, namings: Sequence[Naming]) -> list[int]:
        """Count the tensors that each naming matches."""
        return [sum([n in self.tensors for n in self.known(naming)]) for naming in namings]

    def tensor_of(self, name: str) -> Tensor:
        """Return the audited tensor of a name, or the one that it was dropped as tied to."""
        return self.tensors.get(name) or self.dropped[name]

    def is_equal(self, name: str, other: Tensor) -> bool:
        """Check whether shape and digest equal those of a tensor of the source."""
        tensor = self.tensor_of(name)
        if other.shape != tensor.shape:
            return False
        digest = self.digest(tensor)
        return digest is not None and self.look_at([other], tensor.dtype) == [digest]

    def digest(self, tensor: Tensor) -> int | None:
        """Return the digest of an audited tensor, from the bytes that were read; cached."""
        if tensor.name not in self.digests:
            payloads = self.audit.payloads_of(tensor)
            digest = None if payloads is None else self.audit.digest(tensor, payloads, self.reader)
            self.digests[tensor.name] = digest
        return self.digests[tensor.name]

    def look_at(self, tensors: Sequence[Tensor], dtype: DType) -> list[int | None]:
        """Return the digests of a source's tensors, after the cast to `dtype`; cached."""
        jobs = [DigestJob(tensor, dtype) for tensor in tensors]
        self.origin_digests.compute(jobs, self.threads)
        return [self.origin_digests.results[job.key][0] for job in jobs]

    def digests_of(self, tensors: Sequence[Tensor], dtype: DType) -> list[int | None]:
        """Return what `look_at` does, and report errors.

        A tensor in a form that is not read is none: it is not compared.
        """
        digests = self.look_at(tensors, dtype)
        for tensor in tensors:
            _, failure = self.origin_digests.results[DigestJob(tensor, dtype).key]
            if failure is None or tensor.refusal is not None or self.unread(tensor, dtype):
                continue
            code, message, name, file = failure
            self.audit.report(code, f"{self.origin.resolved}: {message}", name, file)
        return digests

    def unread(self, tensor: Tensor, dtype: DType) -> str:
        """Say why a source's tensor, whose digest was asked for, is in a form that is not read."""
        _, failure = self.origin_digests.results[DigestJob(tensor, dtype).key]
        return str(failure[1]) if failure is not None and failure[0] == "unsupported" else ""

    # What only the source has.

    def lost(self, naming: Naming, taken: Collection[int]) -> list[str]:
        """List tensors that a copy has to have and does not, by the ids of those that it has.

        It may lack what the source records as tied to one that is there, and under full names
        whole trees, as `--tree` leaves them out.
        """
        stored = {self.ties.get(key, key) for key in taken}
        trees = {self.owners.get(key) for key in taken}
        allows_trees = not naming.label and bool(self.kept)
        names: dict[int, str] = {}  # of each tensor one
        for name, tensor in naming.tensors.items():
            key = id(tensor)
            if key in naming.optional or self.ties.get(key, key) in stored:
                continue
            if not allows_trees or self.owners.get(key) in trees:
                names[key] = name
        return list(names.values())

    @cached_property
    def ties(self) -> dict[int, int]:
        """Ids of tensors that the source records as tied, each with that of the first of them."""
        first: dict[object, int] = {}
        by_name = {tensor.name: id(tensor) for tensor in self.origin.tensors}
        ties = {}
        for tensor in self.origin.tensors:
            if tie := self.tie(tensor):
                ties[id(tensor)] = first.setdefault(tie, id(tensor))
        for name, kept in self.origin.ties.items():
            if name in by_name and kept in by_name:
                ties[by_name[name]] = ties.get(by_name[kept], by_name[kept])
        return ties

    @cached_property
    def owners(self) -> dict[int, int]:
        """Numbers of the source's trees by the ids of their tensors."""
        owners = {}
        for number, tree in enumerate(self.origin_trees):
            owners.update(dict.fromkeys(map(id, tree.tensors), number))
        return owners

    @cached_property
    def kept(self) -> set[int]:
        """Ids of the tensors of those trees of the source of which any full name is here."""
        here = set(map(id, self.full.pair(self.tensors).values()))
        trees = [{id(tensor) for tensor in tree.tensors} for tree in self.origin_trees]
        return set().union(*(tree for tree in trees if not tree.isdisjoint(here)))

    # What was renamed.

    def take_renamed(self, missing: Sequence[str], spare: Spare) -> list[str]:
        """Take tensors of equal bytes, or of equal ones after a cast, out of `spare`.

        Returns:
            the names of those for which there is none.
        """
        for cast, settled in product((False, True), repeat=2):
            still = []
            for name in missing:
                tensor = self.tensors[name]
                digest = self.digest(tensor) if spare.may_have(tensor) else None
                if digest is None or not spare.take(tensor, digest, cast=cast, settled=settled):
                    still.append(name)
            missing = still
        return self.without_further_names(missing)

    def without_further_names(self, missing: Sequence[str]) -> list[str]:
        """Leave out names that the copy itself records as tied to one that is not missing."""
        tied = {id(self.tensors[name]): self.tie(self.tensors[name]) for name in missing}
        wanted = set(tied.values()) - {None}
        known = set()
        for tensor in self.tensors.values() if wanted else ():
            if id(tensor) not in tied and self.tie(tensor) in wanted:
                known.add((self.tie(tensor), self.digest(tensor)))
        still = []
        for name in missing:
            tensor = self.tensors[name]
            tie = tied[id(tensor)]
            is_further = tie in wanted and (tie, self.digest(tensor)) in known
            if not is_further or self.digest(tensor) is None:
                still.append(name)
        return still

    @staticmethod
    def tie(tensor: Tensor) -> tuple[object, ...] | None:
        """What tensors that are recorded as tied have in common; None if that is not recorded."""
        if tensor.storage is None:
            return None
        return tensor.storage, tensor.shape, tensor.dtype.name

    def unexplained(self, match: _Match) -> int:
        """Count what a match leaves, after what it does not have by name was found by its bytes."""
        if match.differing:
            return match.problems + len(match.lost)  # not all in any case
        spare = Spare(match.naming, match.pairs, self.look_at, self.owners, self.kept)
        missing = self.missing(match)
        if not all(spare.may_have(self.tensors[name]) for name in missing):
            return match.problems + len(match.lost)
        still = self.take_renamed(missing, spare)
        return len(still) + len(self.lost(match.naming, spare.taken))

    # Report.

    def report(self, match: _Match) -> None:
        """Report what is missing or differs, and what the source has more."""
        where = f"{self.origin.resolved}{match.naming.label}"
        spare = Spare(match.naming, match.pairs, self.digests_of, self.owners, self.kept)
        unknown = self.missing(match)
        missing = self.take_renamed(unknown, spare)
        renamed = sorted({*unknown}.difference(missing))
        if renamed:
            found = f"{counted(len(renamed), 'tensor')} found by their bytes alone in {where}"
            doubt = "which of them has which name is not compared"
            self.audit.warn("renamed", f"{found}, under other names: {shown(renamed)}; {doubt}")
        for name in self.tensors.keys() - {*missing, *match.differing}:
            self.audit.mark_checked(self.audit.payloads_of(self.tensors[name]) or ())
        for name in missing:
            message = f"tensor {name!r}: {where} has no tensor of that name or of these bytes"
            self.audit.report("index-mismatch", message, name)
        for name in match.differing:
            self.report_difference(name, match.pairs[name], where)
        self.report_lost(self.lost(match.naming, spare.taken), where, missing)
        self.warn_of_part(match.naming)

    def report_difference(self, name: str, other: Tensor, where: str) -> None:
        """Report a tensor that differs; one that is not read at all is not proven, and no more."""
        tensor = self.tensor_of(name)
        if self.digest(tensor) is None and tensor.name not in self.audit.damaged:
            self.audit.unchecked[tensor.name, -1] = 1  # the audit has said why
            return
        unread = other.refusal.message if other.refusal is not None else ""
        if other.shape == tensor.shape:
            self.digests_of([other], tensor.dtype)  # says why the source's is damaged
            unread = unread or self.unread(other, tensor.dtype)
        if unread:
            self.audit.unchecked[tensor.name, -1] = 1
            why = f"tensor {name!r} is not compared with {where}: {unread}"
            self.audit.warn("unchecked", why)
            return
        tied = "" if name in self.tensors else f", here tied to {tensor.name!r}"
        message = f"tensor {name!r}{tied}: its bytes differ from those of {other.name!r}"
        if (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            message += f" ({other.dtype.name} {list(other.shape)})"
        self.audit.report("checksum", f"{message} in {where}", name, tensor.first_file)

    def report_lost(self, lost: Sequence[str], where: str, missing: Iterable[str]) -> None:
        """Report tensors that only the source has.

        If the source lacks some too (`missing`), rules may have made them, and a hint says so.
        """
        if lost:
            message = f"{where} has {counted(len(lost), 'tensor')} more: {shown(lost)}"
            message += self.hint if missing else ""
            self.audit.report("incomplete", message, lost[0])

    def warn_of_part(self, naming: Naming) -> None:
        """Say what lies beside the part of a tree that was compared."""
        if naming.path is None:
            return
        here = set(map(id, naming.tensors.values()))
        trees = {self.owners.get(key) for key in here}
        beside = []
        for tensor in self.origin.tensors:
            if id(tensor) not in here and self.owners.get(id(tensor)) in trees:
                beside.append(tensor.name)
        if beside:
            message = f"compared with what lies below {naming.path!r} in {self.origin.resolved}"
            self.audit.warn("left-out", f"{message} alone; beside it are {shown(beside)}")
