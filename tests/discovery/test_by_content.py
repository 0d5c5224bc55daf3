"""A named file is judged by its content, whatever its ending; in a directory endings tell candidates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.discovery.opening import open_catalog
from tests.checkpoints import safetensors_at, torch_at, touch, weights


@pytest.mark.parametrize(
    "name", ["last.pth.tar", "custom_checkpoint_0.pkl", "weights", "ckpt.state", "x.safetensors"]
)
def test_a_torch_file_under_any_name(tmp_path: Path, name: str) -> None:
    path = torch_at(tmp_path / name)
    catalog = open_catalog(path)
    assert catalog.format == "torch"
    result = ema_ckpt.verify(path)
    assert (result.status, result.unchecked_bytes) == ("sound", 0)
    data = bytearray(path.read_bytes())
    data[data.index(b"_rebuild_tensor_v2")] ^= 1  # in data.pkl, whose checksum covers it
    path.write_bytes(data)
    assert ema_ckpt.verify(path).status == "damaged"


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model", "model.old"])
def test_a_safetensors_file_under_any_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save_file(weights(), path)
    assert open_catalog(path).format == "safetensors"
    assert ema_ckpt.verify(path).status == "unproven"
    done = ema_ckpt.consolidate(path, tmp_path / "out.pt", no_verify=True)
    assert done.tensors == 2


def test_a_file_with_the_ending_of_another_format_in_a_directory(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.bin")
    assert open_catalog(tmp_path).format == "safetensors"
    torch.save(weights(), tmp_path / "model.bin")
    assert open_catalog(tmp_path).format == "torch"


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("name", ["x.npz", "x.pt", "x.safetensors"])
def test_arrays_are_refused_by_what_they_are(tmp_path: Path, name: str, command: str) -> None:
    with (tmp_path / name).open("wb") as file:
        np.savez(file, a=np.ones(2))
    with pytest.raises(EmaCkptError, match=r"an \.npz archive of NumPy arrays") as caught:
        getattr(ema_ckpt, command)(tmp_path / name)
    assert caught.value.code == "unsupported"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_program_beside_weights_is_no_second_checkpoint(tmp_path: Path) -> None:
    torch_at(tmp_path / "model.pt")
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "traced.pt"))
    result = ema_ckpt.inspect(tmp_path)
    assert Path(result.resolved).name == "model.pt"
    assert not result.warnings
    with pytest.raises(EmaCkptError, match="TorchScript"):
        ema_ckpt.inspect(tmp_path / "traced.pt")


def test_in_a_directory_a_file_of_unknown_ending_is_no_candidate(tmp_path: Path) -> None:
    torch_at(tmp_path / "a.state")
    with pytest.raises(EmaCkptError) as caught:
        ema_ckpt.inspect(tmp_path)
    assert caught.value.code == "not-a-checkpoint"
    assert ema_ckpt.inspect(tmp_path / "a.state").format == "torch"


@pytest.mark.parametrize(
    "name",
    [
        "m.safetensors.index.fp16.json",
        "m.fp16.safetensors.index.json",
        "m.safetensors.index.json",
        "weights.json",
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_an_index_of_a_variant(tmp_path: Path, name: str, suffix: str) -> None:
    name = name.replace(".safetensors", suffix)
    for number, (key, tensor) in enumerate(weights().items()):
        shard = tmp_path / f"m-0000{number + 1}-of-00002{suffix}"
        save_file({key: tensor}, shard) if suffix == ".safetensors" else torch.save(
            {key: tensor}, shard
        )
    files = {key: f"m-0000{n + 1}-of-00002{suffix}" for n, key in enumerate(weights())}
    index = touch(tmp_path / name, json.dumps({"metadata": {}, "weight_map": files}))
    for path in [index, *([tmp_path] if name != "weights.json" else [])]:
        result = ema_ckpt.inspect(path)
        assert {tensor.name for tensor in result.tensors} == weights().keys()
        assert not result.warnings
        assert ema_ckpt.verify(path).status in ("sound", "unproven")


def test_an_index_of_a_variant_that_lacks_a_shard_is_damaged(tmp_path: Path) -> None:
    safetensors_at(tmp_path / "m-00001-of-00002.safetensors")
    files = {"b": "m-00001-of-00002.safetensors", "c": "m-00002-of-00002.safetensors"}
    touch(tmp_path / "m.safetensors.index.fp16.json", json.dumps({"weight_map": files}))
    assert ema_ckpt.verify(tmp_path).status == "damaged"


def test_names_at_a_url_are_judged_by_content_too(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    source = torch_at(tmp_path / "last.pth.tar")
    try:
        memory.put(str(source), "/by-content/ckpt.state")
        assert ema_ckpt.inspect("memory://by-content/ckpt.state").format == "torch"
    finally:
        memory.rm("/by-content", recursive=True)
    shutil.rmtree(tmp_path)
