"""accelerate: FSDP1 and FSDP2, `save_state` through DCP and as a file a rank, DDP, a plain model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ema_ckpt
from tests.distributed import launcher
from tests.integration.proving import Made, assert_same_bits, goes_through_all_verbs
from tests.integration.table import Row
from tests.integration.training import Net, as_launched, batch, keep, kept

pytestmark = pytest.mark.integration


def prepared(version: int, state_type: str) -> tuple[Any, Any, Any]:
    """(accelerator, model, optimizer) under FSDP.

    accelerate turns FSDP on only where it finds an accelerator; on a CPU its own switch is set by hand. All that then
    shards, saves and loads is accelerate's.
    """
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from torch.distributed.fsdp import FullyShardedDataParallel

    as_launched()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        state_dict_type=state_type,
        auto_wrap_policy="no_wrap",
        cpu_ram_efficient_loading=False,
        use_orig_params=True if version == 1 else None,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    model = Net()
    if (
        version == 1
    ):  # wrapped by hand, which accelerate takes: it would name the device cpu:0, and FSDP1 refuses that
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return (accelerator, *accelerator.prepare(model, optimizer))


def step(accelerator: Any, model: Any, optimizer: Any, number: int) -> None:
    rows = batch(number, accelerator.process_index, accelerator.num_processes)
    accelerator.backward(model(rows).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def keep_whole(accelerator: Any, model: Any, file: Path) -> None:
    """accelerate's `get_state_dict`; of FSDP1 on a CPU torch's whole parameters, which that would free too early."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(model, FullyShardedDataParallel):
        return keep(accelerator.get_state_dict(model), file)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return keep(
            {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}, file
        )


def saves(folder: Path, version: int, state_type: str, use_dcp: bool) -> None:
    warnings.simplefilter("ignore")
    accelerator, model, optimizer = prepared(version, state_type)
    for number in range(3):
        step(accelerator, model, optimizer, number)
    options = {} if use_dcp else {"use_dcp": False}
    accelerator.save_state(str(folder / "checkpoint"), **options)
    keep_whole(accelerator, model, folder / "whole.pt")


def loads(folder: Path, checkpoint: Path, version: int) -> None:
    """Another start is overwritten by what accelerate's own functions read."""
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer

    warnings.simplefilter("ignore")
    accelerator, model, optimizer = prepared(version, "SHARDED_STATE_DICT")
    step(accelerator, model, optimizer, 77)
    plugin = accelerator.state.fsdp_plugin
    load_fsdp_model(plugin, accelerator, model, str(checkpoint))
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, str(checkpoint))
    keep_whole(accelerator, model, folder / "loaded.pt")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("use_dcp", [True, False])
def test_fsdp(version: int, use_dcp: bool, tmp_path: Path) -> None:
    how = "" if use_dcp else ", `use_dcp=False`"
    with Row("accelerate", f"FSDP{version}{how}, 2 ranks") as row:
        launcher.run(2, saves, tmp_path, version, "SHARDED_STATE_DICT", use_dcp, timeout=120)
        made = Made(
            tmp_path / "checkpoint",
            {"pytorch_model_fsdp_0": "live", "optimizer_0": "optimizer"},
            {"pytorch_model_fsdp_0": kept(tmp_path / "whole.pt")},
        )
        goes_through_all_verbs(row, made, tmp_path)
        if use_dcp:
            for part in ("pytorch_model_fsdp_0", "optimizer_0"):  # where accelerate looks for each
                ema_ckpt.reshard(made.path / part, tmp_path / "again" / part, world_size=3)
            launcher.run(2, loads, tmp_path, tmp_path / "again", version, timeout=120)
            assert_same_bits(kept(tmp_path / "loaded.pt"), kept(tmp_path / "whole.pt"))
            row.shown("loaded back", "`load_fsdp_model`, `load_fsdp_optimizer`")
