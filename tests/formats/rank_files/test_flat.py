"""Runs of flattened tensors as boxes, and flat pieces of ranks put together; numpy is the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ema_ckpt

SHAPES = {"a": (5, 3), "b.w": (2, 3, 4), "gain": (), "void": (0, 3), "c": (7,)}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def pieces(world_size: int, *, padded: bool = False) -> list[torch.Tensor]:
    row = torch.cat([tensor.reshape(-1) for tensor in weights().values()])
    step = -(-len(row) // world_size)
    if padded:
        row = torch.cat([row, torch.full((step * world_size - len(row),), float("nan"))])
    return [row[rank * step : (rank + 1) * step].clone() for rank in range(world_size)]


def check(path: Path, tree: str = "", **found: object) -> None:
    expected = weights()
    with ema_ckpt.open(path) as ckpt:
        for name, tensor in expected.items():
            stored = ckpt[f"{tree}.{name}" if tree else name]
            assert stored.shape == tensor.shape
            assert torch.equal(stored, tensor), name


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("padded", [False, True])
def test_equal_partition_with_names_and_shapes(
    tmp_path: Path, world_size: int, padded: bool
) -> None:
    for rank, piece in enumerate(pieces(world_size, padded=padded)):
        tree = {
            "flat": piece,
            "names": list(SHAPES),
            "shapes": [torch.Size(s) for s in SHAPES.values()],
            "decay": 0.9,
        }
        torch.save({"ema": tree}, tmp_path / f"ema_rank{rank}.pt")
    check(tmp_path, "ema")
    assert ema_ckpt.inspect(tmp_path).ema["ema"]["decay"] == 0.9
    assert ema_ckpt.verify(tmp_path).status == "sound"


def test_the_recorded_rank_wins_over_the_file_name(tmp_path: Path) -> None:
    for rank, piece in enumerate(pieces(3)):
        tree = {
            "rank": rank,
            "world_size": 3,
            "flat": piece,
            "names": list(SHAPES),
            "shapes": dict(SHAPES),
        }
        torch.save(tree, tmp_path / f"ema_rank{2 - rank}.pt")
    check(tmp_path)


def save_runs(tmp_path: Path, world_size: int, **more: object) -> None:
    """As `DistEMA` keeps it: each rank's names, first and last element of each, and the data of each."""
    row = {name: tensor.reshape(-1) for name, tensor in weights().items() if tensor.numel()}
    step = -(-sum(map(len, row.values())) // world_size)
    for rank in range(world_size):
        names, runs, data, at = [], [], [], 0
        for name, tensor in row.items():
            first, last = max(rank * step - at, 0), min((rank + 1) * step - at, len(tensor)) - 1
            if first <= last:
                names.append(name)
                runs.append((first, last))
                data.append(tensor[first : last + 1].clone())
            at += len(tensor)
        state = {"name_list": names, "index_list": runs, "ema_param_list": data, **more}
        torch.save({"ema": state}, tmp_path / f"ema_rank{rank}.pt")


def test_runs_of_each_tensor_with_shapes(tmp_path: Path) -> None:
    save_runs(tmp_path, 4, shapes=dict(SHAPES))
    with ema_ckpt.open(tmp_path) as ckpt:
        for name, tensor in weights().items():
            if tensor.numel():
                assert torch.equal(ckpt[f"ema.{name}"], tensor)


def test_runs_without_shapes_are_refused_by_name(tmp_path: Path) -> None:
    save_runs(tmp_path, 2)
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"shapes of 'a'.* missing") as caught:
        ema_ckpt.inspect(tmp_path)
    assert caught.value.code == "unsupported"


def test_a_lost_piece_is_told(tmp_path: Path) -> None:
    for rank, piece in enumerate(pieces(4)[:3]):
        tree = {"flat": piece, "names": list(SHAPES), "shapes": list(SHAPES.values())}
        torch.save(tree, tmp_path / f"ema_rank{rank}.pt")
    with pytest.raises(ema_ckpt.EmaCkptError, match="files missing") as caught:
        ema_ckpt.consolidate(tmp_path, tmp_path / "out.pt")
    assert caught.value.code == "incomplete"
    assert [w.code for w in ema_ckpt.inspect(tmp_path).warnings] == ["incomplete"]


@pytest.mark.parametrize("shape", [(2,), (2, 3), (0, 3), (3, 0)])
def test_a_range_beyond_its_tensor_is_out_of_bounds(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = {"name_list": ["a"], "index_list": [(0, 9)], "ema_param_list": [torch.arange(10.0)]}
    torch.save({"ema": {**state, "shapes": {"a": shape}}}, tmp_path / "ema_rank0.pt")
    with pytest.raises(ema_ckpt.EmaCkptError, match="does not fit") as caught:
        ema_ckpt.consolidate(tmp_path, tmp_path / "out.pt")
    assert caught.value.code == "out-of-bounds"
    assert ema_ckpt.verify(tmp_path).status == "damaged"


@pytest.mark.parametrize("recorded", [{}, {"rank": 1, "world_size": 4}])
def test_a_piece_alone_is_not_the_whole(tmp_path: Path, recorded: dict[str, int]) -> None:
    tree = {"flat": pieces(4)[1], "names": list(SHAPES), "shapes": list(SHAPES.values())}
    torch.save({**tree, **recorded}, tmp_path / "ema_rank1.pt")
    for path in (tmp_path, tmp_path / "ema_rank1.pt"):
        with pytest.raises(ema_ckpt.EmaCkptError, match="missing") as caught:
            ema_ckpt.consolidate(path, tmp_path.parent / "out.pt")
        assert caught.value.code == "incomplete"
    assert [w.code for w in ema_ckpt.inspect(tmp_path).warnings] == ["incomplete"]
    with pytest.raises(ema_ckpt.EmaCkptError, match="missing") as caught:
        ema_ckpt.inspect(tmp_path / "ema_rank1.pt")
    assert caught.value.code == "incomplete"
