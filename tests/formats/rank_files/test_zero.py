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


def save(
    folder: Path, stage: int, world_size: int, alignment: int | None = None, *, is_lean: bool = True
) -> dict[str, torch.Tensor]:
    """Optimizer files of all ranks and the model's file; returns what they hold together.

    `alignment` is that of DeepSpeed's `parameter_alignment`, in elements; without `is_lean` pieces
    keep the padding at the end of the row.
    """
    full = weights()
    buffers = {"rope": torch.arange(4.0)}
    frozen = {"frozen.w": torch.full((2, 3), 9.0)} if stage < 3 else {}
    half = {name: tensor.half() for name, tensor in full.items()}
    if stage == 3:  # what a module holds between its steps
        half = {name: torch.empty(0, dtype=torch.float16) for name in full}
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
    prefixes = [f"zero_pp_rank_{rank}_" for rank in range(world_size)] if stage == 3 else [""]
    for prefix in prefixes:
        torch.save(model, folder / f"{prefix}mp_rank_00_model_states.pt")
    for rank in range(world_size):
        state = {
            "zero_stage": stage,
            "partition_count": world_size,
            "base_optimizer_state": {"state": {}},
        }
        if stage < 3:
            state["single_partition_of_fp32_groups"] = [
                piece_of_group(group, rank, world_size, full, alignment or 1, is_lean=is_lean)
                for group in GROUPS
            ]
            if alignment is not None:
                state["param_alignment_paddings"] = [paddings(group, alignment) for group in GROUPS]
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


def paddings(group: dict, alignment: int) -> list[int]:
    """Elements of padding after each parameter, so that the next one is aligned."""
    numels, begin, listed = [math.prod(shape) for shape in group.values()], 0, []
    for number, numel in enumerate(numels):
        padding = 0 if number == len(numels) - 1 else -(begin + numel) % alignment
        begin += numel + padding
        listed.append(padding)
    return listed


def piece_of_group(
    group: dict,
    rank: int,
    world_size: int,
    full: dict[str, torch.Tensor],
    alignment: int,
    *,
    is_lean: bool,
) -> torch.Tensor:
    """A piece of the row of all parameters, which is padded to a multiple of twice the ranks.

    As DeepSpeed's `_get_groups_without_padding` leaves it (stage_1_and_2.py).
    """
    parts = []
    for name, padding in zip(group, paddings(group, alignment), strict=True):
        parts += [full[name].reshape(-1), torch.full((padding,), float("nan"))]
    row = torch.cat(parts)
    numel = len(row)
    aligned = 2 * world_size * math.ceil(numel / (2 * world_size))
    row = torch.cat([row, torch.full((aligned - numel,), float("nan"))])
    step = aligned // world_size
    end = min(numel, (rank + 1) * step) if is_lean else (rank + 1) * step
    return row[rank * step : max(end, rank * step)].clone()


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
    others = {f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(1, world_size)}
    assert {item.name for item in done.skipped} == {
        "optimizer_state_dict",
        "global_steps",
        "ds_version",
        *(others if stage == 3 else ()),
    }
    assert done.tensors == len(expected)


