"""Proof of a conversion: every tensor of a checkpoint has the digest it has in the one it was made
from.

Digests that either side records are taken as they are; the rest is computed. Names are matched in
full or through trees, as a verb may have written one tree under plain names; what was renamed is
found by its digest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ema_ckpt.analysis.audit import Audit
from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.core.names import EMA, canonical
from ema_ckpt.core.text import counted, shown
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.reading.box_reader import BoxReader, locate
from ema_ckpt.reading.cast import Caster
from ema_ckpt.reading.digests import compute_digest, recorded_digest
from ema_ckpt.state_dicts.ema_config import with_tied_names
from ema_ckpt.state_dicts.ties import with_dropped
from ema_ckpt.state_dicts.tree import Tree, inner_names, list_trees

_BLOCK_NBYTES = 512 << 10


def compare_with(audit: Audit, source: str | os.PathLike[str]) -> None:
    """Report every tensor of the audited checkpoint that is not, bit for bit or after its cast, in
    `source`.

    Raises:
        EmaCkptError: if `source` cannot be read.
    """
    origin = open_catalog(source)
    try:
        _Comparison(audit, with_dropped(origin)).run()
    finally:
        origin.source.close()


@dataclass(frozen=True, slots=True)
class _Names:
    """One way to pair names: a label for messages, and the source's tensors by the name they would
    have.
    """

    label: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class _Comparison:
    def __init__(self, audit: Audit, origin: Catalog) -> None:
        self._audit = audit
        self._origin = origin
        self._reader = BoxReader(_BLOCK_NBYTES)
        self._origin_digests: dict[tuple[str, str], int | None] = {}

    def run(self) -> None:
        """Try each way to pair names until one proves all; else report by the best."""
        mine = {t.name: t for t in self._audit.catalog.tensors}
        ways = self._ways(mine)
        best: tuple[list[str], list[str]] | None = None
        for way in ways:
            missing = [name for name in mine if self._counterpart(name, way) is None]
            differing = [n for n in mine if n not in set(missing) and not self._equal(mine[n], way)]
            if best is None or len(missing) + len(differing) < len(best[0]) + len(best[1]):
                best, chosen = (missing, differing), way
            if not missing and not differing:
                break
        if best is not None:
            self._report(mine, chosen, *best)

    def _ways(self, mine: Mapping[str, Tensor]) -> Sequence[_Names]:
        """Full names, then each tree under the names inside it, the likeliest first."""
        known = list_trees(self._origin)
        full = {_stripped(t.name, tree): t for tree in known for t in tree.tensors}
        full |= {t.name: t for t in self._origin.tensors}
        ways = [
            _Names("", full),
            *(_by_tree(with_tied_names(self._origin, tree)) for tree in known),
        ]
        overlap = {
            id(way): sum(self._counterpart(name, way) is not None for name in mine) for way in ways
        }
        return sorted(ways, key=lambda way: -overlap[id(way)])

    def _counterpart(self, name: str, way: _Names) -> Tensor | None:
        return way.tensors.get(name) or way.tensors.get(canonical(name))

    def _equal(self, tensor: Tensor, way: _Names) -> bool:
        other = self._counterpart(tensor.name, way)
        if other is None or other.shape != tensor.shape:
            return False
        digest = self._digest(tensor)
        return digest is not None and digest == self._origin_digest(other, tensor.dtype)

    def _digest(self, tensor: Tensor) -> int | None:
        """The digest of the audited side, from the bytes that were read."""
        payloads = self._audit.payloads_of(tensor)
        return None if payloads is None else self._audit.digest(tensor, payloads, self._reader)

    def _origin_digest(self, tensor: Tensor, dtype: DType) -> int | None:
        key = (tensor.name, dtype.name)
        if key not in self._origin_digests:
            self._origin_digests[key] = self._find(tensor, dtype)
        return self._origin_digests[key]

    def _find(self, tensor: Tensor, dtype: DType) -> int | None:
        """The digest in the source, of the bytes as they are or as a cast to `dtype` makes them."""
        try:
            if dtype == tensor.dtype:
                recorded = recorded_digest(self._origin, tensor)
                return (
                    recorded
                    if recorded is not None
                    else compute_digest(locate(self._origin, tensor), self._reader)
                )
            if not (dtype.is_castable and tensor.dtype.is_castable):
                return None
            return compute_digest(
                locate(self._origin, tensor), self._reader, Caster(tensor.dtype, dtype).cast
            )
        except EmaCkptError as error:
            message = f"{self._origin.resolved}: {error}"
            self._audit.report(error.code, message, error.tensor, error.file)
            return None

    # Telling.

    def _report(
        self, mine: Mapping[str, Tensor], way: _Names, missing: list[str], differing: list[str]
    ) -> None:
        where = f"{self._origin.resolved}{way.label}"
        used = {id(self._counterpart(name, way)) for name in mine}
        spare = {name: t for name, t in way.tensors.items() if id(t) not in used}
        for name in list(missing):
            found = self._renamed(mine[name], spare)
            if found is not None:
                del spare[found]
                missing.remove(name)
        bad = {*missing, *differing}
        for name in mine.keys() - bad:
            self._audit.mark_checked(self._audit.payloads_of(mine[name]) or ())
        for name in missing:
            message = f"tensor {name!r}: {where} has no tensor of that name or of these bytes"
            self._audit.report("index-mismatch", message, name)
        for name in differing:
            self._audit.report(
                "checksum",
                f"{self._difference(mine[name], way)} in {where}",
                name,
                _file(mine[name]),
            )
        ties = {*_ties(self._audit.catalog), *_ties(self._origin)}
        once = {id(tensor): name for name, tensor in spare.items()}
        lost = [name for name in once.values() if name not in ties]
        if lost and (way.label or not self._is_part(spare, mine)):
            self._audit.report(
                "incomplete",
                f"{where} has {counted(len(lost), 'tensor')} more: {shown(lost)}",
                lost[0],
            )

    def _renamed(self, tensor: Tensor, spare: Mapping[str, Tensor]) -> str | None:
        fitting = [
            n for n, t in spare.items() if (t.shape, t.dtype) == (tensor.shape, tensor.dtype)
        ]
        digest = self._digest(tensor) if fitting else None
        return next(
            (name for name in fitting if self._origin_digest(spare[name], tensor.dtype) == digest),
            None,
        )

    def _difference(self, tensor: Tensor, way: _Names) -> str:
        other = self._counterpart(tensor.name, way)
        head = f"tensor {tensor.name!r}: its bytes differ from those of"
        if other is None or (other.shape == tensor.shape and other.dtype == tensor.dtype):
            return f"{head} {other.name if other else tensor.name!r}"
        return f"{head} {other.name!r} ({other.dtype.name} {list(other.shape)})"

    def _is_part(self, spare: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> bool:
        """Whether only whole trees were left out, as `--tree` does."""
        kept = {t.name for t in self._origin.tensors if t.name in mine}
        if not kept:
            return False
        for tree in list_trees(self._origin):
            names = {t.name for t in tree.tensors}
            if names & kept and names & {t.name for t in spare.values()}:
                return False
        return True


def _stripped(name: str, tree: Tree) -> str:
    """A full name without wrapper prefixes, as writers strip them: those inside the tree only."""
    skip = len(tree.name) + 1 if tree.name else 0
    return name[:skip] + canonical(name[skip:])


def _by_tree(tree: Tree) -> _Names:
    if tree.role == EMA and tree.problem is None:
        kept = dict(tree.named)
    else:
        inner = inner_names(tree)
        kept = {inner[t.name]: t for t in tree.tensors}
    return _Names(f", tree {tree.name!r}", {canonical(name): t for name, t in kept.items()} | kept)


def _ties(catalog: Catalog) -> Iterator[str]:
    yield from catalog.ties
    first: dict[object, str] = {}
    for tensor in catalog.tensors:
        key = (tensor.storage, tensor.shape, tensor.dtype.name)
        if tensor.storage is not None and first.setdefault(key, tensor.name) != tensor.name:
            yield tensor.name


def _file(tensor: Tensor) -> str | None:
    return tensor.chunks[0].file if tensor.chunks else None
