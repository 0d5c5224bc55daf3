"""torch_checkpointing: a file for each item and rank, as its `CheckpointManager` writes them."""

from __future__ import annotations

import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ema_ckpt
from ema_ckpt import EmaCkptError, ShardedEMA
from tests.distributed import launcher
from tests.integration.proving import Made, assert_same_bits, goes_through_all_verbs, whole
from tests.integration.table import Row
from tests.integration.training import Net, as_launched, batch, keep, kept

pytestmark = pytest.mark.integration
KINDS = {
    "fsdp-1": (1, "FSDP2 on 1 rank"),
    "fsdp-2": (2, "FSDP2 on 2 ranks, `ShardedEMA` as an item"),
    "hsdp-4": (4, "HSDP on 4 ranks"),
    "tensor-parallel-4": (4, "FSDP2 with tensor parallelism on 4 ranks"),
    "safetensors-2": (2, "FSDP2 on 2 ranks, model in a layout of safetensors"),
}


def manager(layout: Any = None) -> Any:
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gathered(self: object, data: object, process_group: object = None) -> dict[int, object]:
        """The package gathers this over CUDA; what is gathered and written stays its own."""
        pieces: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, data)
        return dict(enumerate(pieces))

    DefaultMetadataManager._all_gather_pickled_data = gathered
    placed = partial(ItemSpec, resharder=DefaultResharder(), required=False)
    return CheckpointManager(
        CheckpointManager.Config(
            items={"model": placed(layout=layout), "optimizer": placed(), "ema": placed()},
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(
                use_direct_io=False
            ),  # not every disk has it
        )
    )


def sharded(kind: str, seed: int = 0) -> Net:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = Net(seed)
    mesh = None
    if kind == "hsdp-4":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    if kind == "tensor-parallel-4":
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "tensor"))
        rows = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, both["tensor"], {"enc": rows, "dec": rows})
        mesh = both["shards"]
    for layer in (model.enc, model.norm, model):
        fully_shard(layer, mesh=mesh)
    return model


def layout_of(kind: str) -> Any:
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization

    if kind != "safetensors-2":
        return None
    return LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())


def saves(folder: Path, kind: str) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    warnings.simplefilter("ignore")
    rank, world = as_launched()
    model = sharded(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ema = ShardedEMA(model, 0.5)
    ema.attach(optimizer)
    for step in range(2):
        model(batch(step, rank, world)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    payload = {
        "model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 2,
    }  # fmt: skip
    if "ShardedEMA" in KINDS[kind][1]:
        payload["ema"] = ema.state_dict()
    manager(layout_of(kind)).save(str(folder / "run" / "step_2"), payload)
    dist.barrier()
    keep(
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
        folder / "live.pt",
    )
    keep(ema.full_state_dict(), folder / "average.pt")


def loads(folder: Path, kind: str) -> None:
    """What was consolidated, loaded by the package into the same model sharded over these ranks."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch_checkpointing.hf.metadata import HuggingFaceSafetensorsDistributedMetadataFormat

    warnings.simplefilter("ignore")
    as_launched()
    model = sharded(kind, seed=1)
    loaded = manager().load(
        str(folder / "whole"),
        into={"model": model.state_dict()},
        strict=True,
        metadata_format=HuggingFaceSafetensorsDistributedMetadataFormat,
    )
    model.load_state_dict(loaded["model"])
    keep(
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
        folder / "loaded.pt",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_manager(tmp_path: Path, kind: str) -> None:
    world_size, words = KINDS[kind]
    with Row("torch_checkpointing", f"`CheckpointManager`, {words}") as row:
        launcher.run(world_size, saves, tmp_path, kind, timeout=120)
        step = tmp_path / "run" / "step_2"
        assert ema_ckpt.latest(tmp_path / "run") == step
        live, average = kept(tmp_path / "live.pt"), kept(tmp_path / "average.pt")
        roles = {"model": "live", "optimizer": "optimizer"}
        state = {"model": live}
        if "ShardedEMA" in words:
            roles["ema"], state["ema"] = "ema", average
        verdict = "unproven" if kind == "safetensors-2" else "sound"
        goes_through_all_verbs(row, Made(step, roles, state, verdict=verdict), tmp_path)
        with ema_ckpt.open(step) as ckpt:
            assert_same_bits(ckpt.state_dict("model"), live)
            assert ckpt.objects["step"] == 2
        ema_ckpt.consolidate(step, tmp_path / "whole", tree="model")
        launcher.run(2, loads, tmp_path, "fsdp-2", timeout=120)
        assert_same_bits(kept(tmp_path / "loaded.pt"), live)
        row.shown("loaded back", "`CheckpointManager.load`")


def restores(folder: Path) -> None:
    warnings.simplefilter("ignore")
    as_launched()
    model = sharded("fsdp-2", seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
    ema = ShardedEMA(model, 0.5)
    report = ema_ckpt.restore(
        folder / "run", model=model, optimizer=optimizer, ema=ema, extra={"step": 0}
    )
    assert (report.extra["step"], ema.num_updates) == (2, 2)
    assert optimizer.param_groups[0]["lr"] == 0.1
    keep(ema.full_state_dict(), folder / "restored.pt")
    ema_ckpt.save(folder / "ours", model=model, optimizer=optimizer, ema=ema)


def test_restored_at_another_world_size(tmp_path: Path) -> None:
    launcher.run(2, saves, tmp_path, "fsdp-2", timeout=120)
    launcher.run(3, restores, tmp_path, timeout=120)
    assert_same_bits(kept(tmp_path / "restored.pt"), kept(tmp_path / "average.pt"))
    for tree in ("model", "ema"):
        ours = whole(tmp_path / "ours", tree, tmp_path / f"ours-{tree}.safetensors")
        theirs = whole(tmp_path / "run", tree, tmp_path / f"theirs-{tree}.safetensors")
        assert_same_bits(ours, theirs)


def test_files_of_ranks_exchanged(tmp_path: Path) -> None:
    launcher.run(2, saves, tmp_path, "fsdp-2", timeout=120)
    step = tmp_path / "run" / "step_2"
    shutil.move(step / "model_0.pt", step / "aside")
    shutil.move(step / "model_1.pt", step / "model_0.pt")
    shutil.move(step / "aside", step / "model_1.pt")
    seen = ema_ckpt.verify(step)
    assert seen.status == "damaged"
    assert {problem.code for problem in seen.problems} == {"index-mismatch"}
    with pytest.raises(EmaCkptError, match="rank has"):
        ema_ckpt.consolidate(step, tmp_path / "whole.pt", tree="model")
