"""`consolidate`: one tree of a sharded checkpoint as a full state dict, in one file or a Hugging
Face directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ema_ckpt.core.catalog import Catalog, Diagnostic, Tensor
from ema_ckpt.core.errors import UsageError, counted, shown
from ema_ckpt.core.names import EMA, OPTIMIZER
from ema_ckpt.core.text import parse_size
from ema_ckpt.core.write_plan import OutputTensor, WritePlan, keep_first
from ema_ckpt.discovery.opening import opened
from ema_ckpt.ops.objects import header_text, refuse_skipped, unknown_objects, unsupported_metadata
from ema_ckpt.ops.present import check_sources
from ema_ckpt.ops.results import FileEntry, Skipped, WriteResult
from ema_ckpt.ops.suggest import suggested_command, suggested_options
from ema_ckpt.ops.write import (
    TORCH_SUFFIXES,
    Job,
    WriterArgs,
    destination_of,
    payload_nbytes,
    request_of,
    timer,
    write,
)
from ema_ckpt.state_dicts.ema_config import read_ema_config, with_tied_names
from ema_ckpt.state_dicts.selection import missing_weights, select_tree
from ema_ckpt.state_dicts.ties import dropped_names, with_dropped
from ema_ckpt.state_dicts.tree import Tree, default_tree, find_tree, list_trees, live_of

if TYPE_CHECKING:
    import os


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
        tree: the tree to take; by default the only EMA, or the only live tree.
        max_shard_size: bytes of one file of a Hugging Face directory. basename: how its files
            begin.
        fill: take weights that the EMA lacks from the live tree (True), or from the tree named.
        args: options that all writing verbs share, see `WriterArgs`.

    Raises:
        EmaCkptError: with the `code` of what is wrong; then nothing was written.
    """
    elapsed = timer()
    request = request_of(args)
    shard_nbytes = parse_size(max_shard_size)
    _check_basename(basename)
    place = destination_of(out)
    with opened(path) as found:
        catalog = with_dropped(found) if request.expand_ties else found
        known = list_trees(catalog)
        if tree is None:
            given = {"max_shard_size": max_shard_size, "basename": basename, "fill": fill, **args}
            options = suggested_options(given, consolidate.__kwdefaults__)
            picked = default_tree(
                known, suggested_command("consolidate", path, out), catalog.resolved, options
            )
        else:
            convert = suggested_command("convert", path, out) + suggested_options(
                {"tree": tree, **args}
            )
            picked = _pick(catalog, known, tree, convert)
        warnings = [*catalog.warnings]
        whole = with_tied_names(catalog, picked)
        selection = select_tree(
            whole, request.selection, _filling(catalog, known, whole, fill, warnings)
        )
        skipped = (
            unknown_objects(catalog, catalog.objects)
            if catalog.format in ("torch", "rank-files")
            else []
        )
        skipped += [
            Skipped(t.name, t.chunks[0].file if t.chunks else "", "not averaged")
            for t in picked.left_out
        ]
        skipped += unsupported_metadata(
            catalog, selection.entries, "torch" if place.suffix in TORCH_SUFFIXES else "safetensors"
        )
        refuse_skipped(skipped, request.strict)
        check_sources(catalog, (entry.source for entry in selection.entries))
        warnings += _stalled(catalog, picked)
        target, kind, ties = _lay_out(
            catalog,
            selection.entries,
            place,
            shard_nbytes,
            basename,
            expand_ties=request.expand_ties,
        )
        job = Job(
            catalog,
            place,
            kind == "directory",
            target,
            keep_foreign=kind == "directory",
            warnings=warnings,
        )
        write(job, request)
        return WriteResult(
            source=catalog.resolved,
            target=str(place),
            tree=picked.name,
            format="torch" if kind == "torch" else "safetensors",
            files=tuple(
                FileEntry(name or place.name, nbytes) for name, nbytes in target.files.items()
            ),
            tensors=len(selection.entries),
            nbytes=payload_nbytes(target.items),
            seconds=elapsed(),
            renamed=dict(selection.renamed),
            filled=selection.filled,
            ties=ties,
            skipped=tuple(skipped),
            warnings=tuple(job.warnings),
            dry_run=request.dry_run,
        )


def _check_basename(basename: str) -> None:
    if not basename or "/" in basename or basename.startswith("."):
        raise UsageError("usage", f"--basename {basename!r}: expected a plain name such as model")


def _pick(catalog: Catalog, known: Sequence[Tree], name: str, convert: str) -> Tree:
    found = find_tree(known, name, catalog.resolved)
    if found.role == OPTIMIZER:
        message = f"--tree {name}: an optimizer's state is no state dict of a model; `{convert}` takes it whole"
        raise UsageError("usage", message)
    return found


def _stalled(catalog: Catalog, picked: Tree) -> list[Diagnostic]:
    if picked.role != EMA or read_ema_config(catalog, picked, open_objects=False).num_updates != 0:
        return []
    return [
        Diagnostic(
            "ema-stalled",
            f"{picked.name!r} was never updated (num_updates is 0): it equals its first weights",
        )
    ]


def _filling(
    catalog: Catalog,
    known: Sequence[Tree],
    picked: Tree,
    fill: bool | str,
    warnings: list[Diagnostic],
) -> dict[str, Tensor] | None:
    """Weights that the EMA lacks: to be taken if asked for, else told."""
    live = live_of(known, picked)
    source = _fill_source(catalog, known, picked, fill, live)
    filled = missing_weights(picked, source) if source is not None else {}
    if live is not None and picked.role == EMA:
        warnings += _partial(replace(picked, named={**picked.weights, **filled}), live)
    return filled or None


def _fill_source(
    catalog: Catalog, known: Sequence[Tree], picked: Tree, fill: bool | str, live: Tree | None
) -> Tree | None:
    """The tree to take missing weights from, if any are to be taken."""
    if fill is False:
        return None
    named = find_tree(known, fill, catalog.resolved) if isinstance(fill, str) else None
    if named is not None and named.name != picked.partner:
        return named
    if live is None:
        raise UsageError(
            "unknown-tree", f"--fill: {catalog.resolved} has no live tree beside {picked.name!r}"
        )
    return live


def _partial(picked: Tree, live: Tree) -> list[Diagnostic]:
    missing = missing_weights(picked, live)
    if not missing:
        return []
    message = f"{picked.name!r} lacks {counted(len(missing), 'tensor')} that {live.name!r} has: {shown(list(missing))}"
    return [Diagnostic("ema-partial", f"{message}; --fill takes them from {live.name!r}")]


def _lay_out(
    catalog: Catalog,
    entries: Sequence[OutputTensor],
    out: Path,
    shard_nbytes: int,
    basename: str,
    *,
    expand_ties: bool,
) -> tuple[WritePlan, str, dict[str, str]]:
    """The target, what kind of place it is, and the ties it records (dropped name → kept name)."""
    if out.suffix in TORCH_SUFFIXES:
        from ema_ckpt.formats.torch_file import writer as torchfile_target

        return torchfile_target.lay_out(entries, expand_ties=expand_ties), "torch", {}
    from ema_ckpt.formats.safetensors.writer import lay_out_directory, lay_out_file

    kept, ties = (list(entries), dict[str, str]()) if expand_ties else keep_first(entries)
    dropped, _ = dropped_names(catalog, entries)
    text = header_text(catalog) | dropped
    if out.suffix == ".safetensors":
        return lay_out_file(kept, text, ties=ties), "file", ties | dropped
    return (
        lay_out_directory(kept, shard_nbytes, basename, text, ties=ties),
        "directory",
        ties | dropped,
    )
