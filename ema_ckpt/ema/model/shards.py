"""The nouns of the EMA side: `Shard`, `ReplicaGroup`, `TrackedShard`, `ModelShards`, `Shadow`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ema_ckpt.core.box import Box, flat_range_boxes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

ModuleLink = tuple[dict[str, Any], str, object]  # a dictionary, a key, the value registered there


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaGroup:
    """Ranks that hold equal copies of a shard, as its wrapper declares; perhaps only this rank."""

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
    local: Tensor  # live elements, in the one box's shape, or 1-D (a flat piece of FSDP1)
    boxes: tuple[Box, ...]
    is_parameter: bool
    replica: ReplicaGroup | None
    mesh: DeviceMesh | None = None  # with `placements`: of the live DTensor, None for other tensors
    placements: tuple[Placement, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every canonical name of the tensor."""
        return (self.fqn, *self.aliases)

    @property
    def layout(self) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
        """Mesh and placements of the live DTensor; None for other tensors."""
        if self.mesh is None or self.placements is None:
            return None
        return self.mesh, self.placements


@dataclass(frozen=True, slots=True, eq=False)
class TrackedShard:
    """A shard with what is needed to notice that the model has exchanged it.

    `shard.local` is the live memory as long as `container[key]` is `expected`, and `memory`, if
    any, keeps its address.
    """

    shard: Shard
    owner: Tensor  # which an optimizer steps; of FSDP1 without original parameters: the flat
    container: dict[str, Any]
    key: str
    expected: object
    memory: Tensor | None
    persistent: bool = True
    # (first element, numel of the whole) if the shard is part of a flat owner's local shard
    flat_range: tuple[int, int] | None = None

    @property
    def requires_grad(self) -> bool:
        """Whether this is a parameter that is trained."""
        return self.shard.is_parameter and self.owner.requires_grad


@dataclass(frozen=True, slots=True, eq=False)
class ModelShards:
    """All parameters and buffers of a model on this rank, tied ones once; made by `scan_model`.

    Parameters are in the order of `named_parameters()`.
    """

    parameters: tuple[TrackedShard, ...]
    buffers: tuple[TrackedShard, ...]
    # (canonical prefix, module) in the order of `model.state_dict()`, as often as it is registered
    modules: tuple[tuple[str, nn.Module], ...]
    # (children of the parent, name, child), and further names of tied parameters
    module_links: tuple[ModuleLink, ...]

    @property
    def tensors(self) -> tuple[TrackedShard, ...]:
        """Parameters and buffers."""
        return self.parameters + self.buffers

    def by_name(self) -> Mapping[str, TrackedShard]:
        """Return parameters and buffers under each of their names."""
        named: dict[str, TrackedShard] = {}
        for tracked in self.tensors:
            named.update(dict.fromkeys(tracked.shard.names, tracked))
        return named


@dataclass(frozen=True, slots=True, eq=False)
class Shadow:
    """The average of one shard, or of this replica's part of it.

    It covers elements [start, start + numel) of the flattened local shard. `average` has the local
    shard's shape, or is 1-D if the shard is split over replicas; so has `residual` (see
    `compensate`).
    """

    shard: Shard
    start: int
    numel: int
    average: Tensor
    residual: Tensor | None = None
    # over the shard's replicas; of a small shard one part may be all, the others nothing
    is_split: bool = False

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Boxes of the global tensor that are covered; concatenated they are `average`."""
        if not self.is_split:
            return self.shard.boxes
        return part_boxes(self.shard.boxes, self.start, self.numel)


def part_boxes(boxes: tuple[Box, ...], start: int, numel: int) -> tuple[Box, ...]:
    """Return the boxes of elements [start, start + numel) of `boxes`, concatenated row-major."""
    parts: list[Box] = []
    position = 0
    for box in boxes:
        first, last = max(start, position), min(start + numel, position + box.numel)
        if first < last:
            for inner in flat_range_boxes(box.sizes, first - position, last - position):
                offsets = tuple(map(sum, zip(box.offsets, inner.offsets, strict=True)))
                parts.append(Box(offsets, inner.sizes))
        position += box.numel
    return tuple(parts)
