"""Published averages as torch itself sees them: placements, saving and loading by hand, whole tensors on rank 0."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from ema_ckpt.ema.checkpoint.local_shards_tensor import LocalShardsTensor, as_global_tensor
from ema_ckpt.ema.model.placement import dtensor_boxes, torch_computes_offsets
from ema_ckpt.ema.model.shards import Shadow
from tests.distributed.launcher import run
from tests.distributed.layouts import LAYOUTS
from tests.distributed.resume_runs import check, family_of, start, truth

ROWS = [1, 2, 3, 5, 7, 10, 13]
MESHES = {4: [(4,), (2, 2)], 6: [(6,), (2, 3), (3, 2)], 8: [(2, 2, 2)]}
STEPS = 2


def cut_by_torch(
    full: torch.Tensor, sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    """What `distribute_tensor` gives a rank is what our boxes say, and pieces published by them gather to the whole."""
    mesh = init_device_mesh("cpu", sizes)
    tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
    boxes = dtensor_boxes(full.shape, sizes, mesh.get_coordinate() or (), placements)
    held = [
        full[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))].reshape(-1)
        for box in boxes
    ]
    local = torch.cat(held) if held else full.new_empty(0)
    where = f"{tuple(full.shape)} on {sizes} as {placements}"
    even = torch_computes_offsets(full.shape, sizes, placements)
    if even or not any(isinstance(p, _StridedShard) for p in placements):
        # Where it does not divide, torch cuts strided shards in another order than FSDP2 does (see placement.py).
        assert torch.equal(tensor.to_local().reshape(-1), local), where
    if even:
        assert torch.equal(tensor.full_tensor(), full), where
        again = as_global_tensor(boxes, full.shape, tensor.to_local(), (mesh, placements))
        assert isinstance(again, DTensor), where
        assert torch.equal(again.full_tensor(), full), where


def _cuts() -> None:
    for sizes in MESHES[dist.get_world_size()]:
        kinds: list[list[Placement]] = [[Shard(0), Shard(1), Replicate()] for _ in sizes]
        for rows in ROWS:
            full = torch.arange(rows * 4.0).reshape(rows, 4)
            for placements in (
                itertools.product(*kinds) if rows in (3, 10) else [tuple([Shard(0)] * len(sizes))]
            ):
                cut_by_torch(full, sizes, placements)
            if len(sizes) == 2:
                cut_by_torch(full, sizes, (_StridedShard(0, split_factor=sizes[1]), Shard(0)))
                cut_by_torch(full, sizes, (_StridedShard(0, split_factor=3), Replicate()))


@pytest.mark.parametrize("world_size", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_boxes_are_what_torch_distributes(world_size: int) -> None:
    run(world_size, _cuts, timeout=120)


def expected_kind(layout: str, shadow: Shadow) -> type[torch.Tensor]:
    """The same on every rank, so that nobody waits in `full_tensor()` for a rank that has no DTensor."""
    mesh, placements, shape = shadow.shard.mesh, shadow.shard.placements, shadow.shard.shape
    if mesh is None or placements is None:
        return torch.Tensor if tuple(shadow.average.shape) == shape else LocalShardsTensor
    if not torch_computes_offsets(shape, tuple(mesh.shape), placements):
        return LocalShardsTensor
    return (
        DTensor
        if shadow.shard.replica is None or shape[0] % dist.get_world_size() == 0
        else LocalShardsTensor
    )


def by_hand(parent: str, names: list[str]) -> None:
    """Save and load with torch's functions alone; the same layout comes back, and so do pieces in background saves."""
    for name in names:
        one = start(LAYOUTS[dist.get_world_size()][name])
        one.train(STEPS)
        expected = truth(family_of(name), STEPS)
        state = one.ema.state_dict()
        for shadow in one.ema._averages.shadows:
            fqn, kind = shadow.shard.fqn, expected_kind(name, shadow)
            assert type(state["weights"][fqn]) is kind, (
                f"{name} {fqn}: {type(state['weights'][fqn])} is not {kind}"
            )
            assert tuple(state["weights"][fqn].shape) == tuple(expected.average[fqn].shape)
            if kind is DTensor:
                assert torch.equal(state["weights"][fqn].full_tensor(), expected.average[fqn]), fqn
        path = Path(parent, f"{name}.w{dist.get_world_size()}")
        saving = dcp.async_save({"ema": one.ema}, checkpoint_id=path)
        with torch.no_grad():
            for shadow in one.ema._averages.shadows:
                shadow.average.fill_(-1.0)
        saving.result()
        fresh = start(LAYOUTS[dist.get_world_size()][name], blank=True)
        loaded = fresh.ema.state_dict()
        dcp.load({"ema": loaded}, checkpoint_id=path)
        fresh.ema.load_state_dict(loaded)
        check(fresh.ema.state_dict()["weights"], expected.average, name)
        assert fresh.ema.num_updates == STEPS


HAND = {
    2: ["ddp", "fsdp1-full-flat", "fsdp1-full"],
    4: ["fsdp2", "hsdp-2x2", "fsdp2-tp-2x2", "fsdp2-tp-2x2-uneven", "fsdp1-hybrid-flat"],
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("world_size", list(HAND))
def test_averages_saved_and_loaded_by_hand(tmp_path: Path, world_size: int) -> None:
    run(world_size, by_hand, str(tmp_path), HAND[world_size], timeout=120)
    for path in tmp_path.iterdir():
        expected = truth(family_of(path.name.partition(".")[0]), STEPS).average
        state: dict[str, Any] = {name: torch.zeros_like(value) for name, value in expected.items()}
        dcp.load({"ema": {"weights": state}}, checkpoint_id=path, no_dist=True)
        for name, value in expected.items():
            assert torch.equal(state[name], value), f"{path.name} {name}"


def gathered(names: list[str]) -> None:
    for name in names:
        one = start(LAYOUTS[dist.get_world_size()][name])
        one.train(STEPS)
        expected = truth(family_of(name), STEPS)
        options = StateDictOptions(full_state_dict=True)
        live = get_model_state_dict(one.model, options=options)
        with CommDebugMode() as comm:
            full = one.ema.full_state_dict()
            only = one.ema.full_state_dict(complete=False)
        assert comm.get_total_counts() == 0, "the training's groups are left alone"
        if dist.get_rank():
            assert full == only == {}
            continue
        assert list(full) == list(live), name
        assert set(only) == set(expected.average), name
        for fqn, value in expected.average.items():
            assert torch.equal(full[fqn], value), f"{name} {fqn}"
            assert torch.equal(only[fqn], value), f"{name} {fqn}"
        for fqn in full.keys() - expected.average.keys() - {"back.weight"}:
            assert torch.equal(full[fqn], live[fqn]), f"{name} {fqn}"


FULL = {
    2: ["fsdp2-tied-ignored", "fsdp2-checkpointed", "ddp-compiled-inside", "fsdp1-full", "tp"],
    4: ["fsdp2", "hsdp-2x2", "fsdp2-tp-2x2-uneven", "fsdp1-hybrid"],
}


@pytest.mark.parametrize("world_size", list(FULL))
def test_whole_averages_on_rank_zero(world_size: int) -> None:
    run(world_size, gathered, FULL[world_size], timeout=120)
