"""Tied weights: names that a source records as one tensor, never those with merely equal values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.write_plan import OutputTensor


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
