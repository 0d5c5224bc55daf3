"""No verb passes a checkpoint over in silence; `--strict` of the writers refuses to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from tests.checkpoints import dcp_at, ema, safetensors_at, save_dcp, torch_at, weights
from tests.stories.commands import environment

WRITERS = {
    "consolidate": lambda path, out, **args: ema_ckpt.consolidate(path, f"{out}.pt", **args),
    "convert": lambda path, out, **args: ema_ckpt.convert(path, f"{out}.safetensors", **args),
    "reshard": lambda path, out, **args: ema_ckpt.reshard(path, out, 2, **args),
    "synthesize": lambda path, out, **args: ema_ckpt.synthesize(
        [path, path], f"{out}.safetensors", weights=(0.5, 0.5), **args
    ),
}
READERS = {"inspect": ema_ckpt.inspect, "verify": ema_ckpt.verify, "diff": ema_ckpt.diff}


def critic(root: Path) -> str:
    save_dcp(root / "actor", {"model": weights(), "ema": ema()})
    dcp_at(root / "critic")
    return "critic"


def adapter(root: Path) -> str:
    torch_at(root / "pytorch_model.bin", {"model": weights(), "ema": ema()})
    safetensors_at(root / "adapter_model.safetensors")
    return "adapter_model.safetensors"


def newer_step(root: Path) -> str:
    dcp_at(root / "step_1")
    (dcp_at(root / "step_2") / ".metadata").unlink()
    return "step_2"


def other_child(root: Path) -> str:
    dcp_at(root / "step_1")
    torch_at(root / "last.ckpt")
    return "last.ckpt"


CASES: list[Callable[[Path], str]] = [critic, adapter, newer_step, other_child]


def hidden(root: Path) -> Path:
    """Live weights, another tree, and an average below callbacks."""
    live = weights()
    average = {"callbacks": {"EMA": {"ema_weights": weights(1.0)}}}
    return torch_at(
        root / "last.ckpt",
        {"state_dict": live, "hyper_parameters": {"x": torch.ones(2)}, **average},
    )


@pytest.mark.parametrize("verb", ["convert", "reshard"])
def test_a_hidden_average_is_named_where_trees_are_chosen(tmp_path: Path, verb: str) -> None:
    path, run = hidden(tmp_path), WRITERS[verb]
    assert not run(path, tmp_path / "all").warnings
    (warning,) = run(path, tmp_path / "live", tree="state_dict").warnings
    assert warning.code == "left-out"
    assert "callbacks.EMA.ema_weights" in warning.message
    for number, tree in enumerate(("callbacks", "callbacks.EMA", "callbacks.EMA.ema_weights")):
        done = run(path, tmp_path / f"chosen-{number}", tree=["state_dict", tree])
        assert "left-out" not in [warning.code for warning in done.warnings]


def test_open_and_restore_name_a_hidden_average(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = hidden(tmp_path)
    with caplog.at_level("WARNING", "ema_ckpt"), ema_ckpt.open(path):
        assert "callbacks.EMA.ema_weights" in caplog.text
    caplog.clear()
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.w = torch.nn.Parameter(torch.zeros(2, 3))
    model.b = torch.nn.Parameter(torch.zeros(2))
    with caplog.at_level("WARNING", "ema_ckpt"):
        report = ema_ckpt.restore(path, model=model)
    assert "callbacks.EMA.ema_weights" in caplog.text
    assert any("callbacks.EMA.ema_weights" in warning for warning in report.warnings)
    average = ema_ckpt.ShardedEMA(model, 0.5)
    with pytest.raises(EmaCkptError, match=r"callbacks\.EMA\.ema_weights"):
        ema_ckpt.restore(path, model=model, ema=average)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("verb", [*READERS, *WRITERS])
def test_every_verb_names_it(tmp_path: Path, case: Callable[[Path], str], verb: str) -> None:
    name = case(tmp_path / "run")
    if verb in READERS:
        result = READERS[verb](tmp_path / "run")
    else:
        result = WRITERS[verb](tmp_path / "run", tmp_path / "out")
    said = [w.message for w in result.warnings if w.code == "left-out"]
    assert [message.partition(" is left out: ")[0] for message in said] == [name] * len(said)
    assert said


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("verb", WRITERS)
@pytest.mark.parametrize("dry_run", [False, True])
def test_strict_writers_refuse(
    tmp_path: Path, case: Callable[[Path], str], verb: str, dry_run: bool
) -> None:
    name = case(tmp_path / "run")
    with pytest.raises(EmaCkptError, match=rf"--strict: .*'{name}'"):
        WRITERS[verb](tmp_path / "run", tmp_path / "out", strict=True, dry_run=dry_run)
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("verb", ["consolidate", "synthesize"])
def test_strict_writers_of_one_tree_take_weights_beside_the_state_of_a_trainer(
    tmp_path: Path, verb: str
) -> None:
    safetensors_at(tmp_path / "run" / "model.safetensors")
    torch_at(tmp_path / "run" / "optimizer.pt", {"state": {}, "param_groups": []})
    torch.save({}, tmp_path / "run" / "scheduler.pt")
    args = {"tree": ""} if verb == "synthesize" else {}
    result = WRITERS[verb](tmp_path / "run", tmp_path / "out", strict=True, **args)
    assert {w.message.partition(" ")[0] for w in result.warnings} == {"optimizer.pt"}


def test_on_the_command_line(tmp_path: Path) -> None:
    name = critic(tmp_path / "run")
    command = [sys.executable, "-m", "ema_ckpt", "consolidate", "--json"]
    done = subprocess.run(
        [*command, tmp_path / "run", tmp_path / "out.pt"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    (warning,) = json.loads(done.stdout)["warnings"]
    assert warning["code"] == "left-out"
    assert done.stderr.count(f"{name} is left out") == 1
    strict = subprocess.run(
        [*command, tmp_path / "run", tmp_path / "strict.pt", "--strict"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert strict.returncode == 2
    assert json.loads(strict.stdout)["error"]["code"] == "usage"
    assert not (tmp_path / "strict.pt").exists()


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_shard_that_an_index_has_lost_is_named(
    ending: str, is_there: bool, tmp_path: Path
) -> None:
    """Nothing but the names of the files tells of it, if the index has no total."""
    stem, write = ("model", save_file) if ending == "safetensors" else ("pytorch_model", torch.save)
    source, out = tmp_path / "source", tmp_path / "out.safetensors"
    source.mkdir()
    shards = [f"{stem}-0000{n}-of-00003.{ending}" for n in (1, 2, 3)]
    for name, shard in zip("abc", shards, strict=True):
        write({name: torch.ones(2)}, source / shard)
    if not is_there:
        (source / shards[1]).unlink()
    index = source / f"{stem}.{ending}.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shards[0], "c": shards[2]}}))
    found = ema_ckpt.verify(source)
    assert found.status != "damaged" and "stale-file" not in [w.code for w in found.warnings]
    for warnings in (found.warnings, ema_ckpt.consolidate(source, out).warnings):
        (message,) = [w.message for w in warnings if w.code == "left-out"]
        assert "names 2 of the 3 shards" in message and repr(shards[1]) in message
    with pytest.raises(ema_ckpt.UsageError, match="--strict"):
        ema_ckpt.consolidate(source, out, overwrite=True, strict=True)


def test_an_index_of_nothing_that_counts_bytes_is_damaged(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": {}}))
    assert [p.code for p in ema_ckpt.verify(index).problems] == ["index-mismatch"]
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": {}}))
    assert ema_ckpt.verify(index).status == "sound"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_the_state_beside_weights_in_one_file_is_told_where_the_folder_is_named(
    name: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (save_file if name.endswith("safetensors") else torch.save)({"w": torch.ones(2)}, source / name)
    torch.save({"last_epoch": 1}, source / "scheduler.bin")
    (source / "tokenizer.json").write_text("{}")
    told = ema_ckpt.convert(source, tmp_path / "out", to="dcp")
    assert [one.name for one in told.skipped] == ["scheduler.bin"]
    assert ["'tokenizer.json'" in one.message for one in told.warnings] == [True]
    with pytest.raises(EmaCkptError, match="--strict"):
        ema_ckpt.convert(source, tmp_path / "strict", to="dcp", strict=True)
    if name.endswith("bin"):
        told = ema_ckpt.convert(source / name, tmp_path / "file", to="dcp")
        assert (told.skipped, told.warnings) == ((), ())


def test_an_average_that_is_named_is_not_said_to_be_left_out(tmp_path: Path) -> None:
    weights = {"w": torch.randn(2), "b": torch.randn(3)}
    source = tmp_path / "a.pt"
    torch.save({"model": weights, "averaged_model": weights}, source)
    written = ema_ckpt.consolidate(source, tmp_path / "b.pt")
    assert [warning.code for warning in written.warnings] == ["left-out"]
    named = ema_ckpt.consolidate(source, tmp_path / "c.pt", tree="averaged_model")
    assert named.warnings == ()
