"""`convert` and `reshard`: whole checkpoints, all trees, from any readable format to any writable
one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ema_ckpt.core.catalog import Catalog, Diagnostic, Nesting, Object
from ema_ckpt.core.errors import SourceError, UsageError, counted
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER, role_of
from ema_ckpt.core.text import parse_size
from ema_ckpt.core.write_plan import OutputTensor, WritePlan, keep_first
from ema_ckpt.discovery.locate import step_number
from ema_ckpt.discovery.opening import opened
from ema_ckpt.ops.objects import (
    header_text,
    plan_objects,
    rank_keyed,
    refuse_skipped,
    unsupported_metadata,
)
from ema_ckpt.ops.present import check_sources
from ema_ckpt.ops.results import FileEntry, Skipped, WriteResult
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
from ema_ckpt.state_dicts.selection import KeptObject, select_all
from ema_ckpt.state_dicts.ties import dropped_names, with_dropped
from ema_ckpt.state_dicts.tree import Tree, list_trees
from ema_ckpt.storage.directories import join, list_folder

if TYPE_CHECKING:
    import os

_FORMS = ("dcp", "safetensors", "pt")
# A model's weights in a second form, as Hugging Face repositories have them, are no other state.
_STATE_FILES = re.compile(
    r"trainer_state.*|(?!pytorch_model).*\.(pt|pth|bin|ckpt|pkl|pickle|npz|distcp)"
)
_OWN_FILES = re.compile(
    r"\.metadata|__\d+\.metadata|__\d+_\d+\.distcp|ema_ckpt\.json|.*\.safetensors(\.index\.json)?"
)


@dataclass(frozen=True, slots=True)
class _Order:
    """What is to be made: where, in which form, for how many ranks."""

    out: Path
    form: str
    world_size: int
    max_shard_nbytes: int = 5 * 10**9
    verb: str = "convert"


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
    request = request_of(args)
    order = _Order(destination_of(out), "dcp", _ranks(world_size), verb="reshard")
    return _transfer(path, order, tree, request)


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
        src: a checkpoint of any readable format.
        dst: what to make. to: `dcp`, `safetensors` or `pt`; by default what the ending of `dst`
            says, and DCP for a directory.
        world_size: ranks of a DCP target; by default those of a source saved by several ranks, else
            1.
        tree: only these trees; an EMA's settings always come with it.
        args: options that all writing verbs share, see `WriterArgs`.

    Raises:
        EmaCkptError: with the `code` of what is wrong; then nothing was written.
    """
    request = request_of(args)
    place = destination_of(dst)
    form = _form(place, to)
    if world_size is not None and form != "dcp":
        raise UsageError(
            "usage", f"--world-size goes with a DCP target, and {place} is to be {form}"
        )
    ranks = 0 if world_size is None else _ranks(world_size)
    return _transfer(src, _Order(place, form, ranks, parse_size(max_shard_size)), tree, request)


def _ranks(world_size: int) -> int:
    if not 1 <= world_size <= 1 << 20:
        raise UsageError("usage", f"--world-size {world_size}: expected 1 or more")
    return world_size


def _form(place: Path, to: str | None) -> str:
    """The form to write: what is asked for, which the ending of the target must not contradict."""
    named = (
        "pt"
        if place.suffix in TORCH_SUFFIXES
        else "safetensors"
        if place.suffix == ".safetensors"
        else None
    )
    if to is None:
        return named or "dcp"
    if to not in _FORMS:
        raise UsageError("usage", f"--to {to}: expected dcp, safetensors or pt")
    if named is not None and named != to:
        raise UsageError("usage", f"--to {to}: {place.name} has the ending of a {named} file")
    if to == "pt" and named is None:
        raise UsageError(
            "usage", f"--to pt: {place.name} needs the ending .pt, .pth, .bin or .ckpt"
        )
    return to


