"""Trees: boundaries, roles, the forms of EMA trees, pairing, and the choice of a default."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.core.errors import SourceError, UsageError
from ema_ckpt.state_dicts.tree import (
    Tree,
    default_tree,
    find_tree,
    find_trees,
    inner_names,
    list_trees,
    live_of,
)
from tests.catalogs import INT, SCALAR, T, catalog_of

W = T((2, 3))
B = T((3,))


def roles(tree: dict, *, nested: bool = True, **fields: object) -> dict[str, str]:
    return {
        found.name: found.role for found in list_trees(catalog_of(tree, nested=nested, **fields))
    }


def only_ema(tree: dict, *, nested: bool = True) -> Tree:
    (ema,) = [found for found in list_trees(catalog_of(tree, nested=nested)) if found.role == "ema"]
    return ema


# Boundaries where paths nest.


def test_the_first_path_element_tells_the_tree_never_the_first_dot() -> None:
    catalog = catalog_of(
        {"model.embed.weight": W, "model": {"norm.weight": B}, "ema": {"norm.weight": B}}
    )
    found = {tree.name: [tensor.name for tensor in tree.tensors] for tree in list_trees(catalog)}
    assert found == {
        "": ["model.embed.weight"],
        "model": ["model.norm.weight"],
        "ema": ["ema.norm.weight"],
    }


def test_trees_come_in_stored_order_with_names_and_objects() -> None:
    catalog = catalog_of(
        {"step": 7, "optim": {"state": {"w": {"exp_avg": W}}, "lr": 0.1}, "model": {"b": B, "a": W}}
    )
    found = list_trees(catalog)
    assert [(t.name, t.role) for t in found] == [
        ("optim", "optimizer"),
        ("model", "live"),
        ("", "other"),
    ]
    assert [item.name for item in found[0].objects] == ["optim.lr"]
    assert list(found[1].weights) == ["b", "a"]
    assert [item.name for item in found[2].objects] == ["step"]


def test_a_slash_is_only_a_character() -> None:
    catalog = catalog_of({"model": {"blocks/0/w": W}, "ema": {"blocks/0/w": W}})
    assert [list(tree.weights) for tree in list_trees(catalog)] == [["blocks/0/w"], ["blocks/0/w"]]


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": W}, "a.b": W},
        {"a": {"b.c": W}, "a.b": {"c": 5}},
        {"model": {"x": {"y": W}, "x.y": W}},
    ],
)
def test_two_paths_with_one_dotted_name_are_refused(tree: dict) -> None:
    with pytest.raises(SourceError, match=r"share the name '(a\.b|model\.x\.y)") as caught:
        list_trees(catalog_of(tree))
    assert caught.value.code == "name-collision"


def test_a_dictionary_of_recognised_trees_is_passed_through() -> None:
    tree = {
        "app": {
            "model": {"w": W},
            "ema": {"w": W},
            "optim": {"state": {"w": {"exp_avg": W}}},
            "step": 3,
        }
    }
    assert roles(tree) == {
        "app.model": "live",
        "app.ema": "ema",
        "app.optim": "optimizer",
        "app": "other",
    }
    assert live_of(found := list_trees(catalog_of(tree)), only_ema(tree)) is found[0]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"app": {"model": {"w": W}, "foo": {"w": W}}}, {"app": "live"}),
        ({"app": {"model": {"w": W}, "bias": B}}, {"app": "live"}),
        ({"model": {"net": {"w": W}}}, {"model": "live"}),
        ({"model": {"module": {"w": W}}}, {"model": "live"}),
        ({"app": {"args": {"a": 1}}, "model": {"w": W}}, {"model": "live", "app": "other"}),
    ],
)
def test_other_dictionaries_are_not_passed_through(tree: dict, expected: dict) -> None:
    assert roles(tree) == expected


ADAM = {"state": {"w": {"exp_avg": W, "step": SCALAR}}, "param_groups": [{"lr": 0.1}]}
RUN = {"model": {"w": W}, "ema": {"w": W}, "optimizer": ADAM}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"ckpt": RUN}, {"ckpt.model": "live", "ckpt.ema": "ema", "ckpt.optimizer": "optimizer"}),
        (
            {"a": {"b": RUN}},
            {"a.b.model": "live", "a.b.ema": "ema", "a.b.optimizer": "optimizer"},
        ),
        ({"state_dict": RUN}, None),
        ({"module": {"net": {"w": W}, "net_ema": {"w": W}}}, None),
        ({"train_state": RUN}, None),
        ({"foo": {"net_g": {"w": W}, "adam": ADAM}}, None),
        ({"model": {"encoder": {"w": W}, "ema": {"encoder": {"w": W}}}}, None),
        ({"model": {"w": W}, "ema": {"model": {"w": W}, "optimizer": ADAM}}, None),
        ({"state": {"model": {"w": W}, "optimizers": {"Adam": ADAM}, "run": {"a": 1}}}, None),
    ],
)
def test_weights_averages_and_moments_are_never_one_tree(
    tree: dict, expected: dict | None, nested: bool
) -> None:
    for beside in ({}, {"epoch": 1, "foo": {"a": 1, "loss": SCALAR}}):
        (top,) = tree if len(tree) == 1 else ("ema",)
        found = list_trees(catalog_of({**tree, top: {**tree[top], **beside}}, nested=nested))
        for part in found:
            names = {tensor.name for tensor in part.tensors if tensor.shape}
            moments = {name for name in names if name.endswith("exp_avg")}
            averages = {n for n in names - moments if "ema" in n.replace("net_ema", "ema")}
            kinds = [moments, averages, names - moments - averages]
            assert sum(map(bool, kinds)) <= 1, part.name
            if any(kinds):
                role = ("optimizer", "ema", "live")[[bool(kind) for kind in kinds].index(True)]
                assert part.role == role, part.name
        if expected is not None and (nested or not beside):
            assert expected.items() <= {part.name: part.role for part in found}.items()


def test_what_lies_beside_the_trees_of_a_dictionary_is_bookkeeping() -> None:
    tree = {"ckpt": {**RUN, "foo": {"a": 1}, "loss": SCALAR, "epoch": 3}}
    found = {part.name: part for part in list_trees(catalog_of(tree))}
    assert {name: part.role for name, part in found.items()} == {
        "ckpt.model": "live",
        "ckpt.ema": "ema",
        "ckpt.optimizer": "optimizer",
        "ckpt.foo": "other",
        "ckpt": "other",
    }
    assert [entry.name for entry in found["ckpt"].entries] == ["ckpt.loss", "ckpt.epoch"]


@pytest.mark.parametrize("name", ["adam", "opt_g", "last_optimizer_state", "model"])
def test_an_optimizer_is_known_by_its_contents(name: str) -> None:
    assert roles({"net": {"w": W}, name: ADAM}) == {"net": "live", name: "optimizer"}
    flattened = {"state.w.exp_avg": W, "param_groups.w.lr": 0.1}
    assert roles({"net": {"w": W}, name: flattened}) == {"net": "live", name: "optimizer"}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("state", [{"0": {"exp_avg": W}}, {"0": {"step": SCALAR}}, {}])
def test_an_optimizer_may_be_the_whole_checkpoint(state: dict, nested: bool) -> None:
    tree = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
    trees = list_trees(catalog_of(tree, nested=nested))
    assert [(part.name, part.role) for part in trees] == [("", "optimizer")]
    with pytest.raises(UsageError, match=r"optimizer state alone.*convert ckpt out"):
        default_tree(trees, "ema-ckpt consolidate ckpt out")


def test_parameters_with_the_names_of_moments_are_no_optimizer() -> None:
    model = {"state.proj.weight": W, "state.norm.step": SCALAR, "state.sum": B}
    assert roles({"model": model}) == {"model": "live"}
    assert roles(model, nested=False) == {"": "live"}


def test_several_averages_under_one_name_are_trees_of_their_own() -> None:
    manager = {"weights": {"w": W}, "num_updates": INT, "samples_seen": INT, "config": "{}"}
    tree = {"model": {"w": W}, "ema": {"fast": manager, "slow": manager}}
    assert roles(tree) == {"model": "live", "ema.fast": "ema", "ema.slow": "ema"}
    found = list_trees(catalog_of(tree))
    assert [list(t.weights) for t in found] == [["w"], ["w"], ["w"]]
    assert [live_of(found, t).name for t in found[1:]] == ["model", "model"]
    assert [t.name for t in find_trees(found, "ema")] == ["ema.fast", "ema.slow"]


# Boundaries where nothing nests.


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.layers.0.w", "lm_head.weight"], {"": "live"}),
        (["model.layers.0.w", "model.layers.1.w"], {"": "live"}),
        (["net.a.w", "net_ema.a.w"], {"net": "live", "net_ema": "ema"}),
        (["model.a.w", "ema.model.a.w"], {"": "live", "ema": "ema"}),
        (["model.a.w", "lm_head.w", "ema.model.a.w", "ema.lm_head.w"], {"": "live", "ema": "ema"}),
        (["model.a.w", "lm_head.w", "ema.a.w"], {"": "live", "ema": "ema"}),
        (
            ["a.w", "ema.a.w", "optimizer.state.a.w.exp_avg"],
            {"": "live", "ema": "ema", "optimizer": "optimizer"},
        ),
        (["network.w", "cinema.w", "ema", "emanate.w"], {"": "live"}),
        (["generator.w", "generator_ema.w", "critic.w"], {"": "live", "generator_ema": "ema"}),
        (["module.a.w", "ema.a.w"], {"": "live", "ema": "ema"}),
        (["app.model.a.w", "ema.a.w"], {"app.model": "live", "ema": "ema"}),
        (["net.ab", "net_ema.ab"], {"net": "live", "net_ema": "ema"}),
    ],
)
def test_names_decide_where_nothing_nests(names: list[str], expected: dict[str, str]) -> None:
    assert roles(dict.fromkeys(names, W), nested=False) == expected


def test_a_dcp_whose_paths_are_all_single_is_told_by_names() -> None:
    assert roles(dict.fromkeys(["net.a.w", "net_ema.a.w"], W)) == {"net": "live", "net_ema": "ema"}


def test_the_rest_keeps_full_names() -> None:
    (tree,) = list_trees(catalog_of({"model.layers.0.w": W, "lm_head.w": W}, nested=False))
    assert (tree.name, list(tree.weights)) == ("", ["model.layers.0.w", "lm_head.w"])


def test_scalars_at_the_top_do_not_hide_the_live_prefix() -> None:
    for shape in ((), (1,)):
        tree = {
            "online_model.a.w": W,
            "ema_model.a.w": W,
            "initted": T(shape, "bool"),
            "step": T(shape, "int64"),
        }
        assert roles(tree, nested=False) == {
            "online_model": "live",
            "ema_model": "ema",
            "": "other",
        }


def test_a_learned_scalar_at_the_top_does() -> None:
    tree = {"net.w": W, "logit_scale": SCALAR, "net_ema.w": W, "net_ema.logit_scale": SCALAR}
    assert roles(tree, nested=False) == {"": "live", "net_ema": "ema"}


# Roles.


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"foo": {"w": W}}, {"foo": "live"}),
        ({"w": W}, {"": "live"}),
        ({"foo": {"w": W}, "bar": {"w": W}}, {"foo": "other", "bar": "other"}),
        ({"foo": {"w": W}, "model": {"w": W}}, {"foo": "other", "model": "live"}),
        ({"foo": {"w": W}, "optim": {"state": {"w": W}}}, {"foo": "live", "optim": "optimizer"}),
        ({"w": W, "foo": {"w": W}}, {"": "other", "foo": "other"}),
        ({"w": W, "ema": {"w": W}}, {"": "live", "ema": "ema"}),
        ({"model": {"w": W}, "step": INT}, {"model": "live", "": "other"}),
        ({"model": {"w": W}, "extra": {"noise": W}}, {"model": "live", "extra": "other"}),
        (
            {"model": {"w": W}, "ema_config": {"decay": 0.9}},
            {"model": "live", "ema_config": "other"},
        ),
        ({"model": {"name": "resnet"}, "foo": {"w": W}}, {"foo": "live", "model": "other"}),
        ({"s": SCALAR}, {"": "live"}),
        ({"n": INT}, {"": "live"}),
        ({"optimizer_states": [{"state": {"0": {"exp_avg": W}}}], "state_dict": {"w": W}}, None),
        (
            {"ema_optimizer": {"state": {"w": W}}, "model": {"w": W}},
            {"ema_optimizer": "optimizer", "model": "live"},
        ),
        ({}, {}),
    ],
)
def test_roles(tree: dict, expected: dict[str, str] | None) -> None:
    assert roles(tree) == (
        expected if expected is not None else {"state_dict": "live", "": "other"}
    )


def test_a_buffer_may_have_the_name_of_a_setting() -> None:
    average = {"w": W, "step": INT, "decay": SCALAR, "num_updates": INT}
    ema = only_ema({"model": {"w": W, "step": INT, "decay": B}, "ema": average})
    assert list(ema.weights) == ["w", "step"]
    assert list(ema.settings) == ["decay", "num_updates"]
    ema = only_ema({"w": W, "step": INT, "ema": {"w": W, "step": INT}})
    assert (list(ema.weights), list(ema.settings)) == (["w"], ["step"])


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    "statistics",
    [{"loss": SCALAR, "grad": SCALAR}, {"count": INT}, {"hist": T((8,), "int64")}],
)
def test_counters_and_statistics_are_no_second_average(statistics: dict, nested: bool) -> None:
    tree = {"model": {"w": W}, "ema": {"w": W}, "ema_stats": statistics}
    found = roles(tree, nested=nested)
    assert found == {"model": "live", "ema": "ema", "ema_stats": "other"}


def test_what_an_average_is_named_after_is_live() -> None:
    tree = {"unet": {"w": W}, "unet_ema": {"w": W}, "vae": {"w": W}}
    assert roles(tree) == {"unet": "live", "unet_ema": "ema", "vae": "other"}


def test_several_averages_of_one_model_are_told_by_their_equal_names() -> None:
    tree = {"model": {"w": W}, "ema": {"0.99": {"w": W}, "0.999": {"w": W}, "decays": 2}}
    found = list_trees(catalog_of(tree))
    assert [(t.name, t.role, list(t.weights)) for t in found] == [
        ("model", "live", ["w"]),
        ("ema.0.99", "ema", ["w"]),
        ("ema.0.999", "ema", ["w"]),
        ("ema", "other", []),
    ]
    assert find_tree(found, "ema.0.999") is found[2]


def test_a_list_at_the_top_is_a_tree_only_by_name() -> None:
    assert roles({"model": {"w": W}, "stats": [B, B]}) == {"model": "live", "": "other"}
    assert roles({"model": {"w": W}, "shadow_params": [W]}) == {
        "model": "live",
        "shadow_params": "ema",
    }


def test_an_ema_is_known_by_its_contents_too() -> None:
    tree = {"model": {"w": W}, "average": {"weights": {"w": W}, "num_updates": INT}}
    assert roles(tree) == {"model": "live", "average": "ema"}
    tree = {"model": {"w": W}, "averager": {"state": {"w": {"ema_params": W}}}}
    assert roles(tree) == {"model": "live", "averager": "ema"}
    tree = {"model": {"w": W}, "adam": {"state": {"w": {"ema_params": W, "exp_avg": W}}}}
    assert roles(tree) == {"model": "live", "adam": "optimizer"}


@pytest.mark.parametrize("nested", [True, False])
def test_the_state_dict_of_one_ema_may_be_the_whole_checkpoint(nested: bool) -> None:
    tree = {"weights": {"w": W, "n": INT}, "num_updates": INT, "config": "{}"}
    ema = only_ema(tree, nested=nested)
    assert (ema.name, list(ema.weights), list(ema.settings)) == (
        "",
        ["w", "n"],
        ["num_updates", "config"],
    )
    ema = only_ema({"state": {"w": {"ema_params": W}}}, nested=nested)
    assert (ema.name, list(ema.weights)) == ("", ["w"])


def test_torchs_averaged_model_beside_live_weights_is_known_by_its_count() -> None:
    averaged = {"n_averaged": INT, "module.a.w": W, "module.n": INT}
    both = {"model": {"a.w": W}, "swa_model": averaged}
    assert roles(both) == {"model": "live", "swa_model": "ema"}
    found = list_trees(catalog_of(both))
    assert (list(found[1].weights), list(found[1].settings)) == (["a.w", "n"], ["n_averaged"])
    assert live_of(found, found[1]) is found[0]
    # Alone it may be the model of a run, and so it is under a name of live weights.
    assert roles(averaged) == {"": "live"}
    assert roles({"swa_model": averaged}) == {"swa_model": "live"}
    assert roles({"model": averaged, "optimizer": {"state": {"0": {"exp_avg": W}}}}) == {
        "model": "live",
        "optimizer": "optimizer",
    }
    assert roles({"model": {"a.w": W}, "x": {"module.a.w": W, "n_averaged": W}})["x"] == "other"


def test_lightning_averages_lie_under_state_dict() -> None:
    tree = {
        "state_dict": {"w": W},
        "current_model_state": {"w": W},
        "averaging_state": {"n_averaged": INT},
    }
    assert roles(tree) == {
        "state_dict": "ema",
        "current_model_state": "live",
        "averaging_state": "other",
    }
    found = list_trees(catalog_of(tree))
    assert live_of(found, found[0]) is found[1]
    assert list(found[0].settings) == ["n_averaged"]
    del tree["averaging_state"]
    assert roles(tree) == {"state_dict": "ema", "current_model_state": "live"}
    assert roles({"current_model_state": {"w": W}}) == {"current_model_state": "live"}


@pytest.mark.parametrize("nested", [True, False])
def test_mmengine_keeps_the_average_under_state_dict(nested: bool) -> None:
    tree = {
        "state_dict": {"backbone.w": W},
        "ema_state_dict": {"steps": INT, "module.backbone.w": W},
        "message_hub": {"a": 1},
    }
    found = list_trees(catalog_of(tree, nested=nested))
    by_role = {tree.role: tree for tree in found}
    ema, live = by_role["ema"], by_role["live"]
    assert (ema.name, list(ema.weights), list(ema.settings)) == (
        "state_dict",
        ["backbone.w"],
        ["steps"],
    )
    assert (live.name, list(live.weights)) == ("ema_state_dict", ["module.backbone.w"])
    assert live_of(found, ema) is live


@pytest.mark.parametrize(
    "average", [{"backbone.w": W}, {"steps": INT, "module.backbone.w": W, "head.w": W}]
)
def test_an_ema_state_dict_without_the_marks_is_the_average(average: dict) -> None:
    tree = {"state_dict": {"backbone.w": W}, "ema_state_dict": average}
    assert roles(tree) == {"state_dict": "live", "ema_state_dict": "ema"}


# The weights inside an EMA tree.


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("inside", "form", "weights", "settings"),
    [
        (
            {
                "weights": {"a.w": W, "n": INT},
                "residual": {"a.w": W},
                "num_updates": INT,
                "config": "{}",
            },
            "weights.*",
            ["a.w", "n"],
            ["num_updates", "config"],
        ),
        ({"state": {"a.w": {"ema_params": W, "step": INT}}}, "state.<fqn>.ema_params", ["a.w"], []),
        (
            {"ema_model": {"a.w": W, "n": INT}, "initted": INT, "step": INT},
            "ema_model.*",
            ["a.w", "n"],
            None,
        ),
        (
            {"shadow": {"a.w": W}, "decay": 0.9, "num_updates": 4},
            "shadow.*",
            ["a.w"],
            ["decay", "num_updates"],
        ),
        ({"shadow": {"a.w": W}, "backup": {"a.w": W}}, "shadow.*", ["a.w"], []),
        (
            {"model": {"a.w": W, "n": INT}, "config": {"decay": 0.9}},
            "model.*",
            ["a.w", "n"],
            ["config.decay"],
        ),
        ({"module": {"a.w": W}, "n_averaged": INT}, "module.*", ["a.w"], ["n_averaged"]),
        (
            {"a.w": W, "c": T((2,), "complex64"), "n": INT, "decay": SCALAR},
            "*",
            ["a.w", "c", "n"],
            ["decay"],
        ),
        ({"a.w": W, "step": T((4,)), "decay": T((2, 2))}, "*", ["a.w", "step", "decay"], []),
    ],
)
def test_forms(
    nested: bool, inside: dict, form: str, weights: list[str], settings: list[str] | None
) -> None:
    ema = only_ema({"ema": inside, "model": {"a.w": W}}, nested=nested)
    assert (ema.name, ema.layout, list(ema.weights)) == ("ema", form, weights)
    assert settings is None or list(ema.settings) == settings


def test_a_module_that_bears_the_name_of_a_form_does_not_swallow_its_siblings() -> None:
    for name in ("weights", "shadow", "ema_model"):
        ema = only_ema(
            {"ema": {f"{name}.w": W, "head.w": W}, "model": {f"{name}.w": W, "head.w": W}}
        )
        assert list(ema.weights) == [f"{name}.w", "head.w"]


def test_what_is_neither_weight_nor_setting_is_left_out_by_name() -> None:
    ema = only_ema({"ema": {"shadow": {"w": W}, "backup": {"w": W}, "num_updates": INT}})
    assert [tensor.name for tensor in ema.left_out] == ["ema.backup.w"]


@pytest.mark.parametrize("nested", [True, False])
def test_buffers_of_any_dtype_belong_to_the_average(nested: bool) -> None:
    buffers = {
        "bn.num_batches_tracked": INT,
        "attn.relative_position_index": T((4, 4), "int64"),
        "mask": T((3,), "bool"),
        "table": T((2,), "uint8"),
    }
    for beside in ({}, {"model": {"w": W, **buffers}}):
        ema = only_ema({"ema": {"w": W, **buffers, "decay": SCALAR}, **beside}, nested=nested)
        assert list(ema.weights) == ["w", *buffers]
        assert not ema.left_out


def test_the_online_model_is_a_live_tree() -> None:
    inside = {"online_model.w": W, "ema_model.w": W, "initted": INT, "step": INT}
    found = list_trees(catalog_of({"ema": inside}))
    assert [(t.name, t.role, list(t.weights)) for t in found] == [
        ("ema", "ema", ["w"]),
        ("ema.online_model", "live", ["w"]),
    ]
    assert live_of(found, found[0]) is found[1]
    assert find_tree(found, "ema.online_model") is found[1]


def test_a_live_prefix_inside_the_ema_is_dropped_only_if_the_names_match_without_it() -> None:
    wrapped = only_ema({"ema": {"module.w": W, "module.b": B}, "model": {"w": W, "b": B}})
    assert list(wrapped.weights) == ["module.w", "module.b"]
    assert list(only_ema({"ema": {"model.w": W}, "model": {"w": W}}).weights) == ["w"]
    assert list(only_ema({"ema": {"model.w": W}, "model": {"model.w": W}}).weights) == ["model.w"]


# Positions.


def positional(shadows: list[T], live: dict[str, T], **more: object) -> Tree:
    return only_ema({"model": live, "ema": {"shadow_params": shadows, "decay": 0.9}, **more})


def test_positions_pair_with_the_live_parameters_in_stored_order() -> None:
    live = {
        "b.w": W,
        "a.w": T((4, 4)),
        "bn.running_mean": B,
        "bn.num_batches_tracked": INT,
        "a.b": B,
    }
    ema = positional([W, T((4, 4)), B], live)
    assert {fqn: t.name for fqn, t in ema.weights.items()} == {
        "b.w": "ema.shadow_params.0",
        "a.w": "ema.shadow_params.1",
        "a.b": "ema.shadow_params.2",
    }


def test_positions_are_numbers_not_text() -> None:
    shapes = [T((n + 1,)) for n in range(12)]
    live = {f"p{n}": shape for n, shape in enumerate(shapes)}
    flat = {f"model.{k}": v for k, v in live.items()}
    flat |= {f"ema.shadow_params.{n}": shapes[n] for n in (10, 11, *range(10))}
    ema = only_ema(flat, nested=False)
    assert {k.removeprefix("model."): t.shape for k, t in ema.weights.items()} == {
        k: t.shape for k, t in live.items()
    }


def test_a_tied_parameter_has_one_position() -> None:
    tied = T((5, 2), storage="embed")
    ema = positional([T((5, 2)), B], {"embed.w": tied, "norm.w": B, "head.w": tied})
    assert list(ema.weights) == ["embed.w", "norm.w"]


def test_frozen_parameters_have_none_if_the_optimizer_says_so() -> None:
    optim = {"state": {"b": {"exp_avg": B}, "d": {"exp_avg": B}}}
    ema = positional([B, B], {"a": W, "b": B, "c": W, "d": B}, optim=optim)
    assert list(ema.weights) == ["b", "d"]


def test_the_list_may_be_the_whole_tree_with_its_settings_beside_it() -> None:
    ema = only_ema({"model": {"w": W}, "shadow_params": [W], "decay": 0.9, "num_updates": 5})
    assert (ema.name, list(ema.weights), list(ema.settings)) == (
        "shadow_params",
        ["w"],
        ["decay", "num_updates"],
    )


@pytest.mark.parametrize(
    ("shadows", "live", "reason"),
    [
        ([W, T((9,))], {"a": W, "b": B}, "fit no list"),
        ([W], {"a": W, "b": B}, "fit no list"),
        (
            [W, W],
            {
                "a": W,
                "b": T((2, 3), "bool"),
                "c": T((2, 3), storage="s"),
                "d": T((2, 3), storage="s"),
            },
            None,
        ),
    ],
)
def test_positions_that_fit_nothing_are_refused_when_asked_for(
    shadows: list, live: dict, reason: str | None
) -> None:
    ema = positional(shadows, live)
    if reason is None:
        assert list(ema.weights) == ["a", "c"]
        return
    with pytest.raises(SourceError, match=reason) as caught:
        _ = ema.weights
    assert caught.value.code == "unsupported"
    assert inner_names(ema)["ema.shadow_params.0"] == "shadow_params.0"


def test_positions_with_a_gap_or_no_live_tree_are_refused() -> None:
    flat = {"ema.shadow_params.0": W, "ema.shadow_params.2": W, "a": W, "b": W}
    with pytest.raises(SourceError, match="positions 0 to 2 expected, 2 found"):
        _ = only_ema(flat, nested=False).weights
    with pytest.raises(SourceError, match="no single live tree"):
        _ = only_ema({"shadow_params": [W, B]}).weights


def test_positions_that_fit_in_two_ways_are_refused() -> None:
    tied = T((3,), storage="s")
    ema = positional([B, B], {"b": tied, "bn.running_mean": B, "c": tied})
    with pytest.raises(SourceError, match="several lists"):
        _ = ema.weights


# Names without dots.


def test_dotless_names_pair_with_live_names() -> None:
    tree = {
        "model": {"blocks.0.w": W, "head.w": B},
        "model_ema": {"blocks0w": W, "headw": B, "decay": SCALAR},
    }
    ema = only_ema(tree)
    assert {fqn: t.name for fqn, t in ema.weights.items()} == {
        "blocks.0.w": "model_ema.blocks0w",
        "head.w": "model_ema.headw",
    }


def test_dotless_names_pair_inside_a_flat_state_dict() -> None:
    flat = {
        "model.diffusion_model.in.0.w": W,
        "first_stage_model.enc.w": B,
        "model_ema.diffusion_modelin0w": W,
        "model_ema.decay": SCALAR,
        "model_ema.num_updates": INT,
    }
    found = list_trees(catalog_of(flat, nested=False))
    assert [(t.name, t.role) for t in found] == [("", "live"), ("model_ema", "ema")]
    assert list(found[1].weights) == ["diffusion_model.in.0.w"]
    live = live_of(found, found[1])
    assert live is not None
    assert (live.name, list(live.weights)) == ("model", ["diffusion_model.in.0.w"])


def test_dotless_names_that_fit_two_live_names_or_none_are_refused() -> None:
    for live in ({"a.bc": W, "ab.c": W, "a.b": W}, {"abc": W, "a.bc": W, "a.b": W}, {"ab.c": W}):
        ema = only_ema({"model": {**live, "x.y": W}, "ema": {"abc": W, "xy": W, "ab": W}})
        with pytest.raises(SourceError, match="exactly one live name") as caught:
            _ = ema.weights
        assert caught.value.code == "unsupported"


def test_plain_names_without_dots_are_names() -> None:
    ema = only_ema({"model": {"w": W, "b": B, "sub.w": W}, "ema": {"w": W, "b": B}})
    assert list(ema.weights) == ["w", "b"]


# Pairing and finding.


@pytest.mark.parametrize(
    ("tree", "live"),
    [
        ({"ema": {"w": W}, "model": {"w": W}, "critic": {"w": W}}, "model"),
        ({"generator_ema": {"w": W}, "critic": {"w": W}, "generator": {"w": W}}, "generator"),
        ({"denoiser_ema": {"w": W}, "denoiser": {"w": W}, "other": {"w": W}}, "denoiser"),
        ({"ema": {"w": W}, "generator": {"w": W}}, "generator"),
        ({"ema": {"w": W}, "w": W}, ""),
        ({"ema": {"w": W}, "generator": {"w": W}, "net": {"w": W}}, None),
        ({"ema": {"w": W}}, None),
        ({"ema": {"w": W}, "optim": {"state": {"w": W}}}, None),
    ],
)
def test_the_live_tree_of_an_ema(tree: dict, live: str | None) -> None:
    found = list_trees(catalog_of(tree))
    partner = live_of(found, next(t for t in found if t.role == "ema"))
    assert (partner.name if partner else None) == live


def test_a_tree_is_found_by_name_or_by_a_path_below_one() -> None:
    tree = {
        "model": {"layers.0.w": W, "layers.1.w": W, "layers2.w": W},
        "ema": {"weights": {"layers.0.w": W, "n": INT}},
    }
    tree["ema"]["num_updates"] = INT
    found = list_trees(catalog_of(tree))
    assert find_tree(found, "ema") is found[1]
    assert list(find_tree(found, "model.layers").weights) == ["0.w", "1.w"]
    part = find_tree(found, "ema.weights")
    assert (part.role, list(part.weights), list(part.settings)) == (
        "ema",
        ["layers.0.w", "n"],
        ["num_updates"],
    )
    assert list(find_tree(found, "ema.weights.layers.0").weights) == ["w"]


def test_an_ema_below_a_live_tree_is_one() -> None:
    tree = {
        "state_dict": {"model.a.w": W, "model_ema.aw": W, "model_ema.num_updates": INT},
        "epoch": 3,
    }
    part = find_tree(list_trees(catalog_of(tree)), "state_dict.model_ema")
    assert (part.role, list(part.weights), list(part.settings)) == ("ema", ["a.w"], ["num_updates"])


def test_the_short_name_of_a_passed_through_tree_finds_it() -> None:
    found = list_trees(catalog_of({"app": {"model": {"w": W}, "ema": {"w": W}}}))
    assert find_tree(found, "ema").name == "app.ema"
    assert [t.name for t in find_trees(found, "app")] == ["app.model", "app.ema"]
    with pytest.raises(UsageError, match=r"'app' may mean 'app.model', 'app.ema'") as caught:
        find_tree(found, "app")
    assert caught.value.code == "ambiguous-tree"


@pytest.mark.parametrize("name", ["emma", "model.w", "model.", "mod", "model.layer", "weights"])
def test_an_unknown_tree_lists_those_there_are(name: str) -> None:
    found = list_trees(
        catalog_of({"optim": {"s": W}, "model": {"w": W, "layers.w": W}, "ema": {"w": W}})
    )
    with pytest.raises(UsageError, match=r"'ema'.*'optim'|'model'.*'optim'") as caught:
        find_tree(found, name)
    assert caught.value.code == "unknown-tree"


def test_the_nearest_name_is_listed_first() -> None:
    found = list_trees(catalog_of({"optim": {"s": W}, "model": {"w": W}, "ema": {"w": W}}))
    with pytest.raises(UsageError, match=r"it has 'ema', 'optim', 'model'"):
        find_tree(found, "emma")


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        ({"model": {"w": W}, "ema": {"w": W}, "optim": {"s": W}}, "ema"),
        ({"model": {"w": W}, "optim": {"s": W}}, "model"),
        ({"foo": {"w": W}}, "foo"),
        ({"w": W, "n": INT}, ""),
        ({"generator": {"w": W}, "critic": {"w": W}}, "generator"),
        ({"net": {"w": W}, "model": {"w": W}, "ema": {"w": W}}, "ema"),
        ({}, ""),
    ],
)
def test_the_default_tree(tree: dict, name: str) -> None:
    assert default_tree(list_trees(catalog_of(tree))).name == name


def test_values_without_a_tensor_are_no_empty_checkpoint() -> None:
    with pytest.raises(UsageError, match="no tensor that is read") as caught:
        default_tree(list_trees(catalog_of({"step": 3})))
    assert caught.value.code == "empty-selection"


@pytest.mark.parametrize(
    ("tree", "commands"),
    [
        ({"net": {"w": W}, "model": {"w": W}}, ["--tree net", "--tree model"]),
        (
            {"a_ema": {"w": W}, "b_ema": {"w": W}, "model": {"w": W}},
            ["--tree a_ema", "--tree b_ema", "--tree model"],
        ),
        ({"foo": {"w": W}, "b r": {"w": W}}, ["--tree foo", "--tree 'b r'"]),
        ({"w": W, "foo": {"w": W}}, ["--tree ''", "--tree foo"]),
        ({"optim": {"state": {"w": W}}}, ["convert ckpt out"]),
    ],
)
def test_an_unclear_default_gives_one_command_per_candidate(
    tree: dict, commands: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        default_tree(list_trees(catalog_of(tree)), "ema-ckpt consolidate ckpt out")
    assert caught.value.code == "ambiguous-tree"
    message = str(caught.value)
    assert "\n" not in message
    assert message.count("`ema-ckpt ") == len(commands)
    assert all(f"{command}`" in message for command in commands)


def test_inner_names_of_all_tensors() -> None:
    catalog = catalog_of(
        {"model": {"a": W}, "ema": {"weights": {"a": W}, "num_updates": INT}, "n": INT}
    )
    names: dict[str, str] = {}
    for tree in list_trees(catalog):
        names |= inner_names(tree)
    assert names == {
        "model.a": "a",
        "ema.weights.a": "a",
        "ema.num_updates": "num_updates",
        "n": "n",
    }


def test_parts_bring_their_role() -> None:
    catalog = catalog_of(
        {"pytorch_model_fsdp_0": {"w": W}, "rng_0": {"w": W}, "unet_ema": {"w": W}}
    )
    parts = {"pytorch_model_fsdp_0": "live", "rng_0": "other", "unet_ema": "ema"}
    merged = replace(catalog, part_roles=parts)
    assert {tree.name: tree.role for tree in list_trees(merged)} == parts


def test_every_entry_lies_in_exactly_one_tree() -> None:
    tree = {
        "w": W,
        "model": {"w": W, "n": INT},
        "ema": {"online_model.w": W, "ema_model.w": W, "step": 1},
        "x": [1, 2],
    }
    catalog = catalog_of(tree)
    held: list[Tensor | Object] = [
        item for found in list_trees(catalog) for item in (*found.tensors, *found.objects)
    ]
    assert sorted(item.name for item in held) == sorted(
        item.name for item in (*catalog.tensors, *catalog.objects)
    )


# Properties.

keys = st.sampled_from(
    [
        "model",
        "ema",
        "app",
        "net",
        "optim",
        "args",
        "weights",
        "shadow",
        "module",
        "num_updates",
        "w",
        "b.c",
    ]
)
values = st.one_of(st.just(W), st.just(INT), st.just(SCALAR), st.just(1), st.just([W, B]))
state_dicts = st.dictionaries(
    keys,
    st.recursive(values, lambda inner: st.dictionaries(keys, inner, max_size=4), max_leaves=12),
    max_size=5,
)


@given(state_dicts, st.booleans())
@example({"optim": {"model": 1}}, False)
@example({"optim": {"model": 1}}, True)
def test_any_state_dict_is_told_apart_without_loss(tree: dict, nested: bool) -> None:
    catalog = catalog_of(tree, nested=nested)
    try:
        found = list_trees(catalog)
    except SourceError as error:
        assert error.code == "name-collision"
        return
    held = [item for part in found for item in (*part.tensors, *part.objects)]
    assert {id(item) for item in held} == {
        id(item) for item in (*catalog.tensors, *catalog.objects)
    }
    assert len(held) == len(catalog.tensors) + len(catalog.objects)
    assert len({part.name for part in found}) == len(found)
    for part in found:
        assert part.role in ("live", "ema", "optimizer", "other")
        assert all(
            item.name.startswith(f"{part.name}.")
            for item in (*part.tensors, *part.objects)
            if part.name
        )
        assert {id(tensor) for tensor in part.named.values()} <= {
            id(tensor) for tensor in part.tensors
        }
        assert part.role != "live" or part.tensors
        names = inner_names(part)
        assert len(set(names.values())) == len(names) or part.role == "ema"
    try:
        chosen = default_tree(found)
    except UsageError as error:
        # An optimizer without a tensor, as plain SGD's, is still state that `convert` takes whole.
        is_candidate = catalog.tensors or any(part.role == "optimizer" for part in found)
        assert error.code == ("ambiguous-tree" if is_candidate else "empty-selection")
    else:
        assert chosen.role in ("ema", "live")


@given(state_dicts, st.data())
def test_whatever_is_named_is_found_or_refused_by_name(tree: dict, data: st.DataObject) -> None:
    try:
        found = list_trees(catalog_of(tree))
    except SourceError:
        return
    names = [item.name for part in found for item in (*part.tensors, *part.objects)]
    name = data.draw(st.sampled_from([*names, *[n.rpartition(".")[0] for n in names], "nope", ""]))
    try:
        parts = find_trees(found, name)
    except UsageError as error:
        assert error.code == "unknown-tree"
        return
    for part in parts:
        assert (
            name in ("", part.name)
            or part.name.startswith(f"{name}.")
            or part.name.endswith(f".{name}")
        )


def test_twenty_thousand_averages_are_paired_in_linear_time() -> None:
    def seconds(count: int) -> float:
        pairs = {f"x{n}{end}": {"w": W} for n in range(count) for end in ("", "_ema")}
        alone = {f"y{n}_ema": {"w": W} for n in range(count)}
        catalog = catalog_of({**pairs, **alone})
        start = time.process_time()
        assert sum(tree.partner is not None for tree in list_trees(catalog)) == count
        return time.process_time() - start

    seconds(100)
    assert seconds(8000) < 40 * min(
        seconds(800), seconds(800)
    )  # 10 times as many; 100 if quadratic
