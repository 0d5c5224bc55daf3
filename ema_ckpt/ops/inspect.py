"""`inspect`: describe a checkpoint from its metadata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ema_ckpt.core.catalog import Catalog, Diagnostic, Object, Tensor, refuse_problems
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.errors import AccessError, EmaCkptError, SourceError
from ema_ckpt.core.names import EMA, glob_matcher
from ema_ckpt.discovery.opening import opened
from ema_ckpt.ops.object_values import object_values
from ema_ckpt.ops.results.further_fields import with_fields
from ema_ckpt.ops.results.inspect import (
    ChunkEntry,
    InspectResult,
    ObjectEntry,
    TensorEntry,
    TreeEntry,
)
from ema_ckpt.ops.results.quantized import QuantizedEntry, described
from ema_ckpt.reading.quantized.lone_codes import warn_of_lone_codes
from ema_ckpt.reading.quantized.recognise import recognise
from ema_ckpt.reading.unchanged import told_from_damage
from ema_ckpt.state_dicts.ema_config import read_ema_config
from ema_ckpt.state_dicts.ema_health import check_averages
from ema_ckpt.state_dicts.hidden_averages import find_hidden
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
        tree: only the tensors of this tree, or below this dotted path.
        match: only names that match a glob.

    Raises:
        EmaCkptError: `not-found not-a-checkpoint unreadable unsafe-pickle unknown-tree
            empty-selection …`.
    """
    return inspect_with_values(path, tree, match, 0)[0]


def inspect_with_values(
    path: str | os.PathLike[str], tree: str | None, match: Sequence[str], most_objects: int
) -> tuple[InspectResult, dict[str, object]]:
    """Describe a checkpoint as `inspect` does; also read the values of its first objects."""
    with opened(path, lenient=True) as catalog, told_from_damage(catalog):
        if any(problem.code == "index-mismatch" for problem in catalog.problems):
            refuse_problems(catalog.problems)
        trees = list_trees(catalog)
        warnings = [*catalog.warnings, *damage(catalog), *find_hidden(trees)]
        problems = [one.problem for one in trees if one.problem is not None]
        warnings += [Diagnostic(problem.code, str(problem)) for problem in problems]
        warnings += [*check_averages(catalog, trees), *warn_of_lone_codes(catalog)]
        picked = trees if tree is None else find_trees(trees, tree, catalog.resolved)
        globs = (match,) if isinstance(match, str) else tuple(match)
        selected = select_tensors(catalog, picked, globs)
        result = InspectResult(
            path=catalog.path,
            resolved=catalog.resolved,
            format=catalog.format,
            world_size=catalog.world_size,
            nbytes=sum(tensor.nbytes for tensor in catalog.tensors),
            trees=tuple(map(TreeEntry.of, trees)),
            ema={t.name: ema_settings(catalog, t, warnings) for t in trees if t.role == EMA},
            tensors=tuple(_tensor_entries(trees, selected)),
            objects=tuple(ObjectEntry(item.name, item.file) for item in catalog.objects),
            warnings=tuple(warnings),
        )
        result = with_fields(result, quantized=_quantized(catalog, selected))
        return result, object_values(catalog, most_objects)


def _quantized(catalog: Catalog, selected: Iterable[Tensor]) -> tuple[QuantizedEntry, ...] | None:
    """Describe the quantised weights whose codes are among the tensors."""
    names = {tensor.name for tensor in selected}
    weights = recognise(catalog, lenient=True).tensors
    return described([weight for weight in weights if weight.place in names])


def damage(catalog: Catalog) -> Iterator[Diagnostic]:
    """Warn of what a lenient reader passed over, of files that are missing or too short, of holes.

    A tensor in a form that is not read is such a warning too.
    """
    yield from [Diagnostic(problem.code, problem.message) for problem in catalog.problems]
    told = {problem.file for problem in catalog.problems}
    for file, expected in catalog.files.items():
        if file in told:
            continue
        try:
            size = catalog.source.size(file)
        except (SourceError, AccessError) as error:
            yield Diagnostic(error.code, str(error))
            continue
        if size < expected:
            lengths = f"expected at least {expected} bytes, found {size}"
            yield Diagnostic("truncated-file", f"{file}: {lengths}: the file is truncated")
    for tensor in catalog.tensors:
        try:
            prove(tensor)
        except SourceError as error:
            yield Diagnostic(error.code, str(error))


def ema_settings(catalog: Catalog, tree: Tree, warnings: list[Diagnostic]) -> dict[str, object]:
    """Return the settings of an EMA; errors are added to `warnings`."""
    keys = ("num_updates", "decay", "schedule", "dtype")
    try:
        config = read_ema_config(catalog, tree)
    except EmaCkptError as error:
        warnings.append(Diagnostic(error.code, str(error)))
        return dict.fromkeys(keys)
    return {key: getattr(config, key) for key in keys}


def select_tensors(catalog: Catalog, trees: Sequence[Tree], globs: Sequence[str]) -> list[Tensor]:
    """Return the tensors of `trees` whose names match one of `globs`, in stored order."""
    inside: set[int] = set()
    for tree in trees:
        inside.update(map(id, tree.entries))
    items: list[Tensor | Object] = [*catalog.tensors, *catalog.objects]
    names = [item.name for item in items if id(item) in inside]
    refuse_idle("--match", globs, names, catalog.resolved)
    matchers = [glob_matcher(glob) for glob in globs]
    selected = []
    for tensor in catalog.tensors:
        if id(tensor) not in inside:
            continue
        if not globs or any(matches(tensor.name) for matches in matchers):
            selected.append(tensor)
    return selected


def _tensor_entries(trees: Sequence[Tree], tensors: Iterable[Tensor]) -> Iterator[TensorEntry]:
    owners: dict[int, str] = {}
    fqns: dict[str, str] = {}
    for tree in trees:
        owners |= {id(tensor): tree.name for tensor in tree.tensors}
        fqns |= inner_names(tree)
    for tensor in tensors:
        yield TensorEntry(
            name=tensor.name,
            fqn=fqns.get(tensor.name, tensor.name),
            tree=owners.get(id(tensor), ""),
            shape=tensor.shape,
            dtype=tensor.dtype.name,
            nbytes=tensor.nbytes,
            chunks=tuple([ChunkEntry(*c[:3]) for c in tensor.chunks if 0 not in c.sizes]),
        )
