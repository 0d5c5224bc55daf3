"""Tied weights: names that a source shows to be one tensor, told by storage or by a record, never
by equal values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.write_plan import OutputTensor


def with_dropped(catalog: Catalog) -> Catalog:
    """The catalog with the names that its source says it dropped as tied
    (`safetensors.torch.save_model` does).
    """
    if not catalog.ties:
        return catalog
    tensors = {tensor.name: tensor for tensor in catalog.tensors}
    again = [
        replace(tensors[kept], name=dropped, path=_path_beside(tensors[kept].path, dropped))
        for dropped, kept in catalog.ties.items()
        if kept in tensors and dropped not in tensors
    ]
    return replace(catalog, tensors=(*catalog.tensors, *again)) if again else catalog


def dropped_names(
    catalog: Catalog, entries: Sequence[OutputTensor]
) -> tuple[dict[str, str], list[str]]:
    """What a safetensors target records of names that the source dropped: dropped → kept, as they
    are written.

    The second list has those for which it cannot, as their tensor was renamed.
    """
    if not catalog.ties:
        return {}, []
    written = {entry.source.name: entry.name for entry in entries}
    listed = {
        tensor.name for tensor in catalog.tensors
    }  # those are selected, or not, by themselves
    pairs, lost = {}, []
    for dropped, kept in catalog.ties.items():
        name = written.get(kept)
        if name is None or dropped in listed:
            continue
        head = kept[: len(kept) - len(name)]
        if kept == head + name and dropped.startswith(head):
            pairs[dropped[len(head) :]] = name
        else:
            lost.append(dropped)
    return pairs, lost


def _path_beside(path: tuple[str | int, ...], name: str) -> tuple[str | int, ...]:
    home = ".".join(map(str, path[:-1]))
    if not home:
        return (name,)
    return (
        (*path[:-1], name[len(home) + 1 :])
        if name.startswith(f"{home}.")
        else tuple(name.split("."))
    )
