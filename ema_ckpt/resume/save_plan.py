"""Plan a save: rank 0 proves that the shards of all ranks tile and gives each to one rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ema_ckpt.comm.channel import Channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.core.box import Box
from ema_ckpt.core.catalog import Chunk, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import SourceError, StateError
from ema_ckpt.resume.flatten import Leaf, Path

Key = tuple[str, Box | None]  # name of a tensor and a box of it, or of an object


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One thing this rank writes: a box of a tensor, or a pickled object."""

    name: str
    box: Box | None
    data: torch.Tensor | bytes


@dataclass(slots=True, eq=False)
class GlobalListing:
    """Union of all ranks' states, by name, on rank 0.

    Attributes:
        specs: shape and dtype of a tensor; None for an object.
        holders: the ranks that hold an item, and its number there.
    """

    paths: dict[str, Path] = field(default_factory=dict)
    specs: dict[str, tuple[tuple[int, ...], str] | None] = field(default_factory=dict)
    holders: dict[Key, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Payload of all tensors, in bytes."""
        return sum(self.nbytes_of(key) for key in self.holders if key[1] is not None)

    def nbytes_of(self, key: Key) -> int:
        """Payload of one item, in bytes; an object counts as one."""
        name, box = key
        spec = self.specs[name]
        return 1 if box is None or spec is None else box.numel * by_name(spec[1]).itemsize


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


def plan_save(
    leaves: Sequence[Leaf], lowest: frozenset[str], ranks: Channel, call: str
) -> SavePlan:
    """Divide the writing of `leaves` among all ranks: replicas once, near evenly in bytes.

    Args:
        lowest: names that the lowest rank holding them writes, since ranks may differ in them.

    Raises:
        StateError: `hole`, `overlap`, `out-of-bounds` or `index-mismatch`: the shards of all ranks
            make no whole tensor.
    """
    items: list[Item] = []
    described: list[list[Any]] = []  # path, shape and dtype of a tensor, items
    for leaf in leaves:
        if isinstance(leaf.value, bytes):
            items.append(Item(leaf.name, None, leaf.value))
            described.append([leaf.path, None, None, [None]])
            continue
        items += [Item(leaf.name, box, view) for box, view in leaf.value.shards]
        boxes = [[box.offsets, box.sizes] for box, _ in leaf.value.shards]
        dtype = str(leaf.value.dtype).removeprefix("torch.")
        described.append([leaf.path, leaf.value.shape, dtype, boxes])
    gathered = ranks.gather(json.dumps(described).encode())

    def divide() -> tuple[GlobalListing, list[list[int]]]:
        if ranks.rank:
            return GlobalListing(), []
        listing = _merge_listings([json.loads(data) for data in gathered])
        return listing, _assign_writers(listing, len(gathered), lowest)

    listing, numbers = run_on_all_ranks(ranks, call, divide)
    mine = json.loads(ranks.scatter([json.dumps(part).encode() for part in numbers]))
    return SavePlan(tuple(items[number] for number in sorted(mine)), listing)


def _merge_listings(gathered: list[list[Any]]) -> GlobalListing:
    """Merge what the ranks hold, and prove that the boxes of every tensor tile it."""
    listing = GlobalListing()
    for rank, entries in enumerate(gathered):
        number = 0
        for path, shape, dtype, items in entries:
            name = ".".join(map(str, path))
            spec = None if shape is None else (tuple(shape), dtype)
            listing.paths.setdefault(name, tuple(path))
            first = listing.specs.setdefault(name, spec)
            if first is None or spec is None:
                if first is not spec:
                    message = f"{name!r} is a tensor on one rank and an object on another"
                    raise StateError("index-mismatch", message)
            elif first != spec:
                message = f"{name!r} is {dtype} {shape} on rank {rank}"
                other = f"{first[1]} {list(first[0])} elsewhere"
                raise StateError("index-mismatch", f"{message}, but {other}")
            for item in items:
                box = None if item is None else Box(tuple(item[0]), tuple(item[1]))
                listing.holders.setdefault((name, box), []).append((rank, number))
                number += 1
    chunks: dict[str, list[Chunk]] = {}
    for name, box in listing.holders:
        if box is not None:
            chunks.setdefault(name, []).append(Chunk(box.offsets, box.sizes, "?", 0, 0))
    for name, spec in listing.specs.items():
        if spec is None:
            continue
        shape, dtype = spec
        try:
            prove(Tensor(name, (name,), shape, by_name(dtype), tuple(chunks.get(name, ()))))
        except SourceError as error:
            reason = str(error).removeprefix("?: ")
            message = f"{reason}: the ranks' pieces are no whole tensor"
            raise StateError(error.code, message) from None
    return listing


def _assign_writers(
    listing: GlobalListing, world_size: int, lowest: frozenset[str]
) -> list[list[int]]:
    """Numbers of the items that each rank writes: of replicas the rank with the least bytes."""
    numbers: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for key, holders in listing.holders.items():
        rank, number = holders[0]
        if key[0] not in lowest:
            rank, number = min(holders, key=lambda holder: loads[holder[0]])
        numbers[rank].append(number)
        loads[rank] += listing.nbytes_of(key)
    return numbers
