"""Local shards as tensors of global shape that `torch.distributed.checkpoint` saves and loads.

A `DTensor` where torch locates its shard right, a `LocalShardsTensor` elsewhere: for pieces cut
inside rows, parts of a replica, uneven strided shards, and host tensors of a device mesh. Neither
copies: both alias the local memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from ema_ckpt.core.box import Box, row_major_strides, whole
from ema_ckpt.core.errors import StateError
from ema_ckpt.ema.model.placement import local_boxes, torch_computes_offsets

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.device_mesh import DeviceMesh

Layout = tuple["DeviceMesh", Sequence[Placement]]  # of the live DTensor
aten = torch.ops.aten


def as_global_tensor(
    boxes: Sequence[Box],
    shape: Sequence[int],
    local: Tensor,
    layout: DTensor | Layout | None = None,
    replicas: int = 1,
) -> Tensor:
    """Return a tensor of global `shape` whose elements in `boxes` are those of `local`, aliased.

    Args:
        boxes: in elements; concatenated row-major they are `local`'s row-major flattening.
        shape: global, in elements.
        local: of one box's shape, or 1-D.
        layout: mesh and placements of the live tensor, or that itself. With them the result is a
            `DTensor` where torch computes right offsets on every rank. All ranks decide alike.
        replicas: how many ranks divide each shard between them; in a `DTensor` they count as one
            more `Shard`.

    Returns:
        `local` itself if it is the whole tensor and no layout is given.

    Raises:
        StateError: `boxes` hold another number of elements than `local`.
    """
    boxes, shape = tuple(boxes), tuple(shape)
    if sum(box.numel for box in boxes) != local.numel():
        message = f"{local.numel()} local elements cannot fill the boxes {boxes} of shape {shape}"
        raise StateError("internal", message)
    if layout is not None:
        dtensor = _as_dtensor(boxes, shape, local, layout, replicas)
        if dtensor is not None:
            return dtensor
    elif tuple(local.shape) == shape and (boxes == (whole(shape),) or not local.numel()):
        return local
    return LocalShardsTensor(shape, boxes, box_views(boxes, local), local)


def pieces_of(tensor: Tensor) -> tuple[tuple[Box, Tensor], ...]:
    """Return the boxes of a global tensor that this rank holds, with their local elements."""
    if isinstance(tensor, LocalShardsTensor):
        return tuple(zip(tensor.boxes, tensor.views, strict=True))
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach()
        boxes = local_boxes(tuple(tensor.shape), tensor.device_mesh, tensor.placements, local)
        return tuple(zip(boxes, box_views(boxes, local), strict=True))
    return ((whole(tensor.shape), tensor),)


def box_of(tensor: Tensor, box: Box) -> Tensor:
    """Return the elements of `tensor` in `box`, as a view."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def box_views(boxes: Sequence[Box], local: Tensor) -> list[Tensor]:
    """Return `local` in pieces of the boxes' shapes, without a copy."""
    shape, sizes = tuple(local.shape), [box.sizes for box in boxes]
    if sizes == [shape]:
        return [local]
    if len(shape) > 1 and {size[1:] for size in sizes} == {shape[1:]}:
        return list(torch.split(local, [size[0] for size in sizes]))
    parts = torch.split(local.view(-1), list(map(prod, sizes)))
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


