"""Whole tensors on rank 0 from the pieces of all ranks, one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ema_ckpt.comm.channel import Channel, open_channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.comm.rendezvous import meet
from ema_ckpt.core.box import Box
from ema_ckpt.core.errors import StateError
from ema_ckpt.core.text import shown
from ema_ckpt.ema.checkpoint.local_shards_tensor import box_of, pieces_of
from ema_ckpt.ema.model.shards import Shadow

# Of a tensor: for each box the lowest rank that holds it, and the number of the piece there.
_Senders = dict[Box, tuple[int, int]]


def gather_full(
    call: str,
    read: Callable[[], tuple[Sequence[Shadow], dict[str, Tensor], dict[str, Any]]],
    timeout: float,
) -> dict[str, Any]:
    """Return on rank 0 the averages whole, and under the live model's names if there is one.

    Collective. `read` returns the shadows, their averages by name, and the live model's tree or {};
    `timeout` is in seconds.
    """
    meet(call, timeout)
    channel = open_channel("gather")
    shadows, weights, live = run_on_all_ranks(channel, call, read)
    fqns = {name: shadow.shard.fqn for shadow in shadows for name in shadow.shard.names}
    tensors = {fqn: weights[fqn] for fqn in dict.fromkeys(fqns.values()) if fqn in weights}
    if not live:
        return gather_tensors(tensors, channel)
    _add_live(live, fqns, tensors)
    gathered = gather_tensors(tensors, channel)
    if channel.rank:
        return {}
    return {name: gathered.get(fqns[name], value) for name, value in live.items()}


def _add_live(live: Mapping[str, Any], fqns: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Add what is not averaged; a tied tensor is gathered once, under the first of its names."""
    first_names: dict[int, str] = {}
    for name, value in live.items():
        first = first_names.setdefault(id(value), name)
        fqns.setdefault(name, first)
        if fqns[name] == name and isinstance(value, Tensor):
            tensors.setdefault(name, value)


def gather_tensors(tensors: Mapping[str, Tensor], channel: Channel) -> dict[str, Tensor]:
    """Return on rank 0 each tensor whole and on the host; `{}` elsewhere.

    Collective, with the same names on all ranks.

    Raises:
        StateError: `hole`: the pieces of all ranks do not make a tensor whole.
    """
    pieces = {name: pieces_of(tensor) for name, tensor in tensors.items()}
    senders, holes, numbers_to_send = _agree(tensors, pieces, channel)
    if holes:
        raise StateError("hole", f"the ranks' pieces do not make whole tensors of {shown(holes)}")
    if channel.rank:
        for name, number in numbers_to_send:
            channel.send(pieces[name][number][1].detach().cpu().contiguous(), 0)
        return {}
    return {name: _receive(tensors[name], pieces[name], senders[name], channel) for name in tensors}


def _agree(
    tensors: Mapping[str, Tensor],
    pieces: Mapping[str, Sequence[tuple[Box, Tensor]]],
    channel: Channel,
) -> tuple[dict[str, _Senders], list[str], list[tuple[str, int]]]:
    """Return rank 0's senders, the tensors with holes, and the pieces that this rank is to send."""
    boxes = {name: [box for box, _ in tensor_pieces] for name, tensor_pieces in pieces.items()}
    listings = [json.loads(data) for data in channel.gather(json.dumps(boxes).encode())]
    senders: dict[str, _Senders] = {}
    plans: list[tuple[list[str], list[tuple[str, int]]]] = []
    if not channel.rank:
        senders = {name: _senders(name, listings) for name in tensors}
        plans = _plans(tensors, senders, len(listings))
    plan = channel.scatter([json.dumps(plan).encode() for plan in plans])
    holes, numbers = json.loads(plan)
    return senders, holes, numbers


def _senders(name: str, listings: Sequence[Mapping[str, Any]]) -> _Senders:
    senders: _Senders = {}
    for rank, listing in enumerate(listings):
        for number, (offsets, sizes) in enumerate(listing.get(name, [])):
            senders.setdefault(Box(tuple(offsets), tuple(sizes)), (rank, number))
    return senders


def _plans(
    tensors: Mapping[str, Tensor], senders: Mapping[str, _Senders], size: int
) -> list[tuple[list[str], list[tuple[str, int]]]]:
    """Return per rank the tensors with holes, and the pieces to send, as rank 0 receives them."""
    holes: list[str] = []
    pieces: list[list[tuple[str, int]]] = [[] for _ in range(size)]
    for name, tensor_senders in senders.items():
        if sum(box.numel for box in tensor_senders) != tensors[name].numel():
            holes.append(name)
        for rank, number in tensor_senders.values():
            pieces[rank].append((name, number))
    return [(holes, rank_pieces) for rank_pieces in pieces]


def _receive(
    tensor: Tensor, pieces: Sequence[tuple[Box, Tensor]], senders: _Senders, channel: Channel
) -> Tensor:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for box, (rank, number) in senders.items():
        part = pieces[number][1] if not rank else torch.empty(box.sizes, dtype=tensor.dtype)
        if rank:
            channel.receive(part, rank)
        box_of(whole, box).copy_(part)
    return whole
