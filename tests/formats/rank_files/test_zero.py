"""ZeRO partitions in DeepSpeed's layout; put together by the steps of its own `zero_to_fp32.py`."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import ema_ckpt

GROUPS = [
    {"embed.weight": (7, 3), "layer.0.w": (5, 5)},
    {"layer.0.b": (5,), "norm.g": (1,), "scale": ()},
]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator)
        for group in GROUPS
        for name, shape in group.items()
    }


def save(folder: Path, stage: int, world_size: int) -> dict[str, torch.Tensor]:
    """Optimizer files of all ranks and the model's file; returns what they hold together."""
    full = weights()
    buffers = {"rope": torch.arange(4.0)}
    frozen = {"frozen.w": torch.full((2, 3), 9.0)} if stage < 3 else {}
    half = {f"{name}": tensor.half() for name, tensor in full.items()}
    model = {
        "module": {**half, **buffers, "head.weight": half["embed.weight"]},
        "buffer_names": ["rope"],
        "param_shapes": [
            OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in GROUPS
        ],
        "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()},
        "frozen_param_fragments": frozen,
        "shared_params": {"head.weight": "embed.weight"},
        "global_steps": 30,
        "ds_version": "0.16.4",
    }
    middle = "zero_pp_rank_0_" if stage == 3 else ""
    torch.save(model, folder / f"{middle}mp_rank_00_model_states.pt")
    for rank in range(world_size):
        state = {
            "zero_stage": stage,
            "partition_count": world_size,
            "base_optimizer_state": {"state": {}},
        }
        if stage < 3:
            state["single_partition_of_fp32_groups"] = [
                piece_of_group(group, rank, world_size, full) for group in GROUPS
            ]
        else:
            state["fp32_flat_groups"] = [
                torch.cat([piece_of(full[name], rank, world_size) for name in group])
                for group in GROUPS
            ]
        torch.save(
            {"optimizer_state_dict": state},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return {**full, **buffers, **frozen, "head.weight": full["embed.weight"]}


def piece_of_group(
    group: dict, rank: int, world_size: int, full: dict[str, torch.Tensor]
) -> torch.Tensor:
    """A row of all parameters, padded to a multiple of twice the ranks."""
    row = torch.cat([full[name].reshape(-1) for name in group])
    aligned = 2 * world_size * math.ceil(len(row) / (2 * world_size))
    row = torch.cat([row, torch.full((aligned - len(row),), float("nan"))])
    return row.chunk(world_size)[rank].clone()


def piece_of(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A parameter by itself, padded to a multiple of the ranks."""
    step = math.ceil(tensor.numel() / world_size)
    row = torch.cat(
        [tensor.reshape(-1), torch.full((step * world_size - tensor.numel(),), float("nan"))]
    )
    return row[rank * step : (rank + 1) * step].clone()


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_partitions_give_the_weights(tmp_path: Path, stage: int, world_size: int) -> None:
    (tmp_path / "global_step30").mkdir()
    expected = save(tmp_path / "global_step30", stage, world_size)
    found = ema_ckpt.inspect(tmp_path)
    assert (found.format, found.world_size) == ("rank-files", world_size)
    assert [(tree.name, tree.role) for tree in found.trees] == [("module", "live")]
    ema_ckpt.consolidate(tmp_path, tmp_path / "out.pt")
    stored = torch.load(tmp_path / "out.pt", weights_only=True)
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert stored[name].dtype == torch.float32
        assert torch.equal(stored[name], tensor), name
    done = ema_ckpt.convert(tmp_path / "global_step30", tmp_path / "dcp", world_size=2)
    assert {item.name for item in done.skipped} == {
        "optimizer_state_dict",
        "global_steps",
        "ds_version",
    }
    assert done.tensors == len(expected)


@pytest.mark.parametrize(
    "lost", ["zero_pp_rank_2_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"]
)
def test_what_is_missing_is_named(tmp_path: Path, lost: str) -> None:
    save(tmp_path, 2, 3)
    (tmp_path / lost).unlink()
    expected = r"3 ranks|mp_rank_00_model_states"
    with pytest.raises(ema_ckpt.EmaCkptError, match=expected) as caught:
        ema_ckpt.consolidate(tmp_path, tmp_path / "out.pt")
    assert caught.value.code == "incomplete"
    (warning,) = ema_ckpt.inspect(tmp_path).warnings
    assert warning.code == "incomplete"
    assert re.search(expected, warning.message)
    found = ema_ckpt.verify(tmp_path)
    assert (found.status, found.problems[0].code) == ("damaged", "incomplete")
    assert found.checked_bytes  # what is there


def test_shapes_have_to_be_recorded(tmp_path: Path) -> None:
    save(tmp_path, 2, 2)
    model = torch.load(tmp_path / "mp_rank_00_model_states.pt", weights_only=False)
    torch.save({**model, "param_shapes": []}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(ema_ckpt.EmaCkptError, match="param_shapes") as caught:
        ema_ckpt.inspect(tmp_path)
    assert caught.value.code == "unsupported"


def test_frozen_weights_that_are_cut_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 3, 2)
    file = tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    model = torch.load(file, weights_only=False)
    cut = {
        "frozen_param_shapes": {"f": torch.Size([4, 2])},
        "frozen_param_fragments": {"f": torch.ones(4)},
    }
    torch.save({**model, **cut}, file)
    with pytest.raises(ema_ckpt.EmaCkptError, match="frozen weight 'f'") as caught:
        ema_ckpt.inspect(tmp_path)
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_what_nothing_counts_is_never_a_whole(tmp_path: Path, stage: int, lost: int) -> None:
    """Files that do not say how many there were, one of them missing: no piece has a place."""
    save(tmp_path, stage, 3)
    for file in sorted(tmp_path.glob("*optim_states.pt")):
        state = torch.load(file, weights_only=False)
        del state["optimizer_state_dict"]["partition_count"]
        torch.save(state, file)
    (tmp_path / f"zero_pp_rank_{lost}_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.consolidate(tmp_path, tmp_path / "out.pt")
    assert caught.value.code == "incomplete"
    seen = ema_ckpt.inspect(tmp_path)
    assert seen.tensors == ()
    assert "incomplete" in {warning.code for warning in seen.warnings}
    assert ema_ckpt.verify(tmp_path).status == "damaged"
