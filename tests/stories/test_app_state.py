"""Of everything a trainer saves, the weights that were meant (pytorch/pytorch#171706)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from tests.checkpoints import ema, save_dcp, torch_at, touch, weights

APP: dict[str, object] = {
    "model": weights(),
    "ema": ema(),
    "optimizer": {
        "state": {"layer.w": {"exp_avg": torch.ones(2, 3), "step": torch.tensor(9.0)}},
        "param_groups": [],
    },
    "lr_scheduler": {"last_epoch": 3},
    "step": 12,
    "nets": {"critic": {"layer.w": torch.full((1,), 5.0)}},
}


@pytest.fixture(params=["dcp", "torch"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return (
        save_dcp(tmp_path / "run", APP)
        if request.param == "dcp"
        else torch_at(tmp_path / "run.pt", APP)
    )


def _taken(source: Path, tree: str | None = None) -> tuple[str | None, dict[str, torch.Tensor]]:
    out = source.parent / "out.pt"
    written = ema_ckpt.consolidate(source, out, tree, overwrite=True)
    return written.tree, torch.load(out, weights_only=True)


@pytest.mark.parametrize(
    ("tree", "seed"), [(None, 0.5), ("ema", 0.5), ("ema.weights", 0.5), ("model", 0.0)]
)
def test_the_average_by_default_and_any_tree_by_name(
    source: Path, tree: str | None, seed: float
) -> None:
    name, found = _taken(source, tree)
    assert name == (tree or "ema")
    assert list(found) == ["layer.w", "b"]
    assert all(torch.equal(found[key], value) for key, value in weights(seed).items())


@pytest.mark.parametrize("tree", ["nets", "nets.critic"])
def test_a_dotted_path_below_a_tree(source: Path, tree: str) -> None:
    _, found = _taken(source, tree)
    assert list(found) == ["critic.layer.w" if tree == "nets" else "layer.w"]
    assert found.popitem()[1].tolist() == [5.0]


@pytest.mark.parametrize(
    ("wrong", "near"), [("modle", "model"), ("emma", "ema"), ("optimiser", "optimizer")]
)
def test_an_unknown_tree_is_answered_with_those_there_are_the_nearest_first(
    source: Path, wrong: str, near: str
) -> None:
    with pytest.raises(EmaCkptError) as caught:
        _taken(source, wrong)
    assert caught.value.code == "unknown-tree"
    listed = str(caught.value).partition("it has ")[2]
    assert listed.startswith(f"'{near}'")
    assert all(f"'{name}'" in listed for name in ("model", "ema", "optimizer"))
    assert not (source.parent / "out.pt").exists()


def test_an_optimizer_is_no_state_dict_and_convert_is_named(source: Path) -> None:
    with pytest.raises(EmaCkptError, match="ema-ckpt convert") as caught:
        _taken(source, "optimizer")
    assert caught.value.code == "usage"


def test_several_candidates_come_with_a_command_for_each(tmp_path: Path) -> None:
    source = save_dcp(
        tmp_path / "run", {"model": weights(), "ema": weights(1.0), "ema_slow": weights(2.0)}
    )
    with pytest.raises(EmaCkptError) as caught:
        _taken(source)
    assert caught.value.code == "ambiguous-tree"
    for name, seed in (("ema", 1.0), ("ema_slow", 2.0), ("model", 0.0)):
        assert (
            f"`ema-ckpt consolidate {source} {tmp_path / 'out.pt'} --tree {name} --overwrite`"
            in str(caught.value)
        )
        assert torch.equal(_taken(source, name)[1]["b"], weights(seed)["b"])


def test_a_parent_directory_with_optimizer_and_random_state_beside(tmp_path: Path) -> None:
    """huggingface/accelerate#2848: merging failed when it was given the trainer's own directory."""
    parent = tmp_path / "checkpoint"
    parent.mkdir()
    save_dcp(parent / "pytorch_model_fsdp_0", weights())  # type: ignore[arg-type]
    for name in (
        "scheduler.bin",
        "random_states_0.pkl",
        "scaler.pt",
        "training_args.bin",
        "trainer_state.json",
    ):
        touch(parent / name)
    assert torch.equal(_taken(parent)[1]["layer.w"], weights()["layer.w"])
    assert ema_ckpt.inspect(parent).resolved == str(parent)


@pytest.mark.parametrize("down", ["one", "one/two"])
def test_the_only_checkpoint_below_is_found_and_two_are_a_question(
    tmp_path: Path, down: str
) -> None:
    parent = tmp_path / "results"
    os.makedirs(parent / down)
    save_dcp(parent / down / "run", {"model": weights(4.0)}) if down == "one" else save_dcp(
        parent / down, {"model": weights(4.0)}
    )
    touch(parent / "random_states_0.pkl")
    assert torch.equal(_taken(parent)[1]["b"], weights(4.0)["b"])
    save_dcp(parent / "other", {"model": weights()})
    with pytest.raises(EmaCkptError) as caught:
        _taken(parent)
    assert caught.value.code == "ambiguous-path"
    assert "'other'" in str(caught.value)
    assert down in str(caught.value)


def test_an_argument_namespace_is_skipped_by_name_and_never_made(tmp_path: Path) -> None:
    """chemprop/chemprop#1227: safe loading rejected checkpoints that carry their arguments."""
    tree = {
        "state_dict": weights(),
        "args": argparse.Namespace(lr=0.1),
        "history": [{"a": argparse.Namespace()}],
    }
    source = torch_at(tmp_path / "run.pt", tree)
    written = ema_ckpt.consolidate(source, tmp_path / "out.pt")
    assert all(
        torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)[k], v)
        for k, v in weights().items()
    )
    assert {item.name.partition(".")[0] for item in written.skipped} == {"args", "history"}
    assert all("argparse.Namespace" in item.reason for item in written.skipped)
    with pytest.raises(EmaCkptError, match="args") as caught:
        ema_ckpt.consolidate(source, tmp_path / "strict.pt", strict=True)
    assert caught.value.code == "unsupported"
    assert not (tmp_path / "strict.pt").exists()


def test_parts_keep_their_roles_once_they_are_one_checkpoint(tmp_path: Path) -> None:
    save_dcp(tmp_path / "run" / "pytorch_model_fsdp_0", {"model": {"w": torch.ones(4, 3)}})
    save_dcp(
        tmp_path / "run" / "optimizer_0",
        {"optimizer": {"state": {"w": {"exp_avg": torch.ones(4, 3)}}}},
    )
    ema_ckpt.reshard(tmp_path / "run", tmp_path / "two", 2)
    ema_ckpt.convert(tmp_path / "run", tmp_path / "run.safetensors")
    for path in (tmp_path / "run", tmp_path / "two", tmp_path / "run.safetensors"):
        roles = {tree.name: tree.role for tree in ema_ckpt.inspect(path).trees}
        assert roles == {"pytorch_model_fsdp_0": "live", "optimizer_0": "optimizer"}
        ema_ckpt.consolidate(path, tmp_path / "out.safetensors", dtype="bf16", overwrite=True)
        assert load_file(tmp_path / "out.safetensors")["w"].dtype is torch.bfloat16
