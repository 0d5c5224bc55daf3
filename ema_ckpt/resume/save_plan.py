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
    holders: dict[tuple[str, Box | None], list[tuple[int, int]]] = field(default_factory=dict)
    nbytes: int = 0  # of all tensors

    def add(self, rank: int, entries: list[Any]) -> None:
        """Add what a rank holds.

        Raises:
            StateError: `index-mismatch` if a name has another shape or dtype on another rank.
        """
        number = 0
        for path, shape, dtype, items in entries:
            name = ".".join(map(str, path))
            spec = None if shape is None else (tuple(shape), dtype)
            self.paths.setdefault(name, tuple(path))
            first = self.specs.setdefault(name, spec)
            if first != spec:
                if first is None or spec is None:
                    message = "is a tensor on one rank and an object on another"
                else:
                    message = f"is {dtype} {shape} on rank {rank}, but {first[1]} {list(first[0])}"
                    message = f"{message} elsewhere"
                raise StateError("index-mismatch", f"{name!r} {message}")
            for item in items:
                box = None if item is None else Box(tuple(item[0]), tuple(item[1]))
                self.holders.setdefault((name, box), []).append((rank, number))
                number += 1

    def prove_tiling(self) -> None:
        """Prove that the boxes of every tensor tile it.

        Raises:
            StateError: `hole`, `overlap` or `out-of-bounds`.
        """
        chunks: dict[str, list[Chunk]] = {}
        for name, box in self.holders:
            if box is not None:
                chunks.setdefault(name, []).append(Chunk(box.offsets, box.sizes, "?", 0, 0))
        for name, spec in self.specs.items():
            if spec is None:
                continue
            shape, dtype = spec[0], by_name(spec[1])
            try:
                prove(Tensor(name, (name,), shape, dtype, tuple(chunks.get(name, ()))))
            except SourceError as error:
                reason = str(error).removeprefix("?: ")
                message = f"{reason}: the ranks' pieces are no whole tensor"
                raise StateError(error.code, message) from None

    def assign_writers(self, world_size: int) -> list[list[int]]:
        """Number the items that each rank writes: of replicas the lowest one's.

        So live value, average and moments of a parameter are one rank's, where replicas differ.
        """
        numbers: list[list[int]] = [[] for _ in range(world_size)]
        for (name, box), holders in self.holders.items():
            rank, number = holders[0]
            numbers[rank].append(number)
            spec = self.specs[name]
            if box is not None and spec is not None:
                self.nbytes += box.numel * by_name(spec[1]).itemsize
        return numbers


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


def plan_save(leaves: Sequence[Leaf], ranks: Channel, call: str) -> SavePlan:
    """Divide the writing of `leaves` among all ranks: replicas once, by the lowest of them.

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
        listing = GlobalListing()
        for rank, data in enumerate(gathered):
            listing.add(rank, json.loads(data))
        listing.prove_tiling()
        return listing, listing.assign_writers(len(gathered))

    listing, numbers = run_on_all_ranks(ranks, call, divide)
    mine = json.loads(ranks.scatter([json.dumps(part).encode() for part in numbers]))
    return SavePlan(tuple(items[number] for number in sorted(mine)), listing)
