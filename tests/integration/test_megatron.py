"""megatron-core: `dist_checkpointing.save` of a GPT model under tensor parallelism."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ema_ckpt
from tests.distributed import launcher
from tests.integration.proving import Made, assert_same_bits, goes_through_all_verbs
from tests.integration.table import Row
from tests.integration.training import as_launched, keep, kept

pytestmark = pytest.mark.integration


def gpt(parallel: int, seed: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.cuda.synchronize = lambda *args: (
        None
    )  # megatron waits for copies that a CPU does not make
    torch.cuda.current_device = lambda: torch.device("cpu")  # where one flag is reduced
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=parallel)
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True,
        tensor_model_parallel_size=parallel, gradient_accumulation_fusion=False,
        attention_backend="unfused",
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization="LayerNorm"), vocab_size=24, max_sequence_length=8
    )  # fmt: skip


def saves(folder: Path) -> None:
    from megatron.core import dist_checkpointing

    warnings.simplefilter("ignore")
    rank, world = as_launched()
    model = gpt(world, seed=0)
    state = model.sharded_state_dict()
    keep(gathered(state), folder / "whole.pt")  # before `save` reshapes the pieces
    if rank == 0:
        (folder / "iter_0000010").mkdir()
        (folder / "latest_checkpointed_iteration.txt").write_text("10")
    dist.barrier()
    dist_checkpointing.save(
        {"model": state, "iteration": 10, "args": {"lr": 0.1}}, str(folder / "iter_0000010")
    )


def gathered(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole tensors put together by the offsets of megatron's own `ShardedTensor`s."""
    from megatron.core.dist_checkpointing import ShardedTensor

    whole: dict[str, torch.Tensor] = {}
    for item in state.values():
        if isinstance(item, ShardedTensor):
            pieces: list[Any] = [None] * dist.get_world_size()
            data = item.data.detach()[
                (None,) * item.prepend_axis_num
            ]  # a layer is a row of the stored tensor
            dist.all_gather_object(pieces, (item.global_offset, data))
            full = whole.setdefault(item.key, torch.full(item.global_shape, torch.nan))
            for offset, piece in pieces:
                full[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))] = (
                    piece
                )
    return whole


def loads(folder: Path, checkpoint: Path) -> None:
    from megatron.core import dist_checkpointing

    warnings.simplefilter("ignore")
    _, world = as_launched()
    model = gpt(world, seed=1)
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))
    assert state["iteration"] == 10
    model.load_state_dict(state["model"])
    keep(gathered(model.sharded_state_dict()), folder / "loaded.pt")


def test_dist_checkpointing(tmp_path: Path) -> None:
    with Row("megatron-core", "`dist_checkpointing.save`, GPT, tensor parallel on 2 ranks") as row:
        launcher.run(2, saves, tmp_path, timeout=180)
        whole = kept(tmp_path / "whole.pt")
        made = Made(
            tmp_path / "iter_0000010", {"": "live"}, {"": whole}, beside=("common.pt", "metadata.json")
        )  # fmt: skip
        assert ema_ckpt.inspect(tmp_path).resolved == str(made.path)
        goes_through_all_verbs(row, made, tmp_path)
        launcher.run(1, loads, tmp_path, tmp_path / "on-3", timeout=180)
        assert_same_bits(kept(tmp_path / "loaded.pt"), whole)
        row.shown("loaded back", "`dist_checkpointing.load`, tensor parallel 1")
