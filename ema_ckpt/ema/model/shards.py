"""The nouns of the EMA side: a shard of a live tensor, who holds copies of it, how to follow it,
and its average.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ema_ckpt.core.box import Box
from ema_ckpt.ema.model.placement import flat_boxes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaGroup:
    """The ranks that, by the wrapper's own declaration, hold equal copies of a shard; this rank may
    be the only one.
    """

    group: ProcessGroup
    index: int  # of this rank in the group
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One parameter or buffer as this rank holds it.

    `boxes`, in elements of the global tensor, concatenated row-major are `local` in order; () if it
    is empty.
    """

    fqn: str  # canonical
    aliases: tuple[str, ...]  # the other canonical names of a tied tensor
    shape: tuple[int, ...]  # global
    dtype: torch.dtype  # of the live tensor
    local: (
        torch.Tensor
    )  # live elements: in the shape of the one box, or 1-D for a flat piece of FSDP1
    boxes: tuple[Box, ...]
    is_parameter: bool
    replica: ReplicaGroup | None
    mesh: DeviceMesh | None = None  # with `placements`: of the live DTensor, None for other tensors
    placements: tuple[Placement, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every canonical name of the tensor."""
        return (self.fqn, *self.aliases)


@dataclass(frozen=True, slots=True, eq=False)
class TrackedShard:
    """A shard with what is needed to follow it.

    `owner` is the tensor that an optimizer steps (FSDP1 without original parameters: the flat one,
    with `within` telling where this shard begins in its local shard, and how many elements that
    has). `place[key]` is `seen` for as long as `shard.local` is still the live memory; `pointed`,
    if any, must also keep its address.
    """

    shard: Shard
    owner: torch.Tensor
    requires_grad: bool
    persistent: bool
    place: dict[str, Any]
    key: str
    seen: object
    pointed: torch.Tensor | None
    within: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Shadow:
    """The average of one shard, or of this replica's part of it.

    The average covers elements [start, start + numel) of the flattened local shard. `shadow` has
    the local shard's shape, or is 1-D if the shard is split over replicas; `residual` (see
    `compensate`) has the shadow's.
    """

    shard: Shard
    start: int
    numel: int
    shadow: torch.Tensor
    residual: torch.Tensor | None = None
    is_split: bool = (
        False  # over the shard's replicas; of a small shard one part may be all, the others nothing
    )

    @property
    def boxes(self) -> tuple[Box, ...]:
        """What the shadow covers, in elements of the global tensor; concatenated row-major it is
        the shadow.
        """
        return (
            self.shard.boxes
            if not self.is_split
            else part_boxes(self.shard.boxes, self.start, self.numel)
        )


def part_boxes(boxes: tuple[Box, ...], start: int, numel: int) -> tuple[Box, ...]:
    """The boxes of elements [start, start + numel) of `boxes` read one after the other in row-major
    order.
    """
    pieces: list[Box] = []
    position = 0
    for box in boxes:
        first, last = max(start, position), min(start + numel, position + box.numel)
        if first < last:
            inner = flat_boxes(box.sizes, first - position, last - first)
            pieces += [
                Box(tuple(map(sum, zip(box.offsets, b.offsets, strict=True))), b.sizes)
                for b in inner
            ]
        position += box.numel
    return tuple(pieces)
