"""Tied weights of an EMA: averaged once, recorded in its `config`, and owed to the model under
every name.

A model whose head shares the embedding has both names in its state dict, and the averages hold one.
Without its other names such an EMA does not load strictly, and a live weight in their place would
overwrite the shared average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ema_ckpt.core.catalog import Catalog, Object, Tensor
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.core.names import EMA
from ema_ckpt.state_dicts.tree import Tree

_MAX_NBYTES = 64 * 1024


def with_aliases(catalog: Catalog, tree: Tree) -> Tree:
    """`tree` with each averaged weight under all the names that its `config` records, one entry for
    all of them.
    """
    tied = _tied(catalog, tree) if tree.role == EMA and tree.problem is None else {}
    if not tied:
        return tree
    named: dict[str, Tensor] = {}
    for name, tensor in tree.named.items():
        others = [other for other in tied.get(name, ()) if other not in tree.named]
        named |= dict.fromkeys([name, *others], tensor)
    return replace(tree, named=named)


def _tied(catalog: Catalog, tree: Tree) -> dict[str, list[str]]:
    """Other names by the name that is stored; empty where nothing readable records any."""
    entry = tree.settings.get("config")
    if not isinstance(entry, Object) or (entry.nbytes > _MAX_NBYTES and not entry.is_inline):
        return {}
    try:
        document = _document(catalog.reader.load(entry))
    except EmaCkptError:  # a config that cannot be read safely says nothing of ties
        return {}
    found = document.get("tied")
    tied = found.items() if isinstance(found, Mapping) else ()
    return {
        name: [other for other in others if isinstance(other, str)]
        for name, others in tied
        if _is_list(others)
    }


def _document(value: object) -> Mapping[object, object]:
    if isinstance(value, (str, bytes)):
        import json

        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, Mapping) else {}


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))
