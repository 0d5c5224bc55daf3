"""Pieces are put where they were recorded to belong, whatever rank wrote them and however they were cut."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from tests.checkpoints import save_replicas
from tests.sharded import Box, relabel, rows, save_cut


def _tagged(*shape: int) -> torch.Tensor:
    """Values that tell where they belong."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def _consolidated(source: Path, out: Path) -> dict[str, torch.Tensor]:
    ema_ckpt.consolidate(source, out)
    return (
        load_file(out)
        if out.suffix == ".safetensors"
        else torch.load(out, weights_only=True, mmap=True)
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("out", ["out.safetensors", "out.pt"])
def test_rows_that_do_not_divide_and_ranks_without_any(
    tmp_path: Path, ranks: int, out: str
) -> None:
    """pytorch/pytorch#108869: 6 elements on 4 ranks are 2, 2, 2 and none."""
    model = {f"model.n{n}": _tagged(n) for n in (1, 2, 3, 5, 6, 7, 9)} | {
        "model.wide": _tagged(5, 2)
    }
    source = save_cut(
        tmp_path / "run", model, {name: rows(t.shape, ranks) for name, t in model.items()}
    )
    found = _consolidated(source, tmp_path / out)
    assert {f"model.{name}" for name in found} == set(model)
    for name, value in model.items():
        assert torch.equal(found[name.removeprefix("model.")], value), name
    assert ema_ckpt.verify(source).status == "sound"


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_two_pieces_of_one_tensor_on_each_rank_stand_in_the_order_of_rows(
    tmp_path: Path, ranks: int
) -> None:
    """NVIDIA/Megatron-LM#2769: gate and up parts of a fused weight, each cut over the ranks."""
    fused = _tagged(16, 2)
    by_rank: list[list[Box]] = [[((2 * r, 0), (2, 2)), ((8 + 2 * r, 0), (2, 2))] for r in range(4)]
    source = save_cut(tmp_path / "run", {"model.fused": fused}, {"model.fused": by_rank})
    assert torch.equal(_consolidated(source, tmp_path / "direct.safetensors")["fused"], fused)
    ema_ckpt.reshard(source, tmp_path / "cut", ranks)
    found = _consolidated(tmp_path / "cut", tmp_path / "again.safetensors")
    assert torch.equal(found["fused"], fused)


@st.composite
def _grids(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[Box]]]:
    """A tensor of up to three dimensions cut along all of them, its boxes dealt to ranks in any order."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    edges = [
        [0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else ()), size]
        for size in shape
    ]
    boxes: list[Box] = [((), ())]
    for cut in edges:
        spans = list(pairwise(cut))
        boxes = [((*o, a), (*n, b - a)) for o, n in boxes for a, b in spans]
    ranks = draw(st.integers(1, 4))
    dealt: list[list[Box]] = [[] for _ in range(ranks)]
    for box in draw(st.permutations(boxes)):
        dealt[draw(st.integers(0, ranks - 1))].append(box)
    return _tagged(*shape), dealt


@settings(max_examples=25)
@given(grid=_grids())
def test_any_grid_of_boxes_dealt_in_any_order(grid: tuple[torch.Tensor, list[list[Box]]]) -> None:
    """pytorch/pytorch#150490: tensor and data parallelism together, with sizes that do not divide."""
    from tempfile import TemporaryDirectory

    tensor, dealt = grid
    with TemporaryDirectory() as folder:
        source = save_cut(Path(folder, "run"), {"model.w": tensor}, {"model.w": dealt})
        for out in ("out.safetensors", "out.pt"):
            assert torch.equal(_consolidated(source, Path(folder, out))["w"].clone(), tensor)
        with ema_ckpt.open(source) as opened:
            assert torch.equal(opened["model.w"], tensor)


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_all_ranks_hold_whole_keeps_its_shape(tmp_path: Path, ranks: int) -> None:
    """verl-project/verl#7610: replicated buffers were glued together rank by rank."""
    model = {
        "scale": torch.tensor([2.5]),
        "count": torch.tensor(3),
        "table": _tagged(3, 4),
        "none": torch.zeros(0, 2),
    }
    source = save_replicas(tmp_path / "run", {"model": model}, ranks)
    found = _consolidated(source, tmp_path / "out.safetensors")
    for name, value in model.items():
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name
    total = sum(t.numel() * t.element_size() for t in model.values())
    assert ema_ckpt.inspect(source).nbytes == total


@pytest.mark.parametrize("shape", [(0,), (0, 5), (8, 0), (0, 0), (2, 0, 3)])
def test_tensors_without_elements_keep_their_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """deepspeedai/DeepSpeed#8467: a layer without outputs beside a normal one."""
    model = {"layer": torch.zeros(shape, dtype=torch.bfloat16), "other": _tagged(2, 2)}
    source = save_replicas(tmp_path / "run", {"model": model}, 2)
    for out in ("out.safetensors", "out.pt"):
        found = _consolidated(source, tmp_path / out)
        assert found["layer"].shape == shape
        assert found["layer"].dtype == torch.bfloat16
        assert torch.equal(found["other"], model["other"])


_DEFECTS: dict[str, tuple[list[Box], str, str]] = {
    "half": ([((0, 0), (2, 4))], "hole", "8 of 16 elements covered"),
    "gap in the middle": ([((0, 0), (1, 4)), ((3, 0), (1, 4))], "hole", "8 of 16 elements covered"),
    "missing columns": ([((0, 0), (4, 3))], "hole", "12 of 16 elements covered"),
    "some rows twice": (
        [((0, 0), (3, 4)), ((2, 0), (2, 4))],
        "overlap",
        "some of the same elements",
    ),
    "beyond the last row": (
        [((0, 0), (3, 4)), ((3, 0), (2, 4))],
        "out-of-bounds",
        "does not fit into [4, 4]",
    ),
    "beyond the last column": ([((0, 1), (4, 4))], "out-of-bounds", "does not fit into [4, 4]"),
}


@pytest.mark.parametrize("defect", _DEFECTS)
def test_pieces_that_do_not_cover_once_are_refused_by_name(tmp_path: Path, defect: str) -> None:
    """pytorch/pytorch#126595: recorded chunks covered half of each tensor."""
    boxes, code, words = _DEFECTS[defect]
    count, width = sum(sizes[0] for _, sizes in boxes), boxes[0][1][1]
    stacked, row = [], 0
    for _, sizes in boxes:
        stacked.append(((row, 0), sizes))
        row += sizes[0]
    tensors = {"model.bad": torch.zeros(count, width), "model.good": _tagged(4, 4)}
    source = save_cut(
        tmp_path / "run", tensors, {"model.bad": [stacked], "model.good": rows((4, 4), 1)}
    )
    relabel(source, "model.bad", (4, 4), boxes)
    with pytest.raises(EmaCkptError) as caught:
        ema_ckpt.consolidate(source, tmp_path / "out.safetensors")
    assert caught.value.code == code
    assert "'model.bad'" in str(caught.value)
    assert words in str(caught.value)
    assert os.listdir(tmp_path) == ["run"]
    verdict = ema_ckpt.verify(source)
    assert verdict.status == "damaged"
    assert [(p.code, p.tensor) for p in verdict.problems] == [(code, "model.bad")]
    assert [w.code for w in ema_ckpt.inspect(source).warnings] == [code]
    ema_ckpt.consolidate(source, tmp_path / "good.safetensors", match=["good"])
    assert torch.equal(load_file(tmp_path / "good.safetensors")["good"], tensors["model.good"])