@pytest.mark.parametrize("alignment", [None, 1, 4, 8])
@pytest.mark.parametrize("is_lean", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_padding_is_no_weight(
    tmp_path: Path, world_size: int, is_lean: bool, alignment: int | None
) -> None:
    """Between parameters (`parameter_alignment`), and at the end of a row or cut off there."""
    (tmp_path / "step").mkdir()
    expected = save(tmp_path / "step", 2, world_size, alignment, is_lean=is_lean)
    assert ema_ckpt.verify(tmp_path / "step").status == "sound"
    with ema_ckpt.open(tmp_path / "step") as checkpoint:
        for name, tensor in expected.items():
            assert checkpoint[f"module.{name}"].equal(tensor), name


@pytest.mark.parametrize("listed", [[[0, 0]], [[0], [0, 0, 0]], [[0, 0], [0, -1, 0]], "none"])
def test_paddings_that_fit_no_parameters_are_refused(tmp_path: Path, listed: object) -> None:
    save(tmp_path, 2, 2)
    for file in tmp_path.glob("*optim_states.pt"):
        state = torch.load(file, weights_only=False)
        state["optimizer_state_dict"]["param_alignment_paddings"] = listed
        torch.save(state, file)
    with pytest.raises(ema_ckpt.EmaCkptError, match="param_alignment_paddings") as caught:
        ema_ckpt.consolidate(tmp_path, tmp_path / "out.pt")
    assert caught.value.code == "unreadable"


@pytest.mark.parametrize("stage", [2, 3])
def test_the_shapes_of_another_save_are_refused(tmp_path: Path, stage: int) -> None:
    """As a step before more weights were unfrozen: `zero_to_fp32.py` refuses these too."""
    save(tmp_path, stage, 2)
    file, *_ = sorted(tmp_path.glob("*model_states.pt"))
    model = torch.load(file, weights_only=False)
    del model["param_shapes"][0]["embed.weight"]
    torch.save(model, file)
    with pytest.raises(ema_ckpt.EmaCkptError, match="different saves") as caught:
        ema_ckpt.consolidate(tmp_path, tmp_path / "out.pt")
    assert caught.value.code == "index-mismatch"
    assert ema_ckpt.verify(tmp_path).status == "damaged"


@pytest.mark.parametrize("damage", ["missing-file", "truncated-file", "checksum"])
def test_files_of_the_model_that_only_deepspeed_reads_are_checked(
    tmp_path: Path, damage: str
) -> None:
    """In stage 3 each rank has one; `zero_to_fp32.py` and a resumed run load all of them."""
    (tmp_path / "step").mkdir()
    expected = save(tmp_path / "step", 3, 3)
    assert ema_ckpt.verify(tmp_path / "step").status == "sound"
    file = tmp_path / "step" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    data = bytearray(file.read_bytes())
    data[data.index(torch.arange(4.0).numpy().tobytes())] ^= 1
    if damage == "missing-file":
        file.unlink()
    else:
        file.write_bytes(data if damage == "checksum" else b"")
    found = ema_ckpt.verify(tmp_path / "step")
    problem, *_ = found.problems
    assert (found.status, problem.code, problem.file) == ("damaged", damage, file.name)
    with ema_ckpt.open(tmp_path / "step") as checkpoint:
        assert checkpoint["module.embed.weight"].equal(expected["embed.weight"])
    if damage != "checksum":
        assert file.name in " ".join(
            w.message for w in ema_ckpt.inspect(tmp_path / "step").warnings
        )


def test_experts_that_ranks_share_out_are_no_damage(tmp_path: Path) -> None:
    """DeepSpeed's `ep_size=2` on two ranks: each has all of the group of its own experts."""
    save(tmp_path, 2, 2)
    for file in tmp_path.glob("*optim_states.pt"):
        state = torch.load(file)
        state["optimizer_state_dict"]["partition_count"] = [2, 1]
        pieces = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        pieces[1] = torch.cat([pieces[1], pieces[1]])
        torch.save(state, file)
    for command in (ema_ckpt.verify, ema_ckpt.inspect):
        with pytest.raises(ema_ckpt.EmaCkptError, match="group 1 is cut over 1 of 2") as caught:
            command(tmp_path)
        assert caught.value.code == "unsupported"


@pytest.mark.parametrize("stage", [2, 3])
def test_the_file_of_a_save_by_other_ranks_is_refused(tmp_path: Path, stage: int) -> None:
    save(tmp_path, stage, 3)
    other = tmp_path / "other"
    other.mkdir()
    save(other, stage, 2)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (other / name).replace(tmp_path / name)
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"rank_1_.*written by 2 ranks") as caught:
        ema_ckpt.consolidate(tmp_path, tmp_path / "out.pt")
    assert caught.value.code == "incomplete"


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


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_of_stage_3_are_not_in_the_files_of_the_model(
    tmp_path: Path, world_size: int
) -> None:
    """Who leaves out the large optimizer files has only the placeholders."""
    (tmp_path / "global_step30").mkdir()
    save(tmp_path / "global_step30", 3, world_size)
    for file in tmp_path.rglob("*optim_states.pt"):
        file.unlink()
    for path in (tmp_path, tmp_path / "global_step30"):
        with pytest.raises(ema_ckpt.EmaCkptError, match="the files with its pieces") as caught:
            ema_ckpt.consolidate(path, tmp_path / "out.pt")
        assert caught.value.code == "incomplete"
        found = ema_ckpt.verify(path)
        assert (found.status, found.problems[0].code) == ("damaged", "incomplete")
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_of_half_precision_are_said_to_be_such(tmp_path: Path, stage: int) -> None:
    step = tmp_path / "global_step30"
    step.mkdir()
    save(step, stage, 2)
    for file in step.glob("*optim_states.pt"):
        file.unlink()
    for report in (ema_ckpt.consolidate(step, tmp_path / "out.safetensors"), ema_ckpt.verify(step)):
        assert [w.code for w in report.warnings] == ["unchecked", "left-out"]
        assert "weights in full precision" in report.warnings[1].message


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


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_only_the_module_has_are_read_or_named(tmp_path: Path, stage: int) -> None:
    """Frozen ones in stage 1, as `engine.py` saves fragments of them from stage 2 on only."""
    (tmp_path / "step").mkdir()
    expected = save(tmp_path / "step", stage, 2)
    for file in (tmp_path / "step").glob("*model_states.pt"):
        model = torch.load(file, weights_only=False)
        frozen = {"frozen.w": torch.full((2, 3), 9.0), "frozen.tied": torch.full((2, 3), 9.0)}
        if stage == 3:
            frozen = {name: torch.empty(0) for name in frozen}
        model["module"] |= {**frozen, "fp8._extra_state": {"scale": 2}, "none": torch.empty(0, 3)}
        model["shared_params"]["frozen.tied"] = "frozen.w"
        nothing = {"frozen_param_shapes": None, "frozen_param_fragments": None}
        torch.save({**model, **nothing}, file)
    done = ema_ckpt.consolidate(tmp_path / "step", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    unread = {"fp8._extra_state.scale"}
    expected["none"] = torch.empty(0, 3)
    if stage == 1:
        expected["frozen.tied"] = expected["frozen.w"]
    else:
        unread.add("frozen.w")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(name in done.warnings[1].message for name in unread)
    copied = ema_ckpt.convert(tmp_path / "step", tmp_path / "copy")
    assert {f"module.{name}" for name in unread} <= {item.name for item in copied.skipped}
    assert ema_ckpt.verify(tmp_path / "out.pt", against=tmp_path / "step").status == "sound"


@pytest.mark.parametrize("stage", [1, 3])
def test_the_module_lacks_the_prefix_of_checkpoint_wrapper(tmp_path: Path, stage: int) -> None:
    """As its hook takes it out of a state dict, and `named_parameters()` of the model has it."""
    (tmp_path / "step").mkdir()
    expected = save(tmp_path / "step", stage, 2)
    for file in (tmp_path / "step").glob("*model_states.pt"):
        model = torch.load(file, weights_only=False)
        model["param_shapes"] = [
            OrderedDict((wrapped(name), shape) for name, shape in group.items())
            for group in model["param_shapes"]
        ]
        model["shared_params"] = {"head.weight": wrapped("embed.weight")}
        if stage == 1:
            model["module"]["layer.1.w"] = model["module"]["frozen.w"] = torch.full((2, 3), 9.0)
            model["shared_params"][wrapped("layer.1.w")] = "frozen.w"
            model |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
            expected["layer.1.w"] = expected["frozen.w"]
        torch.save(model, file)
    done = ema_ckpt.consolidate(tmp_path / "step", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert len(done.warnings) == 1
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert ema_ckpt.verify(tmp_path / "out.pt", against=tmp_path / "step").status == "sound"


def wrapped(name: str) -> str:
    head, _, last = name.rpartition(".")
    return f"{head}._checkpoint_wrapped_module.{last}" if head else name


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
