"""`convert` and `reshard`: all trees of a checkpoint in another format, or for other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Unpack

from ema_ckpt.core.arguments import texts
from ema_ckpt.core.catalog import Catalog, Diagnostic, Tensor
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.limits import check_ranks
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER, role_of
from ema_ckpt.core.text import counted, parse_size
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.discovery.opening import opened
from ema_ckpt.ops.dequantize import dequantize, exact_warnings, split_warnings, with_exact_parts
from ema_ckpt.ops.files_beside import needed_files
from ema_ckpt.ops.object_plan import (
    left_out,
    plan_objects,
    rank_keyed,
    refuse_skipped,
    warn_of_files,
)
from ema_ckpt.ops.results.write import Skipped, WriteResult
from ema_ckpt.ops.rule_changes import listed, rule_all
from ema_ckpt.ops.write import (
    Output,
    PlannedWrite,
    destination_of,
    finish,
    output_form,
    plan_for,
    refuse_emptiness,
)
from ema_ckpt.reading.unchanged import told_from_damage
from ema_ckpt.state_dicts.hidden_averages import warn_of_hidden
from ema_ckpt.state_dicts.selection import select_all
from ema_ckpt.state_dicts.tree import Tree, of_role
from ema_ckpt.writing.options import WriteOptions, WriterArgs
from ema_ckpt.writing.preflight import check_sources

if TYPE_CHECKING:
    import os


def reshard(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    world_size: int,
    *,
    tree: Sequence[str] | str = (),
    **args: Unpack[WriterArgs],
) -> WriteResult:
    """Write a checkpoint as FSDP2 on `world_size` ranks would, all trees under their full names.

    Args:
        path: a checkpoint of any readable format. out: the directory to make.
        tree: only these trees; an EMA's settings always come with it.
        args: options that all writing verbs share, see `WriterArgs`.

    Raises:
        EmaCkptError: with the `code` of what is wrong; then nothing was written.
    """
    options = WriteOptions.parse(args)
    output = Output(destination_of(out), "dcp", check_ranks(world_size, "--world-size"))
    return _transfer(path, output, tree, options, strip=False)


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: str | None = None,
    world_size: int | None = None,
    *,
    tree: Sequence[str] | str = (),
    max_shard_size: int | str = "5GB",
    **args: Unpack[WriterArgs],
) -> WriteResult:
    """Write a checkpoint in another format, all trees under their full names and nesting.

    Args:
        src: a checkpoint of any readable format. dst: the file or directory to make.
        to: `dcp`, `safetensors` or `pt`; by default the form of the suffix of `dst`, and DCP for a
            directory.
        world_size: ranks of a DCP target; by default those of a source saved by several ranks, else
            1.
        tree: only these trees; an EMA's settings always come with it.
        max_shard_size: largest size of one file of a safetensors directory.
        args: options that all writing verbs share, see `WriterArgs`.

    Raises:
        EmaCkptError: with the `code` of what is wrong; then nothing was written.
    """
    options = WriteOptions.parse(args)
    destination = destination_of(dst)
    form = output_form(destination, to, "dcp")
    if world_size is not None and form != "dcp":
        message = f"--world-size goes with a DCP target, and {destination} is to be {form}"
        raise UsageError("usage", message)
    ranks = None if world_size is None else check_ranks(world_size, "--world-size")
    output = Output(destination, form, ranks, parse_size(max_shard_size))
    return _transfer(src, output, tree, options, strip=True)


def _transfer(
    path: str | os.PathLike[str],
    output: Output,
    tree: Sequence[str] | str,
    options: WriteOptions,
    *,
    strip: bool,
) -> WriteResult:
    """Write all trees, or those of `tree`; `strip` drops wrapper prefixes."""
    started = time.perf_counter()
    with opened(path, workers=options.threads) as opened_catalog, told_from_damage(opened_catalog):
        values = dequantize(opened_catalog, options)
        rules, expand_ties = options.rules, options.expand_ties
        named = [*texts(tree, "--tree")]
        ruled = rule_all(rules, listed(values.catalog, rules, expand_ties=expand_ties), named)
        if options.selection.keep_prefixes or not strip:
            ruled.refuse_mixed_prefixes()
        trees = ruled.trees
        catalog = warn_of_hidden(ruled.catalog, trees, named) if named else ruled.catalog
        chosen = with_exact_parts(options.selection, opened_catalog, options, catalog)
        selection = select_all(catalog, trees, chosen, named, strip=strip)
        objects = plan_objects(catalog, selection.objects, output.format)
        renamed, applied = ruled.changed_names(selection)
        tensors, unfit = _fitting(selection.entries, output.form)
        copied = needed_files(catalog, output.format, output.is_directory)
        skipped = [
            *values.skipped,
            *ruled.skipped,
            *objects.skipped,
            *unfit,
            *left_out(catalog, tensors, output.form, copied),
        ]
        refuse_skipped(skipped, options.strict)
        refuse_emptiness(tensors, [*ruled.skipped, *unfit])
        check_sources(catalog, (tensor.source for tensor in tensors))
        warnings = [*catalog.warnings, *values.warnings(copied), *ruled.warnings, *objects.warnings]
        warnings += warn_of_files(catalog, copied, skipped)
        warnings += exact_warnings(selection)
        warnings += split_warnings(opened_catalog, selection, options, catalog)
        split: list[bool] = []
        if output.form == "dcp":
            names = [*(tensor.name for tensor in tensors), *(o.name for o in objects.kept)]
            warnings += [*rank_keyed(names), *low_precision_casts(tensors, trees)]
            split = tensors_to_split(catalog, trees, tensors)
        paths = [(entry.source.path, entry.path) for entry in selection.entries]
        paths += [(item.source.path, item.path) for item in selection.objects]
        plan, ties = plan_for(
            output,
            catalog,
            tensors,
            objects=objects.kept,
            split=split,
            nesting=catalog.nesting.moved(paths),
            expand_ties=options.expand_ties,
        )
        job = PlannedWrite(
            catalog,
            output,
            plan,
            tensors,
            started,
            source=catalog.path,
            renamed=renamed,
            rules=applied,
            ties=ties,
            copied=copied,
            skipped=skipped,
            warnings=warnings,
            dequantized=values.entries((tensor.source for tensor in tensors), catalog.made_from),
        )
        return finish(job, options)


def _fitting(
    tensors: Sequence[OutputTensor], form: str
) -> tuple[list[OutputTensor], list[Skipped]]:
    """Separate tensors whose dtype the form has from the rest."""
    if form != "safetensors":
        return list(tensors), []
    from ema_ckpt.formats.safetensors.writer import refusal

    kept, skipped = [], []
    for tensor in tensors:
        # One that is not read at all is refused for that, and not left out for its type.
        reason = (
            refusal(tensor.dtype, tensor.source.shape) if tensor.source.refusal is None else None
        )
        if reason is None:
            kept.append(tensor)
        else:
            skipped.append(Skipped.tensor(tensor.source, tensor.name, reason))
    return kept, skipped


def low_precision_casts(
    tensors: Sequence[OutputTensor], trees: Sequence[Tree]
) -> Iterator[Diagnostic]:
    """Warn of averages that are cast to less than float32."""
    averaged: set[int] = set()
    for tree in of_role(trees, EMA):
        averaged.update(map(id, tree.tensors))
    count = 0
    for tensor in tensors:
        is_low = tensor.casts and tensor.dtype.itemsize < 4
        if is_low and id(tensor.source) in averaged:
            count += 1
    if count:
        stored = f"{counted(count, 'averaged tensor')} stored in less than fp32"
        yield Diagnostic("ema-low-precision", f"{stored}: a run that resumes from them stalls")


def tensors_to_split(
    catalog: Catalog, trees: Sequence[Tree], tensors: Sequence[OutputTensor]
) -> list[bool]:
    """Return which tensors are split into rows: as in the source, or the weights of a whole one."""
    owner: dict[int, Tree] = {}
    settings: set[int] = set()
    for tree in trees:
        owner.update(dict.fromkeys(map(id, tree.tensors), tree))
        settings.update(map(id, tree.settings.values()))
    is_whole = catalog.world_size in (None, 1)

    def is_cut(tensor: Tensor) -> bool:
        # Copies of one box, as replicas leave them in rank files, do not cut a tensor.
        for source in catalog.made_from.get(tensor.name, (tensor,)):
            boxes = [chunk[:2] for chunk in source.chunks[:1]]
            if any(chunk[:2] not in boxes for chunk in source.chunks):
                return True
        if not is_whole or not tensor.dtype.is_floating or id(tensor) in settings:
            return False
        tree = owner.get(id(tensor))
        if tree is None or tree.role in (LIVE, EMA, OPTIMIZER):
            return True
        return role_of(tree.name) is None

    return [bool(tensor.source.shape) and is_cut(tensor.source) for tensor in tensors]
