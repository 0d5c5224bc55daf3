"""Whole tensors on rank 0 from the pieces of all ranks, one at a time."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ema_ckpt.comm.channel import Channel, leaving_together
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.comm.rendezvous import meet_and_connect, one_call_at_a_time
from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.errors import StateError
from ema_ckpt.ema.checkpoint.agreement import checksum, compare_values, find_unproven
from ema_ckpt.ema.checkpoint.listing import Entry, GlobalListing, divide, gather_listing
from ema_ckpt.ema.checkpoint.local_shards_tensor import box_of, pieces_of
from ema_ckpt.ema.model.shards import TrackedShard


@dataclass(frozen=True, slots=True, eq=False)
class FullState:
    """What one rank gives to a full state dict.

    Attributes:
        values: tensors of global shape and other values, in order; the names of a tied tensor have
            one and the same.
        parameters: the shards of those that are parameters.
    """

    values: Mapping[str, Any]
    parameters: Sequence[TrackedShard]


def gather_full(call: str, read: Callable[[], FullState], timeout: float) -> dict[str, Any]:
    """Return on rank 0 the values of all ranks whole and on the host, `{}` elsewhere; collective.

    Their order is that of rank 0, then what rank 1 has beside it, and so on: the stages of a
    pipeline follow each other. `timeout` is in seconds.

    Raises:
        StateError: `name-collision`: one name has different shapes or values on ranks that are no
            declared replicas; `hole`: the pieces of all ranks do not make a tensor whole.
    """
    with one_call_at_a_time(call, "gather"), leaving_together("gather"):
        channel = meet_and_connect(call, "gather", timeout)
        state = run_on_all_ranks(channel, call, read)
        firsts = _first_names(state.values, channel)
        values = {name: value for name, value in state.values.items() if firsts[name] == name}
        items: list[_Item] = []
        for name, value in values.items():
            items += [_Item(name, box, part) for box, part in _pieces(value)]
        listing = gather_listing(_entries(values, items), channel, call, "name-collision")
        _compare_replicas(state, listing, items, channel, call)
        mine = [items[number] for number in divide(listing, channel, call)]
        # All memory is taken here: a rank without enough of it can still tell the others.
        given = run_on_all_ranks(
            channel, call, lambda: [item.prepared(channel.rank) for item in mine]
        )
        memory = run_on_all_ranks(channel, call, lambda: _reserve(listing, given, channel.rank))
        if channel.rank:
            for value in given:
                _send(value, memory, channel)
            return {}
        whole_values = _receive_all(listing, items, memory, channel)
        return {name: whole_values[first] for name, first in firsts.items()}


class _Item(NamedTuple):
    """One piece of a tensor, or another value, that this rank may have to give."""

    name: str
    box: Box | None  # None: no tensor
    value: Any

    def prepared(self, rank: int) -> Any:
        """Return the value, pickled if it is no tensor and goes to another rank."""
        if isinstance(self.value, Tensor) or not rank:
            return self.value
        stream = io.BytesIO()
        torch.save(self.value, stream)
        data = stream.getvalue()
        try:
            torch.load(io.BytesIO(data), weights_only=True)
        except Exception as error:
            raise StateError(
                "unsupported",
                f"{self.name!r} holds more than plain values and tensors: it is not sent to rank 0;"
                " pass complete=False",
            ) from error
        return data


def _first_names(values: Mapping[str, Any], channel: Channel) -> dict[str, str]:
    """Return all ranks' names in order, each with the first name of the tensor it is tied to."""
    first_names: dict[int, str] = {}
    mine = [[name, first_names.setdefault(id(value), name)] for name, value in values.items()]
    firsts: dict[str, str] = {}
    for names in channel.exchange_if_different(mine) or [mine]:
        for name, first in names:
            firsts.setdefault(name, firsts.get(first, first))
    return firsts


def _pieces(value: Any) -> Sequence[tuple[Box | None, Any]]:
    """Return the boxes that this rank holds of a tensor; of another value that itself."""
    if not isinstance(value, Tensor):
        return [(None, value)]
    if not value.numel():  # on every rank, so that its shape is known
        return [(whole(value.shape), torch.empty(value.shape, dtype=value.dtype))]
    return pieces_of(value)


