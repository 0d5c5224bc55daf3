"""Averages among the live weights of one dictionary: as submodules, as buffers."""

from __future__ import annotations

import time

import pytest

from ema_ckpt.state_dicts.tree import Tree, find_tree, list_trees, live_of
from tests.catalogs import INT, SCALAR, T, catalog_of

W = T((2, 3))
B = T((3,))


def trees_of(state_dict: dict) -> dict[str, Tree]:
    found = list_trees(catalog_of({"state_dict": state_dict, "epoch": 1}))
    return {tree.name: tree for tree in found if tree.tensors}


def test_names_without_dots_beside_their_settings() -> None:
    found = trees_of(
        {
            "model.in.0.w": W,
            "first_stage.w": B,
            "model_ema.in0w": W,
            "model_ema.decay": SCALAR,
            "model_ema.num_updates": INT,
        }
    )
    assert {name: tree.role for name, tree in found.items()} == {
        "state_dict": "live",
        "state_dict.model_ema": "ema",
    }
    ema = found["state_dict.model_ema"]
    assert list(ema.weights) == ["in.0.w"]
    assert list(ema.settings) == ["decay", "num_updates"]
    assert list(found["state_dict"].weights) == ["model.in.0.w", "first_stage.w"]
    live = live_of(list(found.values()), ema)
    assert live is not None
    assert (live.name, list(live.weights)) == ("state_dict.model", ["in.0.w"])


@pytest.mark.parametrize("online", [True, False])
def test_a_submodule_of_ema_pytorch(online: bool) -> None:
    state_dict = {"net.a.w": W, "ema.ema_model.a.w": W, "ema.initted": INT, "ema.step": INT}
    if online:
        state_dict["ema.online_model.a.w"] = W
    found = trees_of(state_dict)
    assert list(found["state_dict"].weights) == ["net.a.w"]
    assert list(found["state_dict.ema"].weights) == ["a.w"]
    assert ("state_dict.ema.online_model" in found) == online


@pytest.mark.parametrize(
    ("name", "live"), [("denoiser_ema", "denoiser"), ("ema_denoiser", "denoiser"), ("ema", "model")]
)
def test_a_submodule_named_after_the_live_one(name: str, live: str) -> None:
    found = trees_of(
        {f"{live}.a.w": W, f"{live}.a.b": B, f"{name}.a.w": T((4, 3)), f"{name}.a.b": B}
    )
    assert list(found["state_dict"].weights) == [f"{live}.a.w", f"{live}.a.b"]
    assert list(found[f"state_dict.{name}"].weights) == ["a.w", "a.b"]


@pytest.mark.parametrize(
    "others",
    [
        {"ema_gate.weight": W, "proj.weight": W},  # a module's name, not an average
        {"quantize.ema_w": W, "quantize.ema_count": B, "quantize.embed": W},
        {"ema.alpha": B, "ema.delta": W, "out.w": W},
    ],
)
def test_modules_that_only_sound_like_one_stay(others: dict) -> None:
    found = trees_of({"a.w": W, **others})
    assert list(found) == ["state_dict"]
    assert list(found["state_dict"].weights) == ["a.w", *others]


@pytest.mark.parametrize("wrapped", ["", "module."])
def test_buffers_with_underscores_for_dots(wrapped: str) -> None:
    live = {f"{wrapped}backbone.conv1.weight": W, f"{wrapped}head.bias": B, "bn.running_mean": B}
    found = trees_of({**live, "ema_backbone_conv1_weight": W, "ema_head_bias": B})
    assert {name: tree.role for name, tree in found.items()} == {
        "state_dict": "live",
        "state_dict.ema": "ema",
    }
    assert list(found["state_dict"].weights) == list(live)
    assert {name: tensor.name for name, tensor in found["state_dict.ema"].weights.items()} == {
        f"{wrapped}backbone.conv1.weight": "state_dict.ema_backbone_conv1_weight",
        f"{wrapped}head.bias": "state_dict.ema_head_bias",
    }
    assert find_tree(list(found.values()), "state_dict.ema").role == "ema"


@pytest.mark.thorough
def test_many_parts_with_the_name_of_an_average_take_no_time() -> None:
    """Parts of layers, as Mega has them; each compared with all names would take hours."""
    names = [f"layers.{layer}.ema" for layer in range(20_000)]
    started = time.process_time()
    found = trees_of({f"{name}.{part}": W for name in names for part in ("alpha", "delta")})
    assert list(found) == ["state_dict"]
    states = {f"part{index}.state.w.exp_avg": W for index in range(20_000)}
    assert len(trees_of({"a.w": W, **states})) == 20_001
    assert time.process_time() - started < 30


def test_buffers_in_a_file_of_one_state_dict() -> None:
    found = list_trees(catalog_of({"a.w": W, "b": B, "ema_a_w": W, "ema_b": B}, nested=False))
    assert [(t.name, t.role, list(t.weights)) for t in found] == [
        ("", "live", ["a.w", "b"]),
        ("ema", "ema", ["a.w", "b"]),
    ]


@pytest.mark.parametrize(
    "odd", [{"ema_size": B}, {"ema_a_w": B}, {"a_w": W, "ema_a_w": W}], ids=["none", "shape", "two"]
)
def test_buffers_that_do_not_pair_one_to_one_stay(odd: dict) -> None:
    assert list(trees_of({"a.w": W, "b": B, "ema_b": B, **odd})) == ["state_dict"]


@pytest.mark.parametrize(
    "state_dict",
    [
        {"a.w": W, "ema": {"a.w": W, "a.b": B}, "ema.c.w": B, "c.w": B},
        {"m": {"a.w": W, "a.b": B, "c.w": B, "ema": {"a.w": W, "a.b": B}, "ema.c.w": B}},
        {"m": {"a.w": W}, "optimizer": {"state": {"0": {"exp_avg": W}}}, "optimizer.state.1.exp_avg": B},
    ],
)  # fmt: skip
def test_a_tree_in_a_dictionary_and_in_names_is_one(state_dict: dict) -> None:
    """Nothing that one of the two forms holds is lost to the other."""
    catalog = catalog_of(state_dict)
    trees = list_trees(catalog)
    in_trees = sorted(item.name for tree in trees for item in tree.entries)
    assert in_trees == sorted(tensor.name for tensor in catalog.tensors)
    trained = [tree for tree in trees if tree.role in ("ema", "optimizer")]
    assert [len(tree.weights) for tree in trained] == [3 if trained[0].role == "ema" else 2]
