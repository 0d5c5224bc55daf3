"""Rank files that real processes wrote, read without any: every layout, and what the files must say for it."""

from __future__ import annotations

import shutil
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ema_ckpt
from tests.distributed.launcher import run
from tests.distributed.layouts import LAYOUTS, batch

SHAPES = [(7, 3), (3, 24), (1,), (9, 5, 2), (16, 6), (2, 2)]
MESHES = {
    "rows": ((4,), ("d",), [[Shard(0)]]),
    "columns": ((4,), ("d",), [[Shard(-1)]]),
    "grid": (
        (2, 2),
        ("a", "b"),
        [[Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)]],
    ),
    "replicas": (
        (2, 2),
        ("a", "b"),
        [[Replicate(), Shard(0)], [Shard(0), Replicate()], [Replicate(), Replicate()]],
    ),
}


def value(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1


def write_all(parent: str) -> None:
    """One directory a layout; the truth beside it, gathered by torch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, (sizes, dims, placements) in MESHES.items():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=dims)
        tree = {}
        for shape in SHAPES:
            for at, placed in enumerate(placements):
                if all(not isinstance(p, Shard) or p.dim < len(shape) for p in placed):
                    tree[f"{len(tree)}.{at}"] = distribute_tensor(value(shape), mesh, placed)
        save(
            parent,
            f"mesh-{name}",
            tree,
            {key: tensor.full_tensor() for key, tensor in tree.items()},
        )
    for name in ("fsdp2", "hsdp-2x2", "fsdp2-tp-2x2", "fsdp2-tp-2x2-uneven"):
        model = LAYOUTS[world][name]()
        state = model.state_dict()
        whole = {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in state.items()}
        save(parent, name, state, whole)
    write_fsdp1(parent)
    write_verl(parent, rank, world)


def save(parent: str, name: str, tree: dict[str, object], whole: dict[str, object]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = Path(parent, name)
    folder.mkdir(exist_ok=True)
    torch.save(tree, folder / f"model_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        torch.save(whole, Path(parent, f"{name}.truth"))


def write_fsdp1(parent: str) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    from tests.distributed.layouts import fsdp1

    model = fsdp1(ShardingStrategy.FULL_SHARD, True)
    states = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls these forms deprecated
        for kind in ("SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "FULL_STATE_DICT"):
            with FullyShardedDataParallel.state_dict_type(model, StateDictType[kind]):
                states[kind] = model.state_dict()
    save(parent, "fsdp1", states["SHARDED_STATE_DICT"], states["FULL_STATE_DICT"])
    save(parent, "fsdp1-local", states["LOCAL_STATE_DICT"], {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, state in states.items():
            dcp.save({"model": state}, checkpoint_id=Path(parent, f"dcp-{kind}"))


def write_verl(parent: str, rank: int, world: int) -> None:
    """`actor/` with model, optimizer and extra state of every rank."""
    model = LAYOUTS[world]["fsdp2"]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    folder = Path(parent, "verl", "actor")
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    moments = get_optimizer_state_dict(model, optimizer)
    extra = {
        "rng": {"cpu": torch.full((4,), rank), "seed": rank},
        "lr_scheduler": {"last_epoch": 1},
    }
    for part, tree in (("model", state), ("optim", moments), ("extra_state", extra)):
        torch.save(tree, folder / f"{part}_world_size_{world}_rank_{rank}.pt")
    whole = {
        f"model.{key}": t.full_tensor() if isinstance(t, DTensor) else t for key, t in state.items()
    }
    for name, entry in moments["state"].items():
        for key, t in entry.items():
            whole[f"optim.state.{name}.{key}"] = t.full_tensor() if isinstance(t, DTensor) else t
    if rank == 0:
        torch.save(whole, Path(parent, "verl.truth"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("rankfiles")
    run(4, write_all, str(parent))
    return parent


WHOLE = [
    *(f"mesh-{name}" for name in MESHES),
    "fsdp2",
    "hsdp-2x2",
    "fsdp2-tp-2x2",
    "fsdp2-tp-2x2-uneven",
    "fsdp1",
]


def assert_equal(path: Path, truth: dict[str, torch.Tensor]) -> None:
    with ema_ckpt.open(path) as ckpt:
        names = ckpt.keys()
        found = {name: ckpt[name] for name in names}
    assert found.keys() >= truth.keys()
    for name, tensor in truth.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", WHOLE)
def test_every_layout_gives_the_gathered_tensors(written: Path, name: str) -> None:
    truth = torch.load(written / f"{name}.truth")
    assert_equal(written / name, truth)
    found = ema_ckpt.inspect(written / name)
    assert (found.format, found.world_size) == ("rank-files", 4)
    assert ema_ckpt.verify(written / name).status == "sound"


@pytest.mark.parametrize("name", ["mesh-grid", "fsdp2-tp-2x2-uneven"])
def test_files_are_placed_by_content_and_not_by_name(
    written: Path, tmp_path: Path, name: str
) -> None:
    for rank in range(4):
        shutil.copy(
            written / name / f"model_world_size_4_rank_{rank}.pt",
            tmp_path / f"x_rank_{3 - rank}.pt",
        )
    assert_equal(tmp_path, torch.load(written / f"{name}.truth"))


@pytest.mark.parametrize("world_size", [1, 3])
def test_reshard_and_convert_rank_files(written: Path, tmp_path: Path, world_size: int) -> None:
    truth = torch.load(written / "fsdp2-tp-2x2-uneven.truth")
    ema_ckpt.reshard(written / "fsdp2-tp-2x2-uneven", tmp_path / "dcp", world_size)
    assert_equal(tmp_path / "dcp", truth)
    ema_ckpt.convert(tmp_path / "dcp", tmp_path / "x.safetensors")
    assert_equal(tmp_path / "x.safetensors", truth)


def test_flat_parameters_of_a_dcp_checkpoint_are_told(written: Path, tmp_path: Path) -> None:
    found = {
        kind: [w.message for w in ema_ckpt.verify(written / f"dcp-{kind}").warnings]
        for kind in ("SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "FULL_STATE_DICT")
    }
    told = {
        kind: [text for text in texts if "_flat_param'" in text] for kind, texts in found.items()
    }
    assert [len(texts) for texts in told.values()] == [0, 1, 0]
    assert "save with SHARDED_STATE_DICT" in told["LOCAL_STATE_DICT"][0]
    done = ema_ckpt.consolidate(written / "dcp-LOCAL_STATE_DICT", tmp_path / "x.safetensors")
    assert "flat-parameter" in {w.code for w in done.warnings}


def test_parts_of_rank_files_and_private_state(written: Path, tmp_path: Path) -> None:
    truth = torch.load(written / "verl.truth", weights_only=False)
    assert_equal(written / "verl", truth)
    roles = {tree.name: tree.role for tree in ema_ckpt.inspect(written / "verl").trees}
    assert roles["model"] == "live" and roles["optim"] == "optimizer"
    done = ema_ckpt.reshard(written / "verl", tmp_path / "dcp", 2)
    private = {item.name: item.reason for item in done.skipped}
    assert private.keys() == {"extra_state.rng.cpu", "extra_state.rng.seed"}
    assert all("private to each rank" in reason for reason in private.values())
    assert_equal(tmp_path / "dcp", truth)
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"extra_state\.rng\.cpu"):
        ema_ckpt.reshard(written / "verl", tmp_path / "strict", 2, strict=True)
    assert not (tmp_path / "strict").exists()


def test_missing_ranks_are_named(written: Path, tmp_path: Path) -> None:
    for rank in (0, 2):
        shutil.copy(written / "fsdp2" / f"model_world_size_4_rank_{rank}.pt", tmp_path)
    with pytest.raises(
        ema_ckpt.EmaCkptError, match=r"rank 1, 3 of 4 are missing.*one directory"
    ) as caught:
        ema_ckpt.consolidate(tmp_path, tmp_path.parent / "out.safetensors")
    assert caught.value.code == "incomplete"


def test_missing_ranks_are_told_by_the_mesh_alone(written: Path, tmp_path: Path) -> None:
    for rank in (0, 1):
        shutil.copy(
            written / "fsdp2" / f"model_world_size_4_rank_{rank}.pt",
            tmp_path / f"model_rank_{rank}.pt",
        )
    with pytest.raises(ema_ckpt.EmaCkptError, match="rank 2, 3 of 4 are missing") as caught:
        ema_ckpt.consolidate(tmp_path, tmp_path.parent / "out.safetensors")
    assert caught.value.code == "incomplete"
    assert_rest_is_examined(tmp_path, ["incomplete"])


@pytest.mark.parametrize("fault", ["away", "cut", "empty", "no zip"])
def test_one_bad_file_keeps_nobody_from_the_others(
    written: Path, tmp_path: Path, fault: str
) -> None:
    shutil.copytree(written / "fsdp2", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model_world_size_4_rank_1.pt"
    content = file.read_bytes()
    file.unlink()
    if fault != "away":
        file.write_bytes({"cut": content[:-30], "empty": b"", "no zip": b"text"}[fault])
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"rank_1|rank 1") as caught:
        ema_ckpt.consolidate(tmp_path, tmp_path.parent / "out.safetensors")
    code = {"away": "incomplete", "cut": "bad-header", "empty": "truncated-file"}.get(
        fault, "bad-header"
    )
    assert caught.value.code == code
    assert_rest_is_examined(tmp_path, [code])


def assert_rest_is_examined(path: Path, codes: list[str]) -> None:
    """`inspect` lists what there is; `verify` checks it and says which rows nobody has."""
    listed = ema_ckpt.inspect(path)
    assert [w.code for w in listed.warnings if w.code != "hole"] == codes
    assert any("not stored whole: rows" in w.message for w in listed.warnings)
    assert listed.tensors
    assert listed.world_size == 4
    found = ema_ckpt.verify(path)
    assert found.status == "damaged"
    assert [problem.code for problem in found.problems if problem.code != "hole"] == codes
    assert found.checked_bytes > 0


def test_damage_in_a_rank_file_is_found_beside_a_missing_one(written: Path, tmp_path: Path) -> None:
    for rank in (0, 2, 3):
        shutil.copy(written / "fsdp2" / f"model_world_size_4_rank_{rank}.pt", tmp_path)
    file = tmp_path / "model_world_size_4_rank_2.pt"
    with zipfile.ZipFile(file) as archive:
        first = next(i for i in archive.infolist() if "/data/" in i.filename and i.file_size)
        archive.open(first).close()
    data = bytearray(file.read_bytes())
    at = data.index(zipfile.ZipFile(file).read(first))
    data[at] ^= 1
    file.write_bytes(data)
    codes = {problem.code for problem in ema_ckpt.verify(tmp_path).problems}
    assert codes == {"incomplete", "hole", "checksum"}


def test_local_pieces_without_shapes_are_refused(written: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ema_ckpt.EmaCkptError, match=r"names and shapes of the parameters|shape of the whole"
    ) as caught:
        ema_ckpt.consolidate(written / "fsdp1-local", tmp_path / "out.safetensors")
    assert caught.value.code == "unsupported"
    codes = {warning.code for warning in ema_ckpt.inspect(written / "fsdp1-local").warnings}
    assert codes == {"unsupported"}
    first = min((written / "fsdp1-local").iterdir())
    (tmp_path / "model_rank0.pt").write_bytes(first.read_bytes())
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"rank 1.* are missing") as caught:
        ema_ckpt.consolidate(tmp_path / "model_rank0.pt", tmp_path / "out.safetensors")
    assert caught.value.code == "incomplete"
    assert ema_ckpt.verify(tmp_path).status == "damaged"


def test_one_file_alone_is_refused_where_a_piece_is_needed(written: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = written / "fsdp2" / "model_world_size_4_rank_1.pt"
        piece = torch.load(file, weights_only=False)
    whole = {"model": {"w": torch.ones(2)}, "optim": piece}
    torch.save(whole, tmp_path / "c.pt")
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"what one rank has of 4 ranks") as caught:
        ema_ckpt.convert(tmp_path / "c.pt", tmp_path / "dcp")
    assert caught.value.code == "incomplete"
    assert ema_ckpt.verify(tmp_path / "c.pt").status == "damaged"
    assert {w.code for w in ema_ckpt.inspect(tmp_path / "c.pt").warnings} == {"incomplete"}
    done = ema_ckpt.consolidate(tmp_path / "c.pt", tmp_path / "o.safetensors", tree="model")
    assert done.tensors == 1


def test_replicated_tensors_of_one_file_are_whole(written: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = written / "mesh-replicas" / "model_world_size_4_rank_3.pt"
        piece = torch.load(file, weights_only=False)
    truth = torch.load(written / "mesh-replicas.truth")
    whole = {n: t for n, t in piece.items() if all(p.is_replicate() for p in t.placements)}
    assert whole
    torch.save({"model": whole}, tmp_path / "c.pt")
    assert_equal(tmp_path / "c.pt", {f"model.{name}": truth[name] for name in whole})


def test_replicas_that_differ(written: Path, tmp_path: Path) -> None:
    for rank in range(4):
        file = f"model_world_size_4_rank_{rank}.pt"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = torch.load(written / "fsdp2" / file, weights_only=False)
        torch.save({**tree, "buffer": torch.full((1,), float(rank))}, tmp_path / file)
    found = ema_ckpt.inspect(tmp_path)
    assert [w.code for w in found.warnings] == ["replicas-differ"]
    with ema_ckpt.open(tmp_path) as ckpt:
        assert ckpt["buffer"].tolist() == [0.0]


def test_plain_tensors_that_differ_are_no_replicas(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.full((3,), float(rank))}, tmp_path / f"ema_rank{rank}.pt")
    with pytest.raises(
        ema_ckpt.EmaCkptError, match="different plain tensor on each rank"
    ) as caught:
        ema_ckpt.consolidate(tmp_path, tmp_path.parent / "out.safetensors")
    assert (caught.value.code, caught.value.tensor) == ("unsupported", "w")
    assert [w.code for w in ema_ckpt.inspect(tmp_path).warnings] == ["unsupported"]


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("name", ["model_rank_2.bin", "rank-0.ckpt", "ema.rank3.pth"])
def test_pieces_are_no_whole_though_their_file_lies_alone(
    written: Path, tmp_path: Path, layout: str, name: str
) -> None:
    """The tensors tell of ranks that the name does not."""
    shutil.copy(written / layout / "model_world_size_4_rank_2.pt", tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(ema_ckpt.EmaCkptError, match=r"of 4 are missing") as caught:
            ema_ckpt.consolidate(path, tmp_path.parent / "out.safetensors")
        assert caught.value.code == "incomplete"


def test_a_step_of_one_rank_is_not_complete(written: Path, tmp_path: Path) -> None:
    whole = written / "fsdp2"
    shutil.copytree(whole, tmp_path / "step_1")
    (tmp_path / "step_2").mkdir()
    shutil.copy(whole / "model_world_size_4_rank_0.pt", tmp_path / "step_2" / "model_rank_0.pt")
    found = ema_ckpt.inspect(tmp_path)
    assert Path(found.resolved).name == "step_1"
    assert [w.code for w in found.warnings] == ["left-out"]
    assert "rank 1, 2, 3 of 4 are missing" in found.warnings[0].message


def test_one_of_several_is_refused_and_the_family_read(written: Path, tmp_path: Path) -> None:
    for rank in range(4):
        for kind in ("a", "b"):
            source = written / "fsdp2" / f"model_world_size_4_rank_{rank}.pt"
            shutil.copy(source, tmp_path / f"{kind}-rank-{rank}.bin")
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"rank of 4, which are b-rank-\*\.bin"):
        ema_ckpt.inspect(tmp_path / "b-rank-1.bin")
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"'a-rank-\*\.bin', 'b-rank-\*\.bin'"):
        ema_ckpt.inspect(tmp_path)
    assert_equal(tmp_path / "b-rank-*.bin", torch.load(written / "fsdp2.truth"))
