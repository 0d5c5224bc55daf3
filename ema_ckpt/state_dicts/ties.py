"""Tied weights: names that a source records as one tensor, never those with merely equal values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ema_ckpt.core.catalog import Catalog, Ints, Tensor
from ema_ckpt.core.names import EMA, canonical
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.state_dicts.ema_config import with_tied_names
from ema_ckpt.state_dicts.tree import Tree


def with_dropped(catalog: Catalog) -> Catalog:
    """Add the tensors that the source dropped as tied (`safetensors.torch.save_model` does)."""
    tensors = {tensor.name: tensor for tensor in catalog.tensors}
    restored = []
    for dropped, kept in catalog.ties.items():
        if kept in tensors and dropped not in tensors:
            parents = tensors[kept].path[:-1]
            head = ".".join([*map(str, parents), ""])
            path = (*parents, dropped.removeprefix(head))
            if not dropped.startswith(head):
                path = tuple(dropped.split("."))
            restored.append(replace(tensors[kept], name=dropped, path=path))
    return replace(catalog, tensors=(*catalog.tensors, *restored)) if restored else catalog


def dropped_names(
    catalog: Catalog, entries: Sequence[OutputTensor]
) -> tuple[dict[str, str], list[str]]:
    """Map names that the source dropped as tied to the kept names, both as they are written.

    The second list has the dropped names that cannot be recorded, as their tensor was renamed.
    """
    pairs: dict[str, str] = {}
    lost: list[str] = []
    if not catalog.ties:
        return pairs, lost
    written = {entry.source.name: entry.name for entry in entries}
    # A dropped name that the catalog lists was selected, or not, by itself.
    listed = {tensor.name for tensor in catalog.tensors}
    for dropped, kept in catalog.ties.items():
        name = written.get(kept)
        if name is None or dropped in listed:
            continue
        head = kept[: len(kept) - len(name)]
        if kept == head + name and dropped.startswith(head):
            pairs[dropped.removeprefix(head)] = name
        else:
            lost.append(dropped)
    return pairs, lost


class Tied(NamedTuple):
    """The names of one weight, and its shape."""

    names: Sequence[str]
    shape: Ints


def with_all_names(
    catalog: Catalog, tree: Tree, live: Tree | None, fill_from: Tree | None = None
) -> Tree:
    """List each averaged weight of `tree` under all names that are recorded for it.

    Its configuration records them, `live`, which it averages, or else `fill_from`, of which it gets
    what it lacks.
    """
    ties = tied_names(live)
    if fill_from is not live:
        ties = tied_names(fill_from) | ties
    return with_ties_of(with_tied_names(catalog, tree), ties)


def tied_names(live: Tree | None) -> dict[str, Tied]:
    """Find the weights that a tree records under several names, by each of these."""
    if live is None or live.problem is not None:
        return {}
    by_place: dict[object, list[str]] = {}
    for name, tensor in live.weights.items():
        place = _place(tensor)
        if place is not None:
            by_place.setdefault(place, []).append(name)
    found: dict[str, Tied] = {}
    for names in by_place.values():
        if len(names) > 1:
            tied = Tied(names, live.weights[names[0]].shape)
            found.update(dict.fromkeys(map(canonical, names), tied))
    return found


def with_ties_of(tree: Tree, ties: Mapping[str, Tied]) -> Tree:
    """List each averaged weight of `tree` also under the names that live weights tie to its own.

    Averages are often kept by `named_parameters()`, which yields a tied weight once: under its
    other names the average is the same one, and a live weight must not fill its place.
    """
    if not ties or tree.role != EMA or tree.problem is not None:
        return tree
    present = set(map(canonical, tree.named))
    added: dict[str, Tensor] = {}
    done: set[int] = set()
    for name, average in tree.named.items():
        tied = ties.get(canonical(name))
        if tied is None or tied.shape != average.shape or id(tied) in done:
            continue
        done.add(id(tied))
        added |= {other: average for other in tied.names if canonical(other) not in present}
    return replace(tree, named={**tree.named, **added}) if added else tree


def _place(tensor: Tensor) -> object:
    """What tensors have in common that the source records as one; None if there is no such place.

    Tensors in a form that is not read have none: of these no bytes are located.
    """
    if tensor.refusal is not None or not tensor.numel:
        return None
    where: object = tensor.storage
    if tensor.storage is None:  # under a name that was dropped it has the same bytes of the file
        where = tuple([(chunk.file, chunk.offset) for chunk in tensor.chunks if chunk.nbytes])
    return (where, tensor.shape, tensor.dtype.name) if where else None
