from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ema_ckpt.core.box import Box, flat_range_boxes, whole
from ema_ckpt.core.errors import StateError
from ema_ckpt.ema.checkpoint.local_shards_tensor import (
    LocalShardsTensor,
    as_global_tensor,
    pieces_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def flat_piece(shape: tuple[int, ...], start: int, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    local = torch.arange(start, start + numel, dtype=torch.float32)
    return local, as_global_tensor(flat_range_boxes(shape, start, start + numel), shape, local)


def full(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.data())
def test_pieces_are_the_global_elements_and_alias_the_local_ones(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, prod(shape) - 1))
    numel = data.draw(st.integers(1, prod(shape) - start))
    local, tensor = flat_piece(shape, start, numel)
    assert tuple(tensor.shape) == shape
    for box, view in pieces_of(tensor):
        expected = full(shape)[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))]
        assert torch.equal(view, expected)
        view.neg_()
    assert torch.equal(local, -torch.arange(start, start + numel, dtype=torch.float32))


def test_a_whole_local_tensor_is_itself() -> None:
    local = torch.zeros(3, 4)
    assert as_global_tensor([whole((3, 4))], (3, 4), local) is local
    scalar = torch.tensor(2.0)
    assert as_global_tensor([whole(())], (), scalar) is scalar
    empty = torch.zeros(0, 8)
    assert as_global_tensor((), (0, 8), empty) is empty


def test_boxes_must_fit_the_local_elements() -> None:
    with pytest.raises(StateError, match="12 local elements"):
        as_global_tensor([Box((0, 0), (2, 4))], (4, 4), torch.zeros(12))


def test_rows_in_several_boxes_need_no_contiguous_memory() -> None:
    local = torch.arange(24.0).reshape(4, 6).t()[:, :2]
    assert not local.is_contiguous()
    tensor = as_global_tensor([Box((0, 0), (2, 2)), Box((5, 0), (4, 2))], (9, 2), local)
    (_, first), (_, second) = pieces_of(tensor)
    assert torch.equal(torch.cat([first, second]), local)
    assert second.data_ptr() == local[2:].data_ptr()


def test_copies_moves_and_nothing_else() -> None:
    local, tensor = flat_piece((3, 4), 2, 7)
    copy = tensor.clone()
    assert isinstance(copy, LocalShardsTensor)
    local.zero_()
    assert [v.sum().item() for _, v in pieces_of(copy)] == [5.0, 22.0, 8.0]
    copy.copy_(full((3, 4)) * 2)
    assert [v.sum().item() for _, v in pieces_of(copy)] == [10.0, 44.0, 16.0]
    tensor.copy_(copy)
    assert torch.equal(local, torch.arange(2.0, 9.0) * 2)
    assert tensor.detach().views[0].data_ptr() == local.data_ptr()
    assert tensor.cpu().shape == tensor.shape
    half = tensor.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert half.views[1].dtype == torch.bfloat16
    assert half.boxes == tensor.boxes
    empty = torch.empty_like(tensor)
    assert isinstance(empty, LocalShardsTensor)
    assert empty.boxes == tensor.boxes
    assert tensor.new_empty(()).shape == ()
    assert "holds=[[0, 2]+[1, 2]" in repr(tensor)
    with pytest.raises(NotImplementedError, match="full_state_dict"):
        tensor + 1
    with pytest.raises(StateError, match="hold other elements"):
        tensor.copy_(flat_piece((3, 4), 0, 7)[1])


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (7,), (0, 8), (1,)])
def test_pieces_of_all_ranks_make_one_checkpoint(shape: tuple[int, ...], tmp_path: Path) -> None:
    """One process stands for all ranks: every piece under a key of its own, saved and read by torch alone."""
    n = prod(shape)
    cuts = sorted({0, n // 3, n // 2, n})
    local = torch.arange(n, dtype=torch.float32)
    parts = {
        f"w{i}": as_global_tensor(flat_range_boxes(shape, a, b), shape, local[a:b])
        for i, (a, b) in enumerate(pairwise(cuts))
    }
    dcp.save({"ema": parts}, checkpoint_id=tmp_path / "c", no_dist=True)
    targets = {
        f"w{i}": as_global_tensor(flat_range_boxes(shape, a, b), shape, torch.zeros(b - a))
        for i, (a, b) in enumerate(pairwise(cuts))
    }
    dcp.load({"ema": targets}, checkpoint_id=tmp_path / "c", no_dist=True)
    for name, tensor in targets.items():
        assert [v.tolist() for _, v in pieces_of(tensor)] == [
            v.tolist() for _, v in pieces_of(parts[name])
        ]


def test_a_tensor_without_elements_keeps_its_shape(tmp_path: Path) -> None:
    flat = torch.zeros(0)
    tensor = as_global_tensor((), (0, 8), flat)
    assert isinstance(tensor, LocalShardsTensor)
    dcp.save({"w": tensor}, checkpoint_id=tmp_path / "c", no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    assert metadata.state_dict_metadata["w"].size == torch.Size([0, 8])
    dcp.load({"w": tensor}, checkpoint_id=tmp_path / "c", no_dist=True)


@pytest.mark.parametrize("shared", [False, True])
def test_staging_copies_the_pieces(shared: bool) -> None:
    local, tensor = flat_piece((4, 5), 3, 11)
    stager = DefaultStager(StagingOptions(False, shared, False, False))
    staged = stager.stage({"ema": {"w": tensor, "v": tensor}})
    local.fill_(-1)
    assert isinstance(staged["ema"]["w"], LocalShardsTensor)
    assert torch.cat([v.reshape(-1) for v in staged["ema"]["w"].views]).tolist() == list(
        range(3, 14)
    )
    assert staged["ema"]["w"].boxes == tensor.boxes
    stager.close()
