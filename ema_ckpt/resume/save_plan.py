"""Plan a save: what this rank holds, and which of it this rank writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ema_ckpt.comm.channel import Channel
from ema_ckpt.core.box import Box
from ema_ckpt.ema.checkpoint.listing import Entry, GlobalListing, divide
from ema_ckpt.resume.flatten import Leaf


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One thing this rank writes: a box of a tensor, or a pickled object."""

    name: str
    box: Box | None
    data: torch.Tensor | bytes


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """The items that this rank writes; `listing` is filled on rank 0 only."""

    items: tuple[Item, ...]
    listing: GlobalListing

    def on_host(self) -> SavePlan:
        """Copy every tensor to the host, so that training may go on."""
        items = []
        for item in self.items:
            if isinstance(item.data, torch.Tensor):
                data = item.data.detach().to("cpu", copy=True)
                items.append(Item(item.name, item.box, data))
            else:
                items.append(item)
        return SavePlan(tuple(items), self.listing)


def entries_of(leaves: Sequence[Leaf]) -> list[Entry]:
    """List what this rank holds, for the listing of all ranks."""
    entries: list[Entry] = []
    for leaf in leaves:
        if isinstance(leaf.value, bytes):
            entries.append((leaf.path, None, None, [None]))
            continue
        boxes = [box for box, _ in leaf.value.shards]
        dtype = str(leaf.value.dtype).removeprefix("torch.")
        entries.append((leaf.path, leaf.value.shape, dtype, boxes))
    return entries


def plan_save(
    leaves: Sequence[Leaf], listing: GlobalListing, ranks: Channel, call: str
) -> SavePlan:
    """Divide the writing of `leaves` among all ranks: replicas once, by the lowest of them.

    Raises:
        StateError: `hole`, `overlap` or `out-of-bounds`: the shards of all ranks make no whole
            tensor.
    """
    items: list[Item] = []
    for leaf in leaves:
        if isinstance(leaf.value, bytes):
            items.append(Item(leaf.name, None, leaf.value))
        else:
            items += [Item(leaf.name, box, view) for box, view in leaf.value.shards]
    numbers = divide(listing, ranks, call)
    return SavePlan(tuple(items[number] for number in sorted(numbers)), listing)