def _transfer(
    path: str | os.PathLike[str], order: _Order, tree: Sequence[str] | str, request: Request
) -> WriteResult:
    elapsed = timer()
    with opened(path) as found:
        catalog = with_dropped(found) if request.expand_ties else found
        known = list_trees(catalog)
        selection = select_all(
            catalog, known, request.selection, tree, strip=order.verb != "reshard"
        )
        carried = plan_objects(
            catalog, selection.objects, "torch" if order.form == "pt" else order.form
        )
        entries, unfit = _fitting(selection.entries, order.form)
        skipped = [
            *carried.skipped,
            *unfit,
            *_unread(catalog),
            *unsupported_metadata(catalog, entries, order.form),
        ]
        skipped += _beside(catalog)
        refuse_skipped(skipped, request.strict)
        check_sources(catalog, (entry.source for entry in entries))
        warnings = [*catalog.warnings, *carried.warnings]
        if order.form == "dcp":
            warnings += [*rank_keyed([e.name for e in entries] + [o.name for o in carried.objects])]
            warnings += _low_precision(entries, known)
        target, ties = _lay_out(catalog, known, entries, carried.objects, order, request)
        is_file = order.form == "pt" or order.out.suffix == ".safetensors"
        keep = order.form == "safetensors" and not is_file
        job = Job(catalog, order.out, not is_file, target, keep, warnings)
        write(job, request)
        return WriteResult(
            source=catalog.resolved,
            target=str(order.out),
            tree=None,
            format="torch" if order.form == "pt" else order.form,
            files=tuple(
                FileEntry(name or order.out.name, nbytes) for name, nbytes in target.files.items()
            ),
            tensors=len(entries),
            nbytes=payload_nbytes(target.items),
            seconds=elapsed(),
            renamed=dict(selection.renamed),
            ties=ties,
            skipped=tuple(skipped),
            warnings=tuple(job.warnings),
            dry_run=request.dry_run,
        )


def _fitting(
    entries: Sequence[OutputTensor], form: str
) -> tuple[list[OutputTensor], list[Skipped]]:
    """Entries that the form has a type for, and the rest."""
    if form != "safetensors":
        return list(entries), []
    from ema_ckpt.formats.safetensors.writer import refusal

    kept, skipped = [], []
    for entry in entries:
        reason = refusal(entry.dtype)
        if reason is None:
            kept.append(entry)
        else:
            file = entry.source.chunks[0].file if entry.source.chunks else ""
            skipped.append(Skipped(entry.name, file, reason))
    return kept, skipped


def _unread(catalog: Catalog) -> list[Skipped]:
    """Entries of a DCP whose class is unknown: what their bytes mean is not told."""
    return list(
        dict.fromkeys(
            Skipped(entry.name, entry.file, f"is a {entry.kind}, unknown to ema_ckpt")
            for entry in catalog.unknown_entries
        )
    )


def _beside(catalog: Catalog) -> list[Skipped]:
    """What is not in the trees: state of single ranks in rank files, and files and folders beside
    the checkpoint.

    Beside a DCP that is every file; elsewhere what describes a model (config, tokenizer, README) is
    no state. A checkpoint that is one file, named as such, has nothing beside it.
    """
    found = [
        Skipped(".".join(map(str, path)), file, reason)
        for path, file, reason in catalog.rank_private
    ]
    if catalog.resolved.rstrip("/") != catalog.source.root.rstrip("/"):
        return found
    own = {part for file in catalog.files for part in (file, file.partition("/")[0])}
    names = [name for name in _names_beside(catalog) if name not in own]
    return [
        *found,
        *(Skipped(name, name, "beside the checkpoint, not part of it") for name in names),
    ]


def _names_beside(catalog: Catalog) -> Iterator[str]:
    """Files and folders in the checkpoint's folder, and files in those of its parts, that may hold
    state of the run.
    """
    for place in dict.fromkeys(["", *(file.rpartition("/")[0] for file in catalog.files)]):
        held = list_folder(join(catalog.source.root, place) if place else catalog.source.root)
        names = held.files if place else (*held.folders, *held.files)
        for name in names:
            if name in held.folders:
                is_state = _holds_weights(join(held.root, name))
            else:
                is_state = catalog.format == "dcp" or _STATE_FILES.fullmatch(name) is not None
            if is_state and not name.startswith(".") and not _OWN_FILES.fullmatch(name):
                yield f"{place}/{name}" if place else name