def _entries(values: Mapping[str, Any], items: Sequence[_Item]) -> list[Entry]:
    boxes: dict[str, list[Box | None]] = {name: [] for name in values}
    for item in items:
        boxes[item.name].append(item.box)
    entries: list[Entry] = []
    for name, value in values.items():
        shape, dtype = None, None
        if isinstance(value, Tensor):
            shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        entries.append(((name,), shape, dtype, boxes[name]))
    return entries


def _compare_replicas(
    state: FullState, listing: GlobalListing, items: Sequence[_Item], channel: Channel, call: str
) -> None:
    """Compare parameters that several ranks hold and no wrapper keeps equal; collective."""
    unproven = find_unproven(listing, "", state.parameters, channel)
    checksums: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for item in items:
        if item.name in unproven.names and item.box is not None:
            part = (item.box.offsets, checksum(item.value))
            checksums.setdefault(item.name, []).append(part)
    compare_values(list(checksums.items()), unproven, unproven.names, channel, call)


class _Memory(NamedTuple):
    """What a rank needs for the exchange: whole tensors on rank 0, and room for one piece."""

    tensors: dict[str, Tensor]
    scratch: Tensor

    def piece(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the room for a piece as a tensor."""
        nbytes = prod(shape) * dtype.itemsize
        return self.scratch[:nbytes].view(dtype).view(tuple(shape))


def _reserve(listing: GlobalListing, given: Sequence[Any], rank: int) -> _Memory:
    """Take the memory that this rank needs: to receive on rank 0, to send on others."""
    tensors: dict[str, Tensor] = {}
    nbytes = 0
    if rank:
        sizes = [v.nbytes for v in given if isinstance(v, Tensor) and not _is_ready(v)]
        nbytes = max(sizes, default=0)
    else:
        for (name, box), holders in listing.holders.items():
            spec = listing.specs[name]
            if box is not None and spec is not None:
                dtype = getattr(torch, spec[1])
                if name not in tensors:
                    tensors[name] = torch.empty(spec[0], dtype=dtype)
                if holders[0][0]:
                    nbytes = max(nbytes, box.numel * dtype.itemsize)
    return _Memory(tensors, torch.empty(nbytes, dtype=torch.uint8))


def _is_ready(value: Tensor) -> bool:
    """Return whether a tensor can be sent as it lies in memory."""
    is_marked = value.is_conj() or value.is_neg()
    return value.device.type == "cpu" and value.is_contiguous() and not is_marked


def _send(value: Tensor | bytes, memory: _Memory, channel: Channel) -> None:
    if isinstance(value, bytes):
        channel.send(torch.tensor([len(value)]), 0)
        channel.send(torch.frombuffer(bytearray(value), dtype=torch.uint8), 0)
        return
    value = value.detach().as_subclass(Tensor)
    if not _is_ready(value):
        value = memory.piece(value.shape, value.dtype).copy_(value)
    channel.send(value, 0)


def _receive_all(
    listing: GlobalListing, items: Sequence[_Item], memory: _Memory, channel: Channel
) -> dict[str, Any]:
    """Put together what this rank has and what the others send."""
    values: dict[str, Any] = {}
    for (name, box), holders in listing.holders.items():
        rank, number = holders[0]
        if box is None or name not in memory.tensors:
            values[name] = _receive_object(rank, channel) if rank else items[number].value
            continue
        value = values[name] = memory.tensors[name]
        if rank:
            part = memory.piece(box.sizes, value.dtype)
            channel.receive(part, rank)
        else:
            part = items[number].value
        box_of(value, box).copy_(part)
    return values


def _receive_object(rank: int, channel: Channel) -> Any:
    nbytes = torch.zeros(1, dtype=torch.int64)
    channel.receive(nbytes, rank)
    data = torch.empty(int(nbytes), dtype=torch.uint8)
    channel.receive(data, rank)
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
