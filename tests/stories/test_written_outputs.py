"""What is written is complete, indexed and readable by the tools it is meant for; what fails leaves nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from tests.checkpoints import dcp_at, save_dcp, touch

MODEL = {
    "embed.w": torch.randn(30, 10),  # 1200 bytes
    "a.w": torch.randn(10, 5),  # 200
    "b.w": torch.randn(10, 5),
    "c.w": torch.randn(5, 5).bfloat16(),  # 50
    "count": torch.tensor(3),  # 8
    "none": torch.zeros(0, 4),
}
TOTAL = sum(t.numel() * t.element_size() for t in MODEL.values())


@pytest.mark.parametrize("limit", ["1B", "100B", "250B", "410B", "1000B", "1.5kB", "5GB"])
def test_shards_hold_every_tensor_once_and_the_index_names_them(tmp_path: Path, limit: str) -> None:
    """pytorch/torchtitan#2137: output of several files came without its index."""
    source = save_dcp(tmp_path / "run", {"model": MODEL})
    written = ema_ckpt.consolidate(source, tmp_path / "hf", max_shard_size=limit)
    shards = [file.path for file in written.files if file.path.endswith(".safetensors")]
    nbytes = float(limit.rstrip("kGB")) * {"k": 1e3, "G": 1e9}.get(limit[-2], 1)
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        held = load_file(tmp_path / "hf" / shard)
        size = sum(t.numel() * t.element_size() for t in held.values())
        full = [t for t in held.values() if t.numel()]
        assert size <= nbytes or len(full) == 1, (
            "only a tensor above the limit may pass it, alone in its file"
        )
        assert not found.keys() & held.keys()
        found |= held
    assert found.keys() == MODEL.keys()
    assert all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype
        for name, value in MODEL.items()
    )
    if len(shards) == 1:
        assert shards == ["model.safetensors"]
        assert not (tmp_path / "hf" / "model.safetensors.index.json").exists()
        return
    assert shards == [
        f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
    ]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == TOTAL
    assert index["weight_map"].keys() == MODEL.keys()
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / shard, "pt") as file:
            assert torch.equal(file.get_tensor(name), MODEL[name])
            assert file.metadata()["format"] == "pt"
    assert sorted(os.listdir(tmp_path / "hf")) == sorted(file.path for file in written.files)
    sizes = {file.path: (tmp_path / "hf" / file.path).stat().st_size for file in written.files}
    assert sizes == {file.path: file.nbytes for file in written.files}


EMPTY: list[dict[str, torch.Tensor]] = [
    {},
    {"a": torch.tensor([]), "b": torch.tensor([])},
    {"a": torch.zeros(0, 5), "b": torch.zeros(3, 0, dtype=torch.int64), "c": torch.tensor(2.0)},
]


@pytest.mark.parametrize("model", EMPTY, ids=["no tensor", "two empty", "zero sizes"])
@pytest.mark.parametrize("out", ["out.safetensors", "out.pt", "hf"])
def test_empty_tensors_and_empty_checkpoints_round_trip(
    tmp_path: Path, model: dict[str, torch.Tensor], out: str
) -> None:
    """safetensors/safetensors#280, safetensors/safetensors#601."""
    sources = [
        save_dcp(tmp_path / "run", {**model}),
        tmp_path / "run.pt",
        tmp_path / "run.safetensors",
    ]
    torch.save(model, sources[1])
    save_file(model, sources[2], metadata={"note": "kept or not, no tensor"})
    for index, source in enumerate(sources):
        target = tmp_path / f"{index}-{out}"
        assert ema_ckpt.inspect(source).nbytes == sum(
            t.numel() * t.element_size() for t in model.values()
        )
        assert ema_ckpt.consolidate(source, target).tensors == len(model)
        path = target / "model.safetensors" if out == "hf" else target
        found = (
            torch.load(path, weights_only=True, mmap=True)
            if out.endswith("pt")
            else load_file(path)
        )
        assert found.keys() == model.keys()
        for name, value in model.items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert torch.equal(found[name], value)


def test_success_means_that_the_file_is_there_and_opens(tmp_path: Path) -> None:
    """pytorch/torchtitan#307: the converter printed success and wrote nothing."""
    source = dcp_at(tmp_path / "run")
    for out in ("a.safetensors", "b.pt", "c"):
        written = ema_ckpt.consolidate(source, tmp_path / out)
        assert written.target == str(tmp_path / out)
        assert {t.fqn for t in ema_ckpt.inspect(tmp_path / out).tensors} == {"layer.w", "b"}
        assert ema_ckpt.verify(tmp_path / out).status == "sound"


_REFUSED = {
    "existing": ("taken.pt", {}, "target-exists"),
    "no parent": ("no/where/out.pt", {"dtype": "fp8"}, "usage"),
    "parent is a file": ("taken.pt/out.pt", {}, "usage"),
    "dtype": ("out.pt", {"dtype": "fp8"}, "usage"),
    "threads": ("out.pt", {"threads": 0}, "usage"),
    "memory": ("out.pt", {"max_memory": "4MB"}, "usage"),
    "size": ("out", {"max_shard_size": "many"}, "usage"),
    "base name": ("out", {"basename": "../x"}, "usage"),
    "rename": ("out.pt", {"rename": ["layer"]}, "usage"),
    "tree": ("out.pt", {"tree": "emma"}, "unknown-tree"),
    "fill": ("out.pt", {"fill": "nothing"}, "unknown-tree"),
    "match": ("out.pt", {"match": ["layr*"]}, "empty-selection"),
    "nothing left": ("out.pt", {"exclude": ["*"]}, "empty-selection"),
    "collision": ("out.pt", {"rename": ["layer.w=b"]}, "name-collision"),
}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("why", _REFUSED)
def test_a_refusal_is_one_line_and_leaves_nothing(tmp_path: Path, why: str, dry_run: bool) -> None:
    source = dcp_at(tmp_path / "run")
    touch(tmp_path / "taken.pt", "somebody's")
    out, options, code = _REFUSED[why]
    with pytest.raises(EmaCkptError) as caught:
        ema_ckpt.consolidate(source, tmp_path / out, dry_run=dry_run, **options)  # type: ignore[arg-type]
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["run", "taken.pt"]
    assert (tmp_path / "taken.pt").read_text() == "somebody's"


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors", "hf"])
def test_a_dry_run_tells_the_bytes_and_touches_nothing(tmp_path: Path, out: str) -> None:
    source = dcp_at(tmp_path / "run")
    place = tmp_path / "place"
    place.mkdir()
    os.utime(place, (1, 1))
    planned = ema_ckpt.consolidate(source, place / out, dry_run=True)
    assert place.stat().st_mtime == 1
    assert not any(place.iterdir())
    done = ema_ckpt.consolidate(source, place / out)
    assert planned.dry_run
    assert not done.dry_run
    assert planned.files == done.files
    assert (planned.tensors, planned.nbytes, planned.tree) == (done.tensors, done.nbytes, done.tree)
