"""Whole local shards from averages that are split over replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ema_ckpt.comm.channel import lost_rank
from ema_ckpt.comm.rendezvous import meet
from ema_ckpt.core.box import flat_range_boxes
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.ema.checkpoint.local_shards_tensor import box_of
from ema_ckpt.ema.model.placement import replica_part
from ema_ckpt.ema.model.shards import ReplicaGroup, Shadow

# What each replica sends at a time; the scratch is this times one more than their number.
_MESSAGE_NBYTES = 8 << 20
# The name since torch 2.14, which warns of the older one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Piece(NamedTuple):
    """Elements [offset, offset + numel) of each replica's part of a target."""

    shadow: Shadow
    target: Tensor  # of the local shard's size
    offset: int
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes in the message, a multiple of 16 so that every piece begins aligned."""
        return -(-self.numel * self.target.element_size() // 16) * 16


def meet_replicas(
    shadows: Iterable[Shadow], call: str, timeout: float, failure: Exception | None
) -> None:
    """Wait until all replicas that split one of `shadows` came to `call`, none with a failure.

    Raises:
        CollectiveError: some did not come within `timeout` seconds.
        EmaCkptError: `failure`, or that of another replica.
    """
    for replica, _ in _by_replica_group(shadows):
        try:
            meet(call, timeout, replica.group, failure)
        except EmaCkptError as error:  # the replicas of other groups must hear of it too
            failure = error
    if failure is not None:
        raise failure


class ReplicaGather:
    """Writes each split average whole into its target, rounded to the target's dtype.

    All memory is taken when it is made, so that a rank without enough of it can still tell the
    others; `run` is collective over the replicas.
    """

    def __init__(self, targets: Mapping[Shadow, Tensor]) -> None:
        self._messages: list[tuple[ReplicaGroup, list[_Piece]]] = []
        for replica, shadows in _by_replica_group(targets):
            message: list[_Piece] = []
            nbytes = 0
            for piece in _pieces(shadows, targets, replica.count):
                if message and nbytes + piece.nbytes > _MESSAGE_NBYTES:
                    self._messages.append((replica, message))
                    message, nbytes = [], 0
                message.append(piece)
                nbytes += piece.nbytes
            if message:
                self._messages.append((replica, message))
        self._scratch: dict[torch.device, Tensor] = {}
        for replica, message in self._messages:
            self._reserve(message[0].target.device, (replica.count + 1) * _nbytes_of(message))

    def run(self) -> None:
        """Exchange the averages.

        Raises:
            CollectiveError: `rank-failed`: another replica died.
        """
        for replica, message in self._messages:
            _all_gather(message, replica, self._scratch[message[0].target.device])
        self._scratch.clear()

    def _reserve(self, device: torch.device, nbytes: int) -> None:
        scratch = self._scratch.get(device)
        if scratch is None or scratch.numel() < nbytes:
            self._scratch[device] = torch.zeros(nbytes, dtype=torch.uint8, device=device)


def _by_replica_group(shadows: Iterable[Shadow]) -> list[tuple[ReplicaGroup, list[Shadow]]]:
    """Return split shadows by the group that splits them; in the same order on all replicas."""
    groups: dict[int, tuple[ReplicaGroup, list[Shadow]]] = {}
    for shadow in shadows:
        replica = shadow.shard.replica
        if shadow.is_split and replica is not None:
            groups.setdefault(id(replica.group), (replica, []))[1].append(shadow)
    return list(groups.values())


def _parts(shadow: Shadow, count: int) -> list[tuple[int, int]]:
    return [replica_part(tuple(shadow.shard.local.shape), count, index) for index in range(count)]


def _pieces(
    shadows: Sequence[Shadow], targets: Mapping[Shadow, Tensor], count: int
) -> Iterator[_Piece]:
    for shadow in shadows:
        target = targets[shadow]
        longest = max(numel for _, numel in _parts(shadow, count))
        step = _MESSAGE_NBYTES // target.element_size()
        for offset in range(0, longest, step):
            yield _Piece(shadow, target, offset, min(step, longest - offset))


def _nbytes_of(message: Sequence[_Piece]) -> int:
    return sum(piece.nbytes for piece in message)


def _all_gather(message: Sequence[_Piece], replica: ReplicaGroup, scratch: Tensor) -> None:
    """Send this replica's part of every piece to all replicas, and write those of all."""
    sizes = [piece.nbytes for piece in message]
    nbytes = _nbytes_of(message)
    sent, received = scratch[:nbytes], scratch[nbytes : (replica.count + 1) * nbytes]
    for piece, memory in zip(message, torch.split(sent, sizes), strict=True):
        part = piece.shadow.average.view(-1)[piece.offset : piece.offset + piece.numel]
        memory.view(piece.target.dtype)[: part.numel()].copy_(part)
    try:
        _all_gather_single(received, sent, group=replica.group)
    except RuntimeError as error:
        raise lost_rank() from error
    for index, part in enumerate(received.view(replica.count, -1)):
        for piece, memory in zip(message, torch.split(part, sizes), strict=True):
            start, numel = _parts(piece.shadow, replica.count)[index]
            length = max(0, min(piece.numel, numel - piece.offset))
            values = memory.view(piece.target.dtype)[:length]
            _write_flat(piece.target, start + piece.offset, values)


def _write_flat(target: Tensor, start: int, values: Tensor) -> None:
    """Write 1-D `values` from row-major element `start` on, however `target` lies in memory."""
    stop = start + values.numel()
    if target.is_contiguous():
        target.view(-1)[start:stop].copy_(values)
        return
    boxes = flat_range_boxes(target.shape, start, stop)
    for box, part in zip(boxes, torch.split(values, [box.numel for box in boxes]), strict=True):
        box_of(target, box).copy_(part.view(box.sizes))
