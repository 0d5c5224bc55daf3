"""`synthesize`: an average of another length from snapshots of averages, or any weighted sum of
checkpoints.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from ema_ckpt.analysis.weighted_sum import WeightedSum
from ema_ckpt.core.catalog import Catalog, Diagnostic, Tensor
from ema_ckpt.core.errors import UsageError, counted
from ema_ckpt.core.text import parse_size
from ema_ckpt.core.write_plan import HeaderBytes, OutputTensor, WriteItem, WritePlan
from ema_ckpt.ops.objects import refuse_skipped, unknown_objects
from ema_ckpt.ops.present import check_sources
from ema_ckpt.ops.results import FileEntry, Skipped, WriteResult
from ema_ckpt.ops.suggest import suggested_command, suggested_options
from ema_ckpt.ops.synthesize_inputs import (
    Snapshot,
    match_names,
    open_snapshots,
    parts_of,
    refuse_unsummable,
    weights_for,
)
from ema_ckpt.ops.write import (
    TORCH_SUFFIXES,
    Job,
    Request,
    WriterArgs,
    destination_of,
    payload_nbytes,
    request_of,
    timer,
    write,
)
from ema_ckpt.state_dicts.selection import select_tree
from ema_ckpt.state_dicts.tree import Tree
from ema_ckpt.storage.files import local_path

Paths = Sequence[str | os.PathLike[str]]


def synthesize(
    snapshots: Paths,
    out: str | os.PathLike[str],
    *,
    sigma_rel: float | None = None,
    weights: Sequence[float] | None = None,
    sigma_rels: Sequence[float] | None = None,
    steps: Sequence[float] | None = None,
    tree: str | Sequence[str] = (),
    to: str | None = None,
    world_size: int = 1,
    max_shard_size: int | str = "5GB",
    **args: Unpack[WriterArgs],
) -> WriteResult:
    """Write the weighted sum of snapshots: a post-hoc EMA (EDM2), or weights of your own.

    Args:
        snapshots: checkpoints of any layouts and formats that hold the same names and shapes.
        out: `X.safetensors`, a torch file (`.pt .pth .bin .ckpt`), or else a directory.
        sigma_rel: relative width of the average that is wanted, at the time of the latest snapshot.
        weights: one for each snapshot, taken as they are.
        sigma_rels, steps: width and time of each snapshot; by default as its EMA's `config` records
            them.
        tree: the tree of each snapshot, by default its only EMA; of several all are taken, snapshot
            by snapshot.
        to: `dcp`, `safetensors` or `pt`; by default what the ending of `out` says, and safetensors
            for a directory.
        world_size: ranks of a DCP target. max_shard_size: bytes of one file of a safetensors
            directory.
        args: options that all writing verbs share, see `WriterArgs`.

    Raises:
        EmaCkptError: with the `code` of what is wrong; then nothing was written.
    """
    request = request_of(args)
    if isinstance(snapshots, (str, os.PathLike)):
        raise UsageError("usage", f"{os.fspath(snapshots)}: one path; give a list of snapshots")
    place = destination_of(out)
    order = _Order(place, _form(place, to, world_size), world_size, parse_size(max_shard_size))
    if not snapshots:
        raise UsageError("usage", "no snapshots are given")
    told = {"sigma_rel": sigma_rel, "weights": weights, "sigma_rels": sigma_rels, "steps": steps}
    form = {"to": to, "world_size": world_size, "max_shard_size": max_shard_size}
    options = suggested_options({**told, **form, **args}, synthesize.__kwdefaults__)
    call = (suggested_command("synthesize", *snapshots, out), options)
    held = open_snapshots(snapshots, (tree,) if isinstance(tree, str) else tree, call)
    try:
        factors, warnings = weights_for(
            held, sigma_rel=sigma_rel, weights=weights, sigma_rels=sigma_rels, steps=steps
        )
        return _write(held, factors, order, request, warnings)
    finally:
        for snapshot in held:
            snapshot.catalog.source.close()


@dataclass(frozen=True, slots=True)
class _Order:
    """What to make: where, in which form, and the sizes that form asks for."""

    out: Path
    form: str
    world_size: int
    max_shard_nbytes: int

    @property
    def is_directory(self) -> bool:
        return self.form != "pt" and self.out.suffix != ".safetensors"


def _write(
    held: Sequence[Snapshot],
    factors: Sequence[float],
    order: _Order,
    request: Request,
    warnings: list[Diagnostic],
) -> WriteResult:
    elapsed = timer()
    blend = WeightedSum(request.verify)
    virtual = _virtual(blend, held, match_names(held), factors)
    last = held[-1].tree
    average = Tree(
        last.name,
        last.role,
        virtual.tensors,
        named={tensor.name: tensor for tensor in virtual.tensors},
    )
    selection = select_tree(average, request.selection)
    refuse_unsummable(selection.entries)
    skipped = _check(held, request.strict)
    target = _Checked(_lay_out(selection.entries, order, blend), blend)
    keep = order.is_directory and order.form == "safetensors"
    warnings = [*virtual.warnings, *warnings]
    job = Job(virtual, order.out, order.is_directory, target, keep, warnings, beside=_local(held))
    write(job, request)
    job.warnings += _overflows(selection.entries, blend)
    return WriteResult(
        source=", ".join(dict.fromkeys(snapshot.catalog.resolved for snapshot in held)),
        target=str(order.out),
        tree=", ".join(dict.fromkeys(snapshot.tree.name for snapshot in held)),
        format="torch" if order.form == "pt" else order.form,
        files=tuple(
            FileEntry(name or order.out.name, nbytes) for name, nbytes in target.files.items()
        ),
        tensors=len(selection.entries),
        nbytes=payload_nbytes(selection.entries),
        seconds=elapsed(),
        renamed=dict(selection.renamed),
        skipped=tuple(skipped),
        warnings=tuple(job.warnings),
        dry_run=request.dry_run,
    )


def _overflows(entries: Sequence[OutputTensor], blend: WeightedSum) -> Iterator[Diagnostic]:
    for entry in entries:
        count = blend.overflow.get(entry.source.name)
        if count:
            kind = entry.source.dtype.name
            message = f"{counted(count, 'finite sum')} of {entry.name!r} became infinite in {kind}; use smaller weights"
            yield Diagnostic("overflow", message)


def _check(held: Sequence[Snapshot], strict: bool) -> list[Skipped]:
    """Refuse what is incomplete or unsafe; the objects of torch files that are left out."""
    skipped: dict[Skipped, None] = {}
    for snapshot in held:
        check_sources(snapshot.catalog, snapshot.tree.weights.values())
        if snapshot.catalog.format in ("torch", "rank-files"):
            skipped |= dict.fromkeys(unknown_objects(snapshot.catalog, snapshot.catalog.objects))
    refuse_skipped(list(skipped), strict)
    return list(skipped)


def _form(place: Path, to: str | None, world_size: int) -> str:
    named = (
        "pt"
        if place.suffix in TORCH_SUFFIXES
        else "safetensors"
        if place.suffix == ".safetensors"
        else None
    )
    form = to or named or "safetensors"
    if form not in ("dcp", "safetensors", "pt"):
        raise UsageError("usage", f"--to {to}: expected dcp, safetensors or pt")
    if named is not None and named != form:
        raise UsageError("usage", f"--to {to}: {place.name} has the ending of a {named} file")
    if form == "pt" and named is None:
        raise UsageError(
            "usage", f"--to pt: {place.name} needs the ending .pt, .pth, .bin or .ckpt"
        )
    if world_size < 1 or (world_size > 1 and form != "dcp"):
        raise UsageError(
            "usage", f"--world-size {world_size}: goes with --to dcp, and is 1 or more"
        )
    return form


def _virtual(
    blend: WeightedSum,
    held: Sequence[Snapshot],
    named: Mapping[str, list[Tensor]],
    factors: Sequence[float],
) -> Catalog:
    """The sums as a catalog. Its `files` identify what a killed run would have to be continued
    with.
    """
    tensors = tuple(
        blend.add(name, parts_of(tensors, held, factors)) for name, tensors in named.items()
    )
    files = {
        os.path.join(s.catalog.source.root, file): n
        for s in held
        for file, n in s.catalog.files.items()
    }
    told = repr((factors, [snapshot.label for snapshot in held]))
    files[f"weights {hashlib.sha256(told.encode('utf-8', 'surrogatepass')).hexdigest()}"] = 0
    label = ", ".join(snapshot.label for snapshot in held)
    warnings: list[Diagnostic] = [
        warning for snapshot in held for warning in snapshot.catalog.warnings
    ]
    return Catalog(
        label,
        held[-1].catalog.resolved,
        "safetensors",
        tensors,
        (),
        blend,
        blend,
        False,
        files=files,
        warnings=tuple(warnings),
    )


def _local(held: Sequence[Snapshot]) -> tuple[str, ...]:
    return tuple(path for s in held if (path := local_path(s.catalog.resolved)) is not None)


def _lay_out(entries: Sequence[OutputTensor], order: _Order, blend: WeightedSum) -> WritePlan:
    if order.form == "dcp":
        from ema_ckpt.formats.dcp.writer import lay_out

        return lay_out(
            entries, (), [bool(entry.source.shape) for entry in entries], order.world_size, blend
        )
    if order.form == "pt":
        from ema_ckpt.formats.torch_file import writer as torchfile_target

        return torchfile_target.lay_out(entries)
    from ema_ckpt.formats.safetensors.writer import lay_out_directory, lay_out_file

    return (
        lay_out_directory(entries, order.max_shard_nbytes)
        if order.is_directory
        else lay_out_file(entries)
    )


@dataclass(frozen=True, slots=True)
class _Checked:
    """A target whose frames, which make it complete, are written only once every source matched its
    checksums.
    """

    inner: WritePlan
    blend: WeightedSum

    @property
    def files(self) -> Mapping[str, int]:
        return self.inner.files

    @property
    def items(self) -> Sequence[WriteItem]:
        return self.inner.items

    def header_bytes(self, crcs: Sequence[int], digests: Mapping[str, int]) -> Iterator[HeaderBytes]:
        self.blend.finish()
        yield from self.inner.header_bytes(crcs, digests)
