"""Checkpoints of which a part did not arrive: two nodes with disks of their own (verl-project/verl#2356)."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from tests.checkpoints import dcp_at, save_replicas

# Eight replicated tensors, which DCP spreads over the files of four ranks.
MODEL = {f"layer{index}.w": torch.full((3, 2), float(index)) for index in range(8)}


@pytest.fixture
def spread(tmp_path: Path) -> Path:
    return save_replicas(tmp_path / "run", {"model": MODEL}, ranks=4)


def _held(path: Path) -> dict[str, list[str]]:
    """Names of tensors by the file that holds them."""
    found: dict[str, list[str]] = {}
    for tensor in ema_ckpt.inspect(path).tensors:
        for chunk in tensor.chunks:
            found.setdefault(chunk.file, []).append(tensor.name)
    return found


def test_every_missing_file_is_named_with_what_it_holds_and_what_to_do(
    spread: Path, tmp_path: Path
) -> None:
    held = _held(spread)
    assert sorted(held) == [f"__{rank}_0.distcp" for rank in range(4)]
    gone = ["__2_0.distcp", "__3_0.distcp"]
    for file in gone:
        (spread / file).unlink()
    with pytest.raises(EmaCkptError) as caught:
        ema_ckpt.consolidate(spread, tmp_path / "out.safetensors")
    assert caught.value.code == "missing-file"
    message = str(caught.value)
    assert "2 of 4 files are missing" in message
    assert all(file in message for file in gone)
    assert "__0_0" not in message
    assert all(repr(name) in message for file in gone for name in held[file])
    assert "into one directory" in message
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_what_lies_in_the_files_that_are_there_can_be_taken(spread: Path, tmp_path: Path) -> None:
    held = _held(spread)
    (spread / "__2_0.distcp").unlink()
    rest = [
        name.removeprefix("model.")
        for file, names in held.items()
        if file != "__2_0.distcp"
        for name in names
    ]
    ema_ckpt.consolidate(spread, tmp_path / "out.safetensors", match=rest)
    found = load_file(tmp_path / "out.safetensors")
    assert sorted(found) == sorted(rest)
    assert all(torch.equal(found[name], MODEL[name]) for name in rest)


def test_inspect_warns_of_each_missing_or_short_file_once(spread: Path) -> None:
    (spread / "__1_0.distcp").unlink()
    os.truncate(spread / "__3_0.distcp", 100)
    warnings = ema_ckpt.inspect(spread).warnings
    assert [(w.code, w.message.partition(":")[0]) for w in warnings] == [
        ("missing-file", "__1_0.distcp"),
        ("truncated-file", "__3_0.distcp"),
    ]
    assert re.search(r"expected at least \d+ bytes, found 100", warnings[1].message)


def test_inspect_warns_of_each_missing_shard_once(spread: Path, tmp_path: Path) -> None:
    written = ema_ckpt.consolidate(spread, tmp_path / "hf", max_shard_size=64)
    shards = [file.path for file in written.files if file.path.endswith(".safetensors")]
    assert len(shards) > 2
    (tmp_path / "hf" / shards[0]).unlink()
    os.truncate(tmp_path / "hf" / shards[1], (tmp_path / "hf" / shards[1]).stat().st_size - 1)
    found = ema_ckpt.inspect(tmp_path / "hf").warnings
    assert [(w.code, w.message.partition(":")[0]) for w in found] == [
        ("missing-file", shards[0]),
        ("truncated-file", shards[1]),
    ]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    lost = [name for name, file in index["weight_map"].items() if file == shards[0]]
    assert all(repr(name) in found[0].message for name in lost)


@pytest.mark.parametrize("nbytes", [0, 1, 300])
def test_metadata_that_was_cut_short_says_so(tmp_path: Path, nbytes: int) -> None:
    path = dcp_at(tmp_path / "run")
    os.truncate(path / ".metadata", nbytes)
    with pytest.raises(
        EmaCkptError, match=rf"^\.metadata: .*cut short at {nbytes} bytes"
    ) as caught:
        ema_ckpt.inspect(path)
    assert caught.value.code == "unreadable"


def test_a_missing_folder_is_damage_as_a_missing_file_is(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "c" / "x.safetensors")
    weight_map = {"a": "x.safetensors", "b": "sub/y.safetensors"}
    index = json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map})
    (tmp_path / "c" / "model.safetensors.index.json").write_text(index)
    found = ema_ckpt.verify(tmp_path / "c")
    assert found.status == "damaged"
    assert [(p.code, p.file) for p in found.problems] == [("missing-file", "sub/y.safetensors")]
