"""`synthesize`: a post-hoc EMA from snapshots, or any weighted sum of checkpoints."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from ema_ckpt.analysis.weighted_sum import WeightedSum
from ema_ckpt.core.arguments import number, numbers, texts
from ema_ckpt.core.catalog import Catalog, Diagnostic, Tensor
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.limits import check_ranks
from ema_ckpt.core.text import counted, parse_size
from ema_ckpt.ops.object_plan import (
    header_text,
    refuse_skipped,
    unknown_objects,
    unsupported_metadata,
)
from ema_ckpt.ops.results.further_fields import with_fields
from ema_ckpt.ops.results.write import Skipped, WriteResult
from ema_ckpt.ops.rule_changes import RuledSource, rule_one
from ema_ckpt.ops.suggested_commands import suggested_command, suggested_options
from ema_ckpt.ops.synthesize_inputs import (
    Snapshot,
    StepChoice,
    amplified_rounding,
    copied_integers,
    describe_terms,
    log_sum,
    match_names,
    mixed_roles,
    open_snapshots,
    parts_of,
    refuse_quantized,
    refuse_unsummable,
    refuse_whole_run,
    snapshots_of,
    weights_for,
)
from ema_ckpt.ops.write import Output, PlannedWrite, destination_of, finish, output_form, plan_for
from ema_ckpt.state_dicts.selection import Selection, select_tree
from ema_ckpt.state_dicts.tree import Tree
from ema_ckpt.writing.options import WriteOptions, WriterArgs
from ema_ckpt.writing.preflight import check_sources

Paths = Sequence[str | os.PathLike[str]]


def synthesize(
    snapshots: Paths | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    sigma_rel: float | None = None,
    weights: Sequence[float] | None = None,
    sigma_rels: Sequence[float] | None = None,
    steps: Sequence[float] | None = None,
    last: int | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    stride: int = 1,
    scheme: str | None = None,
    tree: str | Sequence[str] = (),
    to: str | None = None,
    world_size: int = 1,
    max_shard_size: int | str = "5GB",
    **args: Unpack[WriterArgs],
) -> WriteResult:
    """Write the weighted sum of snapshots: a post-hoc EMA (EDM2), a merge, or weights of your own.

    Args:
        snapshots: checkpoints of any layouts and formats that hold the same names and shapes; or
            with `last`, `from_step` or `to_step` the directory of one run.
        out: `X.safetensors`, a torch file (`.pt .pth .bin .ckpt`), or else a directory.
        sigma_rel: relative width of the average that is wanted, at the time of the latest snapshot.
        weights: one for each snapshot, taken as they are.
        sigma_rels, steps: width and time of each snapshot; by default as its EMA's `config` records
            them.
        last: take the newest complete steps of a run, so many.
        from_step, to_step: take the complete steps of a run whose numbers are between these.
        stride: of those take each `stride`-th, counted from the newest.
        scheme: weights by position, the oldest first: `uniform`, `linear`, `cosine`, `minus-sqrt`
            or `ema:DECAY`; `uniform` for the steps of a run if nothing else is given.
        tree: the tree of each snapshot, by default its only EMA, or its only live tree; of several
            all are taken, snapshot by snapshot.
        to: `dcp`, `safetensors` or `pt`; by default what the ending of `out` says, and safetensors
            for a directory.
        world_size: ranks of a DCP target. max_shard_size: bytes of one file of a safetensors
            directory.
        args: options that all writing verbs share, see `WriterArgs`.

    Raises:
        EmaCkptError: with the `code` of what is wrong; then nothing was written.
    """
    started = time.perf_counter()
    options = WriteOptions.parse(args)
    choice = StepChoice.parse(last, from_step, to_step, stride)
    if isinstance(snapshots, (str, os.PathLike)):
        if not choice.is_run:
            raise UsageError("usage", f"{os.fspath(snapshots)}: one path; give a list of snapshots")
        snapshots = [snapshots]
    snapshots = list(snapshots)
    sigma_rel = number(sigma_rel, "--sigma-rel")
    weights, steps = numbers(weights, "--weights"), numbers(steps, "--steps")
    sigma_rels = numbers(sigma_rels, "--sigma-rels")
    output = _output_of(out, to, world_size, parse_size(max_shard_size))
    if not snapshots:
        raise UsageError("usage", "no snapshots are given")
    profile = {"sigma_rel": sigma_rel, "weights": weights, "sigma_rels": sigma_rels, "steps": steps}
    paths, warnings = snapshots_of(snapshots, choice)
    if choice.is_run and (sigma_rel, weights, scheme) == (None, None, None):
        scheme = "uniform"
    picked = {**choice._asdict(), "scheme": scheme}
    sizes = {"to": to, "world_size": world_size, "max_shard_size": max_shard_size}
    flags = suggested_options({**profile, **picked, **sizes, **args}, synthesize.__kwdefaults__)
    command = suggested_command("synthesize", *snapshots, out)
    names = texts(tree, "--tree")
    opened_snapshots = open_snapshots(paths, names, (command, flags), options)
    try:
        if scheme is not None and len(paths) == 1 and not choice.is_run:
            refuse_whole_run(paths[0], opened_snapshots)
        factors, doubts = weights_for(
            opened_snapshots,
            sigma_rel=sigma_rel,
            weights=weights,
            sigma_rels=sigma_rels,
            steps=steps,
            scheme=scheme,
        )
        warnings += doubts
        if not names:
            warnings += mixed_roles(opened_snapshots, is_run=choice.is_run)
        if scheme is not None:
            log_sum(opened_snapshots, factors)
        return _write(opened_snapshots, factors, output, options, warnings, started)
    finally:
        for snapshot in opened_snapshots:
            snapshot.catalog.source.close()


def _write(
    snapshots: Sequence[Snapshot],
    factors: Sequence[float],
    output: Output,
    options: WriteOptions,
    warnings: list[Diagnostic],
    started: float,
) -> WriteResult:
    inputs = match_names(snapshots)
    weighted_sum, ruled, selection = _select(snapshots, inputs, factors, options)
    casts = _casts(selection, ruled.catalog, inputs)
    if casts:
        weighted_sum, ruled, selection = _select(snapshots, inputs, factors, options, casts)
    catalog, last = ruled.catalog, snapshots[-1].tree
    renamed, rules = ruled.changed_names(selection)
    refuse_quantized(selection.entries, snapshots, catalog.made_from)
    refuse_unsummable(selection.entries)
    warnings += amplified_rounding(snapshots, factors)
    warnings += [*copied_integers(selection.entries, snapshots[-1]), *ruled.warnings]
    skipped = dict.fromkeys(ruled.skipped)
    for snapshot in snapshots:
        check_sources(snapshot.catalog, snapshot.tree.weights.values())
        skipped |= dict.fromkeys([*snapshot.values.skipped, *unknown_objects(snapshot.catalog)])
    skipped |= dict.fromkeys(unsupported_metadata(catalog, selection.entries, output.format))
    skipped |= dict.fromkeys(_unlike_text(snapshots, catalog.header_text))
    refuse_skipped(list(skipped), options.strict)
    split = [bool(tensor.source.shape) for tensor in selection.entries]
    plan, _ = plan_for(output, catalog, selection.entries, split=split)
    resolved = tuple(snapshot.catalog.resolved for snapshot in snapshots)
    job = PlannedWrite(
        catalog,
        output,
        plan,
        selection.entries,
        started,
        source=", ".join(dict.fromkeys(snapshot.catalog.path for snapshot in snapshots)),
        resolved=resolved,
        tree=", ".join(dict.fromkeys(snapshot.tree.name for snapshot in snapshots)),
        renamed=renamed,
        rules=rules,
        skipped=list(skipped),
        warnings=[*catalog.warnings, *warnings, *snapshots[-1].values.warnings()],
        dequantized=snapshots[-1].values.entries(last.weights.values(), {}),
        read_paths=resolved,
    )
    result = finish(job, options)
    overflows = []
    for tensor in selection.entries:
        count = weighted_sum.overflow.get(tensor.source.name)
        if count:
            sums = f"{counted(count, 'finite sum')} of {tensor.name!r}"
            remedy = "another --dtype" if tensor.source.name in casts else "smaller weights"
            infinite = f"became infinite in {tensor.source.dtype.name}; use {remedy}"
            overflows.append(Diagnostic("overflow", f"{sums} {infinite}"))
    terms = describe_terms(snapshots, factors)
    result = replace(result, warnings=(*result.warnings, *overflows))
    return with_fields(result, snapshots=terms)


def _select(
    snapshots: Sequence[Snapshot],
    inputs: Mapping[str, list[Tensor]],
    factors: Sequence[float],
    options: WriteOptions,
    casts: Mapping[str, DType] | None = None,
) -> tuple[WeightedSum, RuledSource, Selection]:
    """Make the sums, apply rules to them, and select what is written."""
    weighted_sum = WeightedSum(options.verify)
    catalog = virtual_catalog(weighted_sum, snapshots, inputs, factors, casts or {})
    last = snapshots[-1].tree
    named = {tensor.name: tensor for tensor in catalog.tensors}
    average = Tree(last.name, last.role, catalog.tensors, named=named)
    ruled = rule_one(options.rules, catalog, average)
    return weighted_sum, ruled, select_tree(ruled.tree, options.selection)


def _casts(selection: Selection, catalog: Catalog, sums: Collection[str]) -> dict[str, DType]:
    """Choose what sums are rounded to at once, by name: the type that all made of them is cast to.

    A sum of bfloat16 that is written as float32 must not be rounded to bfloat16 before.
    """
    wanted: dict[str, set[DType]] = {}
    stored: dict[str, DType] = {}
    for entry in selection.entries:
        sources = catalog.made_from.get(entry.source.name, (entry.source,))
        for source in sources:
            dtype = entry.dtype if all(s.name in sums for s in sources) else source.dtype
            wanted.setdefault(source.name, set()).add(dtype)
            stored[source.name] = source.dtype
    return {
        name: dtypes.pop()
        for name, dtypes in wanted.items()
        if len(dtypes) == 1 and dtypes != {stored[name]}
    }


def virtual_catalog(
    weighted_sum: WeightedSum,
    snapshots: Sequence[Snapshot],
    named: Mapping[str, list[Tensor]],
    factors: Sequence[float],
    casts: Mapping[str, DType],
) -> Catalog:
    """Return the sums as a catalog; its `files` identify the inputs of an interrupted run.

    Args:
        casts: what sums are rounded to, by name, if not to the type of their parts.
    """
    tensors = tuple(
        weighted_sum.add(name, parts_of(inputs, snapshots, factors), casts.get(name))
        for name, inputs in named.items()
    )
    files = {}
    warnings: dict[Diagnostic, None] = {}
    left_out: dict[str, None] = {}
    for snapshot in snapshots:
        warnings |= dict.fromkeys(snapshot.catalog.warnings)
        left_out |= dict.fromkeys(snapshot.catalog.left_out)
        for file, nbytes in snapshot.catalog.files.items():
            files[os.path.join(snapshot.catalog.source.root, file)] = nbytes
    labels = [snapshot.label for snapshot in snapshots]
    weights = repr((factors, labels)).encode("utf-8", "surrogatepass")
    files[f"weights {hashlib.sha256(weights).hexdigest()}"] = 0
    return Catalog(
        path=", ".join(labels),
        resolved=snapshots[-1].catalog.resolved,
        format="safetensors",
        tensors=tensors,
        objects=(),
        source=weighted_sum,
        reader=weighted_sum,
        nested=False,
        files=files,
        warnings=tuple(warnings),
        left_out=tuple(left_out),
        header_text=_common_text(snapshots),
        made_by=" ".join([snapshot.values.catalog.made_by for snapshot in snapshots]).strip(),
    )


def _common_text(snapshots: Sequence[Snapshot]) -> dict[str, str]:
    """Return the text of safetensors headers that all snapshots have alike."""
    first, *others = [header_text(snapshot.catalog) for snapshot in snapshots]
    return {
        key: text for key, text in first.items() if all(other.get(key) == text for other in others)
    }


def _unlike_text(snapshots: Sequence[Snapshot], common: Mapping[str, str]) -> Iterator[Skipped]:
    """List the text of headers that the snapshots do not have alike, and that nobody can sum."""
    keys = {key: None for snapshot in snapshots for key in header_text(snapshot.catalog)}
    for key in keys:
        if key not in common:
            reason = "text of safetensors headers that is not the same in all snapshots"
            yield Skipped(f"__metadata__.{key}", "", reason)


def _output_of(
    out: str | os.PathLike[str], to: str | None, world_size: int, max_shard_nbytes: int
) -> Output:
    destination = destination_of(out)
    form = output_form(destination, to, "safetensors")
    check_ranks(world_size, "--world-size")
    if world_size > 1 and form != "dcp":
        message = f"--world-size {world_size}: goes with --to dcp"
        raise UsageError("usage", message)
    return Output(destination, form, world_size, max_shard_nbytes)
