"""Whole local shards from averages that are divided over replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ema_ckpt.comm.rendezvous import meet
from ema_ckpt.core.box import flat_range_boxes
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.ema.checkpoint.local_shards_tensor import box_of
from ema_ckpt.ema.model.placement import replica_part
from ema_ckpt.ema.model.shards import ReplicaGroup, Shadow

# What each replica sends at a time; the scratch is this times one more than their number.
_MESSAGE_NBYTES = 8 << 20

_Piece = tuple[
    Shadow, int, int
]  # elements [offset, offset + length) of each replica's part of a slot


def meet_replicas(
    slots: Sequence[Shadow], call: str, timeout: float, failure: Exception | None
) -> None:
    """Return once all replicas that divide one of `slots` came to `call`, none of them with a
    failure.

    Raises:
        CollectiveError: some did not within `timeout` seconds.
        EmaCkptError: `failure`, or that of another replica.
    """
    for replica, _ in _divided(slots):
        try:
            meet(call, timeout, replica.group, failure)
        except EmaCkptError as error:  # the replicas of other groups must hear of it too
            failure = error
    if failure is not None:
        raise failure


def gather(slots: Sequence[Shadow], target: Callable[[Shadow], torch.Tensor]) -> None:
    """Write each divided average whole into `target(slot)`, of the local shard's size, rounded to
    its dtype.

    Collective over the replicas.
    """
    for replica, members in _divided(slots):
        message: list[_Piece] = []
        nbytes = 0
        for piece in _pieces(members, target):
            if message and nbytes + _nbytes(piece, target) > _MESSAGE_NBYTES:
                _pass_on(message, replica, target)
                message, nbytes = [], 0
            message.append(piece)
            nbytes += _nbytes(piece, target)
        if message:
            _pass_on(message, replica, target)


def _divided(slots: Sequence[Shadow]) -> list[tuple[ReplicaGroup, list[Shadow]]]:
    """Divided slots by the group that divides them; the same order on all replicas."""
    groups: dict[int, tuple[ReplicaGroup, list[Shadow]]] = {}
    for slot in slots:
        if slot.is_split and slot.shard.replica is not None:
            groups.setdefault(id(slot.shard.replica.group), (slot.shard.replica, []))[1].append(
                slot
            )
    return list(groups.values())


def _parts(slot: Shadow, count: int) -> list[tuple[int, int]]:
    return [replica_part(tuple(slot.shard.local.shape), count, index) for index in range(count)]


def _pieces(slots: Sequence[Shadow], target: Callable[[Shadow], torch.Tensor]) -> Iterator[_Piece]:
    for slot in slots:
        replica = slot.shard.replica
        longest = max(numel for _, numel in _parts(slot, replica.count if replica else 1))
        step = _MESSAGE_NBYTES // target(slot).element_size()
        for offset in range(0, longest, step):
            yield slot, offset, min(step, longest - offset)


def _nbytes(piece: _Piece, target: Callable[[Shadow], torch.Tensor]) -> int:
    """Bytes in the message, a multiple of 16 so that every piece begins aligned."""
    return -(-piece[2] * target(piece[0]).element_size() // 16) * 16


def _pass_on(
    message: Sequence[_Piece], replica: ReplicaGroup, target: Callable[[Shadow], torch.Tensor]
) -> None:
    """Send this replica's part of every piece to all replicas, and write what comes."""
    sizes = [_nbytes(piece, target) for piece in message]
    device = target(message[0][0]).device
    sent = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    received = torch.empty(replica.count * sum(sizes), dtype=torch.uint8, device=device)
    for (slot, offset, length), room in zip(message, torch.split(sent, sizes), strict=True):
        mine = slot.average.view(-1)[offset : offset + length]
        room.view(target(slot).dtype)[: mine.numel()].copy_(mine)
    dist.all_gather_into_tensor(received, sent, group=replica.group)
    for index, rooms in enumerate(received.view(replica.count, -1)):
        for (slot, offset, length), room in zip(message, torch.split(rooms, sizes), strict=True):
            into, (start, numel) = target(slot), _parts(slot, replica.count)[index]
            theirs = room.view(into.dtype)[: max(0, min(length, numel - offset))]
            _write(into, start + offset, theirs)


def _write(into: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Write 1-D `values` to elements [start, start + numel) of `into` in row-major order, however
    it lies in memory.
    """
    if into.is_contiguous():
        into.view(-1)[start : start + values.numel()].copy_(values)
        return
    boxes = flat_range_boxes(into.shape, start, start + values.numel())
    for box, part in zip(boxes, torch.split(values, [box.numel for box in boxes]), strict=True):
        box_of(into, box).copy_(part.view(box.sizes))
