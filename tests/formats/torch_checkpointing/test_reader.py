"""Checkpoints of torch_checkpointing, laid out by hand; tests/integration has those of the package itself.

The oracle is the whole tensor that was cut, and `expected.json` for the committed one.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt
from ema_ckpt import EmaCkptError

WHOLE = torch.arange(35, dtype=torch.float32).reshape(7, 5)
BIAS = torch.arange(7, dtype=torch.float32)
MESH = {"device_type": "cpu", "mesh_shape": (2,), "mesh_data": (0, 1), "mesh_dim_names": None}
TORCH = "TorchSerialization"


def placed(
    shape: Sequence[int], placements: Sequence[dict[str, Any]], mesh: dict[str, Any] = MESH
) -> dict[str, Any]:
    data = {
        "global_shape": list(shape), "dtype": "torch.float32", "stride": [1] * len(shape), "mesh_spec": mesh,
        "placements": list(placements),
    }  # fmt: skip
    sharding = {"type": "DTensorShardingMetadata", "data": data}
    return {"sharding_metadata": sharding, "ranks": tuple(mesh["mesh_data"])}


ROWS = placed((7, 5), [{"type": "Shard", "dim": 0}])
BIAS_ROWS = placed((7,), [{"type": "Shard", "dim": 0}])


def item(
    groups: dict[Sequence[str | int], list[dict[str, Any]]],
    layouts: Sequence[tuple[str, str] | None] = (None, None),
) -> dict[str, Any]:
    infos = [
        layout and {"file_path": layout[0], "serialization_format": {"type": layout[1]}}
        for layout in layouts
    ]
    paths = {json.dumps(list(path), separators=(",", ":")): found for path, found in groups.items()}
    return {"nested_path_to_metadata": paths, "rank_to_layout_info": dict(enumerate(infos))}


def write_metadata(root: Path, items: dict[str, Any], world_size: int = 2, **more: object) -> None:
    root.mkdir(exist_ok=True)
    document = {"metadata": items, "world_size": world_size, "version": "2.0", **more}
    (root / "metadata.pkl").write_bytes(pickle.dumps(document))


def write(root: Path) -> Path:
    """Two ranks with four rows and three, and a step of each."""
    write_metadata(root, {"model": item({("w",): [ROWS], ("b",): [BIAS_ROWS]})})
    for rank, rows in enumerate((slice(0, 4), slice(4, 7))):
        torch.save({"w": WHOLE[rows].clone(), "b": BIAS[rows].clone()}, root / f"model_{rank}.pt")
        torch.save(12, root / f"step_{rank}.pt")
    return root


def check(root: Path) -> None:
    with ema_ckpt.open(root) as ckpt:
        assert torch.equal(ckpt["model.w"], WHOLE)
        assert torch.equal(ckpt["model.b"], BIAS)


def test_local_tensors_are_placed_by_the_metadata(tmp_path: Path) -> None:
    root = write(tmp_path / "step_3")
    check(root)
    check(tmp_path)
    assert ema_ckpt.latest(tmp_path) == root
    seen = ema_ckpt.inspect(root)
    assert (seen.format, seen.world_size, seen.warnings) == ("rank-files", 2, ())
    assert {(tree.name, tree.role) for tree in seen.trees if tree.tensors} == {("model", "live")}
    assert [chunk.offsets for chunk in seen.tensors[0].chunks] == [(0, 0), (4, 0)]
    assert ema_ckpt.verify(root).status == "sound"
    ema_ckpt.reshard(root, tmp_path / "three", world_size=3)
    check(tmp_path / "three")
    assert ema_ckpt.verify(tmp_path / "three", against=root).status == "sound"
    with ema_ckpt.open(root) as ckpt:
        assert ckpt.objects["step"] == 12


def test_metadata_named_itself(tmp_path: Path) -> None:
    check(write(tmp_path / "a") / "metadata.pkl")


def test_tensor_parallel_inside_data_parallel(tmp_path: Path) -> None:
    """As torch composes them: the tensor dimension is cut first by the inner mesh dimension."""
    mesh = MESH | {"mesh_shape": (2, 2), "mesh_data": (0, 1, 2, 3)}
    cuts = [{"type": "StridedShard", "dim": 0, "split_factor": 2}, {"type": "Shard", "dim": 0}]
    root = tmp_path / "a"
    write_metadata(root, {"model": item({("w",): [placed((7, 5), cuts, mesh)]}, [None] * 4)}, 4)
    for rank, (first, last) in enumerate([(0, 2), (4, 6), (2, 4), (6, 7)]):
        torch.save({"w": WHOLE[first:last].clone()}, root / f"model_{rank}.pt")
    with ema_ckpt.open(root) as ckpt:
        assert torch.equal(ckpt["model.w"], WHOLE)


def test_boxes_in_a_padded_local_tensor(tmp_path: Path) -> None:
    """What a tensor with a geometry of its own records: several boxes, each with its local corner."""
    root, groups = tmp_path / "a", []
    for rank, (first, last) in enumerate([(0, 4), (4, 7)]):
        halves = [(0, 2), (2, 5)]
        data = {
            "global_shape": [7, 5], "dtype": "torch.float32",
            "global_offsets": [[first, begin] for begin, _ in halves],
            "local_offsets": [[1, 0], [1, 3]],
            "local_sizes": [[last - first, end - begin] for begin, end in halves],
        }  # fmt: skip
        sharding = {"type": "default_tensor_v1", "data": data}
        groups.append({"sharding_metadata": sharding, "ranks": (rank,)})
        local = torch.full((6, 7), -1.0)
        local[1 : 1 + last - first, 0:2] = WHOLE[first:last, 0:2]
        local[1 : 1 + last - first, 3:6] = WHOLE[first:last, 2:5]
        root.mkdir(exist_ok=True)
        torch.save({"w": local}, root / f"model_{rank}.pt")
    write_metadata(root, {"model": item({("w",): groups})})
    with ema_ckpt.open(root) as ckpt:
        assert torch.equal(ckpt["model.w"], WHOLE)


def test_layouts_of_other_names_and_serializations(tmp_path: Path) -> None:
    root = tmp_path / "a"
    nested = item(
        {("layers", 0, "w"): [ROWS], ("b",): [BIAS_ROWS]},
        [(f"rank_{rank}/model.safetensors", "SafetensorsSerialization") for rank in range(2)],
    )
    settings = item({}, [(f"settings_{rank}.json", "JsonSerialization") for rank in range(2)])
    blob = item({}, [("blob_0.bin", "RawSerialization"), ("blob_1.bin", "RawSerialization")])
    write_metadata(root, {"model": nested, "settings": settings, "blob": blob})
    for rank, rows in enumerate((slice(0, 4), slice(4, 7))):
        (root / f"rank_{rank}").mkdir()
        local = {"layers.0.w": WHOLE[rows].clone(), "b": BIAS[rows].clone()}
        save_file(local, root / f"rank_{rank}" / "model.safetensors")
        (root / f"settings_{rank}.json").write_text('{"lr": 0.5, "betas": [1, 2]}')
        (root / f"blob_{rank}.bin").write_bytes(b"anything")
    with ema_ckpt.open(root) as ckpt:
        assert torch.equal(ckpt["model.layers.0.w"], WHOLE)
        assert torch.equal(ckpt["model.b"], BIAS)
        assert ckpt.objects["settings.lr"] == 0.5
        assert ckpt.objects["settings.betas"] == [1, 2]
    assert ema_ckpt.verify(root).status == "unproven"
    written = ema_ckpt.convert(root, tmp_path / "out.pt")
    assert {item.name for item in written.skipped} == {"blob"}
    for place in ("rank_0/model.safetensors", "rank_1/model.safetensors"):
        with pytest.raises(EmaCkptError, match="one rank of 2") as caught:
            ema_ckpt.inspect(root / place)
        assert caught.value.code == "incomplete"


def test_state_of_each_rank_is_left_out_by_name(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    for rank in range(2):
        torch.save({"state": torch.tensor([rank])}, root / f"rng_{rank}.pt")
        torch.save({"seen": rank}, root / f"data_{rank}.pt")
        torch.save({"w": torch.tensor([float(rank)])}, root / f"stray_{rank}.pt")
    written = ema_ckpt.convert(root, tmp_path / "out.pt", exclude=["stray.*"])
    assert {item.name for item in written.skipped} == {"rng.state", "data.seen"}
    with pytest.raises(EmaCkptError, match=r"stray\.w"):
        ema_ckpt.convert(root, tmp_path / "other.pt")


def test_an_item_of_some_ranks_that_nothing_records(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    torch.save({"w": torch.ones(2)}, root / "extra_0.pt")
    (warning,) = ema_ckpt.inspect(root).warnings
    assert warning.code == "unchecked"
    assert "'extra'" in warning.message


@pytest.mark.parametrize("name", ["model_0.pt", "model_1.pt", "step_1.pt"])
def test_one_file_of_several_is_refused(tmp_path: Path, name: str) -> None:
    root = write(tmp_path / "a")
    with pytest.raises(EmaCkptError, match="one rank of 2") as caught:
        ema_ckpt.consolidate(root / name, tmp_path / "out.pt")
    assert caught.value.code == "incomplete"


def test_missing_file(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    (root / "model_1.pt").unlink()
    seen = ema_ckpt.verify(root)
    assert seen.status == "damaged"
    assert ("missing-file", "model_1.pt") in [(p.code, p.file) for p in seen.problems]
    with pytest.raises(EmaCkptError, match=r"model_1\.pt"):
        ema_ckpt.consolidate(root, tmp_path / "out.pt")
    warnings = ema_ckpt.inspect(root).warnings
    assert any("model_1.pt" in warning.message for warning in warnings)


def test_exchanged_files(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    (root / "model_0.pt").rename(root / "aside")
    (root / "model_1.pt").rename(root / "model_0.pt")
    (root / "aside").rename(root / "model_1.pt")
    seen = ema_ckpt.verify(root)
    assert seen.status == "damaged"
    assert {problem.code for problem in seen.problems} == {"index-mismatch"}


def test_tensor_that_the_metadata_has_and_the_file_has_not(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    torch.save({"w": WHOLE[4:].clone()}, root / "model_1.pt")
    (problem, *_) = ema_ckpt.verify(root).problems
    assert (problem.code, problem.tensor) == ("index-mismatch", "model.b")


def test_placement_of_an_unknown_kind_is_refused_where_it_is_selected(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    unknown = {"sharding_metadata": {"type": "Ragged", "data": {}}, "ranks": (0, 1)}
    write_metadata(root, {"model": item({("w",): [unknown], ("b",): [BIAS_ROWS]})})
    assert [warning.code for warning in ema_ckpt.inspect(root).warnings] == ["unsupported"]
    with pytest.raises(EmaCkptError, match="Ragged"):
        ema_ckpt.consolidate(root, tmp_path / "out.pt")
    ema_ckpt.consolidate(root, tmp_path / "out.pt", exclude=["w"])
    assert torch.equal(torch.load(tmp_path / "out.pt")["b"], BIAS)


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"version": "1.0"}, "unsupported"),
        ({"world_size": -1}, "unreadable"),
        ({"metadata": {"model": 3}}, "unreadable"),
        ({"more": Hostile()}, "unsafe-pickle"),
    ],
)
def test_metadata_that_is_not_read(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    root = write(tmp_path / "a")
    write_metadata(
        root, **({"items": {"model": item({("w",): [ROWS]})}} | {"world_size": 2} | change)
    )
    with pytest.raises(EmaCkptError) as caught:
        ema_ckpt.inspect(root)
    assert caught.value.code == code


def test_metadata_cut_short(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    data = (root / "metadata.pkl").read_bytes()
    (root / "metadata.pkl").write_bytes(data[: len(data) // 2])
    seen = ema_ckpt.verify(root)
    assert [problem.code for problem in seen.problems] == ["unreadable"]


def test_another_file_of_that_name_means_nothing(tmp_path: Path) -> None:
    torch.save({"w": WHOLE}, tmp_path / "weights.pt")
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({"names": ["w"], "metadata": 3}))
    with ema_ckpt.open(tmp_path) as ckpt:
        assert torch.equal(ckpt["w"], WHOLE)
