"""What torch's HuggingFaceStorageWriter leaves when every rank saves its own: put together without any rank."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ema_ckpt
from tests.distributed.launcher import run

SHAPES = {"embed.weight": (11, 3), "rows.weight": (4, 6), "columns.weight": (5, 8), "one": (1,)}
PLAIN = {"bias": torch.arange(5), "scale": torch.tensor(2.5)}


def value(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) - 3


def write(parent: str, mapping: dict[str, int] | None) -> None:
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tree: dict[str, torch.Tensor] = dict(PLAIN)
    for name in SHAPES:
        tree[name] = distribute_tensor(value(name), mesh, [Shard(int(name[0] == "c"))])
    writer = HuggingFaceStorageWriter(
        path=parent, save_distributed=True, fqn_to_index_mapping=mapping
    )
    dcp.save(tree, storage_writer=writer)


def truth() -> dict[str, torch.Tensor]:
    return PLAIN | {name: value(name) for name in SHAPES}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("shards")
    two = {name: 1 + number % 2 for number, name in enumerate(sorted(truth()))}
    for ranks, mapping in ((1, None), (2, two), (4, None)):
        run(ranks, write, str(parent / f"{ranks}"), mapping)
    return parent


def assert_whole(path: Path) -> None:
    with ema_ckpt.open(path) as ckpt:
        assert set(ckpt.keys()) == set(truth())
        for name, tensor in truth().items():
            assert torch.equal(ckpt[name], tensor), name
            assert ckpt[name].dtype == tensor.dtype


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_files_of_all_ranks_are_one_checkpoint(
    written: Path, tmp_path: Path, ranks: int
) -> None:
    path = written / str(ranks)
    assert_whole(path)
    listed = ema_ckpt.inspect(path)
    assert (listed.format, listed.world_size) == ("safetensors", ranks)
    assert [warning.code for warning in listed.warnings] == ["unchecked"]
    found = ema_ckpt.verify(path)
    assert (found.status, found.problems) == ("unproven", ())
    done = ema_ckpt.reshard(path, tmp_path / "dcp", 3)
    assert "unchecked" in [warning.code for warning in done.warnings]
    assert_whole(tmp_path / "dcp")


def test_a_missing_lower_shard_is_a_hole(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "4", tmp_path / "3")
    next((tmp_path / "3").glob("shard-00002-*")).unlink()
    with pytest.raises(ema_ckpt.EmaCkptError, match="not stored whole: rows 3 to 5") as caught:
        out = tmp_path / "out.safetensors"
        ema_ckpt.consolidate(tmp_path / "3", out, exclude=["columns.weight"])
    assert (caught.value.code, caught.value.tensor) == ("hole", "embed.weight")
    found = ema_ckpt.verify(tmp_path / "3")
    assert found.status == "damaged"
    holes = {problem.tensor for problem in found.problems if problem.code == "hole"}
    assert holes >= {"embed.weight", "rows.weight", "columns.weight"}
    (warning,) = [w for w in found.warnings if "HuggingFaceStorageWriter" in w.message]
    assert "none of which is of shard 2," in warning.message


def test_a_missing_last_shard_is_never_sound(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "4", tmp_path / "3")
    next((tmp_path / "3").glob("shard-00004-*")).unlink()
    found = ema_ckpt.verify(tmp_path / "3")
    assert found.status != "sound"
    assert any("missing last rows go unseen" in warning.message for warning in found.warnings)


def test_files_that_disagree_are_named(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "2", tmp_path / "2")
    other = tmp_path / "other"
    tree = {name: tensor.to(torch.float64) for name, tensor in truth().items() if "." in name}
    writer = HuggingFaceStorageWriter(path=other, save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process only
        dcp.save(tree, storage_writer=writer)
    (file,) = other.glob("shard-*")
    shutil.copy(file, tmp_path / "2" / "shard-00003-model-00001-of-00002.safetensors")
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"shard-00003.*float64.*float32") as caught:
        ema_ckpt.inspect(tmp_path / "2")
    assert caught.value.code == "index-mismatch"
