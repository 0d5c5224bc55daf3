"""Tied weights: names that a source records as one tensor, never those with merely equal values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.names import EMA, canonical
from ema_ckpt.core.write_plan import OutputTensor
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


def with_ties_of(tree: Tree, live: Tree | None) -> Tree:
    """List each averaged weight of `tree` also under the names that the live tree ties to its own.

    Averages are often kept by `named_parameters()`, which yields a tied weight once: under its
    other names the average is the same one, and a live weight must not fill its place.
    """
    if live is None or live.problem is not None or tree.role != EMA or tree.problem is not None:
        return tree
    averages = {canonical(name): tensor for name, tensor in tree.named.items()}
    missing = [name for name in live.weights if canonical(name) not in averages]
    averaged = _averages_by_place(averages, live) if missing else {}
    named = dict(tree.named)
    for name in missing:
        average = averaged.get(_place(live.weights[name]))
        if average is not None:
            named[name] = average
    return replace(tree, named=named) if len(named) > len(tree.named) else tree


def _averages_by_place(averages: Mapping[str, Tensor], live: Tree) -> dict[object, Tensor]:
    found: dict[object, Tensor] = {}
    for name, tensor in live.weights.items():
        average = averages.get(canonical(name))
        if average is not None and tensor.numel and average.shape == tensor.shape:
            found.setdefault(_place(tensor), average)
    return found


def _place(tensor: Tensor) -> object:
    """What tensors have in common that the source records as one."""
    where: object = tensor.storage
    if tensor.storage is None:  # under a name that was dropped it has the same bytes of the file
        where = tuple((chunk.file, chunk.offset) for chunk in tensor.chunks[:1])
    return where, tensor.shape, tensor.dtype.name
