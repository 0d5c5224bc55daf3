"""The union of what all ranks hold, on rank 0: do the pieces tile, and which rank gives each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ema_ckpt.comm.channel import Channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.core.box import Box
from ema_ckpt.core.catalog import Chunk, Tensor
from ema_ckpt.core.coverage import HOLE_REMEDY, prove
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import SourceError, StateError

Path = tuple[str | int, ...]
# What a rank holds under one path: path, shape and dtype (None of an object), then of each piece
# offsets and sizes, or None for an object.
Entry = tuple[Path, Sequence[int] | None, str | None, Sequence[Any]]


@dataclass(slots=True, eq=False)
class GlobalListing:
    """Union of all ranks' states, by name, on rank 0; empty elsewhere.

    Attributes:
        specs: shape and dtype of a tensor; None for an object.
        holders: the ranks that hold an item, lowest first, and its number there.
    """

    paths: dict[str, Path] = field(default_factory=dict)
    specs: dict[str, tuple[tuple[int, ...], str] | None] = field(default_factory=dict)
    holders: dict[tuple[str, Box | None], list[tuple[int, int]]] = field(default_factory=dict)
    first_ranks: dict[str, int] = field(default_factory=dict)  # that have a name
    nbytes: int = 0  # of all tensors

    def add(self, rank: int, entries: list[Any], code: str) -> None:
        """Add what a rank holds; `code` is that of the error.

        Raises:
            StateError: a name has another shape or dtype on another rank.
        """
        number = 0
        for path, shape, dtype, items in entries:
            name = ".".join(map(str, path))
            spec = None if shape is None else (tuple(shape), dtype)
            self.paths.setdefault(name, tuple(path))
            first_rank = self.first_ranks.setdefault(name, rank)
            first = self.specs.setdefault(name, spec)
            if first != spec:
                kinds = f"{_kind(spec)} on rank {rank}, but {_kind(first)} on rank {first_rank}"
                raise StateError(
                    code,
                    f"{name!r} is {kinds}: give what a rank has of its own a name of its own, and"
                    " make DTensors of uneven pieces with shape= and stride=",
                    tensor=name,
                )
            for item in items:
                box = None if item is None else Box(tuple(item[0]), tuple(item[1]))
                self.holders.setdefault((name, box), []).append((rank, number))
                number += 1

    def refuse_nested(self, code: str) -> None:
        """Refuse a name under which one rank has a value, and another rank more names.

        Raises:
            StateError: with that code.
        """
        for name, path in self.paths.items():
            for length in range(1, len(path)):
                outer = ".".join(map(str, path[:length]))
                if self.paths.get(outer) == path[:length]:
                    one, other = self.first_ranks[outer], self.first_ranks[name]
                    raise StateError(
                        code,
                        f"{outer!r} is a value on rank {one}, and holds {name!r} on rank {other}:"
                        " give what a rank has of its own a name of its own",
                        tensor=outer,
                    )

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
                reason = str(error).removeprefix("?: ").removesuffix(f"; {HOLE_REMEDY}")
                reason = reason.removesuffix("; the rest is in '?'")  # pieces are in no file yet
                message = f"{reason}: the ranks' pieces are no whole tensor"
                raise StateError(error.code, message) from None

    def assign_senders(self, world_size: int) -> list[list[int]]:
        """Number the items that each rank gives: of replicas the lowest one's.

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


def gather_listing(
    entries: Sequence[Entry], ranks: Channel, call: str, code: str = "index-mismatch"
) -> GlobalListing:
    """Unite what all ranks hold; collective.

    Raises:
        StateError: of that code: a name has another shape or dtype on another rank.
    """
    gathered = ranks.gather(json.dumps(entries).encode())

    def unite() -> GlobalListing:
        listing = GlobalListing()
        for rank, data in enumerate(gathered):
            listing.add(rank, json.loads(data), code)
        listing.refuse_nested(code)
        return listing

    return run_on_all_ranks(ranks, call, unite)


def divide(listing: GlobalListing, ranks: Channel, call: str) -> list[int]:
    """Return the numbers of the items that this rank gives, in the listing's order; collective.

    Raises:
        StateError: `hole`, `overlap` or `out-of-bounds`: the pieces of all ranks make no whole
            tensor.
    """

    def assign() -> list[list[int]]:
        listing.prove_tiling()
        return listing.assign_senders(ranks.size)

    numbers = run_on_all_ranks(ranks, call, assign)
    mine: list[int] = json.loads(ranks.scatter([json.dumps(part).encode() for part in numbers]))
    return mine


def _kind(spec: tuple[tuple[int, ...], str] | None) -> str:
    return "an object" if spec is None else f"{spec[1]} {list(spec[0])}"
