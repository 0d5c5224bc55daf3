"""DCP checkpoints of any cut, written by torch's own planner and file writer for ranks that need not exist."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]
Cuts = Mapping[str, Sequence[Sequence[Box]]]


class _Pieces(DefaultSavePlanner):
    """Plans and hands out the boxes of one rank."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Sequence[Box]]
    ) -> None:
        super().__init__()
        self._tensors, self._boxes = tensors, boxes

    def create_local_plan(self) -> SavePlan:
        items = [
            _item(name, self._tensors[name], box)
            for name, boxes in self._boxes.items()
            for box in boxes
        ]
        self.plan = SavePlan(
            items, planner_data={name: tuple(name.split(".", 1)) for name in self._boxes}
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        offsets = write_item.index.offset or ()
        sizes = next(n for o, n in self._boxes[write_item.index.fqn] if tuple(o) == tuple(offsets))
        box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        return self._tensors[write_item.index.fqn][box].clone()


def _item(name: str, tensor: torch.Tensor, box: Box) -> WriteItem:
    offsets, sizes = map(torch.Size, box)
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes),
        TensorProperties.create_from_tensor(tensor),
        tensor.size(),
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def save_cut(path: Path, tensors: Mapping[str, torch.Tensor], cuts: Cuts) -> Path:
    """Save `tensors` (names begin with their tree) with the boxes that `cuts` gives to each rank, by name."""
    ranks = max(map(len, cuts.values()))
    writer = FileSystemWriter(path)
    writer.set_up_storage_writer(is_coordinator=True)
    planners = [
        _Pieces(tensors, {name: by_rank[rank] for name, by_rank in cuts.items()})
        for rank in range(ranks)
    ]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
    plans = [writer.prepare_local_plan(planner.create_local_plan()) for planner in planners]
    shared, metadata = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(shared)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for planner, plan in zip(planners, plans, strict=True)
    ]
    writer.finish(metadata, results)
    return path


def rows(shape: Sequence[int], ranks: int) -> list[list[Box]]:
    """One box of whole rows a rank, cut as `torch.chunk` cuts; ranks without rows hold an empty one at the end."""
    each = -(-shape[0] // ranks) if shape[0] else 0
    found = []
    for rank in range(ranks):
        start = min(rank * each, shape[0])
        count = min(each, shape[0] - start)
        found.append([((start, *([0] * (len(shape) - 1))), (count, *shape[1:]))])
    return found


def relabel(path: Path, name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Record another shape and other places for the pieces of a tensor, as a faulty writer would."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    entry = metadata.state_dict_metadata[name]
    entry.size = torch.Size(shape)
    for chunk, (offsets, sizes) in zip(entry.chunks, boxes, strict=True):
        held = metadata.storage_data.pop(MetadataIndex(name, chunk.offsets))
        assert tuple(chunk.sizes) == tuple(sizes)
        chunk.offsets = torch.Size(offsets)
        metadata.storage_data[MetadataIndex(name, chunk.offsets)] = held
    file.write_bytes(pickle.dumps(metadata, protocol=4))
