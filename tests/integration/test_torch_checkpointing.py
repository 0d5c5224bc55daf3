"""torch_checkpointing: a file for each item and rank, plain and FSDP2, as its `CheckpointManager` writes them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import launcher
from tests.integration.proving import Made, goes_through_all_verbs
from tests.integration.table import Row
from tests.integration.training import Net, as_launched, batch, keep, kept

pytestmark = pytest.mark.integration


def manager() -> Any:
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
    spec = ItemSpec(resharder=DefaultResharder())
    return CheckpointManager(
        CheckpointManager.Config(
            items={"model": spec, "optimizer": spec},
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(
                use_direct_io=False
            ),  # not every disk has it
        )
    )


def saves(folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    rank, world = as_launched()
    model = Net()
    for layer in (model.enc, model.norm, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(batch(0, rank, world)).square().mean().backward()
    optimizer.step()
    payload = {
        "model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 1,
    }  # fmt: skip
    manager().save(str(folder / "step_1"), payload)
    dist.barrier()
    keep(
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
        folder / "whole.pt",
    )


@pytest.mark.xfail(reason="no reader yet")
def test_manager(tmp_path: Path) -> None:
    with Row("torch_checkpointing", "`CheckpointManager`, FSDP2 on 2 ranks") as row:
        launcher.run(2, saves, tmp_path, timeout=120)
        made = Made(
            tmp_path / "step_1", {"model": "live", "optimizer": "optimizer"}, {"model": kept(tmp_path / "whole.pt")}
        )  # fmt: skip
        goes_through_all_verbs(row, made, tmp_path)
