"""Whole tensors on rank 0 from the pieces of all ranks, one tensor at a time and without touching
the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ema_ckpt.comm.channel import Channel, open_channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.comm.rendezvous import meet
from ema_ckpt.core.box import Box
from ema_ckpt.core.errors import StateError
from ema_ckpt.core.text import shown
from ema_ckpt.ema.checkpoint.local_shards_tensor import pieces_of
from ema_ckpt.ema.model.live import live_tree
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.ema.swap import refuse_inside

if TYPE_CHECKING:
    from ema_ckpt.ema.manager import ShardedEMA

_CALL = "full_state_dict"


def gather_full(ema: ShardedEMA, complete: bool, timeout: float) -> dict[str, Any]:
    """See `ShardedEMA.full_state_dict`."""
    meet(_CALL, timeout)
    ours = open_channel("gather")
    weights, live = run_on_all_ranks(ours, _CALL, lambda: _held(ema, complete))
    names = {name: slot.shard.fqn for slot in ema.averages.shadows for name in slot.shard.names}
    averaged = {fqn: weights[fqn] for fqn in dict.fromkeys(names.values()) if fqn in weights}
    if not complete:
        return gather_tensors(averaged, ours)
    # A tied tensor is gathered once, under the first of its names.
    first = {id(value): name for name, value in reversed(live.items())}
    names = {name: names.get(name, first[id(value)]) for name, value in live.items()}
    rest = {
        name: value for name, value in live.items() if names[name] == name and name not in averaged
    }
    whole = gather_tensors(
        {**averaged, **{n: v for n, v in rest.items() if isinstance(v, torch.Tensor)}}, ours
    )
    return (
        {name: whole.get(names[name], value) for name, value in live.items()}
        if not ours.rank
        else {}
    )


def _held(ema: ShardedEMA, complete: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The averages that this rank holds, and with `complete` the live model."""
    refuse_inside(ema.model, f"{_CALL}()")
    return ema.state_dict()["weights"], live_tree(scan_model(ema.model)) if complete else {}


def gather_tensors(tensors: Mapping[str, torch.Tensor], ours: Channel) -> dict[str, torch.Tensor]:
    """On rank 0 each tensor whole and on the host; `{}` elsewhere. Collective, with the same names
    on all ranks.

    Raises:
        StateError: `hole`: the pieces of all ranks do not make a tensor whole.
    """
    held = {name: pieces_of(tensor) for name, tensor in tensors.items()}
    mine = {name: [[box.offsets, box.sizes] for box, _ in pieces] for name, pieces in held.items()}
    gathered = [json.loads(data) for data in ours.gather(json.dumps(mine).encode())]
    senders = {name: _senders(name, gathered) for name in tensors} if not ours.rank else {}
    holes = [
        name
        for name, found in senders.items()
        if sum(box.numel for box in found) != tensors[name].numel()
    ]
    told = json.loads(
        ours.scatter(
            [json.dumps([holes, _orders(senders, rank)]).encode() for rank in range(len(gathered))]
        )
    )
    if told[0]:
        raise StateError("hole", f"the ranks' pieces do not make whole tensors of {shown(told[0])}")
    for name, index in told[1] if ours.rank else []:
        ours.send(held[name][index][1].detach().cpu().contiguous(), 0)
    return {
        name: _received(tensors[name], held[name], found, ours) for name, found in senders.items()
    }


def _senders(name: str, gathered: Sequence[Mapping[str, Any]]) -> dict[Box, tuple[int, int]]:
    """For each box of a tensor the lowest rank that holds it, and the number of the piece there."""
    found: dict[Box, tuple[int, int]] = {}
    for rank, listing in enumerate(gathered):
        for index, (offsets, sizes) in enumerate(listing.get(name, [])):
            found.setdefault(Box(tuple(offsets), tuple(sizes)), (rank, index))
    return found


def _orders(
    senders: Mapping[str, Mapping[Box, tuple[int, int]]], rank: int
) -> list[tuple[str, int]]:
    """What a rank has to send, in the order in which rank 0 receives it."""
    return [
        (name, index)
        for name, found in senders.items()
        for holder, index in found.values()
        if holder == rank
    ]


def _received(
    tensor: torch.Tensor,
    held: Sequence[tuple[Box, torch.Tensor]],
    senders: Mapping[Box, tuple[int, int]],
    ours: Channel,
) -> torch.Tensor:
    """Put a tensor together on rank 0."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for box, (rank, index) in senders.items():
        target = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        if not rank:
            target.copy_(held[index][1])
            continue
        part = torch.empty(box.sizes, dtype=tensor.dtype)
        ours.receive(part, rank)
        target.copy_(part)
    return whole
