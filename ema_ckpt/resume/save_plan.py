"""Who writes what: every rank lists the pieces it holds, rank 0 proves that they tile and gives
each to one rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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
from ema_ckpt.resume.flatten import Leaf, Path, Pieces

Key = tuple[str, Box | None]


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One thing this rank writes: a box of a tensor, or a pickled object."""

    name: str
    box: Box | None
    data: torch.Tensor | bytes


@dataclass(slots=True, eq=False)
class Listing:
    """What all ranks hold together, on rank 0: shape and dtype of each tensor, its boxes, and the
    objects.
    """

    paths: dict[str, Path] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    boxes: dict[str, dict[Box, int]] = field(default_factory=dict)  # and the rank that writes each
    objects: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Payload of all tensors, in bytes."""
        return sum(
            by_name(dtype).itemsize * sum(box.numel for box in self.boxes[name])
            for name, (_, dtype) in self.tensors.items()
        )


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """This rank's share of a save; `listing` is filled on rank 0 only."""

    items: tuple[Item, ...]
    listing: Listing


def plan(leaves: Sequence[Leaf], lowest: frozenset[str], ours: Channel, call: str) -> Plan:
    """Divide the writing of `leaves` among all ranks: what several hold is written once, near
    evenly in bytes.

    Args:
        lowest: names that the lowest rank holding them writes, since ranks may differ in them.

    Raises:
        StateError: `hole`, `overlap`, `out-of-bounds` or `index-mismatch`: the pieces of all ranks
            are no tensor.
    """
    gathered = ours.gather(json.dumps([_described(leaf) for leaf in leaves]).encode())
    listing, picks = run_on_all_ranks(
        ours, call, lambda: _divided(gathered, lowest) if ours.rank == 0 else (Listing(), [])
    )
    picked = set(json.loads(ours.scatter([json.dumps(pick).encode() for pick in picks])))
    items = [item for number, item in enumerate(_items(leaves)) if number in picked]
    return Plan(tuple(items), listing)


def _items(leaves: Iterable[Leaf]) -> Iterable[Item]:
    for leaf in leaves:
        if isinstance(leaf.value, Pieces):
            yield from (Item(leaf.name, box, view) for box, view in leaf.value.held)
        else:
            yield Item(leaf.name, None, leaf.value)


def _described(leaf: Leaf) -> list[Any]:
    if isinstance(leaf.value, bytes):
        return [leaf.path, None, None, []]
    boxes = [[box.offsets, box.sizes] for box, _ in leaf.value.held]
    return [leaf.path, leaf.value.shape, str(leaf.value.dtype).removeprefix("torch."), boxes]


def _divided(gathered: Sequence[bytes], lowest: frozenset[str]) -> tuple[Listing, list[list[int]]]:
    """The listing of all ranks, and the numbers of the items that each of them writes."""
    listing = Listing()
    holders: dict[Key, list[tuple[int, int]]] = {}  # rank and number of the item there
    for rank, data in enumerate(gathered):
        _add(listing, holders, rank, json.loads(data))
    for name in listing.tensors:
        _prove(listing, name)
    picks: list[list[int]] = [[] for _ in gathered]
    loads = [0] * len(gathered)
    for (name, box), held in holders.items():
        rank, number = held[0] if name in lowest else min(held, key=lambda place: loads[place[0]])
        picks[rank].append(number)
        loads[rank] += _settle(listing, name, box, rank)
    return listing, picks


def _add(
    listing: Listing, holders: dict[Key, list[tuple[int, int]]], rank: int, entries: list[Any]
) -> None:
    number = 0
    for path, shape, dtype, boxes in entries:
        name = ".".join(map(str, path))
        listing.paths.setdefault(name, tuple(path))
        if shape is None:
            listing.objects.setdefault(name, rank)
            holders.setdefault((name, None), []).append((rank, number))
            number += 1
            continue
        known = listing.tensors.setdefault(name, (tuple(shape), dtype))
        if known != (tuple(shape), dtype) or name in listing.objects:
            raise StateError(
                "index-mismatch",
                f"{name!r} is {dtype} {shape} on rank {rank}, but {known[1]} {list(known[0])} elsewhere",
            )
        held = listing.boxes.setdefault(name, {})
        for offsets, sizes in boxes:
            box = Box(tuple(offsets), tuple(sizes))
            held.setdefault(box, rank)
            holders.setdefault((name, box), []).append((rank, number))
            number += 1


def _settle(listing: Listing, name: str, box: Box | None, rank: int) -> int:
    """Note who writes an entry; its weight in bytes."""
    if box is None:
        listing.objects[name] = rank
        return 1
    listing.boxes[name][box] = rank
    return box.numel * by_name(listing.tensors[name][1]).itemsize


def _prove(listing: Listing, name: str) -> None:
    shape, dtype = listing.tensors[name]
    if name in listing.objects:
        raise StateError(
            "index-mismatch", f"{name!r} is a tensor on one rank and an object on another"
        )
    boxes = listing.boxes.get(name, {})
    chunks = tuple(Chunk(box.offsets, box.sizes, "?", 0, 0) for box in boxes)
    try:
        prove(Tensor(name, (name,), shape, by_name(dtype), chunks))
    except SourceError as error:
        raise StateError(
            error.code, f"{str(error).removeprefix('?: ')}: the ranks' pieces are no whole tensor"
        ) from None
