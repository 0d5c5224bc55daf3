"""`inspect`: what is in a checkpoint, from its metadata."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from ema_ckpt.core.catalog import Catalog, Diagnostic, Object, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.errors import EmaCkptError, SourceError, UnsafeError
from ema_ckpt.core.names import EMA, glob_matcher
from ema_ckpt.discovery.opening import opened
from ema_ckpt.ops.checkpoint import tree_entry
from ema_ckpt.ops.results import ChunkEntry, InspectResult, ObjectEntry, TensorEntry
from ema_ckpt.state_dicts.ema_config import read_ema_config
from ema_ckpt.state_dicts.selection import refuse_idle
from ema_ckpt.state_dicts.tree import Tree, find_trees, inner_names, list_trees

if TYPE_CHECKING:
    import os


def inspect(
    path: str | os.PathLike[str], tree: str | None = None, match: Sequence[str] = ()
) -> InspectResult:
    """Describe a checkpoint: trees, tensors, who holds which rows, EMA settings, objects, warnings.

    Reads metadata, and of data files only the settings of EMA trees. A missing or short data file
    or an unsafe object is a warning.

    Args:
        path: a checkpoint, a directory that holds one, or an fsspec URL of either.
        tree: only the tensors of this tree, or below this dotted path. match: only names that fit a
            glob.

    Raises:
        EmaCkptError: `not-found not-a-checkpoint unreadable unsafe-pickle unknown-tree
            empty-selection …`.
    """
    with opened(path, lenient=True) as catalog:
        known = list_trees(catalog)
        warnings = [*catalog.warnings, *_missing_files(catalog), *_geometry(catalog)]
        warnings += [
            Diagnostic(tree.problem.code, str(tree.problem))
            for tree in known
            if tree.problem is not None
        ]
        settings = {
            tree.name: _settings(catalog, tree, warnings) for tree in known if tree.role == EMA
        }
        return InspectResult(
            path=catalog.path,
            resolved=catalog.resolved,
            format=catalog.format,
            world_size=catalog.world_size,
            nbytes=sum(tensor.nbytes for tensor in catalog.tensors),
            trees=tuple(map(tree_entry, known)),
            tensors=tuple(_tensor_entries(catalog, known, tree, match)),
            objects=tuple(ObjectEntry(item.name, item.file) for item in catalog.objects),
            ema=settings,
            warnings=tuple(warnings),
        )


def _missing_files(catalog: Catalog) -> Iterable[Diagnostic]:
    told = {
        warning.message.partition(":")[0] for warning in catalog.warnings
    }  # by a reader that met it first
    for file, expected in catalog.files.items():
        if file in told:
            continue
        try:
            found = catalog.source.size(file)
        except (SourceError, UnsafeError) as error:
            yield Diagnostic(error.code, str(error))
            continue
        if found < expected:
            yield Diagnostic(
                "truncated-file",
                f"{file}: expected at least {expected} bytes, found {found}: the file is truncated",
            )


def _geometry(catalog: Catalog) -> Iterable[Diagnostic]:
    for tensor in catalog.tensors:
        try:
            prove(tensor)
        except SourceError as error:
            yield Diagnostic(error.code, str(error))


def _settings(catalog: Catalog, tree: Tree, warnings: list[Diagnostic]) -> dict[str, object]:
    try:
        found = read_ema_config(catalog, tree)
    except EmaCkptError as error:
        warnings.append(Diagnostic(error.code, str(error)))
        return {"num_updates": None, "decay": None, "schedule": None, "dtype": None}
    if found.num_updates == 0:
        warnings.append(
            Diagnostic("ema-stalled", f"{tree.name!r} was never updated (num_updates is 0)")
        )
    return {
        "num_updates": found.num_updates,
        "decay": found.decay,
        "schedule": found.schedule,
        "dtype": found.dtype,
    }


def _tensor_entries(
    catalog: Catalog, known: Sequence[Tree], only: str | None, match: Sequence[str]
) -> Iterable[TensorEntry]:
    wanted: set[int] | None = None
    if only is not None:
        picked = find_trees(known, only, catalog.resolved)
        wanted = {id(item) for found in picked for item in (*found.tensors, *found.objects)}
    globs = (match,) if isinstance(match, str) else tuple(match)
    items = chain[Tensor | Object](catalog.tensors, catalog.objects)
    held = [item.name for item in items if wanted is None or id(item) in wanted]
    refuse_idle("--match", globs, held, catalog.resolved)
    tests = [glob_matcher(glob) for glob in globs]
    owner = {id(tensor): tree.name for tree in known for tensor in tree.tensors}
    fqns = {name: fqn for tree in known for name, fqn in inner_names(tree).items()}
    for tensor in catalog.tensors:
        if wanted is not None and id(tensor) not in wanted:
            continue
        if tests and not any(test(tensor.name) for test in tests):
            continue
        yield _tensor_entry(tensor, owner.get(id(tensor), ""), fqns.get(tensor.name, tensor.name))


def _tensor_entry(tensor: Tensor, tree: str, fqn: str) -> TensorEntry:
    chunks = tuple(
        ChunkEntry(c.offsets, c.sizes, c.file) for c in tensor.chunks if 0 not in c.sizes
    )
    return TensorEntry(
        tensor.name, fqn, tree, tensor.shape, tensor.dtype.name, tensor.nbytes, chunks
    )
