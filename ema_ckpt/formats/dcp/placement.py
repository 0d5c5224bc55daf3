"""Which rank writes what several ranks hold alike, as torch's save planner decides it.

Ranks without rows of a tensor all hold the same empty piece, and the planner keeps one of these on
the rank with the least to write so far (`torch/distributed/checkpoint/_dedup_save_plans.py`): it
goes through the items of rank 0, then of rank 1 and so on, counts a whole tensor's bytes for each
piece of it and 1 for an object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """A tensor or object of the state dict: `nbytes` of the whole; `rows` on dim 0 if it is split,
    else None.
    """

    name: str
    nbytes: int
    rows: int | None


def idle_homes(items: Sequence[PlannedItem], world_size: int) -> dict[str, int]:
    """The rank that writes the empty piece of each split tensor; -1 where every rank has rows.

    `items` are in the order of the state dict.
    """
    homes: dict[str, int] = {}
    first_idle = [
        world_size if item.rows is None else _used_ranks(item.rows, world_size) for item in items
    ]
    loads = [0] * world_size
    for rank in sorted({0, *(rank for rank in first_idle if rank < world_size)}):
        # What other ranks write of their own comes to count only after the ranks that are chosen
        # from here.
        for item, idle in zip(items, first_idle, strict=True):
            if item.rows is None:
                home = min(range(world_size), key=loads.__getitem__) if rank == 0 else None
            elif idle == rank:
                home = homes[item.name] = min(range(rank, world_size), key=loads.__getitem__)
            else:
                home = rank if rank < idle else None
            if home is not None:
                loads[home] += item.nbytes or 1
    return {item.name: homes.get(item.name, -1) for item in items}


def _used_ranks(rows: int, world_size: int) -> int:
    """How many ranks get rows when each takes `ceil(rows / world_size)`."""
    return -(-rows // -(-rows // world_size)) if rows else 0