class LocalShardsTensor(Tensor):
    """This rank's pieces of a tensor of global shape: boxes, and views of the local memory.

    Understood by `dcp.save`, `dcp.load` and `dcp.async_save`'s staging through the protocol that
    `DTensor` also follows. It is no operand for arithmetic: anything but copying and moving raises
    `NotImplementedError`.
    """

    boxes: tuple[Box, ...]
    views: tuple[Tensor, ...]

    def __new__(
        cls, shape: Sequence[int], boxes: Sequence[Box], views: Sequence[Tensor], like: Tensor
    ) -> Self:
        """Make a tensor of `like`'s dtype and device, which may have no piece at all."""
        strides = row_major_strides(shape)
        self: Self = Tensor._make_wrapper_subclass(
            cls, tuple(shape), strides=strides, dtype=like.dtype, device=like.device
        )
        self.boxes = tuple(boxes)
        self.views = tuple(view.detach() for view in views)
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        del tensor_contents
        pieces = ", ".join(f"{list(box.offsets)}+{list(box.sizes)}" for box in self.boxes)
        return (
            f"LocalShardsTensor(shape={list(self.shape)}, dtype={self.dtype}, device={self.device},"
            f" holds=[{pieces}])"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it as an instance method
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        operation = _OPERATIONS.get(func)
        if operation is None:
            raise NotImplementedError(
                f"{func} on a tensor of which this rank holds only pieces; `pieces_of(tensor)`"
                " gives those, `ShardedEMA.full_state_dict()` whole tensors"
            )
        return operation(*args, **(kwargs or {}))

    def __create_write_items__(self, fqn: str, tensor: LocalShardsTensor) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        items = []
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), tensor.size())
            index = MetadataIndex(fqn, chunk.offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        # A tensor without elements still has a shape to keep: every rank lists one empty piece, DCP
        # keeps one.
        boxes = self.boxes if self.numel() else (whole(self.shape),)
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, view in zip(self.boxes, self.views, strict=True):
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return view
        if not self.numel():
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        raise StateError("internal", f"this rank holds no piece of {index.fqn!r} at {index.offset}")


def _as_dtensor(
    boxes: tuple[Box, ...],
    shape: tuple[int, ...],
    local: Tensor,
    layout: DTensor | Layout,
    replicas: int,
) -> DTensor | None:
    """Return a `DTensor` if there is one of which torch finds every rank's elements at `boxes`."""
    stride = row_major_strides(shape)
    if isinstance(layout, DTensor):
        stride, layout = layout.stride(), (layout.device_mesh, layout.placements)
    mesh, placements = layout
    # DTensor.from_local would move a host tensor to the mesh's device, and so break the alias.
    if mesh.get_coordinate() is None or len(boxes) > 1 or local.device.type != mesh.device_type:
        return None
    candidates = [placements]
    if replicas > 1:
        candidates = _split_over_replicas(shape, mesh.shape, placements, replicas)
    for candidate in candidates:
        if _torch_finds(boxes, shape, local, mesh, candidate):
            memory, size = _without_storage_offset(local.detach()), torch.Size(shape)
            return DTensor.from_local(
                memory, mesh, tuple(candidate), run_check=False, shape=size, stride=stride
            )
    return None


def _torch_finds(
    boxes: tuple[Box, ...],
    shape: tuple[int, ...],
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
) -> bool:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not torch_computes_offsets(shape, mesh.shape, placements):
        return False
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    expected = (Box(tuple(offsets), tuple(sizes)),) if prod(sizes) else ()
    return tuple(local.shape) == tuple(sizes) and boxes == expected


def _split_over_replicas(
    shape: tuple[int, ...],
    mesh_sizes: Sequence[int],
    placements: Sequence[Placement],
    replicas: int,
) -> list[Sequence[Placement]]:
    """Return placements with a replicated mesh dimension that cuts rows inside all other cuts."""
    # Only where rows divide evenly are `torch.chunk` and near-even parts the same on every rank.
    row_cuts = []
    for size, placement in zip(mesh_sizes, placements, strict=True):
        cuts_rows = isinstance(placement, Shard | _StridedShard) and placement.dim == 0
        row_cuts.append(size if cuts_rows else 1)
    if not shape or shape[0] % (prod(row_cuts) * replicas):
        return []
    candidates: list[Sequence[Placement]] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate) and mesh_sizes[axis] == replicas:
            factor = prod(row_cuts[axis + 1 :])
            cut = _StridedShard(0, split_factor=factor) if factor > 1 else Shard(0)
            candidates.append([*placements[:axis], cut, *placements[axis + 1 :]])
    return candidates


def _without_storage_offset(local: Tensor) -> Tensor:
    """Return the same memory as a tensor with storage offset 0."""
    # A DTensor takes over the offset of its local tensor; then its data pointer is not 0, and the
    # staging of `dcp.async_save` tries to copy a storage that it does not have (torch 2.13).
    if not local.storage_offset():
        return local
    if not local.numel():
        return torch.empty(local.shape, dtype=local.dtype, device=local.device)
    return torch.utils.dlpack.from_dlpack(local)


def _map_views(
    tensor: LocalShardsTensor, change: Callable[[Tensor], Tensor] = Tensor.detach
) -> LocalShardsTensor:
    like = change(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    views = [change(view) for view in tensor.views]
    return LocalShardsTensor(tensor.shape, tensor.boxes, views, like)


def _view(tensor: LocalShardsTensor, size: Sequence[int]) -> LocalShardsTensor:
    if tuple(size) != tuple(tensor.shape):
        raise NotImplementedError("a LocalShardsTensor keeps its shape")
    return _map_views(tensor)


def _clone(tensor: LocalShardsTensor, memory_format: object = None) -> LocalShardsTensor:
    del memory_format
    return _map_views(tensor, torch.clone)


def _new_empty(tensor: LocalShardsTensor, size: Sequence[int], **options: Any) -> Tensor:
    kwargs: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    kwargs |= {name: value for name, value in options.items() if value is not None}
    if tuple(size) != tuple(tensor.shape):
        return torch.empty(tuple(size), **kwargs)
    return _map_views(tensor, lambda view: torch.empty_like(view, **kwargs))


def _empty_like(tensor: LocalShardsTensor, memory_format: object = None, **options: Any) -> Tensor:
    del memory_format
    return _new_empty(tensor, tensor.shape, **options)


def _to_copy(tensor: LocalShardsTensor, **options: Any) -> LocalShardsTensor:
    return _map_views(tensor, lambda view: aten._to_copy.default(view, **options))


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, LocalShardsTensor):
        raise NotImplementedError("a rank that holds only pieces cannot fill a whole tensor")
    if not isinstance(source, LocalShardsTensor):
        parts: Sequence[Tensor] = [box_of(source, box) for box in target.boxes]
    elif source.boxes == target.boxes:
        parts = source.views
    else:
        message = f"cannot copy {source!r} into {target!r}: they hold other elements"
        raise StateError("internal", message)
    for view, part in zip(target.views, parts, strict=True):
        view.copy_(part, non_blocking=non_blocking)
    return target


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _map_views,
    aten.alias.default: _map_views,
    aten.view.default: _view,
    aten.clone.default: _clone,
    aten.new_empty.default: _new_empty,
    aten.empty_like.default: _empty_like,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
}
