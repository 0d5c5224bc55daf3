"""Live weights that fill the place of averages, and may be tied to weights that have one."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ema_ckpt.core.catalog import Catalog, Diagnostic, Tensor
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import AccessError, EmaCkptError
from ema_ckpt.core.names import EMA, canonical
from ema_ckpt.core.text import shown
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.ops.origin_digests import BLOCK_NBYTES, DigestJob, OriginDigests
from ema_ckpt.reading.box_reader import BoxReader, locate
from ema_ckpt.runtime.executor import Workers
from ema_ckpt.state_dicts.tree import Tree
from ema_ckpt.writing.options import WriteOptions

_BEGINNING_NBYTES = 4096
_SHOWN = 10


class _Alike(NamedTuple):
    """Weights of one shape and type: those that fill, and those that have an average."""

    filled: dict[str, Tensor]
    averaged: dict[str, Tensor]


class _Beginnings(OriginDigests):
    """The work of computing checksums of the first bytes alone."""

    def digest(self, tensor: Tensor, _dtype: DType, reader: BoxReader) -> int | None:
        return crc32(_beginning(self.origin, tensor, reader))

    def _workers(self, jobs: Collection[DigestJob], threads: int) -> Workers:
        return Workers(min(threads, len(jobs)))


def sources_of(
    catalog: Catalog, entries: Iterable[OutputTensor], stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return those of the `stored` tensors that are written, or that rules made what is written of.

    Args:
        catalog: the checkpoint after the rules.
    """
    names = set[str]()
    for entry in entries if stored else ():
        sources = catalog.made_from.get(entry.source.name, (entry.source,))
        names.update(source.name for source in sources)
    return {name: tensor for name, tensor in stored.items() if tensor.name in names}


def find_unrecorded_ties(
    catalog: Catalog,
    tree: Tree,
    live: Tree | None,
    filled: Mapping[str, Tensor],
    options: WriteOptions,
) -> Iterator[Diagnostic]:
    """Warn of live weights that fill `tree` and have the bytes of others which it averages.

    DCP and most safetensors files do not record ties. Only weights of one shape and type are read,
    the first bytes of each, and all of those that begin alike; constants are not told of. A dry run
    reads none.
    """
    if live is None or tree.role != EMA or options.dry_run:
        return
    groups = _alike(tree, live, filled)
    if not groups:
        return
    try:
        pairs = _equal(catalog, groups, options.threads)
    except AccessError:  # it is of what need not be written, too
        return
    if pairs:
        others = shown(list(dict.fromkeys(pairs.values())))
        what = f"{shown(list(pairs))} may be tied to {others}: in {live.name!r} they are equal, and"
        what += f" --fill takes live weights, not the averages of {others}, in whose place a load"
        flags = "" if options.rules else _excluding(pairs, options)
        remedy = f"leave them out ({flags or '--exclude'}) and load with strict=False"
        yield Diagnostic("ema-partial", f"{what} may put them; if so, {remedy}")


def _excluding(names: Iterable[str], options: WriteOptions) -> str:
    if not options.selection.keep_prefixes:
        names = map(canonical, names)
    flags = [f"--exclude {shlex.quote(name)}" for name in names]
    return " ".join(flags[:_SHOWN] + ["…"] * (len(flags) > _SHOWN))


def _alike(tree: Tree, live: Tree, filled: Mapping[str, Tensor]) -> list[_Alike]:
    groups: dict[object, _Alike] = {}
    for name, tensor in filled.items():
        if tensor.numel and not tensor.dtype.is_discrete:
            key = tensor.shape, tensor.dtype.name
            groups.setdefault(key, _Alike({}, {})).filled[name] = tensor
    averages = set(map(canonical, tree.weights))
    for name, tensor in live.weights.items():
        group = groups.get((tensor.shape, tensor.dtype.name))
        if group is not None and canonical(name) in averages:
            group.averaged[name] = tensor
    return [group for group in groups.values() if group.averaged]


def _equal(catalog: Catalog, groups: Sequence[_Alike], threads: int) -> dict[str, str]:
    """Map the names of filled weights to those of averaged ones that have the same bytes."""
    begin_alike = _agreeing(_Beginnings(catalog), groups, threads)
    digests = OriginDigests(catalog)
    pairs = {}
    for group in _agreeing(digests, begin_alike, threads):
        first = reversed(group.averaged.items())
        names = {_result(digests, tensor): name for name, tensor in first}
        for name, tensor in group.filled.items():
            digest = _result(digests, tensor)
            if digest is not None and not _is_constant(catalog, tensor, digest):
                pairs[name] = names[digest]
    return pairs


def _agreeing(work: OriginDigests, groups: Sequence[_Alike], threads: int) -> list[_Alike]:
    """Keep the weights whose checksum one on the other side has too; not what cannot be read."""
    jobs = []
    for group in groups:
        for tensor in (*group.filled.values(), *group.averaged.values()):
            jobs.append(DigestJob(tensor, tensor.dtype))
    work.compute(jobs, threads)
    kept = []
    for group in groups:
        left = {_result(work, tensor) for tensor in group.filled.values()}
        common = left & {_result(work, tensor) for tensor in group.averaged.values()} - {None}
        sides = [{n: t for n, t in s.items() if _result(work, t) in common} for s in group]
        if common:
            kept.append(_Alike(*sides))
    return kept


def _result(work: OriginDigests, tensor: Tensor) -> int | None:
    return work.results[DigestJob(tensor, tensor.dtype).key][0]


def _is_constant(catalog: Catalog, tensor: Tensor, digest: int) -> bool:
    """Whether all elements are equal, as those of biases and norms often are at first."""
    try:
        begin = bytes(_beginning(catalog, tensor, BoxReader(BLOCK_NBYTES)))
    except AccessError:
        raise
    except EmaCkptError:
        return True  # whoever writes it says why it cannot be read
    size = tensor.dtype.itemsize
    if begin != begin[:size] * (len(begin) // size):
        return False
    block, crc = memoryview(begin[:size] * (BLOCK_NBYTES // size)), 0
    for start in range(0, tensor.nbytes, len(block)):
        crc = crc32(block[: tensor.nbytes - start], crc)
    return crc == digest


def _beginning(catalog: Catalog, tensor: Tensor, reader: BoxReader) -> memoryview:
    """Read the first bytes of a tensor.

    Raises:
        SourceError: whatever keeps them from being read.
    """
    out = memoryview(bytearray(min(tensor.nbytes, _BEGINNING_NBYTES)))
    reader.read(locate(catalog, tensor), out)
    return out
