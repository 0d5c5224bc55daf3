"""`reshard` against what FSDP2 itself saves on N ranks, and what torch loads of it."""

from __future__ import annotations

import hashlib
import json
import pickle
import warnings
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ema_ckpt
from tests.distributed.launcher import run
from tests.formats.writing import raw_bytes

FIXTURES = Path(__file__).parents[2] / "fixtures"
WORLDS = (1, 2, 3, 4, 8)
# Rows of 1, 2, 3, 5, 7, 9, 13 and 16: uneven on some of the worlds, fewer than ranks on others.
WIDTHS = (3, 13, 2, 16, 9, 1, 7, 5)


class Model(nn.Module):
    """Linear layers of awkward widths, a buffer of each kind, a layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(WIDTHS))
        self.norm = nn.LayerNorm(WIDTHS[-1])
        self.register_buffer("seen", torch.tensor(41))
        self.register_buffer("table", torch.arange(12).reshape(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


def make(shard: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Model()
    if shard:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def trees(shard: bool = True) -> dict[str, object]:
    """Model, optimizer after one step, EMA with its settings, and odd objects."""
    model, optimizer = make(shard)
    x = torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(5))
    model(x).square().mean().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    average = {name: t.detach() * 2 if t.is_floating_point() else t for name, t in weights.items()}
    ema = {"weights": average, "num_updates": torch.tensor(7), "config": '{"version": 1}'}
    return {"model": weights, "optim": moments, "ema": ema, "step": 12, "note": {"a": [1, "x"]}}


def save_fsdp2(parent: str) -> None:
    world = dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(trees(), checkpoint_id=Path(parent, f"w{world}"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("fsdp2")
    for world in WORLDS:
        run(world, save_fsdp2, str(parent))
    return parent


def metadata_of(path: Path) -> Metadata:
    return FileSystemReader(path).read_metadata()


def layout(path: Path) -> dict[str, object]:
    """Shape, dtype, chunks and the file of each, for every tensor; the kind alone for objects."""
    metadata = metadata_of(path)
    files = {
        (index.fqn, tuple(index.offset or ())): info
        for index, info in metadata.storage_data.items()
    }
    found: dict[str, object] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            found[name] = "object"
            continue
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        split = len(chunks) > 1
        places = [files[name, offsets].relative_path for offsets, _ in chunks] if split else None
        found[name] = (tuple(entry.size), entry.properties.dtype, chunks, places)
    return found


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with ema_ckpt.open(path) as ckpt:
        names = ckpt.keys()
        return {name: ckpt[name] for name in names}


@pytest.mark.parametrize("source", WORLDS)
@pytest.mark.parametrize("target", WORLDS)
def test_layout_is_that_of_fsdp2(saved: Path, tmp_path: Path, source: int, target: int) -> None:
    done = ema_ckpt.reshard(saved / f"w{source}", tmp_path / "out", target)
    mine, theirs = layout(tmp_path / "out"), layout(saved / f"w{target}")
    assert mine.keys() == theirs.keys()
    for name, found in mine.items():
        assert found == theirs[name], name
    names = {f"__{rank}_0.distcp" for rank in range(target)}
    assert names <= {path.name for path in (tmp_path / "out").iterdir()}
    assert not done.skipped and not done.warnings
    paths = metadata_of(tmp_path / "out").planner_data
    assert list(paths.items()) == list(metadata_of(saved / f"w{source}").planner_data.items())
    expected = tensors(saved / f"w{source}")
    found = tensors(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_items_are_whole_archives_with_true_checksums(saved: Path, tmp_path: Path) -> None:
    ema_ckpt.reshard(saved / "w4", tmp_path / "out", 3)
    for index, info in metadata_of(tmp_path / "out").storage_data.items():
        data = (tmp_path / "out" / info.relative_path).read_bytes()[
            info.offset : info.offset + info.length
        ]
        (tmp_path / "item").write_bytes(data)
        with zipfile.ZipFile(tmp_path / "item") as archive:
            assert archive.testzip() is None
            payload = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
            assert all(entry.CRC or not entry.file_size for entry in payload)
            assert bool(payload) == (index.offset is not None)
        value = torch.load(tmp_path / "item", weights_only=True)
        assert not isinstance(value, torch.Tensor) or value.is_contiguous()


def test_torch_converts_it(saved: Path, tmp_path: Path) -> None:
    ema_ckpt.reshard(saved / "w3", tmp_path / "out", 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "out", tmp_path / "mine.pt")
        dcp_to_torch_save(saved / "w3", tmp_path / "theirs.pt")
    mine, theirs = (
        torch.load(tmp_path / name, weights_only=False) for name in ("mine.pt", "theirs.pt")
    )
    assert mine["step"] == theirs["step"] == 12
    assert mine["note"] == theirs["note"]
    assert mine["optim"]["param_groups"] == theirs["optim"]["param_groups"]
    for tree in ("model", "ema"):
        mine_flat, flat = (t[tree].get("weights", t[tree]) for t in (mine, theirs))
        assert all(torch.equal(mine_flat[name], tensor) for name, tensor in flat.items())


def load_and_compare(resharded: str, truth: str) -> list[str]:
    """Load into a fresh FSDP2 model, compare bit for bit, and tell which files this rank opened."""
    state = trees()
    for tree in (state["model"], state["ema"]["weights"]):
        for tensor in tree.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.detach().fill_(1)
    opened: list[str] = []
    reader = FileSystemReader(resharded)
    original = reader.fs.create_stream

    def create_stream(path: object, mode: str) -> object:
        opened.append(Path(str(path)).name)
        return original(path, mode)

    reader.fs.create_stream = create_stream
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader)
    expected = pickle.loads(Path(truth).read_bytes())
    flat = {f"model.{k}": v for k, v in state["model"].items()}
    flat |= {f"ema.weights.{k}": v for k, v in state["ema"]["weights"].items()}
    flat["ema.num_updates"] = state["ema"]["num_updates"]
    for name, moments in state["optim"]["state"].items():
        flat |= {f"optim.state.{name}.{key}": v for key, v in moments.items()}
    for name, tensor in flat.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, expected[name]), name
    assert state["step"] == 12
    return sorted(set(opened) - {".metadata"})


@pytest.mark.parametrize(("source", "target"), [(8, 3), (1, 4), (2, 8), (4, 1)])
def test_ranks_load_it_and_open_their_own_file(
    saved: Path, tmp_path: Path, source: int, target: int
) -> None:
    ema_ckpt.reshard(saved / f"w{source}", tmp_path / "out", target)
    (tmp_path / "truth").write_bytes(pickle.dumps(tensors(saved / f"w{source}")))
    opened = run(target, load_and_compare, str(tmp_path / "out"), str(tmp_path / "truth"))
    for rank, names in enumerate(opened):
        assert set(names) <= {f"__{rank}_0.distcp", "__0_0.distcp"}


def test_chain_of_world_sizes_is_the_identity(saved: Path, tmp_path: Path) -> None:
    at = saved / "w4"
    for step, world in enumerate((3, 8, 2, 4)):
        ema_ckpt.reshard(at, tmp_path / str(step), world)
        at = tmp_path / str(step)
    expected = tensors(saved / "w4")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(at).items())
    # Back at four ranks the bytes are those of going there directly.
    ema_ckpt.reshard(saved / "w4", tmp_path / "direct", 4)
    same = [p.name for p in (tmp_path / "direct").iterdir() if p.suffix == ".distcp"]
    assert all(
        (at / name).read_bytes() == (tmp_path / "direct" / name).read_bytes() for name in same
    )


# Other layouts as sources.


def save_other_layouts(parent: str) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    values = {
        f"t{i}": torch.randn(shape)
        for i, shape in enumerate([(7, 3), (37, 4), (3, 24), (50, 6), (5,), (2, 3, 4)])
    }
    line, grid = (
        init_device_mesh("cpu", (4,)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")),
    )
    trees = {
        "columns": {k: distribute_tensor(v, line, [Shard(v.dim() - 1)]) for k, v in values.items()},
        "hsdp": {k: distribute_tensor(v, grid, [Replicate(), Shard(0)]) for k, v in values.items()},
    }
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
    parallelize_module(model, grid["b"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in model:
        fully_shard(layer, mesh=grid["a"])
    trees["fsdp2-tp"] = dict(fully_shard(model, mesh=grid["a"]).state_dict())
    for name, tree in trees.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": tree}, checkpoint_id=Path(parent, name))
        whole = {f"model.{key}": t.full_tensor() for key, t in tree.items()}
        if dist.get_rank() == 0:
            torch.save(whole, Path(parent, f"{name}.truth"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("others")
    run(4, save_other_layouts, str(parent))
    return parent


@pytest.mark.parametrize("name", ["columns", "hsdp", "fsdp2-tp"])
@pytest.mark.parametrize("world", [1, 2, 3, 64])
def test_other_layouts_become_rows(others: Path, tmp_path: Path, name: str, world: int) -> None:
    ema_ckpt.reshard(others / name, tmp_path / "out", world)
    truth = torch.load(others / f"{name}.truth")
    found = tensors(tmp_path / "out")
    assert found.keys() == truth.keys()
    for key, tensor in truth.items():
        assert torch.equal(found[key], tensor), key
    for key, entry in metadata_of(tmp_path / "out").state_dict_metadata.items():
        rows = [len(part) for part in torch.arange(truth[key].shape[0]).chunk(world)]
        assert [chunk.sizes[0] for chunk in entry.chunks if 0 not in chunk.sizes] == rows
    assert ema_ckpt.verify(tmp_path / "out").status == "sound"
    assert len(list((tmp_path / "out").glob("__*_0.distcp"))) == world


@pytest.mark.parametrize(
    "name",
    [
        "fsdp1-w4",
        "fsdp2-tp-2x2-uneven",
        "hsdp-2x2",
        "chunks-w2",
        "strided-w2",
        "idle-ranks-w4",
        "dtypes-w2",
    ],
)
def test_fixtures_keep_their_recorded_sums(tmp_path: Path, name: str) -> None:
    truth = json.loads((FIXTURES / "expected.json").read_text())[f"dcp/{name}"]["tensors"]
    for world in (1, 3):
        out = tmp_path / str(world)
        ema_ckpt.reshard(FIXTURES / "dcp" / name, out, world)
        found = {
            key: hashlib.sha256(raw_bytes(tensor)).hexdigest()
            for key, tensor in tensors(out).items()
        }
        assert found == {key: entry["sha256"] for key, entry in truth.items()}