def _holds_weights(folder: str) -> bool:
    """Whether a folder beside a checkpoint holds state of its own: not one of configs or logs, nor
    another step.
    """
    if step_number(folder.rpartition("/")[2]) is not None:
        return False
    try:
        files = list_folder(folder).files
    except SourceError:  # what may not be listed is told rather than passed over
        return True
    return any(_STATE_FILES.fullmatch(name) or _OWN_FILES.fullmatch(name) for name in files)


def _low_precision(entries: Sequence[OutputTensor], known: Sequence[Tree]) -> list[Diagnostic]:
    averages = {id(tensor) for tree in known if tree.role == EMA for tensor in tree.tensors}
    cast = [
        e.name for e in entries if e.casts and id(e.source) in averages and e.dtype.itemsize < 4
    ]
    if not cast:
        return []
    message = f"{counted(len(cast), 'averaged tensor')} stored in less than fp32: a run that resumes from them stalls"
    return [Diagnostic("ema-low-precision", message)]


def _lay_out(
    catalog: Catalog,
    known: Sequence[Tree],
    entries: Sequence[OutputTensor],
    objects: Sequence[KeptObject],
    order: _Order,
    request: Request,
) -> tuple[WritePlan, dict[str, str]]:
    """The target, and the ties it records (dropped name → kept name)."""
    if order.form == "dcp":
        from ema_ckpt.formats.dcp.writer import StoredObject, lay_out

        split = _split(catalog, known, entries)
        stored = [StoredObject(held.name, held.path, held.source) for held in objects]
        ranks = order.world_size or catalog.world_size or 1
        return lay_out(entries, stored, split, ranks, catalog.source, catalog.order), {}
    inline = [
        Object(o.name, o.path, o.source.file, inline=o.source.inline, is_inline=True)
        for o in objects
    ]
    nested = catalog.nesting or Nesting()
    if order.form == "pt":
        from ema_ckpt.formats.torch_file import writer as torchfile_target

        return torchfile_target.lay_out(
            entries, nesting=nested, objects=inline, expand_ties=request.expand_ties
        ), {}
    from ema_ckpt.formats.safetensors.writer import lay_out_directory, lay_out_file

    dropped, _ = dropped_names(catalog, entries)
    text = header_text(catalog) | dropped
    kept, ties = (list(entries), dict[str, str]()) if request.expand_ties else keep_first(entries)
    places = {entry.name: entry.path for entry in entries if entry.name in ties}
    if order.out.suffix == ".safetensors":
        return lay_out_file(
            kept, text, nesting=nested, objects=inline, ties=ties, tied_paths=places
        ), ties | dropped
    limit = order.max_shard_nbytes
    return lay_out_directory(
        kept, limit, "model", text, nesting=nested, objects=inline, ties=ties, tied_paths=places
    ), ties | dropped


def _split(catalog: Catalog, known: Sequence[Tree], entries: Sequence[OutputTensor]) -> list[bool]:
    """Which tensors are cut into rows: those that the source cuts, or, if it is whole itself, the
    weights.
    """
    owner = {id(tensor): tree for tree in known for tensor in tree.tensors}
    settings = {id(item) for tree in known for item in tree.settings.values()}
    layout_free = catalog.world_size is None or catalog.world_size == 1

    def cut(entry: OutputTensor) -> bool:
        source, tree = entry.source, owner.get(id(entry.source))
        # Copies of one box, as replicas leave them in rank files, do not cut a tensor.
        if (
            len(source.chunks) > 1
            and len({(chunk.offsets, chunk.sizes) for chunk in source.chunks}) > 1
        ):
            return True
        if not layout_free or not source.dtype.is_floating or id(source) in settings:
            return False
        role = tree.role if tree is not None else LIVE
        return role in (LIVE, EMA, OPTIMIZER) or (tree is not None and role_of(tree.name) is None)

    return [bool(entry.source.shape) and cut(entry) for entry in entries]
