"""`consolidate`: one tree of a sharded checkpoint as one file or a Hugging Face directory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from ema_ckpt.core.catalog import Catalog, Diagnostic, Tensor
from ema_ckpt.core.display import NAME_LENGTH, shortened
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.names import EMA, OPTIMIZER, TORCH_SUFFIXES
from ema_ckpt.core.text import counted, parse_size, shown
from ema_ckpt.discovery.opening import opened
from ema_ckpt.ops.dequantize import dequantize, exact_warnings, split_warnings, with_exact_parts
from ema_ckpt.ops.files_beside import settings_beside
from ema_ckpt.ops.object_plan import (
    refuse_skipped,
    unknown_objects,
    unsupported_metadata,
    warn_of_files,
)
from ema_ckpt.ops.results.write import Skipped, WriteResult
from ema_ckpt.ops.rule_changes import listed, rule_one
from ema_ckpt.ops.suggested_commands import suggested_command, suggested_options
from ema_ckpt.ops.unrecorded_ties import find_unrecorded_ties, sources_of
from ema_ckpt.ops.write import (
    Output,
    PlannedWrite,
    destination_of,
    finish,
    plan_for,
    refuse_emptiness,
)
from ema_ckpt.reading.unchanged import told_from_damage
from ema_ckpt.state_dicts.ema_health import find_copy, find_misfits, find_stalled
from ema_ckpt.state_dicts.hidden_averages import warn_of_hidden
from ema_ckpt.state_dicts.selection import missing_weights, select_tree
from ema_ckpt.state_dicts.ties import with_all_names
from ema_ckpt.state_dicts.tree import Tree, default_tree, find_tree, list_trees, live_of
from ema_ckpt.storage.files import is_file_name
from ema_ckpt.writing.options import WriteOptions, WriterArgs
from ema_ckpt.writing.preflight import check_sources

_MAX_BASENAME_NBYTES = 200  # of the 255 that a name may have


def consolidate(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tree: str | None = None,
    *,
    max_shard_size: int | str = "5GB",
    basename: str = "model",
    fill: bool | str = False,
    **args: Unpack[WriterArgs],
) -> WriteResult:
    """Write one tree, by default the EMA, whole.

    Args:
        path: a checkpoint, a directory that holds one, or an fsspec URL of either.
        out: `X.safetensors`, a torch file (`.pt .pth .bin .ckpt`), or else a Hugging Face
            directory.
        tree: the tree to write; by default the only EMA, or the only live tree.
        max_shard_size: largest size of one file of a Hugging Face directory.
        basename: name that the files of a directory begin with.
        fill: take weights that the EMA lacks from the live tree (True), or from the tree named.
        args: options that all writing verbs share, see `WriterArgs`.

    Raises:
        EmaCkptError: with the `code` of what is wrong; then nothing was written.
    """
    started = time.perf_counter()
    options = WriteOptions.parse(args)
    output = _output_of(out, parse_size(max_shard_size), basename)
    with opened(path, workers=options.threads) as opened_catalog, told_from_damage(opened_catalog):
        values = dequantize(opened_catalog, options)
        catalog = listed(values.catalog, options.rules, expand_ties=options.expand_ties)
        trees = list_trees(catalog)
        catalog = warn_of_hidden(catalog, trees, () if tree is None else (tree,))
        given = {"max_shard_size": max_shard_size, "basename": basename, "fill": fill, **args}
        picked = _pick(catalog, trees, tree, suggested_command("consolidate", path, out), given)
        live = live_of(trees, picked)
        fill_from = _fill_tree(catalog, trees, picked, live, fill)
        whole = with_all_names(catalog, picked, live, fill_from)
        filled = {} if fill_from is None else missing_weights(whole, fill_from)
        stored, ruled = catalog, rule_one(options.rules, catalog, whole, filled)
        if options.selection.keep_prefixes:
            ruled.refuse_mixed_prefixes()
        catalog = ruled.catalog
        chosen = with_exact_parts(options.selection, opened_catalog, options, catalog)
        selection = select_tree(ruled.tree, chosen, ruled.filled or None)
        copied, without = settings_beside(catalog, output.is_directory)
        renamed, rules = ruled.changed_names(selection)
        skipped = [
            *values.skipped,
            *ruled.skipped,
            *unknown_objects(catalog),
            *(Skipped.tensor(tensor, tensor.name, "not averaged") for tensor in picked.left_out),
            *unsupported_metadata(catalog, selection.entries, output.format),
            *without,
        ]
        refuse_skipped(skipped, options.strict)
        refuse_emptiness(selection.entries, ruled.skipped)
        check_sources(catalog, (tensor.source for tensor in selection.entries))
        warnings = [*catalog.warnings, *ema_warnings(catalog, whole, live, filled)]
        taken = sources_of(catalog, selection.entries, filled)
        warnings += find_unrecorded_ties(stored, whole, fill_from, taken, options)
        warnings += [*ruled.warnings, *values.warnings()]
        warnings += warn_of_files(catalog, {*copied, *values.named_files}, skipped)
        warnings += exact_warnings(selection)
        warnings += split_warnings(opened_catalog, selection, options, catalog)
        plan, ties = plan_for(output, catalog, selection.entries, expand_ties=options.expand_ties)
        job = PlannedWrite(
            catalog,
            output,
            plan,
            selection.entries,
            started,
            source=catalog.path,
            tree=picked.name,
            renamed=renamed,
            rules=rules,
            filled=selection.filled,
            ties=ties,
            copied=copied,
            skipped=skipped,
            warnings=warnings,
            dequantized=values.entries((e.source for e in selection.entries), catalog.made_from),
        )
        return finish(job, options)


def _pick(
    catalog: Catalog,
    trees: Sequence[Tree],
    name: str | None,
    command: str,
    given: Mapping[str, object],
) -> Tree:
    """Return the tree to write; `command` and the options `given` are for messages.

    Raises:
        UsageError: `ambiguous-tree unknown-tree`; `usage` for an optimizer's.
    """
    if name is None:
        flags = suggested_options(given, consolidate.__kwdefaults__)
        return default_tree(trees, command, catalog.resolved, flags, catalog.warnings)
    picked = find_tree(trees, name, catalog.resolved)
    if picked.role == OPTIMIZER:
        shared = {key: value for key, value in given.items() if key in WriterArgs.__annotations__}
        instead = command.replace(" consolidate ", " convert ", 1)
        instead += suggested_options({"tree": name, **shared})
        message = "an optimizer's state is no state dict of a model"
        raise UsageError("usage", f"--tree {name}: {message}; `{instead}` takes it whole")
    return picked


def _fill_tree(
    catalog: Catalog, trees: Sequence[Tree], picked: Tree, live: Tree | None, fill: bool | str
) -> Tree | None:
    """Return the tree that `fill` takes missing weights from."""
    if fill is False:
        return None
    if isinstance(fill, str):
        named = find_tree(trees, fill, catalog.resolved)
        if named.name != picked.partner:
            return named
    if live is None:
        message = f"--fill: {catalog.resolved} has no live tree beside {picked.name!r}"
        raise UsageError("unknown-tree", message)
    return live


def ema_warnings(
    catalog: Catalog, tree: Tree, live: Tree | None, filled: Mapping[str, Tensor]
) -> Iterator[Diagnostic]:
    """Warn of weights that an EMA lacks and that are not filled, and of an EMA that looks wrong."""
    if tree.role != EMA:
        return
    missing: Mapping[str, Tensor] = {}
    if live is not None:
        missing = missing_weights(replace(tree, named={**tree.weights, **filled}), live)
    if live is not None and missing:
        lacks = f"lacks {counted(len(missing), 'tensor')} that {live.name!r} has"
        hint = f"--fill takes them from {live.name!r}"
        message = f"{tree.name!r} {lacks}: {shown(list(missing))}; {hint}"
        yield Diagnostic("ema-partial", message)
    yield from find_stalled(catalog, tree)
    yield from find_copy(catalog, tree)
    if live is not None:
        yield from find_misfits(tree, live)


def _output_of(out: str | os.PathLike[str], max_shard_nbytes: int, basename: str) -> Output:
    # What begins the name of a file, with `-00001-of-00002.safetensors` after it.
    is_plain = is_file_name(basename) and not re.search(r"[/\\]|^\.", basename)
    if not is_plain or len(os.fsencode(basename)) > _MAX_BASENAME_NBYTES:
        given = shortened(repr(basename), NAME_LENGTH)
        raise UsageError("usage", f"--basename {given}: expected a plain name such as model")
    destination = destination_of(out)
    form = "pt" if destination.suffix in TORCH_SUFFIXES else "safetensors"
    return Output(destination, form, max_shard_nbytes=max_shard_nbytes, basename=basename)
